//! Replies of the control API, and the mapping of errors to HTTP statuses.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use sandbox::checkpoint::CheckpointError;
use sandbox::contract::SandboxError;
use sandbox::contract::setup::{SetupEnd, SetupFailure};
use sandbox::git::error::GitError;
use sandbox::manager::ManagerError;
use sandbox::transfer::TransferError;
use serde_json::{Value, json};
use store::error::StoreError;
use tokio::sync::mpsc;

/// The reply to an action.
#[derive(Debug)]
pub enum ControlReply {
    /// One JSON value.
    Json(StatusCode, Value),
    /// Text with its content type.
    Text(&'static str, String),
    /// A stream of JSON lines, which ends when the sender is dropped.
    Lines(mpsc::Receiver<Result<Bytes, std::io::Error>>),
}

impl ControlReply {
    /// 200 with a value.
    pub fn ok(value: Value) -> Self {
        ControlReply::Json(StatusCode::OK, value)
    }
}

/// Why an action failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The request is invalid.
    #[error("{0}")]
    Bad(String),
    /// The peer is another user.
    #[error("this gate belongs to another user")]
    Forbidden,
    /// The named object does not exist.
    #[error("{0}")]
    NotFound(String),
    /// The path exists, but not with this method.
    #[error("Method not allowed")]
    Method(String),
    /// The request body is too large.
    #[error("the request body is larger than {0} bytes")]
    TooLarge(usize),
    /// Too many writes.
    #[error("Rate limit exceeded")]
    RateLimited(Duration),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The sandbox manager failed.
    #[error(transparent)]
    Sandbox(#[from] ManagerError),
    /// The set-up command of a new sandbox failed.
    #[error("{origin}: {failure}{}{}", removal_note(*.is_removed), setup_hint(failure))]
    SetUp {
        /// The option or key that names the command.
        origin: &'static str,
        /// The command's failure.
        failure: SetupFailure,
        /// Whether the unfinished sandbox was removed.
        is_removed: bool,
    },
    /// Another program listens on the address.
    #[error(
        "port {} is already in use on {}; publish on another port, or on port 0 to let the system \
         choose one",
        .0.port(),
        .0.ip()
    )]
    PortTaken(SocketAddr),
    /// The operation failed.
    #[error("{0}")]
    Failed(String),
    /// New settings were refused; the text lists every problem.
    #[error("{0}")]
    Config(String),
    /// The gate is shutting down, or a part of it is unavailable.
    #[error("{0}")]
    Unavailable(String),
}

impl ControlError {
    /// The error for an id without a registration.
    pub(crate) fn container_not_found() -> Self {
        Self::NotFound("Container not found".to_owned())
    }

    /// The status and body of the HTTP response.
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
            ControlError::PortTaken(_) => (StatusCode::CONFLICT, "port_taken"),
            ControlError::Failed(_) => (StatusCode::INTERNAL_SERVER_ERROR, "failed"),
            ControlError::Store(error) => store_status(error),
            ControlError::Sandbox(error) => manager_status(error),
            ControlError::SetUp { failure, .. } => setup_status(failure),
        };
        (status, json!({ "error": self.to_string(), "code": code }))
    }
}

fn removal_note(is_removed: bool) -> &'static str {
    if is_removed {
        "\nNothing of the sandbox is left."
    } else {
        ""
    }
}

fn setup_hint(failure: &SetupFailure) -> &'static str {
    match failure.end {
        SetupEnd::Exited(_) => "",
        SetupEnd::TimedOut(_) => "\nsandbox.setup_timeout sets the time that the command has.",
    }
}

/// The status for a failed set-up command. The gate itself did not fail.
fn setup_status(failure: &SetupFailure) -> (StatusCode, &'static str) {
    let code = match failure.end {
        SetupEnd::Exited(_) => "setup_failed",
        SetupEnd::TimedOut(_) => "timed_out",
    };
    (StatusCode::UNPROCESSABLE_ENTITY, code)
}

fn store_status(error: &StoreError) -> (StatusCode, &'static str) {
    match error {
        StoreError::IpTaken { .. } => (StatusCode::CONFLICT, "ip_taken"),
        StoreError::Exists { .. } => (StatusCode::CONFLICT, "exists"),
        StoreError::NotFound { .. } => (StatusCode::NOT_FOUND, "not_found"),
        StoreError::NewerSchema { .. }
        | StoreError::InvalidBackup { .. }
        | StoreError::File { .. } => (StatusCode::BAD_REQUEST, "unfit_file"),
        StoreError::Unavailable { .. } | StoreError::Closed => {
            (StatusCode::SERVICE_UNAVAILABLE, "registry_unavailable")
        }
        StoreError::Write { .. } | StoreError::Read { .. } | StoreError::Export { .. } => {
            (StatusCode::INTERNAL_SERVER_ERROR, "database")
        }
    }
}

