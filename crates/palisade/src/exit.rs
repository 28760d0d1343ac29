//! Exit codes and the error that carries one.

use control::client::ClientError;
use http::StatusCode;

/// What the process tells its caller. The numbers are an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Done.
    Ok,
    /// It was tried and failed.
    Failed,
    /// Wrong usage or configuration.
    Usage,
    /// There is no such thing.
    NotFound,
    /// It is already there.
    Exists,
    /// No gate answers.
    GateUnreachable,
    /// What keeps sandboxes is not there.
    BackendUnavailable,
    /// The gate said no.
    Denied,
    /// It took too long.
    TimedOut,
    /// What a command inside a sandbox ended with.
    Command(u8),
}

impl Exit {
    /// The number.
    pub const fn code(self) -> u8 {
        match self {
            Exit::Ok => 0,
            Exit::Failed => 1,
            Exit::Usage => 2,
            Exit::NotFound => 3,
            Exit::Exists => 4,
            Exit::GateUnreachable => 5,
            Exit::BackendUnavailable => 6,
            Exit::Denied => 7,
            Exit::TimedOut => 124,
            Exit::Command(code) => code,
        }
    }
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        std::process::ExitCode::from(exit.code())
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
        Some(ClientError::Refused { code, .. }) if code == "backend_unavailable" => {
            Exit::BackendUnavailable
        }
        Some(ClientError::Refused { code, .. }) if code == "timed_out" => Exit::TimedOut,
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
