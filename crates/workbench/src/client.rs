//! Client of a workbench that runs in another process or container: waits until it is ready, and
//! reconnects after it was restarted.
//!
//! ```text
//!   unknown ── connects, /health is ok ──▶ ready ── a call ──▶ response
//!      ▲                                     │
//!      └───────── cannot connect ────────────┘
//! ```
//!
//! Each call uses a new connection, so the client always knows whether the request can have reached
//! the server. A request that cannot have reached the server is retried; a request that may have
//! reached the server is not, because the tool may have run. Responses come from an untrusted
//! container: their size is limited, and they are parsed as data only.

pub mod address;
mod attempt;
pub mod output;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use config::section::sandbox::RemoteContainer;
use http::header::HeaderValue;
use http::{Method, Response, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::request::{
    BashRequest, EditRequest, EditResult, FindRequest, FindResult, GrepRequest, GrepResult,
    LsRequest, LsResult, ReadFileRequest, ReadResult, WriteRequest, WriteResult,
};
use crate::tools::bash::{BashResult, CommandEvent, OutputTail};
use address::{WorkbenchAddress, ip_address};
use attempt::AttemptError;
use output::CommandOutput;

/// Maximum size of a response body in bytes: an image of 16 MiB in base64.
const MAX_RESPONSE: usize = 32 << 20;

/// Why a call has no result.
#[derive(Debug, thiserror::Error)]
pub enum WorkbenchClientError {
    /// The workbench was not ready in time.
    #[error("Timed out waiting for coding sidecar at {0}")]
    TimedOut(String),
    /// The dialer of the caller failed, and a retry would not help.
    #[error("{address} cannot be reached: {reason}")]
    DialFailed {
        /// The address.
        address: String,
        /// The error of the dialer.
        reason: String,
    },
    /// The socket cannot be connected to, and waiting does not change that.
    #[error("cannot connect to {address}: {reason}")]
    Inaccessible {
        /// The address.
        address: String,
        /// The cause and the fix.
        reason: String,
    },
    /// The workbench rejected the token.
    #[error("the workbench at {0} does not accept our token; see sandbox.remote.auth")]
    Unauthorized(String),
    /// A token is required, and none is configured.
    #[error(
        "sandbox.remote.auth.required is true but no token is configured; set sandbox.remote.auth.token"
    )]
    NoToken,
    /// The host is neither an IP address nor localhost.
    #[error("'{0}' is neither an IP address nor localhost")]
    InvalidAddress(String),
    /// The connection was lost; the tool may or may not have run.
    #[error("the connection to {address} was lost, and the tool may or may not have run: {reason}")]
    ConnectionLost {
        /// The address.
        address: String,
        /// The error of the connection.
        reason: String,
    },
    /// The tool returned an error.
    #[error("{0}")]
    Refused(String),
    /// The response is not a response of a workbench.
    #[error("invalid response from {address}: {reason}; check that a workbench listens there")]
    InvalidResponse {
        /// The address.
        address: String,
        /// What is invalid.
        reason: String,
    },
}

/// Client of one workbench.
#[derive(Debug)]
pub struct WorkbenchClient {
    address: WorkbenchAddress,
    wait: Duration,
    token: Option<HeaderValue>,
    /// Whether the last health check succeeded and no connection has failed since.
    ready: AtomicBool,
}

impl WorkbenchClient {
    /// A client that waits at most `wait` for the workbench to become ready.
    pub fn new(
        address: WorkbenchAddress,
        wait: Duration,
        token: Option<&str>,
    ) -> Result<Self, WorkbenchClientError> {
        if let WorkbenchAddress::Tcp(host, _) = &address
            && ip_address(host).is_none()
        {
            return Err(WorkbenchClientError::InvalidAddress(host.clone()));
        }
        let invalid_token = |_| WorkbenchClientError::InvalidResponse {
            address: address.to_string(),
            reason: "the token cannot be sent".to_owned(),
        };
        let token = token
            .map(|token| HeaderValue::from_str(&format!("Bearer {token}")))
            .transpose()
            .map_err(invalid_token)?
            .map(|mut value| {
                value.set_sensitive(true);
                value
            });
        Ok(Self {
            address,
            wait,
            token,
            ready: AtomicBool::new(false),
        })
    }

    /// The client for a container of `sandbox.remote`.
    pub fn for_container(container: &RemoteContainer) -> Result<Self, WorkbenchClientError> {
        let address = match (&container.socket_path, &container.tcp) {
            (Some(path), _) => WorkbenchAddress::Unix(path.clone()),
            (None, Some(tcp)) => WorkbenchAddress::Tcp(tcp.host.to_string(), tcp.port),
            (None, None) => return Err(WorkbenchClientError::InvalidAddress(String::new())),
        };
        let token = container.auth.token.as_ref().map(|token| token.expose());
        let token = token.filter(|token| !token.is_empty());
        if container.auth.required && token.is_none() {
            return Err(WorkbenchClientError::NoToken);
        }
        Self::new(
            address,
            Duration::from_millis(container.wait_for_ready_ms),
            token,
        )
    }

    /// The address of the workbench.
    pub fn address(&self) -> &WorkbenchAddress {
        &self.address
    }

    /// Runs a command and streams its output. Dropping the stream ends the command.
    pub async fn bash(&self, request: &BashRequest) -> Result<CommandOutput, WorkbenchClientError> {
        let response = self.post("/bash", request).await?;
        if response.status() != StatusCode::OK {
            return Err(self.read_error(response).await);
        }
        let address = self.address.to_string();
        Ok(CommandOutput::new(response.into_body(), address))
    }

