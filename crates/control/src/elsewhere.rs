//! The container of `sandbox.remote`, as an operator meets it: shown among the sandboxes and
//! entered on record. It is made, stopped and removed by whoever runs it, and whoever asks for
//! that here is told so.

use config::Settings;
use config::section::sandbox::Remote;
use policy::audit::AuditEvent;
use policy::id::SandboxId;
use sandbox::contract::SandboxError;
use sandbox::name::Slug;
use serde_json::{Value, json};
use store::Store;
use workbench::client::Client;

use crate::action::Action;
use crate::remote::NAME;
use crate::reply::{ControlError, Reply};
use crate::sandboxes::body::SessionBody;
use crate::wall_now;

/// What may be asked of it.
#[derive(Debug, PartialEq)]
pub(crate) enum Asked {
    /// How it is.
    Show,
    /// To be let in.
    Enter(SessionBody),
    /// Its ports.
    Ports,
    /// Something that only whoever runs it can do.
    Elsewhere(&'static str),
}

/// What an action asks of it, if that is whom it is about.
pub(crate) fn asked(action: &Action, settings: &Settings) -> Option<Asked> {
    settings.sandbox.remote.as_ref()?;
    let (id, asked) = match action {
        Action::ShowSandbox(id) => (id, Asked::Show),
        Action::EnterSandbox(id, body) => (id, Asked::Enter(body.clone())),
        Action::ListPorts(id) => (id, Asked::Ports),
        Action::DeleteSandbox(id, _) => (id, Asked::Elsewhere("deleted")),
        Action::PauseSandbox(id) => (id, Asked::Elsewhere("paused")),
        Action::ResumeSandbox(id) => (id, Asked::Elsewhere("resumed")),
        Action::SnapshotSandbox(id, _) => (id, Asked::Elsewhere("committed")),
        Action::ListCheckpoints(id)
        | Action::MakeCheckpoint(id, _)
        | Action::RestoreCheckpoint(id, _) => (id, Asked::Elsewhere("kept")),
        Action::ForkSandbox(id, _) => (id, Asked::Elsewhere("copied")),
        Action::PublishPort(id, _) => (id, Asked::Elsewhere("published")),
        Action::Health
        | Action::Metrics
        | Action::Describe
        | Action::ListRegistrations
        | Action::GetRegistration(_)
        | Action::Register(_)
        | Action::Unregister(_)
        | Action::ListSandboxes(_)
        | Action::CreateSandbox(..)
        | Action::QueryAudit(_)
        | Action::ExportAudit(_)
        | Action::TailAudit(_)
        | Action::VerifyAudit
        | Action::ShowConfig
        | Action::ReloadConfig
        | Action::BackupRegistry(_)
        | Action::RestoreRegistry(_)
        | Action::ResetRegistry
        | Action::ShowAuthority
        | Action::RotateAuthority
        | Action::ExplainRequest(_)
        | Action::TryPolicy(_)
        | Action::ListTools
        | Action::AcceptTools(_)
        | Action::Shutdown => return None,
    };
    (id.as_str() == NAME).then_some(asked)
}

/// Answers for it.
pub(crate) async fn answer(
    asked: Asked,
    store: &Store,
    settings: &Settings,
) -> Result<Reply, ControlError> {
    match asked {
        Asked::Show => {
            let shown = shown(settings, None).await;
            let missing = || SandboxError::NotFound(NAME.to_owned());
            Ok(Reply::ok(shown.ok_or_else(|| refusal(missing()))?))
        }
        Asked::Enter(body) => {
            let id = SandboxId::parse(NAME).map_err(|error| {
                let message = format!("'{NAME}' is no id: {error}");
                ControlError::Failed(message)
            })?;
            // Whether it is there is for the client to find out, which waits for it.
            let event = AuditEvent {
                method: Some(body.purpose.as_str().to_owned()),
                ..AuditEvent::lifecycle("sandbox_entered", Some(id))
            };
            store.audit().record_durable(event, wall_now()).await?;
            // Nothing of the operator's goes into a container of somebody else's unasked.
            Ok(Reply::ok(json!({ "id": NAME, "environment": [] })))
        }
        Asked::Ports => Ok(Reply::ok(json!({
            "id": NAME,
            "open": null,
            "reason": "the container is managed elsewhere",
            "published": [],
        }))),
        Asked::Elsewhere(what) => Err(refusal(SandboxError::Elsewhere(what))),
    }
}

/// The container as clients see it, if one is configured and `named` may mean it.
pub(crate) async fn shown(settings: &Settings, named: Option<&str>) -> Option<Value> {
    let remote = settings.sandbox.remote.as_ref()?;
    if named.is_some_and(|word| word != NAME && !is_its_name(word)) {
        return None;
    }
    let reason = reason(remote).await;
    let status = if reason.is_none() { "active" } else { "error" };
    Some(json!({
        "id": NAME,
        "name": NAME,
        "branch_name": null,
        "container_id": NAME,
        "status": status,
        "reason": reason,
        "backend": "remote",
        "repository": null,
        "common": null,
        "base": null,
        "root": false,
        "nested": false,
        "published": [],
        "created_at": null,
        "warnings": [],
    }))
}

/// Why it cannot be reached now, if it cannot.
async fn reason(remote: &Remote) -> Option<String> {
    let health = match Client::of(remote) {
        Ok(client) => client.health().await,
        Err(error) => Err(error),
    };
    health.err().map(|error| error.to_string())
}

/// Refuses a name that already means the container.
pub(crate) fn refuse_its_name(name: &str, settings: &Settings) -> Result<(), ControlError> {
    if settings.sandbox.remote.is_some() && is_its_name(name) {
        return Err(refusal(SandboxError::Elsewhere("made")));
    }
    Ok(())
}

fn is_its_name(name: &str) -> bool {
    Slug::from_name(name).is_ok_and(|slug| slug.as_str() == NAME)
}

fn refusal(error: SandboxError) -> ControlError {
    ControlError::Sandbox(error.into())
}
