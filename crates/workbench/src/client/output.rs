//! The event stream of a command: newline-delimited JSON from `/bash`.

use std::pin::Pin;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{Buf, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::Deserialize;

use super::WorkbenchClientError;
use crate::tools::bash::{CommandEvent, CommandStream, OutputChunk};

/// Maximum length of a line in the stream, in bytes.
const MAX_LINE: usize = 1 << 20;

/// The event stream of a running command.
pub struct CommandOutput {
    body: Pin<Box<Incoming>>,
    /// Bytes after the last complete line.
    buffer: BytesMut,
    address: String,
    ended: bool,
}

impl CommandOutput {
    pub(super) fn new(body: Incoming, address: String) -> Self {
        Self {
            body: Box::pin(body),
            buffer: BytesMut::new(),
            address,
            ended: false,
        }
    }

    /// The next event. The last one is [`CommandEvent::Done`] or [`CommandEvent::Failed`]; a
    /// stream that ends without it is an error.
    pub async fn next(&mut self) -> Result<CommandEvent, WorkbenchClientError> {
        loop {
            if let Some(end) = memchr::memchr(b'\n', &self.buffer) {
                let line = self.buffer.split_to(end);
                self.buffer.advance(1);
                if line.trim_ascii().is_empty() {
                    continue;
                }
                return self.event(&line);
            }
            if self.buffer.len() > MAX_LINE {
                return Err(self.invalid_response("a line of the output is too long"));
            }
            let connection_lost = |reason: &str| WorkbenchClientError::ConnectionLost {
                address: self.address.clone(),
                reason: reason.to_owned(),
            };
            match self.body.as_mut().frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
                Some(Err(error)) => return Err(connection_lost(&error.to_string())),
                None if self.ended => return Err(connection_lost("the command has ended already")),
                None => {
                    return Err(connection_lost(
                        "the stream ended before the exit status of the command",
                    ));
                }
            }
        }
    }

    fn event(&mut self, line: &[u8]) -> Result<CommandEvent, WorkbenchClientError> {
        let event: EventLine = serde_json::from_slice(line)
            .map_err(|error| self.invalid_response(&error.to_string()))?;
        Ok(match event {
            EventLine::Delta {
                data,
                stream,
                base64,
            } => {
                let chunk = match base64 {
                    None => OutputChunk::Text(data),
                    Some(bytes) => OutputChunk::Bytes(
                        STANDARD
                            .decode(bytes)
                            .map_err(|error| self.invalid_response(&error.to_string()))?,
                    ),
                };
                CommandEvent::Output(stream.unwrap_or(CommandStream::Stdout), chunk)
            }
            EventLine::Done {
                exit_code,
                timed_out,
            } => {
                self.ended = true;
                CommandEvent::Done {
                    exit_code,
                    timed_out,
                }
            }
            EventLine::Error { message } => {
                self.ended = true;
                CommandEvent::Failed(message)
            }
        })
    }

    fn invalid_response(&self, reason: &str) -> WorkbenchClientError {
        WorkbenchClientError::InvalidResponse {
            address: self.address.clone(),
            reason: reason.to_owned(),
        }
    }
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum EventLine {
    Delta {
        data: String,
        stream: Option<CommandStream>,
        base64: Option<String>,
    },
    #[serde(rename_all = "camelCase")]
    Done {
        exit_code: i32,
        #[serde(default)]
        timed_out: bool,
    },
    Error {
        message: String,
    },
}
