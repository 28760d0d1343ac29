//! Whether the workbench is there, and one request to it.

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

use super::address::{Address, obstacle};
use super::{Client, ClientError};

/// Between two looks whether it is there.
const STEP: Duration = Duration::from_millis(100);

/// How long one look may take.
const LOOK: Duration = Duration::from_secs(2);

/// Why an attempt failed.
pub(super) enum Failed {
    /// Nobody can have heard of it.
    Unreached,
    /// Nobody can have heard of it, and it is in vain to try again.
    Closed(String),
    /// The socket cannot be used, and waiting does not help: the cause and the fix.
    Inaccessible(String),
    /// Somebody may have.
    Perhaps(String),
}

impl Client {
    /// Waits until it is there and well.
    pub async fn wait_until_ready(&self) -> Result<(), ClientError> {
        self.ready_by(Instant::now() + self.wait).await
    }

    /// Whether it is there and well now. Waits for nothing.
    pub async fn health(&self) -> Result<(), ClientError> {
        let timed_out = || ClientError::TimedOut(self.address.to_string());
        let look = tokio::time::timeout(LOOK, self.attempt(Method::GET, "/health", Bytes::new()));
        match look.await {
            Err(_) | Ok(Err(Failed::Unreached | Failed::Perhaps(_))) => Err(timed_out()),
            Ok(Err(Failed::Closed(reason))) => Err(self.closed(reason)),
            Ok(Err(Failed::Inaccessible(reason))) => Err(self.inaccessible(reason)),
            Ok(Ok(response)) if response.status() == StatusCode::UNAUTHORIZED => {
                Err(ClientError::Unauthorized(self.address.to_string()))
            }
            Ok(Ok(response)) => {
                let health: Health = tokio::time::timeout(LOOK, self.read(response))
                    .await
                    .map_err(|_| timed_out())??;
                health.ok.then_some(()).ok_or_else(timed_out)
            }
        }
    }

    pub(super) async fn ready_by(&self, deadline: Instant) -> Result<(), ClientError> {
        loop {
            match self.health().await {
                Ok(()) => {
                    self.ready.store(true, Ordering::Release);
                    return Ok(());
                }
                Err(ClientError::TimedOut(_)) if Instant::now() + STEP <= deadline => {
                    tokio::time::sleep(STEP).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// What a connection that failed means.
    async fn not_connected(&self, error: &io::Error) -> Failed {
        match &self.address {
            Address::Unix(path) => match obstacle(path, error).await {
                Some(reason) => Failed::Inaccessible(reason),
                None => Failed::Unreached,
            },
            Address::Tcp(..) => Failed::Unreached,
            // It is the caller's way, which knows better.
            Address::Way(_) => Failed::Closed(error.to_string()),
        }
    }

    /// One request on a connection of its own.
    pub(super) async fn attempt(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Response<Incoming>, Failed> {
        let line = match self.address.connect().await {
            Ok(line) => line,
            Err(error) => return Err(self.not_connected(&error).await),
        };
        let (mut sender, connection) = hyper::client::conn::http1::Builder::new()
            .max_buf_size(256 * 1024)
            .handshake(TokioIo::new(line))
            .await
            .map_err(|_| Failed::Unreached)?;
        // Ends with the answer's body, or when that is dropped.
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection to a workbench ended early");
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
            // Handed back: not a byte of it was written.
            Some(_) => Failed::Unreached,
            None => Failed::Perhaps(error.into_error().to_string()),
        })
    }
}

#[derive(Deserialize)]
struct Health {
    ok: bool,
}
