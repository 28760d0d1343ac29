//! The containers of `sandbox.remote`, as an operator meets them: shown among the sandboxes and
//! entered on record. They are made, stopped and removed remote_backend, and a request to do that
//! here is refused with that reason.

use config::Settings;
use config::section::sandbox::RemoteContainer;
use policy::audit::AuditEvent;
use policy::id::SandboxId;
use sandbox::contract::SandboxError;
use sandbox::name::Slug;
use serde_json::{Value, json};
use store::Store;
use tokio::task::JoinSet;
use workbench::client::WorkbenchClient;

use crate::action::Action;
use crate::body::SessionBody;
use crate::reply::{ControlError, Reply};
use crate::wall_now;

/// What may be asked of a container.
#[derive(Debug, PartialEq)]
pub(crate) enum Asked {
    /// How it is.
    Show,
    /// To be let in.
    Enter(SessionBody),
    /// Its ports.
    Ports,
    /// An operation that only the container's owner can do.
    Elsewhere(&'static str),
}

/// The container that an action is about, and what is asked of it.
pub(crate) fn asked<'s>(
    action: &Action,
    settings: &'s Settings,
) -> Option<(&'s RemoteContainer, Asked)> {
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
        Action::Health(_)
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
    Some((settings.sandbox.remote.named(id.as_str())?, asked))
}

/// Answers for it.
pub(crate) async fn answer(
    container: &RemoteContainer,
    asked: Asked,
    store: &Store,
) -> Result<Reply, ControlError> {
    let name = &container.name;
    match asked {
        Asked::Show => Ok(Reply::ok(show(container).await)),
        Asked::Enter(body) => {
            let id = SandboxId::parse(name).map_err(|error| {
                let message = format!("the name of the container is not valid: {error}");
                ControlError::Failed(message)
            })?;
            // Whether it is there is for the client to find out, which waits for it.
            let event = AuditEvent {
                method: Some(body.purpose.as_str().to_owned()),
                ..AuditEvent::lifecycle("sandbox_entered", Some(id))
            };
            store.audit().record_durable(event, wall_now()).await?;
            // Nothing of the operator's goes into a connect-only container by default.
            Ok(Reply::ok(
                json!({ "id": name, "backend": "remote", "environment": [] }),
            ))
        }
        Asked::Ports => Ok(Reply::ok(json!({
            "id": name,
            "open": null,
            "reason": "the container is managed remote_backend",
            "published": [],
        }))),
        Asked::Elsewhere(what) => Err(refusal(SandboxError::ManagedExternally(what))),
    }
}

/// The containers as clients see them, in the order of the settings: those that `named` may
/// mean, or all. They are asked at the same time, since each may take its whole time-out.
pub(crate) async fn shown(settings: &Settings, named: Option<&str>) -> Vec<Value> {
    let is_meant = |container: &&RemoteContainer| {
        named.is_none_or(|word| word == container.name || slug_of(word) == container.name)
    };
    let containers = settings.sandbox.remote.all().iter().filter(is_meant);
    let mut asking = JoinSet::new();
    for (place, container) in containers.cloned().enumerate() {
        asking.spawn(async move { (place, show(&container).await) });
    }
    let mut rows = asking.join_all().await;
    rows.sort_by_key(|(place, _)| *place);
    rows.into_iter().map(|(_, row)| row).collect()
}

/// One container as clients see it.
async fn show(container: &RemoteContainer) -> Value {
    let reason = reason(container).await;
    let status = if reason.is_none() { "active" } else { "error" };
    json!({
        "id": container.name,
        "name": container.name,
        "branch_name": null,
        "container_id": container.name,
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
    })
}

/// Why it cannot be reached now, if it cannot.
async fn reason(container: &RemoteContainer) -> Option<String> {
    let health = match WorkbenchClient::of(container) {
        Ok(client) => client.health().await,
        Err(error) => Err(error),
    };
    health.err().map(|error| error.to_string())
}

/// Refuses a name that already means a container.
pub(crate) fn refuse_its_name(name: &str, settings: &Settings) -> Result<(), ControlError> {
    let slug = slug_of(name);
    if settings.sandbox.remote.named(&slug).is_some() {
        return Err(refusal(SandboxError::ManagedExternally("made")));
    }
    Ok(())
}

/// The name that a sandbox of this name would get; empty where none can be made of it.
fn slug_of(name: &str) -> String {
    Slug::from_name(name).map_or_else(|_| String::new(), String::from)
}

fn refusal(error: SandboxError) -> ControlError {
    ControlError::Sandbox(error.into())
}
