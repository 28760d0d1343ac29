//! Which failure of ours is which for an agent.

use control::client::ClientError;
use mcp::agents::workshop::WorkshopError;
use sandbox::contract::SandboxError;
use sandbox::transfer::{MemberRefusal, TransferError};

use crate::exit::{Exit, exit_of};

/// Whether a path on the operator's side is what is wrong.
fn names_wrongly(error: &TransferError) -> bool {
    match error {
        TransferError::Missing(_) => true,
        TransferError::Refused { reason, .. } => matches!(
            reason,
            MemberRefusal::Absolute
                | MemberRefusal::Climbs
                | MemberRefusal::NoPath
                | MemberRefusal::Link
                | MemberRefusal::Repository
                | MemberRefusal::OurOwn
        ),
        TransferError::Malformed(_)
        | TransferError::Exists(_)
        | TransferError::TooLarge(_)
        | TransferError::TooMany(_)
        | TransferError::System { .. } => false,
    }
}

/// Which failure it is for an agent: what it named wrongly, what is refused, or what broke.
pub fn told(error: anyhow::Error) -> WorkshopError {
    let sentence = format!("{error:#}");
    let is_taken = matches!(
        error.downcast_ref::<ClientError>(),
        Some(ClientError::Refused { code, .. }) if code == "exists" || code == "branch_exists"
    );
    let transfer = match error.downcast_ref::<SandboxError>() {
        Some(SandboxError::Transfer(transfer)) => Some(transfer),
        _ => error.downcast_ref::<TransferError>(),
    };
    match transfer {
        Some(transfer) if names_wrongly(transfer) => return WorkshopError::Invalid(sentence),
        Some(TransferError::Refused { .. }) => return WorkshopError::Refused(sentence),
        _ => {}
    }
    match exit_of(&error) {
        Exit::Usage | Exit::NotFound => WorkshopError::Invalid(sentence),
        Exit::Exists if is_taken => WorkshopError::Invalid(sentence),
        Exit::Exists | Exit::Denied => WorkshopError::Refused(sentence),
        Exit::Ok
        | Exit::Failed
        | Exit::GateUnreachable
        | Exit::BackendUnavailable
        | Exit::TimedOut
        | Exit::Command(_) => WorkshopError::Failed(sentence),
    }
}
