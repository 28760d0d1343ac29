//! Request bodies of the control API for sandboxes and policies.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use config::section::sandbox::Tier;
use policy::id::SandboxId;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::registration_request::{UnknownFields, repo_schema};

/// The body of a request for a new sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateBody {
    /// Sandbox name.
    pub name: String,
    /// An absolute path in the operator's repository; none for an empty workspace.
    #[serde(default)]
    pub repository: Option<PathBuf>,
    /// Clone depth; full history if omitted.
    #[serde(default)]
    pub depth: Option<u32>,
    /// Whether to copy uncommitted changes.
    #[serde(default)]
    pub dirty: bool,
    /// Repositories that the sandbox may use, each as owner/name or as an object with `name`
    /// and `max_receive_pack_bytes`; the repository of `origin` if
    /// omitted.
    #[serde(default)]
    #[schemars(schema_with = "repos_schema")]
    pub repos: Option<Vec<Value>>,
    /// Identity for git push: user or bot.
    #[serde(default)]
    pub auth_mode: Option<String>,
    /// Isolation backend: namespace, docker or remote; `sandbox.backend` if omitted.
    #[serde(default)]
    pub backend: Option<String>,
    /// Whether the agent is root in the sandbox.
    #[serde(default)]
    pub root: bool,
    /// Whether programs in the sandbox may create user namespaces.
    #[serde(default)]
    pub nested: bool,
    /// A program and its arguments to run once in the new sandbox, instead of the configured
    /// set-up command. If the command fails, no sandbox is created.
    #[serde(default)]
    pub setup_command: Option<Vec<String>>,
    /// Ports to publish on the host's loopback from the start. If a port is in use, no sandbox
    /// is created.
    #[serde(default)]
    pub publish: Vec<PortBody>,
    /// Names of the credentials that the gate adds to requests of the sandbox; those of
    /// `credentials.default` that have a value if omitted.
    #[serde(default)]
    pub credentials: Option<Vec<String>>,
    /// Which hosts the sandbox may reach in addition to the configuration; `sandbox.tier` if
    /// omitted.
    #[serde(default)]
    pub tier: Option<Tier>,
    /// Names of presets whose hosts the sandbox may reach as well.
    #[serde(default)]
    pub presets: Vec<String>,
}

/// The body of a request that changes the credentials of a sandbox or container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GrantBody {
    /// Names of credentials to grant.
    pub grant: Vec<String>,
    /// Names of credentials to revoke.
    pub revoke: Vec<String>,
}

/// The body of a request that passes on variables of the operator's environment: names and
/// values. Variables that no credential reads are ignored.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VariablesBody(pub BTreeMap<String, String>);

impl std::fmt::Debug for VariablesBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.keys()).finish()
    }
}

fn repos_schema(_: &mut SchemaGenerator) -> Schema {
    let items = repo_schema(UnknownFields::Refuse);
    let list = json!({ "type": "array", "nullable": true, "items": items });
    Schema::try_from(list).unwrap_or_default()
}

/// The body of a request for a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotBody {
    /// The commit message, such as `bash: cargo test`.
    pub message: String,
}

/// The body of a request to enter a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SessionBody {
    /// The purpose of the session.
    pub purpose: Purpose,
}

/// The purpose of a session in a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Purpose {
    /// Run a command.
    Exec,
    /// Open a shell.
    Shell,
    /// Copy files in.
    Upload,
    /// Copy files out.
    Download,
}

/// The body of a request about a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LabelBody {
    /// The label of the checkpoint.
    pub label: String,
}

/// The body of a request to restore a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RestoreBody {
    /// The label of the checkpoint.
    pub label: String,
    /// Whether to discard the current files of the workspace instead of committing a snapshot
    /// first.
    #[serde(default)]
    pub no_snapshot: bool,
}

/// The body of a request for a fork.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ForkBody {
    /// Name of the new sandbox.
    pub name: String,
}

/// The body of a request about a published port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PortBody {
    /// Listen address on the host's loopback. Port 0 lets the system choose a port.
    pub host: SocketAddr,
    /// The port in the sandbox; 0 unpublishes the address.
    pub port: u16,
}

impl Purpose {
    /// The name of the purpose in audit records.
    pub const fn as_str(self) -> &'static str {
        match self {
            Purpose::Exec => "exec",
            Purpose::Shell => "shell",
            Purpose::Upload => "upload",
            Purpose::Download => "download",
        }
    }
}

/// The body of a request for the decision about another request, which is not sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TryBody {
    /// The URL of the request.
    pub url: String,
    /// The method; GET if omitted.
    #[serde(default = "default_method", skip_serializing_if = "is_default_method")]
    pub method: String,
    /// The sandbox that would send the request; if omitted, rules for single sandboxes do not
    /// apply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub sandbox: Option<SandboxId>,
    /// The program in the sandbox that would send the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
}

fn default_method() -> String {
    "GET".to_owned()
}

fn is_default_method(method: &String) -> bool {
    method == "GET"
}
