//! Exit codes of the command line, and the error type that carries an exit code.

use control::client::ControlClientError;
use control::reply;
use http::StatusCode;
use sandbox::contract::SandboxError;
use sandbox::git::error::GitError;
use sandbox::transfer::TransferError;

/// Exit status of the process. The numbers are a stable interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CliExit {
    /// Success.
    Ok,
    /// Failure.
    Failed,
    /// Wrong usage or configuration.
    Usage,
    /// The named object does not exist.
    NotFound,
    /// The object already exists, or its state forbids the operation: active, paused, unmerged.
    Exists,
    /// The gate is not running.
    GateUnreachable,
    /// The isolation backend is not available.
    BackendUnavailable,
    /// The policy refuses.
    Denied,
    /// Timeout.
    TimedOut,
    /// The exit code of a command in a sandbox.
    Command(u8),
}

impl CliExit {
    /// The exit code.
    pub const fn code(self) -> u8 {
        match self {
            CliExit::Ok => 0,
            CliExit::Failed => 1,
            CliExit::Usage => 2,
            CliExit::NotFound => 3,
            CliExit::Exists => 4,
            CliExit::GateUnreachable => 5,
            CliExit::BackendUnavailable => 6,
            CliExit::Denied => 7,
            CliExit::TimedOut => 124,
            CliExit::Command(code) => code,
        }
    }
}

impl From<CliExit> for std::process::ExitCode {
    fn from(exit: CliExit) -> Self {
        std::process::ExitCode::from(exit.code())
    }
}

/// An error with its exit code. Any other error exits with 1.
#[derive(Debug)]
pub struct CliError {
    /// The exit status.
    pub exit: CliExit,
    /// The message to print.
    pub message: String,
}

impl CliError {
    /// An error that exits with `exit`.
    pub fn new(exit: CliExit, message: impl Into<String>) -> Self {
        Self {
            exit,
            message: message.into(),
        }
    }

    /// An invalid configuration, with each problem on its own line.
    pub fn invalid_config(problems: &config::Problems) -> Self {
        let message = format!("invalid configuration\n{problems}");
        Self::new(CliExit::Usage, message)
    }
}

impl std::fmt::Display for CliError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for CliError {}

/// The exit status of any error. The gate and this process return the same errors, so both are
/// mapped by the status and error code of the control API.
pub fn exit_of(error: &anyhow::Error) -> CliExit {
    if let Some(failure) = error.downcast_ref::<CliError>() {
        return failure.exit;
    }
    let (status, code) = if let Some(error) = error.downcast_ref::<ControlClientError>() {
        match error {
            ControlClientError::Unreachable { .. } => return CliExit::GateUnreachable,
            ControlClientError::Broken(_) => return CliExit::Failed,
            ControlClientError::Refused { status, code, .. } => (*status, code.as_str()),
        }
    } else if let Some(error) = error.downcast_ref::<SandboxError>() {
        reply::sandbox_status(error)
    } else if let Some(error) = error.downcast_ref::<TransferError>() {
        reply::transfer_status(error)
    } else if let Some(error) = error.downcast_ref::<GitError>() {
        reply::git_status(error)
    } else {
        return CliExit::Failed;
    };
    exit_of_response(status, code)
}

fn exit_of_response(status: StatusCode, code: &str) -> CliExit {
    match (status, code) {
        (_, "backend_unavailable") => CliExit::BackendUnavailable,
        (_, "timed_out") => CliExit::TimedOut,
        // The request was valid, but its operation failed: exit code 1, as git itself exits.
        (
            _,
            "git_conflict" | "workspace_refused" | "transfer_refused" | "too_much" | "setup_failed",
        ) => CliExit::Failed,
        (StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY, _) => CliExit::Usage,
        (StatusCode::NOT_FOUND, _) => CliExit::NotFound,
        (StatusCode::CONFLICT, _) => CliExit::Exists,
        (StatusCode::FORBIDDEN, _) => CliExit::Denied,
        _ => CliExit::Failed,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use sandbox::contract::setup::{SetupEnd, SetupFailure};
    use sandbox::name::Slug;

    use super::*;

    fn code<E: std::error::Error + Send + Sync + 'static>(error: E) -> u8 {
        exit_of(&anyhow::Error::from(error).context("upload failed")).code()
    }

    #[test]
    fn local_and_gate_errors_have_the_same_exit_code() {
        let refused = |status: StatusCode, word: &str| ControlClientError::Refused {
            status,
            code: word.to_owned(),
            message: String::new(),
            body: serde_json::Value::Null,
        };
        for (local, remote, expected) in [
            (
                code(SandboxError::NotFound("fix".into())),
                code(refused(StatusCode::NOT_FOUND, "not_found")),
                3,
            ),
            (
                code(TransferError::Missing("file".into())),
                code(SandboxError::Transfer(TransferError::Missing(
                    "file".into(),
                ))),
                3,
            ),
            (
                code(TransferError::Exists("file".into())),
                code(refused(StatusCode::CONFLICT, "exists")),
                4,
            ),
            (
                code(SandboxError::Busy {
                    name: Slug::from_name("fix").unwrap(),
                    what: String::new(),
                }),
                code(refused(StatusCode::CONFLICT, "busy")),
                4,
            ),
            (
                code(SandboxError::Paused("fix".into())),
                code(refused(StatusCode::CONFLICT, "paused")),
                4,
            ),
            (
                code(refused(StatusCode::CONFLICT, "unmerged")),
                code(refused(StatusCode::CONFLICT, "port_taken")),
                4,
            ),
            (
                code(GitError::Conflicts(Vec::new())),
                code(refused(StatusCode::CONFLICT, "git_conflict")),
                1,
            ),
            (
                code(refused(StatusCode::UNPROCESSABLE_ENTITY, "setup_failed")),
                code(SandboxError::from(SetupFailure {
                    end: SetupEnd::Exited(3),
                    lines: Vec::new(),
                })),
                1,
            ),
            (
                code(refused(StatusCode::UNPROCESSABLE_ENTITY, "timed_out")),
                code(SandboxError::from(SetupFailure {
                    end: SetupEnd::TimedOut(Duration::ZERO),
                    lines: Vec::new(),
                })),
                124,
            ),
            (
                code(TransferError::TooLarge(1)),
                code(refused(StatusCode::UNPROCESSABLE_ENTITY, "too_much")),
                1,
            ),
        ] {
            assert_eq!((local, remote), (expected, expected));
        }
        assert_eq!(exit_of(&anyhow::anyhow!("something")).code(), 1);
    }
}