fn manager_status(error: &ManagerError) -> (StatusCode, &'static str) {
    match error {
        ManagerError::Sandbox(error) => sandbox_status(error),
        ManagerError::Git(error) => git_status(error),
        ManagerError::Unmerged { .. } => (StatusCode::CONFLICT, "unmerged"),
        ManagerError::Unsaved { .. } => (StatusCode::CONFLICT, "unsaved"),
        ManagerError::Checkpoint(error) => checkpoint_status(error),
        ManagerError::NoCheckpoint { .. } => (StatusCode::NOT_FOUND, "no_checkpoint"),
        ManagerError::NoRepository(_) => (StatusCode::BAD_REQUEST, "no_repository"),
        ManagerError::RepositoryGone { .. } => (StatusCode::CONFLICT, "repository_gone"),
        ManagerError::BranchGone { .. } => (StatusCode::CONFLICT, "branch_gone"),
    }
}

/// The status for an error of a sandbox.
pub fn sandbox_status(error: &SandboxError) -> (StatusCode, &'static str) {
    match error {
        SandboxError::Name(_) => (StatusCode::BAD_REQUEST, "invalid_name"),
        SandboxError::Exists(_) => (StatusCode::CONFLICT, "exists"),
        SandboxError::NotFound(_) => (StatusCode::NOT_FOUND, "not_found"),
        SandboxError::Busy { .. } => (StatusCode::CONFLICT, "busy"),
        SandboxError::Paused(_) => (StatusCode::CONFLICT, "paused"),
        SandboxError::Stopped { .. } => (StatusCode::CONFLICT, "stopped"),
        SandboxError::InvalidTransition(_) => (StatusCode::CONFLICT, "misstep"),
        SandboxError::Unavailable { .. } => {
            (StatusCode::SERVICE_UNAVAILABLE, "backend_unavailable")
        }
        SandboxError::ManagedExternally(_) => (StatusCode::CONFLICT, "managed_elsewhere"),
        SandboxError::NotResponding(_) | SandboxError::Protocol { .. } => {
            (StatusCode::SERVICE_UNAVAILABLE, "sandbox_silent")
        }
        SandboxError::TimedOut { .. } => (StatusCode::GATEWAY_TIMEOUT, "timed_out"),
        SandboxError::SetUp(failure) => setup_status(failure),
        SandboxError::Transfer(error) => transfer_status(error),
        SandboxError::Connect { .. } => (StatusCode::BAD_GATEWAY, "nobody_listens"),
        SandboxError::Create { .. }
        | SandboxError::Start { .. }
        | SandboxError::TooMuchOutput(_)
        | SandboxError::System { .. } => (StatusCode::INTERNAL_SERVER_ERROR, "sandbox_failed"),
    }
}

/// The status for an error of a transfer.
pub fn transfer_status(error: &TransferError) -> (StatusCode, &'static str) {
    match error {
        TransferError::Missing(_) => (StatusCode::NOT_FOUND, "no_path"),
        TransferError::Exists(_) => (StatusCode::CONFLICT, "exists"),
        TransferError::Refused { .. } | TransferError::Malformed(_) => {
            (StatusCode::UNPROCESSABLE_ENTITY, "transfer_refused")
        }
        TransferError::TooLarge(_) | TransferError::TooMany(_) => {
            (StatusCode::UNPROCESSABLE_ENTITY, "too_much")
        }
        TransferError::System { .. } => (StatusCode::INTERNAL_SERVER_ERROR, "transfer_failed"),
    }
}

fn checkpoint_status(error: &CheckpointError) -> (StatusCode, &'static str) {
    match error {
        CheckpointError::Exists(_) => (StatusCode::CONFLICT, "exists"),
        CheckpointError::Changed(_) => (StatusCode::CONFLICT, "changed"),
        CheckpointError::TooMuch { .. } => (StatusCode::UNPROCESSABLE_ENTITY, "too_much"),
        CheckpointError::Unreadable { .. } | CheckpointError::Io { .. } => {
            (StatusCode::INTERNAL_SERVER_ERROR, "checkpoint_failed")
        }
    }
}

/// The status for an error of a branch or workspace.
pub fn git_status(error: &GitError) -> (StatusCode, &'static str) {
    match error {
        GitError::NotARepository(_)
        | GitError::OtherOwner(_)
        | GitError::Unsupported { .. }
        | GitError::NoCommits(_)
        | GitError::Bare(_) => (StatusCode::BAD_REQUEST, "repository"),
        GitError::BranchExists(_) => (StatusCode::CONFLICT, "branch_exists"),
        GitError::NoBranch(_) => (StatusCode::NOT_FOUND, "no_branch"),
        GitError::BranchBlocked(_)
        | GitError::BranchInUse(_)
        | GitError::Moved(_)
        | GitError::Conflicts(_)
        | GitError::Dirty(_)
        | GitError::NotFastForward(_)
        | GitError::Busy { .. }
        | GitError::Locked { .. }
        | GitError::Interrupted { .. }
        | GitError::Unrelated(_) => (StatusCode::CONFLICT, "git_conflict"),
        GitError::Forbidden { .. }
        | GitError::TooMuch { .. }
        | GitError::BadObject { .. }
        | GitError::BadBundle(_)
        | GitError::Refused(_) => (StatusCode::UNPROCESSABLE_ENTITY, "workspace_refused"),
        GitError::Worker { .. }
        | GitError::BadManifest(_)
        | GitError::Git { .. }
        | GitError::Io { .. } => (StatusCode::INTERNAL_SERVER_ERROR, "git_failed"),
    }
}
