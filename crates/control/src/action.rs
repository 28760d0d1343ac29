//! The closed list of what can be asked.

use std::path::PathBuf;

use policy::audit::Kind;
use policy::id::{RequestId, SandboxId};
use policy::reason::Reason;
use policy::verdict::Word;
use sandbox::contract::Force;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::body::{
    CreateBody, ForkBody, LabelBody, PortBody, RestoreBody, SessionBody, SnapshotBody, TryBody,
};
use crate::registration_request::RegisterRequest;

/// One thing an operator asks. Everything the gate can be told is a variant here.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// How the gate is.
    Health(HealthDepth),
    /// Numbers, as Prometheus text.
    Metrics,
    /// This list, as an OpenAPI document.
    Describe,
    /// Every registration.
    ListRegistrations,
    /// One registration.
    GetRegistration(SandboxId),
    /// Adds or replaces a registration.
    Register(Box<RegisterRequest>),
    /// Ends a registration.
    Unregister(SandboxId),
    /// Every sandbox, or those that a name or id may mean.
    ListSandboxes(Option<String>),
    /// One sandbox.
    ShowSandbox(SandboxId),
    /// Makes a sandbox.
    CreateSandbox(Box<CreateBody>, ReplyMode),
    /// Removes a sandbox with everything it had.
    DeleteSandbox(SandboxId, Force),
    /// Stops every process of a sandbox.
    PauseSandbox(SandboxId),
    /// Resumes all processes of a sandbox.
    ResumeSandbox(SandboxId),
    /// Lets an operator into a sandbox.
    EnterSandbox(SandboxId, SessionBody),
    /// Commits a sandbox's workspace to its branch.
    SnapshotSandbox(SandboxId, SnapshotBody),
    /// The checkpoints of a sandbox.
    ListCheckpoints(SandboxId),
    /// Keeps the files of a sandbox under a label.
    MakeCheckpoint(SandboxId, LabelBody),
    /// Puts the files of a checkpoint back.
    RestoreCheckpoint(SandboxId, RestoreBody),
    /// Makes a sandbox with the files and the branch of another.
    ForkSandbox(SandboxId, ForkBody),
    /// The ports of a sandbox.
    ListPorts(SandboxId),
    /// Publishes a port of a sandbox, or takes it back.
    PublishPort(SandboxId, PortBody),
    /// Audit records, oldest or newest first.
    QueryAudit(AuditQuery),
    /// Audit records as a stream of lines.
    ExportAudit(AuditQuery),
    /// Audit records as they are written.
    TailAudit(AuditQuery),
    /// Checks the audit chain.
    VerifyAudit,
    /// The settings in force, and where each came from.
    ShowConfig,
    /// Reads the files again, now.
    ReloadConfig,
    /// Copies the database to a file.
    BackupRegistry(PathBuf),
    /// Puts a backup in the database's place.
    RestoreRegistry(PathBuf),
    /// Starts an empty database.
    ResetRegistry,
    /// The certificate authority, without its key.
    ShowAuthority,
    /// Puts a new root in the authority's place.
    RotateAuthority,
    /// Why a request was refused, or what became of it.
    ExplainRequest(RequestId),
    /// What would become of a request.
    TryPolicy(TryBody),
    /// The servers behind the bridge and what is known of their tools.
    ListTools,
    /// Takes changed definitions of tools for the true ones.
    AcceptTools(AcceptBody),
    /// Stops the gate.
    Shutdown,
}

/// What a health report is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthDepth {
    /// Checks that are made now: the registry is read, listeners are connected to.
    Checked,
    /// The state as it is known, at once.
    Known,
}

/// When a caller receives the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyMode {
    /// When it is done.
    Single,
    /// As it goes, in lines.
    Stream,
}

impl Action {
    /// The action's name in metrics, logs and the OpenAPI document.
    pub const fn name(&self) -> &'static str {
        match self {
            Action::Health(_) => "health",
            Action::Metrics => "metrics",
            Action::Describe => "describe",
            Action::ListRegistrations => "registrations.list",
            Action::GetRegistration(_) => "registrations.get",
            Action::Register(_) => "registrations.put",
            Action::Unregister(_) => "registrations.delete",
            Action::ListSandboxes(_) => "sandboxes.list",
            Action::ShowSandbox(_) => "sandboxes.show",
            Action::CreateSandbox(..) => "sandboxes.create",
            Action::DeleteSandbox(..) => "sandboxes.delete",
            Action::PauseSandbox(_) => "sandboxes.pause",
            Action::ResumeSandbox(_) => "sandboxes.resume",
            Action::EnterSandbox(..) => "sandboxes.enter",
            Action::SnapshotSandbox(..) => "sandboxes.snapshot",
            Action::ListCheckpoints(_) => "checkpoints.list",
            Action::MakeCheckpoint(..) => "checkpoints.make",
            Action::RestoreCheckpoint(..) => "checkpoints.restore",
            Action::ForkSandbox(..) => "sandboxes.fork",
            Action::ListPorts(_) => "ports.list",
            Action::PublishPort(..) => "ports.publish",
            Action::QueryAudit(_) => "audit.query",
            Action::ExportAudit(_) => "audit.export",
            Action::TailAudit(_) => "audit.tail",
            Action::VerifyAudit => "audit.verify",
            Action::ShowConfig => "config.show",
            Action::ReloadConfig => "config.reload",
            Action::BackupRegistry(_) => "registry.backup",
            Action::RestoreRegistry(_) => "registry.restore",
            Action::ResetRegistry => "registry.reset",
            Action::ShowAuthority => "ca.show",
            Action::RotateAuthority => "ca.rotate",
            Action::ExplainRequest(_) => "requests.explain",
            Action::TryPolicy(_) => "policy.try",
            Action::ListTools => "tools.list",
            Action::AcceptTools(_) => "tools.accept",
            Action::Shutdown => "shutdown",
        }
    }
}

/// Which audit records.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditQuery {
    /// Only this sandbox's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxId>,
    /// Only this plane's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<Kind>,
    /// Only with this verdict.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Word>,
    /// Only with this reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<Reason>,
    /// Only of this request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<RequestId>,
    /// From this moment on (milliseconds since 1970).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<i64>,
    /// Before this moment (milliseconds since 1970).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until: Option<i64>,
    /// Only after this record.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<u64>,
    /// At most so many.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
    /// Newest first.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub newest_first: bool,
}

/// The body of a request that accepts changed definitions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AcceptBody {
    /// The server, by its name in `tools`.
    pub server: String,
    /// One of its tools; all of them if not said.
    #[serde(default)]
    pub tool: Option<String>,
}

/// The body of a request that names a file on the operator's machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FileBody {
    /// An absolute path.
    pub path: PathBuf,
}
