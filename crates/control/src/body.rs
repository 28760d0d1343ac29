//! The bodies of requests about sandboxes and policies.

use std::net::SocketAddr;
use std::path::PathBuf;

use policy::id::SandboxId;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::registration_request::{UnknownFields, repo_schema};

/// The body of a request for a new sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateBody {
    /// What to call it.
    pub name: String,
    /// An absolute path in the operator's repository; none for an empty workspace.
    #[serde(default)]
    pub repository: Option<PathBuf>,
    /// How many generations of history come along; all of them if not said.
    #[serde(default)]
    pub depth: Option<u32>,
    /// Whether uncommitted changes come along.
    #[serde(default)]
    pub dirty: bool,
    /// Repositories it may speak to, each as owner/name or as an object with `name` and
    /// `max_receive_pack_bytes`; the one `origin` points to if not said.
    #[serde(default)]
    #[schemars(schema_with = "repos_schema")]
    pub repos: Option<Vec<Value>>,
    /// As whom it pushes: user or bot.
    #[serde(default)]
    pub auth_mode: Option<String>,
    /// What keeps it in: namespace, docker or remote; as configured if not said.
    #[serde(default)]
    pub backend: Option<String>,
    /// Whether the agent is root inside.
    #[serde(default)]
    pub root: bool,
    /// Whether programs inside may make user namespaces.
    #[serde(default)]
    pub nested: bool,
    /// A program and its arguments that run once in the new sandbox, instead of the configured
    /// set-up command. If they fail, nothing is made.
    #[serde(default)]
    pub setup_command: Option<Vec<String>>,
    /// Ports of the host's loopback that lead inside from the start. One that is taken is a
    /// refusal, and nothing is made.
    #[serde(default)]
    pub publish: Vec<PortBody>,
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
    /// What was done, such as `bash: cargo test`.
    pub message: String,
}

/// The body of a request to enter a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SessionBody {
    /// What for.
    pub purpose: Purpose,
}

/// What a sandbox is entered for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Purpose {
    /// A command.
    Exec,
    /// A shell.
    Shell,
    /// Files in.
    Upload,
    /// Files out.
    Download,
}

/// The body of a request about a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LabelBody {
    /// What it is called.
    pub label: String,
}

/// The body of a request to put a checkpoint back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RestoreBody {
    /// What it is called.
    pub label: String,
    /// Whether to give up what the workspace holds now, instead of taking a snapshot first.
    #[serde(default)]
    pub no_snapshot: bool,
}

/// The body of a request for a fork.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ForkBody {
    /// What to call the new sandbox.
    pub name: String,
}

/// The body of a request about a published port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PortBody {
    /// Where the host listens: an address of its loopback. Port 0 lets the system choose.
    pub host: SocketAddr,
    /// The port inside; 0 takes the publication back.
    pub port: u16,
}

impl Purpose {
    /// The word in audit records.
    pub const fn as_str(self) -> &'static str {
        match self {
            Purpose::Exec => "exec",
            Purpose::Shell => "shell",
            Purpose::Upload => "upload",
            Purpose::Download => "download",
        }
    }
}

/// The body of a request that asks what would become of another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TryBody {
    /// The URL that would be asked for.
    pub url: String,
    /// The method; GET when not given.
    #[serde(default = "get", skip_serializing_if = "is_get")]
    pub method: String,
    /// The sandbox that would ask; rules that are only about some do not count without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub sandbox: Option<SandboxId>,
    /// The program inside that would ask.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
}

fn get() -> String {
    "GET".to_owned()
}

fn is_get(method: &String) -> bool {
    method == "GET"
}