    /// Runs a command to its end and returns the tail of its output.
    pub async fn run(&self, request: &BashRequest) -> Result<BashResult, WorkbenchClientError> {
        let mut output = self.bash(request).await?;
        let mut collected = OutputTail::default();
        loop {
            match output.next().await? {
                CommandEvent::Output(stream, chunk) => collected.push(stream, &chunk),
                CommandEvent::Done {
                    exit_code,
                    timed_out,
                } => return Ok(collected.result(exit_code, timed_out)),
                CommandEvent::Failed(why) => return Err(WorkbenchClientError::Refused(why)),
            }
        }
    }

    /// Reads a file.
    pub async fn read_file(
        &self,
        request: &ReadFileRequest,
    ) -> Result<ReadResult, WorkbenchClientError> {
        self.call("/read", request).await
    }

    /// Writes a file.
    pub async fn write(&self, request: &WriteRequest) -> Result<WriteResult, WorkbenchClientError> {
        self.call("/write", request).await
    }

    /// Changes a file.
    pub async fn edit(&self, request: &EditRequest) -> Result<EditResult, WorkbenchClientError> {
        self.call("/edit", request).await
    }

    /// Lists a directory.
    pub async fn ls(&self, request: &LsRequest) -> Result<LsResult, WorkbenchClientError> {
        self.call("/ls", request).await
    }

    /// Finds files.
    pub async fn find(&self, request: &FindRequest) -> Result<FindResult, WorkbenchClientError> {
        self.call("/find", request).await
    }

    /// Searches lines.
    pub async fn grep(&self, request: &GrepRequest) -> Result<GrepResult, WorkbenchClientError> {
        self.call("/grep", request).await
    }

    /// Calls a tool by its name with a JSON request. bash is excluded, because its response is a
    /// stream.
    pub async fn call_tool(
        &self,
        tool: &str,
        request: &serde_json::Value,
    ) -> Result<serde_json::Value, WorkbenchClientError> {
        self.call(&format!("/{tool}"), request).await
    }

    async fn call<T: DeserializeOwned>(
        &self,
        path: &str,
        request: &impl Serialize,
    ) -> Result<T, WorkbenchClientError> {
        let response = self.post(path, request).await?;
        if response.status() != StatusCode::OK {
            return Err(self.read_error(response).await);
        }
        let response: ResponseBody<T> = self.read(response).await?;
        Ok(response.result)
    }

    /// Sends a request; retries until the deadline while no attempt can have reached the server.
    async fn post(
        &self,
        path: &str,
        request: &impl Serialize,
    ) -> Result<Response<Incoming>, WorkbenchClientError> {
        let body = serde_json::to_vec(&RequestBody {
            // The original sidecar requires a session id.
            session_id: "palisade",
            request,
        });
        let body = Bytes::from(body.map_err(|error| self.invalid_response(&error))?);
        let deadline = Instant::now() + self.wait;
        loop {
            if !self.ready.load(Ordering::Acquire) {
                self.wait_ready_until(deadline).await?;
            }
            match self.attempt(Method::POST, path, body.clone()).await {
                Ok(response) => return Ok(response),
                Err(AttemptError::NotSent) => self.ready.store(false, Ordering::Release),
                Err(AttemptError::DialFailed(reason)) => return Err(self.dial_failed(reason)),
                Err(AttemptError::Inaccessible(reason)) => return Err(self.inaccessible(reason)),
                Err(AttemptError::MaybeSent(reason)) => {
                    self.ready.store(false, Ordering::Release);
                    return Err(self.connection_lost(reason));
                }
            }
        }
    }

    async fn read<T: DeserializeOwned>(
        &self,
        response: Response<Incoming>,
    ) -> Result<T, WorkbenchClientError> {
        let body = Limited::new(response.into_body(), MAX_RESPONSE).collect();
        let body = body
            .await
            .map_err(|error| self.connection_lost(error.to_string()))?;
        serde_json::from_slice(&body.to_bytes()).map_err(|error| self.invalid_response(&error))
    }

    async fn read_error(&self, response: Response<Incoming>) -> WorkbenchClientError {
        if response.status() == StatusCode::UNAUTHORIZED {
            return WorkbenchClientError::Unauthorized(self.address.to_string());
        }
        match self.read::<ErrorBody>(response).await {
            Ok(body) => WorkbenchClientError::Refused(body.error),
            Err(error) => error,
        }
    }

    fn dial_failed(&self, reason: String) -> WorkbenchClientError {
        WorkbenchClientError::DialFailed {
            address: self.address.to_string(),
            reason,
        }
    }

    fn inaccessible(&self, reason: String) -> WorkbenchClientError {
        WorkbenchClientError::Inaccessible {
            address: self.address.to_string(),
            reason,
        }
    }

    fn connection_lost(&self, reason: String) -> WorkbenchClientError {
        WorkbenchClientError::ConnectionLost {
            address: self.address.to_string(),
            reason,
        }
    }

    fn invalid_response(&self, reason: &dyn std::error::Error) -> WorkbenchClientError {
        WorkbenchClientError::InvalidResponse {
            address: self.address.to_string(),
            reason: reason.to_string(),
        }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct RequestBody<'a, T> {
    session_id: &'a str,
    #[serde(flatten)]
    request: &'a T,
}

#[derive(Deserialize)]
struct ResponseBody<T> {
    result: T,
}

#[derive(Deserialize)]
struct ErrorBody {
    error: String,
}
