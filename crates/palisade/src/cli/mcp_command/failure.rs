//! Maps errors of the command line to those that an agent receives.

use control::client::ControlClientError;
use mcp::agents::sandbox_service::SandboxServiceError;
use sandbox::contract::SandboxError;
use sandbox::transfer::{MemberRefusal, TransferError};

use crate::exit::{CliExit, exit_of};

/// Whether the agent named an invalid path on the host.
fn is_invalid_path(error: &TransferError) -> bool {
    match error {
        TransferError::Missing(_) => true,
        TransferError::Refused { reason, .. } => matches!(
            reason,
            MemberRefusal::Absolute
                | MemberRefusal::DotDot
                | MemberRefusal::InvalidPath
                | MemberRefusal::Link
                | MemberRefusal::Repository
                | MemberRefusal::StateDirectory
        ),
        TransferError::Malformed(_)
        | TransferError::Exists(_)
        | TransferError::TooLarge(_)
        | TransferError::TooMany(_)
        | TransferError::System { .. } => false,
    }
}

/// Classifies an error for an agent: invalid arguments, a refusal, or a failure.
pub fn service_error(error: anyhow::Error) -> SandboxServiceError {
    let message = format!("{error:#}");
    let name_exists = matches!(
        error.downcast_ref::<ControlClientError>(),
        Some(ControlClientError::Refused { code, .. }) if code == "exists" || code == "branch_exists"
    );
    let transfer = match error.downcast_ref::<SandboxError>() {
        Some(SandboxError::Transfer(transfer)) => Some(transfer),
        _ => error.downcast_ref::<TransferError>(),
    };
    match transfer {
        Some(transfer) if is_invalid_path(transfer) => {
            return SandboxServiceError::Invalid(message);
        }
        Some(TransferError::Refused { .. }) => return SandboxServiceError::Refused(message),
        _ => {}
    }
    match exit_of(&error) {
        CliExit::Usage | CliExit::NotFound => SandboxServiceError::Invalid(message),
        CliExit::Exists if name_exists => SandboxServiceError::Invalid(message),
        CliExit::Exists | CliExit::Denied => SandboxServiceError::Refused(message),
        CliExit::Ok
        | CliExit::Failed
        | CliExit::GateUnreachable
        | CliExit::BackendUnavailable
        | CliExit::TimedOut
        | CliExit::Command(_) => SandboxServiceError::Failed(message),
    }
}
