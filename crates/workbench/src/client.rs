//! The client: connects to a workbench that somebody else runs, waits for it, and finds it again
//! when it was away.
//!
//! ```text
//!   unknown ── connects, /health says ok ──▶ ready ── a call ──▶ answer
//!      ▲                                       │
//!      └────────── cannot connect ─────────────┘
//! ```
//!
//! Each call has a connection of its own, so that it is always known whether it can have
//! reached the server. One that cannot have is made again; one that may have is not, for it may
//! have been carried out. What comes back was said by whatever runs in there: it is bounded,
//! and read as nothing but data.

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

/// The largest answer: a picture of 16 MiB, in base64.
const MAX_ANSWER: usize = 32 << 20;

/// Why a call has no result.
#[derive(Debug, thiserror::Error)]
pub enum WorkbenchClientError {
    /// Nobody was there in time.
    #[error("Timed out waiting for coding sidecar at {0}")]
    TimedOut(String),
    /// The way to it is closed.
    #[error("{address} cannot be reached: {reason}")]
    Closed {
        /// Where.
        address: String,
        /// What the way there said.
        reason: String,
    },
    /// The socket cannot be connected to, and waiting does not change that.
    #[error("cannot connect to {address}: {reason}")]
    Inaccessible {
        /// Where.
        address: String,
        /// Why, and what to do.
        reason: String,
    },
    /// It does not know us.
    #[error("the workbench at {0} does not accept our token; see sandbox.remote.auth")]
    Unauthorized(String),
    /// A token is wanted, and there is none.
    #[error("sandbox.remote.auth.required is true but there is no token")]
    NoToken,
    /// The address means nothing.
    #[error("'{0}' is neither an IP address nor localhost")]
    InvalidAddress(String),
    /// The connection broke; whether the call was carried out is not known.
    #[error(
        "the connection to {address} broke, and whether the call was carried out is not known: \
         {reason}"
    )]
    ConnectionLost {
        /// Where.
        address: String,
        /// How.
        reason: String,
    },
    /// The tool said no.
    #[error("{0}")]
    Refused(String),
    /// What came back is none of the answers we know.
    #[error("{address} does not answer as a workbench does: {reason}")]
    InvalidResponse {
        /// Where.
        address: String,
        /// What is strange.
        reason: String,
    },
}

/// A workbench somewhere else.
#[derive(Debug)]
pub struct WorkbenchClient {
    address: WorkbenchAddress,
    wait: Duration,
    token: Option<HeaderValue>,
    /// Whether it was well when we last asked, and was not away since.
    ready: AtomicBool,
}

impl WorkbenchClient {
    /// A client that waits so long for its workbench.
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
        let strange = |_| WorkbenchClientError::InvalidResponse {
            address: address.to_string(),
            reason: "the token cannot be sent".to_owned(),
        };
        let token = token
            .map(|token| HeaderValue::from_str(&format!("Bearer {token}")))
            .transpose()
            .map_err(strange)?
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
    pub fn of(container: &RemoteContainer) -> Result<Self, WorkbenchClientError> {
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

    /// Where it connects to.
    pub fn address(&self) -> &WorkbenchAddress {
        &self.address
    }

    /// Runs a command; what it says comes as it says it. Dropping what is returned ends it.
    pub async fn bash(&self, request: &BashRequest) -> Result<CommandOutput, WorkbenchClientError> {
        let response = self.post("/bash", request).await?;
        if response.status() != StatusCode::OK {
            return Err(self.refusal(response).await);
        }
        let address = self.address.to_string();
        Ok(CommandOutput::new(response.into_body(), address))
    }

    /// Runs a command to its end, and keeps the last of what it said.
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

    /// Finds lines.
    pub async fn grep(&self, request: &GrepRequest) -> Result<GrepResult, WorkbenchClientError> {
        self.call("/grep", request).await
    }

    /// Calls a tool by its name, with whatever it is to be asked. Not bash, whose answer is
    /// not one value.
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
            return Err(self.refusal(response).await);
        }
        let answer: ResponseBody<T> = self.read(response).await?;
        Ok(answer.result)
    }

    /// Sends a request, again and again as long as nobody can have heard it.
    async fn post(
        &self,
        path: &str,
        request: &impl Serialize,
    ) -> Result<Response<Incoming>, WorkbenchClientError> {
        let body = serde_json::to_vec(&RequestBody {
            // The original wants one.
            session_id: "palisade",
            request,
        });
        let body = Bytes::from(body.map_err(|error| self.strange(&error))?);
        let deadline = Instant::now() + self.wait;
        loop {
            if !self.ready.load(Ordering::Acquire) {
                self.ready_by(deadline).await?;
            }
            match self.attempt(Method::POST, path, body.clone()).await {
                Ok(response) => return Ok(response),
                Err(AttemptError::NotSent) => self.ready.store(false, Ordering::Release),
                Err(AttemptError::Closed(reason)) => return Err(self.closed(reason)),
                Err(AttemptError::Inaccessible(reason)) => return Err(self.inaccessible(reason)),
                Err(AttemptError::MaybeSent(reason)) => {
                    self.ready.store(false, Ordering::Release);
                    return Err(self.broken(reason));
                }
            }
        }
    }

    async fn read<T: DeserializeOwned>(
        &self,
        response: Response<Incoming>,
    ) -> Result<T, WorkbenchClientError> {
        let body = Limited::new(response.into_body(), MAX_ANSWER).collect();
        let body = body.await.map_err(|error| self.broken(error.to_string()))?;
        serde_json::from_slice(&body.to_bytes()).map_err(|error| self.strange(&error))
    }

    async fn refusal(&self, response: Response<Incoming>) -> WorkbenchClientError {
        if response.status() == StatusCode::UNAUTHORIZED {
            return WorkbenchClientError::Unauthorized(self.address.to_string());
        }
        match self.read::<ErrorBody>(response).await {
            Ok(refusal) => WorkbenchClientError::Refused(refusal.error),
            Err(error) => error,
        }
    }

    fn closed(&self, reason: String) -> WorkbenchClientError {
        WorkbenchClientError::Closed {
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

    fn broken(&self, reason: String) -> WorkbenchClientError {
        WorkbenchClientError::ConnectionLost {
            address: self.address.to_string(),
            reason,
        }
    }

    fn strange(&self, reason: &dyn std::error::Error) -> WorkbenchClientError {
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
