//! The other end of the door: what the CLI and its kin ask with.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::UnixStream;

use crate::http_api::{LINES, VERSION_HEADER};

/// Why nothing useful came back.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens.
    #[error("no gate answers on {path}: {reason}")]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        reason: io::Error,
    },
    /// The conversation broke off.
    #[error("the gate hung up: {0}")]
    Broken(String),
    /// The gate said no.
    #[error("{message}")]
    Refused {
        /// The status it answered with.
        status: StatusCode,
        /// Its stable word.
        code: String,
        /// Its sentence.
        message: String,
        /// Its whole answer.
        body: Value,
    },
}

/// A gate, reached through its socket. Each call is a connection of its own: calls are
/// few, and a gate that was restarted in between is simply the next one to answer.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    limit: Option<Duration>,
}

/// An answer whose body has not been read yet.
#[derive(Debug)]
pub struct Answer {
    status: StatusCode,
    version: Option<String>,
    in_lines: bool,
    body: Incoming,
}

impl Client {
    /// A client for the gate at `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            limit: None,
        }
    }

    /// The same client with a bound on how long an answer may take. A gate that is stopped
    /// or stuck accepts connections and never answers.
    #[must_use]
    pub fn within(mut self, limit: Duration) -> Self {
        self.limit = Some(limit);
        self
    }

    /// Where the gate is.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// GETs `path`.
    pub async fn get(&self, path: &str) -> Result<Value, ClientError> {
        self.send(Method::GET, path, None).await?.json().await
    }

    /// POSTs `body` to `path`.
    pub async fn post(&self, path: &str, body: &Value) -> Result<Value, ClientError> {
        self.send(Method::POST, path, Some(body))
            .await?
            .json()
            .await
    }

    /// POSTs `body` to `path`, and receives progress from a gate that streams it.
    pub async fn post_watched(
        &self,
        path: &str,
        body: &Value,
        on_progress: impl FnMut(&Value),
    ) -> Result<Value, ClientError> {
        let sent = self.send_patiently(Method::POST, path, Some(body), LINES);
        let answer = sent.await?;
        if answer.in_lines {
            answer.last_line(on_progress).await
        } else {
            answer.json().await
        }
    }

    /// DELETEs `path`.
    pub async fn delete(&self, path: &str) -> Result<Value, ClientError> {
        self.send(Method::DELETE, path, None).await?.json().await
    }

    /// Sends one request and returns when the head of the answer is there.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Answer, ClientError> {
        let sent = self.send_patiently(method, path, body, "*/*");
        match self.limit {
            None => sent.await,
            Some(limit) => tokio::time::timeout(limit, sent)
                .await
                .unwrap_or_else(|_| Err(self.unreachable(io::ErrorKind::TimedOut.into()))),
        }
    }

    fn unreachable(&self, reason: io::Error) -> ClientError {
        ClientError::Unreachable {
            path: self.socket.clone(),
            reason,
        }
    }

    async fn send_patiently(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        accept: &'static str,
    ) -> Result<Answer, ClientError> {
        let stream = UnixStream::connect(&self.socket)
            .await
            .map_err(|error| self.unreachable(error))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(broken)?;
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "the connection to the gate ended early");
            }
        });
        let body = body
            .map(|value| Bytes::from(value.to_string()))
            .unwrap_or_default();
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "localhost")
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, accept)
            .header(VERSION_HEADER, env!("CARGO_PKG_VERSION"))
            .body(Full::new(body))
            .map_err(|error| ClientError::Broken(error.to_string()))?;
        let response = sender.send_request(request).await.map_err(broken)?;
        let version = response
            .headers()
            .get(VERSION_HEADER)
            .and_then(|value| value.to_str().ok())
            .map(str::to_owned);
        let kind = response.headers().get(header::CONTENT_TYPE);
        Ok(Answer {
            status: response.status(),
            version,
            in_lines: kind.is_some_and(|kind| kind.as_bytes() == LINES.as_bytes()),
            body: response.into_body(),
        })
    }
}

impl Answer {
    /// The version of the gate that answered.
    pub fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }

    /// The whole answer as JSON, or the gate's refusal.
    pub async fn json(self) -> Result<Value, ClientError> {
        let status = self.status;
        let bytes = self.body.collect().await.map_err(broken)?.to_bytes();
        let value: Value = serde_json::from_slice(&bytes)
            .map_err(|error| ClientError::Broken(format!("its answer is not JSON: {error}")))?;
        if status.is_success() {
            Ok(value)
        } else {
            Err(refusal(status, value))
        }
    }

    /// The answer at the end of a stream of lines; `on_progress` receives the lines about progress.
    async fn last_line(
        mut self,
        mut on_progress: impl FnMut(&Value),
    ) -> Result<Value, ClientError> {
        let mut rest = Vec::new();
        while let Some(frame) = self.body.frame().await {
            let frame = frame.map_err(broken)?;
            rest.extend_from_slice(frame.data_ref().map_or(&[], |data| &data[..]));
            while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = rest.drain(..=end).collect();
                let mut line: Value = serde_json::from_slice(&line).map_err(|error| {
                    ClientError::Broken(format!("its answer is not JSON: {error}"))
                })?;
                if let Some(progress) = line.get("progress") {
                    on_progress(progress);
                } else if let Some(done) = line.get_mut("done") {
                    return Ok(done.take());
                } else if let Some(failed) = line.get_mut("failed") {
                    let status = failed.get("status").and_then(Value::as_u64);
                    let status = status.and_then(|status| u16::try_from(status).ok());
                    let status = status.and_then(|status| StatusCode::from_u16(status).ok());
                    let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
                    return Err(refusal(status, failed.take()));
                }
            }
        }
        Err(ClientError::Broken("its answer has no end".to_owned()))
    }

    /// The whole answer as text, or the gate's refusal.
    pub async fn text(self) -> Result<String, ClientError> {
        if !self.status.is_success() {
            self.json().await?;
            return Err(ClientError::Broken("a refusal without a reason".to_owned()));
        }
        let bytes = self.body.collect().await.map_err(broken)?.to_bytes();
        String::from_utf8(bytes.into()).map_err(|error| ClientError::Broken(error.to_string()))
    }

    /// Hands over the body piece by piece as it arrives; `false` from `take` ends it.
    pub async fn stream(mut self, mut take: impl FnMut(&[u8]) -> bool) -> Result<(), ClientError> {
        if !self.status.is_success() {
            return self.json().await.map(drop);
        }
        while let Some(frame) = self.body.frame().await {
            if let Some(data) = frame.map_err(broken)?.data_ref()
                && !take(data)
            {
                break;
            }
        }
        Ok(())
    }
}

fn refusal(status: StatusCode, body: Value) -> ClientError {
    let text = |name: &str| body.get(name).and_then(Value::as_str).map(str::to_owned);
    let message = text("error").unwrap_or_else(|| format!("the gate answered {status}"));
    let code = text("code").unwrap_or_default();
    ClientError::Refused {
        status,
        code,
        message,
        body,
    }
}

#[expect(clippy::needless_pass_by_value, reason = "the shape map_err asks for")]
fn broken(error: hyper::Error) -> ClientError {
    ClientError::Broken(error.to_string())
}
