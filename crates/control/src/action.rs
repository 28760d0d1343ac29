//! [`Action`]: the closed list of operations that the control socket accepts.

use std::path::PathBuf;

use policy::audit::Kind;
use policy::id::{RequestId, SandboxId};
use policy::reason::Reason;
use policy::verdict::VerdictKind;
use sandbox::contract::Force;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::body::{
    CreateBody, ForkBody, GrantBody, LabelBody, PortBody, RestoreBody, SessionBody, SnapshotBody,
    TryBody, VariablesBody,
};
use crate::registration_request::RegisterRequest;

/// One operation of the control API. Every operation of the gate is a variant of this enum.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Health report of the gate.
    Health(HealthDepth),
    /// Metrics, as Prometheus text.
    Metrics,
    /// The API, as an OpenAPI document.
    Describe,
    /// Every registration.
    ListRegistrations,
    /// One registration.
    GetRegistration(SandboxId),
    /// Adds or replaces a registration.
    Register(Box<RegisterRequest>),
    /// Ends a registration.
    Unregister(SandboxId),
    /// Every sandbox, or those that match a name or id.
    ListSandboxes(Option<String>),
    /// One sandbox.
    ShowSandbox(SandboxId),
    /// Creates a sandbox.
    CreateSandbox(Box<CreateBody>, ReplyMode),
    /// Deletes a sandbox with its files and branch.
    DeleteSandbox(SandboxId, Force),
    /// Suspends every process of a sandbox.
    PauseSandbox(SandboxId),
    /// Resumes all processes of a sandbox.
    ResumeSandbox(SandboxId),
    /// Opens an operator's session in a sandbox.
    EnterSandbox(SandboxId, SessionBody),
    /// Commits a sandbox's workspace to its branch.
    SnapshotSandbox(SandboxId, SnapshotBody),
    /// The checkpoints of a sandbox.
    ListCheckpoints(SandboxId),
    /// Saves the files of a sandbox under a label.
    MakeCheckpoint(SandboxId, LabelBody),
    /// Restores the files of a checkpoint.
    RestoreCheckpoint(SandboxId, RestoreBody),
    /// Creates a sandbox with the files and the branch of another.
    ForkSandbox(SandboxId, ForkBody),
    /// The ports of a sandbox.
    ListPorts(SandboxId),
    /// Publishes a port of a sandbox, or unpublishes it.
    PublishPort(SandboxId, PortBody),
    /// Audit records, oldest or newest first.
    QueryAudit(AuditQuery),
    /// Audit records as a stream of lines.
    ExportAudit(AuditQuery),
    /// Audit records as they are written.
    TailAudit(AuditQuery),
    /// Checks the audit chain.
    VerifyAudit,
    /// The settings in force, and the origin of each.
    ShowConfig,
    /// Reloads the configuration files now.
    ReloadConfig,
    /// Copies the database to a file.
    BackupRegistry(PathBuf),
    /// Replaces the database by a backup.
    RestoreRegistry(PathBuf),
    /// Replaces the database by an empty database.
    ResetRegistry,
    /// The certificate authority, without its key.
    ShowAuthority,
    /// Replaces the root of the authority.
    RotateAuthority,
    /// Why a request was refused, or how it ended.
    ExplainRequest(RequestId),
    /// The decision about a request that is not sent.
    TryPolicy(TryBody),
    /// Every credential, without its value.
    ListCredentials,
    /// Reads the value of a credential and reports whether that works.
    TestCredential(String),
    /// Keeps variables of the operator's environment.
    OfferVariables(VariablesBody),
    /// Grants credentials to a sandbox or container, or revokes them.
    ChangeCredentials(SandboxId, GrantBody),
    /// The servers behind the bridge, with the tools that each has listed.
    ListTools,
    /// Trusts changed definitions of tools.
    AcceptTools(AcceptBody),
    /// Stops the gate.
    Shutdown,
}

/// Whether a health report runs its checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthDepth {
    /// The checks run now: the registry is read, and each listener gets a test connection.
    Checked,
    /// The last known state, without running checks.
    Known,
}

/// When a caller receives the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyMode {
    /// One reply, when the action is done.
    Single,
    /// JSON lines, as the action progresses.
    Stream,
}

impl Action {
    /// The name of the action in metrics, logs and the OpenAPI document.
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
            Action::ListCredentials => "credentials.list",
            Action::TestCredential(_) => "credentials.test",
            Action::OfferVariables(_) => "credentials.variables",
            Action::ChangeCredentials(..) => "credentials.change",
            Action::ListTools => "tools.list",
            Action::AcceptTools(_) => "tools.accept",
            Action::Shutdown => "shutdown",
        }
    }
}

/// A filter for audit records.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditQuery {
    /// Only records of this sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxId>,
    /// Only records of this kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<Kind>,
    /// Only records with this verdict.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verdict: Option<VerdictKind>,
    /// Only records with this reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<Reason>,
    /// Only records of this request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<RequestId>,
    /// Only records since this time (milliseconds since 1970).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<i64>,
    /// Only records before this time (milliseconds since 1970).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until: Option<i64>,
    /// Only records after this sequence number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<u64>,
    /// Maximum number of records.
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
    /// A tool of the server; every changed tool if omitted.
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
