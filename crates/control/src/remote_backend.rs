//! Actions on the containers of `sandbox.remote`: they are listed among the sandboxes, and
//! sessions in them are recorded. Their lifecycle is managed externally, so actions that would
//! change it are refused.

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
use crate::reply::{ControlError, ControlReply};
use crate::wall_now;

/// An operation on a remote container.
#[derive(Debug, PartialEq)]
pub(crate) enum RemoteOperation {
    /// Show its status.
    Show,
    /// Open a session.
    Enter(SessionBody),
    /// List its ports.
    Ports,
    /// An operation that only the container's owner can do, as a participle for the error
    /// message.
    External(&'static str),
}

/// The remote container that an action names, and the operation on it.
pub(crate) fn operation_on<'s>(
    action: &Action,
    settings: &'s Settings,
) -> Option<(&'s RemoteContainer, RemoteOperation)> {
    let (id, operation) = match action {
        Action::ShowSandbox(id) => (id, RemoteOperation::Show),
        Action::EnterSandbox(id, body) => (id, RemoteOperation::Enter(body.clone())),
        Action::ListPorts(id) => (id, RemoteOperation::Ports),
        Action::DeleteSandbox(id, _) => (id, RemoteOperation::External("deleted")),
        Action::PauseSandbox(id) => (id, RemoteOperation::External("paused")),
        Action::ResumeSandbox(id) => (id, RemoteOperation::External("resumed")),
        Action::SnapshotSandbox(id, _) => (id, RemoteOperation::External("committed")),
        Action::ListCheckpoints(id)
        | Action::MakeCheckpoint(id, _)
        | Action::RestoreCheckpoint(id, _) => (id, RemoteOperation::External("kept")),
        Action::ForkSandbox(id, _) => (id, RemoteOperation::External("copied")),
        Action::PublishPort(id, _) => (id, RemoteOperation::External("published")),
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
        | Action::ListCredentials
        | Action::TestCredential(_)
        | Action::OfferVariables(_)
        | Action::ChangeCredentials(..)
        | Action::ListTools
        | Action::AcceptTools(_)
        | Action::Shutdown => return None,
    };
    Some((settings.sandbox.remote.find(id.as_str())?, operation))
}

/// Runs an operation on a remote container.
pub(crate) async fn run(
    container: &RemoteContainer,
    operation: RemoteOperation,
    store: &Store,
) -> Result<ControlReply, ControlError> {
    let name = &container.name;
    match operation {
        RemoteOperation::Show => Ok(ControlReply::ok(show(container).await)),
        RemoteOperation::Enter(body) => {
            let id = SandboxId::parse(name).map_err(|error| {
                let message = format!("invalid container name in sandbox.remote: {error}");
                ControlError::Failed(message)
            })?;
            // The gate does not check whether the container runs: the client waits for its
            // workbench.
            let event = AuditEvent {
                method: Some(body.purpose.as_str().to_owned()),
                ..AuditEvent::lifecycle("sandbox_entered", Some(id))
            };
            store.audit().record_durable(event, wall_now()).await?;
            // By default, no variable of the operator is passed to a remote container.
            Ok(ControlReply::ok(
                json!({ "id": name, "backend": "remote", "environment": [] }),
            ))
        }
        RemoteOperation::Ports => Ok(ControlReply::ok(json!({
            "id": name,
            "open": null,
            "reason": "the container is managed externally",
            "published": [],
        }))),
        RemoteOperation::External(what) => Err(refusal(SandboxError::ManagedExternally(what))),
    }
}

/// The containers called `name`, or all, as JSON in the order of the settings. The containers
/// are queried concurrently, since each may take its whole timeout.
pub(crate) async fn list(settings: &Settings, name: Option<&str>) -> Vec<Value> {
    let matches = |container: &&RemoteContainer| {
        name.is_none_or(|name| name == container.name || slug_of(name) == container.name)
    };
    let containers = settings.sandbox.remote.all().iter().filter(matches);
    let mut queries = JoinSet::new();
    for (index, container) in containers.cloned().enumerate() {
        queries.spawn(async move { (index, show(&container).await) });
    }
    let mut rows = queries.join_all().await;
    rows.sort_by_key(|(index, _)| *index);
    rows.into_iter().map(|(_, row)| row).collect()
}

/// One container as JSON.
async fn show(container: &RemoteContainer) -> Value {
    let reason = unreachable_reason(container).await;
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

/// Why the container cannot be reached; none if it can.
async fn unreachable_reason(container: &RemoteContainer) -> Option<String> {
    let health = match WorkbenchClient::for_container(container) {
        Ok(client) => client.health().await,
        Err(error) => Err(error),
    };
    health.err().map(|error| error.to_string())
}

/// Refuses the name of a remote container for a new sandbox.
pub(crate) fn refuse_remote_name(name: &str, settings: &Settings) -> Result<(), ControlError> {
    let slug = slug_of(name);
    if settings.sandbox.remote.find(&slug).is_some() {
        return Err(refusal(SandboxError::ManagedExternally("made")));
    }
    Ok(())
}

/// The slug of a sandbox name; empty if the name has none.
fn slug_of(name: &str) -> String {
    Slug::from_name(name).map_or_else(|_| String::new(), String::from)
}

fn refusal(error: SandboxError) -> ControlError {
    ControlError::Sandbox(error.into())
}
