//! HTTP client of the control socket, for the command line and the MCP server.

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

/// Why a call to the gate failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlClientError {
    /// No gate accepts connections on the socket.
    #[error("the gate does not answer on {path}: {reason}")]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// The error of the system.
        reason: io::Error,
    },
    /// The connection ended early, or the response is invalid.
    #[error("the connection to the gate failed: {0}")]
    Broken(String),
    /// The gate answered with an error.
    #[error("{message}")]
    Refused {
        /// The HTTP status.
        status: StatusCode,
        /// The stable error code.
        code: String,
        /// The error message.
        message: String,
        /// The whole JSON body.
        body: Value,
    },
}

/// A client of one gate's socket. Each call opens its own connection: calls are few, and a gate
/// that was restarted in between answers the next call.
#[derive(Clone, Debug)]
pub struct ControlClient {
    socket: PathBuf,
    timeout: Option<Duration>,
}

/// A response whose body has not been read yet.
#[derive(Debug)]
pub struct ControlResponse {
    status: StatusCode,
    version: Option<String>,
    is_json_lines: bool,
    body: Incoming,
}

impl ControlClient {
    /// A client for the gate at `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            timeout: None,
        }
    }

    /// The same client with a timeout for the head of each response. A gate that is suspended
    /// or stuck accepts connections and never answers.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// The path of the gate's socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// GETs `path`.
    pub async fn get(&self, path: &str) -> Result<Value, ControlClientError> {
        self.send(Method::GET, path, None).await?.json().await
    }

    /// POSTs `body` to `path`.
    pub async fn post(&self, path: &str, body: &Value) -> Result<Value, ControlClientError> {
        self.send(Method::POST, path, Some(body))
            .await?
            .json()
            .await
    }

    /// POSTs `body` to `path`; `on_progress` receives the progress lines of a streamed
    /// response.
    pub async fn post_watched(
        &self,
        path: &str,
        body: &Value,
        on_progress: impl FnMut(&Value),
    ) -> Result<Value, ControlClientError> {
        let sent = self.send_without_timeout(Method::POST, path, Some(body), LINES);
        let answer = sent.await?;
        if answer.is_json_lines {
            answer.last_line(on_progress).await
        } else {
            answer.json().await
        }
    }

    /// DELETEs `path`.
    pub async fn delete(&self, path: &str) -> Result<Value, ControlClientError> {
        self.send(Method::DELETE, path, None).await?.json().await
    }

    /// Sends one request and returns when the head of the response has arrived.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<ControlResponse, ControlClientError> {
        let sent = self.send_without_timeout(method, path, body, "*/*");
        match self.timeout {
            None => sent.await,
            Some(timeout) => tokio::time::timeout(timeout, sent)
                .await
                .unwrap_or_else(|_| Err(self.unreachable(io::ErrorKind::TimedOut.into()))),
        }
    }

    fn unreachable(&self, reason: io::Error) -> ControlClientError {
        ControlClientError::Unreachable {
            path: self.socket.clone(),
            reason,
        }
    }

    async fn send_without_timeout(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        accept: &'static str,
    ) -> Result<ControlResponse, ControlClientError> {
        let stream = UnixStream::connect(&self.socket)
            .await
            .map_err(|error| self.unreachable(error))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(broken)?;
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "connection to the gate ended early");
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
            .map_err(|error| ControlClientError::Broken(error.to_string()))?;
        let response = sender.send_request(request).await.map_err(broken)?;
        let version = response
            .headers()
            .get(VERSION_HEADER)
            .and_then(|value| value.to_str().ok())
            .map(str::to_owned);
        let kind = response.headers().get(header::CONTENT_TYPE);
        Ok(ControlResponse {
            status: response.status(),
            version,
            is_json_lines: kind.is_some_and(|kind| kind.as_bytes() == LINES.as_bytes()),
            body: response.into_body(),
        })
    }
}

impl ControlResponse {
    /// The version of the gate.
    pub fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }

    /// The whole response as JSON, or the gate's error.
    pub async fn json(self) -> Result<Value, ControlClientError> {
        let status = self.status;
        let bytes = self.body.collect().await.map_err(broken)?.to_bytes();
        let value: Value = serde_json::from_slice(&bytes).map_err(|error| {
            ControlClientError::Broken(format!("the response is not JSON: {error}"))
        })?;
        if status.is_success() {
            Ok(value)
        } else {
            Err(refused(status, value))
        }
    }

    /// The result at the end of a stream of JSON lines; `on_progress` receives the progress
    /// lines.
    async fn last_line(
        mut self,
        mut on_progress: impl FnMut(&Value),
    ) -> Result<Value, ControlClientError> {
        let mut rest = Vec::new();
        while let Some(frame) = self.body.frame().await {
            let frame = frame.map_err(broken)?;
            rest.extend_from_slice(frame.data_ref().map_or(&[], |data| &data[..]));
            while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = rest.drain(..=end).collect();
                let mut line: Value = serde_json::from_slice(&line).map_err(|error| {
                    ControlClientError::Broken(format!("the response is not JSON: {error}"))
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
                    return Err(refused(status, failed.take()));
                }
            }
        }
        Err(ControlClientError::Broken(
            "the response has no last line".to_owned(),
        ))
    }

    /// The whole response as text, or the gate's error.
    pub async fn text(self) -> Result<String, ControlClientError> {
        if !self.status.is_success() {
            self.json().await?;
            return Err(ControlClientError::Broken(
                "the gate answered with an error status and no error message".to_owned(),
            ));
        }
        let bytes = self.body.collect().await.map_err(broken)?.to_bytes();
        String::from_utf8(bytes.into())
            .map_err(|error| ControlClientError::Broken(error.to_string()))
    }

    /// Passes each chunk of the body to `take` as it arrives; `take` returns `false` to stop.
    pub async fn stream(
        mut self,
        mut take: impl FnMut(&[u8]) -> bool,
    ) -> Result<(), ControlClientError> {
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

fn refused(status: StatusCode, body: Value) -> ControlClientError {
    let text = |name: &str| body.get(name).and_then(Value::as_str).map(str::to_owned);
    let message = text("error").unwrap_or_else(|| format!("the gate answered {status}"));
    let code = text("code").unwrap_or_default();
    ControlClientError::Refused {
        status,
        code,
        message,
        body,
    }
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "the signature that map_err needs"
)]
fn broken(error: hyper::Error) -> ControlClientError {
    ControlClientError::Broken(error.to_string())
}
