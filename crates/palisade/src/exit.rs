//! Exit codes and the error that carries one.

use control::client::ClientError;
use http::StatusCode;

/// What the process tells its caller. The numbers are an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Done.
    Ok = 0,
    /// It was tried and failed.
    Failed = 1,
    /// Wrong usage or configuration.
    Usage = 2,
    /// There is no such thing.
    NotFound = 3,
    /// It is already there.
    Exists = 4,
    /// No gate answers.
    GateUnreachable = 5,
    /// The gate said no.
    Denied = 7,
    /// It took too long.
    TimedOut = 124,
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        std::process::ExitCode::from(exit as u8)
    }
}

/// A failure with the exit code it deserves. Any other error exits 1.
#[derive(Debug)]
pub struct Failure {
    /// The code.
    pub exit: Exit,
    /// What to print.
    pub message: String,
}

impl Failure {
    /// A failure that exits with `exit`.
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self {
            exit,
            message: message.into(),
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

/// The exit code of any error.
pub fn exit_of(error: &anyhow::Error) -> Exit {
    if let Some(failure) = error.downcast_ref::<Failure>() {
        return failure.exit;
    }
    match error.downcast_ref::<ClientError>() {
        Some(ClientError::Unreachable { .. }) => Exit::GateUnreachable,
        Some(ClientError::Refused { status, .. }) => exit_of_status(*status),
        Some(ClientError::Broken(_)) | None => Exit::Failed,
    }
}

fn exit_of_status(status: StatusCode) -> Exit {
    match status {
        StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY => Exit::Usage,
        StatusCode::NOT_FOUND => Exit::NotFound,
        StatusCode::CONFLICT => Exit::Exists,
        StatusCode::FORBIDDEN => Exit::Denied,
        _ => Exit::Failed,
    }
}
