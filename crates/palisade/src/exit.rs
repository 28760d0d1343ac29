//! Exit codes and the error that carries one.

use control::client::ClientError;
use control::reply;
use http::StatusCode;
use sandbox::contract::SandboxError;
use sandbox::git::error::GitError;
use sandbox::transfer::TransferError;

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
    /// It is already there, or in a state that forbids what was asked: active, paused, unmerged.
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

    /// A configuration with mistakes, each on its own line.
    pub fn refused(problems: &config::Problems) -> Self {
        let message = format!("the configuration was refused\n{problems}");
        Self::new(Exit::Usage, message)
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

/// The exit code of any error: the one place that knows. What the gate refuses and what is
/// refused here are the same errors, so both go by the status and word that the door has for
/// them.
pub fn exit_of(error: &anyhow::Error) -> Exit {
    if let Some(failure) = error.downcast_ref::<Failure>() {
        return failure.exit;
    }
    let (status, word) = if let Some(error) = error.downcast_ref::<ClientError>() {
        match error {
            ClientError::Unreachable { .. } => return Exit::GateUnreachable,
            ClientError::Broken(_) => return Exit::Failed,
            ClientError::Refused { status, code, .. } => (*status, code.as_str()),
        }
    } else if let Some(error) = error.downcast_ref::<SandboxError>() {
        reply::sandbox_status(error)
    } else if let Some(error) = error.downcast_ref::<TransferError>() {
        reply::transfer_status(error)
    } else if let Some(error) = error.downcast_ref::<GitError>() {
        reply::git_status(error)
    } else {
        return Exit::Failed;
    };
    exit_of_answer(status, word)
}

fn exit_of_answer(status: StatusCode, word: &str) -> Exit {
    match (status, word) {
        (_, "backend_unavailable") => Exit::BackendUnavailable,
        (_, "timed_out") => Exit::TimedOut,
        // It was asked for rightly and is not to be, as with git itself.
        (
            _,
            "git_conflict" | "workspace_refused" | "transfer_refused" | "too_much" | "setup_failed",
        ) => Exit::Failed,
        (StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY, _) => Exit::Usage,
        (StatusCode::NOT_FOUND, _) => Exit::NotFound,
        (StatusCode::CONFLICT, _) => Exit::Exists,
        (StatusCode::FORBIDDEN, _) => Exit::Denied,
        _ => Exit::Failed,
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
    fn what_is_refused_here_exits_as_what_the_gate_refuses() {
        let refused = |status: StatusCode, word: &str| ClientError::Refused {
            status,
            code: word.to_owned(),
            message: String::new(),
            body: serde_json::Value::Null,
        };
        for (here, there, expected) in [
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
            assert_eq!((here, there), (expected, expected));
        }
        assert_eq!(exit_of(&anyhow::anyhow!("something")).code(), 1);
    }
}
