//! What a command says, line by line.

use std::pin::Pin;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{Buf, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::Deserialize;

use super::ClientError;
use crate::tools::bash::{Event, Said, Stream};

/// The longest line of a command's answer.
const MAX_LINE: usize = 1 << 20;

/// What a command says, as it comes.
pub struct Output {
    body: Pin<Box<Incoming>>,
    /// What came after the last line.
    rest: BytesMut,
    address: String,
    over: bool,
}

impl Output {
    pub(super) fn new(body: Incoming, address: String) -> Self {
        Self {
            body: Box::pin(body),
            rest: BytesMut::new(),
            address,
            over: false,
        }
    }

    /// What happens next. The last is [`Event::Done`] or [`Event::Failed`]; that it never came
    /// is an error.
    pub async fn next(&mut self) -> Result<Event, ClientError> {
        loop {
            if let Some(end) = memchr::memchr(b'\n', &self.rest) {
                let line = self.rest.split_to(end);
                self.rest.advance(1);
                if line.trim_ascii().is_empty() {
                    continue;
                }
                return self.event(&line);
            }
            if self.rest.len() > MAX_LINE {
                return Err(self.strange("a line without an end"));
            }
            let broken = |reason: &str| ClientError::Broken {
                address: self.address.clone(),
                reason: reason.to_owned(),
            };
            match self.body.as_mut().frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.rest.extend_from_slice(&data);
                    }
                }
                Some(Err(error)) => return Err(broken(&error.to_string())),
                None if self.over => return Err(broken("the command has ended already")),
                None => return Err(broken("the end of the command never came")),
            }
        }
    }

    fn event(&mut self, line: &[u8]) -> Result<Event, ClientError> {
        let told: Told =
            serde_json::from_slice(line).map_err(|error| self.strange(&error.to_string()))?;
        Ok(match told {
            Told::Delta {
                data,
                stream,
                base64,
            } => {
                let said = match base64 {
                    None => Said::Text(data),
                    Some(bytes) => Said::Bytes(
                        STANDARD
                            .decode(bytes)
                            .map_err(|error| self.strange(&error.to_string()))?,
                    ),
                };
                Event::Output(stream.unwrap_or(Stream::Stdout), said)
            }
            Told::Done {
                exit_code,
                timed_out,
            } => {
                self.over = true;
                Event::Done {
                    exit_code,
                    timed_out,
                }
            }
            Told::Error { message } => {
                self.over = true;
                Event::Failed(message)
            }
        })
    }

    fn strange(&self, reason: &str) -> ClientError {
        ClientError::Strange {
            address: self.address.clone(),
            reason: reason.to_owned(),
        }
    }
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Told {
    Delta {
        data: String,
        stream: Option<Stream>,
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
