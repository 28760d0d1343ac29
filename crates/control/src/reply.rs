//! What comes back, and the one place where failures become statuses.

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use serde_json::{Value, json};
use store::error::StoreError;
use tokio::sync::mpsc;

/// The answer to an action.
#[derive(Debug)]
pub enum Reply {
    /// One JSON value.
    Json(StatusCode, Value),
    /// Text of some type.
    Text(&'static str, String),
    /// JSON lines, as they come. The sender is dropped at the end.
    Lines(mpsc::Receiver<Result<Bytes, std::io::Error>>),
}

impl Reply {
    /// 200 with a value.
    pub fn ok(value: Value) -> Self {
        Reply::Json(StatusCode::OK, value)
    }
}

/// Why an action was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The request itself is wrong.
    #[error("{0}")]
    Bad(String),
    /// The peer is another user.
    #[error("this gate belongs to another user")]
    Forbidden,
    /// The thing does not exist.
    #[error("{0}")]
    NotFound(String),
    /// The path exists, the method does not.
    #[error("Method not allowed")]
    Method(String),
    /// The body is larger than a request may be.
    #[error("the request body is larger than {0} bytes")]
    TooLarge(usize),
    /// Too many writes.
    #[error("Rate limit exceeded")]
    RateLimited(Duration),
    /// The store said no.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// New settings were refused; the text lists every problem.
    #[error("{0}")]
    Config(String),
    /// The gate is on its way out or a part of it does not answer.
    #[error("{0}")]
    Unavailable(String),
}

impl ControlError {
    /// The status and body a client sees.
    pub fn respond(&self) -> (StatusCode, Value) {
        let (status, code) = match self {
            ControlError::Bad(_) => (StatusCode::BAD_REQUEST, "bad_request"),
            ControlError::Forbidden => (StatusCode::FORBIDDEN, "forbidden"),
            ControlError::NotFound(_) => (StatusCode::NOT_FOUND, "not_found"),
            ControlError::Method(_) => (StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed"),
            ControlError::TooLarge(_) => (StatusCode::PAYLOAD_TOO_LARGE, "too_large"),
            ControlError::RateLimited(_) => (StatusCode::TOO_MANY_REQUESTS, "rate_limited"),
            ControlError::Config(_) => (StatusCode::UNPROCESSABLE_ENTITY, "bad_config"),
            ControlError::Unavailable(_) => (StatusCode::SERVICE_UNAVAILABLE, "unavailable"),
            ControlError::Store(error) => store_status(error),
        };
        (status, json!({ "error": self.to_string(), "code": code }))
    }
}

fn store_status(error: &StoreError) -> (StatusCode, &'static str) {
    match error {
        StoreError::IpTaken { .. } => (StatusCode::CONFLICT, "ip_taken"),
        StoreError::Exists { .. } => (StatusCode::CONFLICT, "exists"),
        StoreError::NotFound { .. } => (StatusCode::NOT_FOUND, "not_found"),
        StoreError::NewerSchema { .. } | StoreError::Unfit { .. } | StoreError::File { .. } => {
            (StatusCode::BAD_REQUEST, "unfit_file")
        }
        StoreError::Unavailable { .. } | StoreError::Closed => {
            (StatusCode::SERVICE_UNAVAILABLE, "registry_unavailable")
        }
        StoreError::Write { .. } | StoreError::Read { .. } | StoreError::Export { .. } => {
            (StatusCode::INTERNAL_SERVER_ERROR, "database")
        }
    }
}
