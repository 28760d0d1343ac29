//! One attempt to send a request to the workbench, and health checks.

use std::io;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::time::Instant;

use super::address::{WorkbenchAddress, explain_permanent_error};
use super::{WorkbenchClient, WorkbenchClientError};

/// Interval between health checks while the workbench is not ready.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Timeout of one health check.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(2);

/// Why an attempt failed, and whether the request can have reached the server.
pub(super) enum AttemptError {
    /// The request cannot have reached the server.
    NotSent,
    /// The dialer of the caller failed: the request cannot have reached the server, and a retry
    /// would not help.
    DialFailed(String),
    /// The socket cannot be used, and waiting does not help: the cause and the fix.
    Inaccessible(String),
    /// The request may have reached the server.
    MaybeSent(String),
}

impl WorkbenchClient {
    /// Waits until the workbench is ready.
    pub async fn wait_until_ready(&self) -> Result<(), WorkbenchClientError> {
        self.wait_ready_until(Instant::now() + self.wait).await
    }

    /// Checks once whether the workbench is ready.
    pub async fn health(&self) -> Result<(), WorkbenchClientError> {
        let timed_out = || WorkbenchClientError::TimedOut(self.address.to_string());
        let health_request = tokio::time::timeout(
            HEALTH_TIMEOUT,
            self.attempt(Method::GET, "/health", Bytes::new()),
        );
        match health_request.await {
            Err(_) | Ok(Err(AttemptError::NotSent | AttemptError::MaybeSent(_))) => {
                Err(timed_out())
            }
            Ok(Err(AttemptError::DialFailed(reason))) => Err(self.dial_failed(reason)),
            Ok(Err(AttemptError::Inaccessible(reason))) => Err(self.inaccessible(reason)),
            Ok(Ok(response)) if response.status() == StatusCode::UNAUTHORIZED => {
                Err(WorkbenchClientError::Unauthorized(self.address.to_string()))
            }
            Ok(Ok(response)) => {
                let health: Health = tokio::time::timeout(HEALTH_TIMEOUT, self.read(response))
                    .await
                    .map_err(|_| timed_out())??;
                health.ok.then_some(()).ok_or_else(timed_out)
            }
        }
    }

    pub(super) async fn wait_ready_until(
        &self,
        deadline: Instant,
    ) -> Result<(), WorkbenchClientError> {
        loop {
            match self.health().await {
                Ok(()) => {
                    self.ready.store(true, Ordering::Release);
                    return Ok(());
                }
                Err(WorkbenchClientError::TimedOut(_))
                    if Instant::now() + POLL_INTERVAL <= deadline =>
                {
                    tokio::time::sleep(POLL_INTERVAL).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Classifies a failed connect.
    async fn classify_connect_error(&self, error: &io::Error) -> AttemptError {
        match &self.address {
            WorkbenchAddress::Unix(path) => match explain_permanent_error(path, error).await {
                Some(reason) => AttemptError::Inaccessible(reason),
                None => AttemptError::NotSent,
            },
            WorkbenchAddress::Tcp(..) => AttemptError::NotSent,
            // The dialer of the caller has its own retries.
            WorkbenchAddress::Dialer(_) => AttemptError::DialFailed(error.to_string()),
        }
    }

    /// Sends one request on a new connection.
    pub(super) async fn attempt(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Response<Incoming>, AttemptError> {
        let stream = match self.address.connect().await {
            Ok(stream) => stream,
            Err(error) => return Err(self.classify_connect_error(&error).await),
        };
        let (mut sender, connection) = hyper::client::conn::http1::Builder::new()
            .max_buf_size(256 * 1024)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|_| AttemptError::NotSent)?;
        // The connection ends with the response body, or when the body is dropped.
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "connection to the workbench ended early");
            }
        });
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        if let Ok(path) = path.parse() {
            *request.uri_mut() = path;
        }
        let headers = request.headers_mut();
        headers.insert(HOST, HeaderValue::from_static("localhost"));
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(token) = &self.token {
            headers.insert(AUTHORIZATION, token.clone());
        }
        let sent = sender.try_send_request(request).await;
        sent.map_err(|mut error| match error.take_message() {
            // hyper returned the request: no byte of it was written.
            Some(_) => AttemptError::NotSent,
            None => AttemptError::MaybeSent(error.into_error().to_string()),
        })
    }
}

#[derive(Deserialize)]
struct Health {
    ok: bool,
}
