//! `tools`: MCP servers behind the bridge.

use std::path::PathBuf;
use std::time::Duration;

use policy::toolbox::{CallerToolRules, ToolNameRules, ToolRules, Wildcard};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::leaf::{self, EnvEntry, Name, Text};

/// One stdio MCP server that the bridge serves over HTTP.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BridgedServer {
    /// Name of the server in URLs, verdicts and metrics.
    #[schemars(with = "Text<Name>")]
    pub name: String,
    /// The program and its arguments.
    #[schemars(length(min = 1))]
    pub command: Vec<String>,
    /// Working directory of the process; relative to this file.
    #[serde(default, with = "leaf::optional")]
    #[schemars(with = "Option<Text<PathBuf>>")]
    pub work_dir: Option<PathBuf>,
    /// Environment variables, each `NAME=value`.
    #[serde(default, with = "leaf::list")]
    #[schemars(with = "Vec<Text<EnvEntry>>")]
    pub env: Vec<EnvEntry>,
    /// Where the server runs.
    #[serde(default)]
    pub runtime: ToolRuntime,
    /// Let agents in sandboxes use the server although it runs outside a sandbox (`local`).
    #[serde(default)]
    pub expose: bool,
    /// Run one process for all sessions instead of one per session.
    #[serde(default)]
    pub shared: bool,
    /// Names of tools that may be used; `*` matches any text.
    #[serde(default = "any_name")]
    #[schemars(with = "Vec<Text<Name>>")]
    pub allow: Vec<String>,
    /// Names of tools that may not be used, even if `allow` matches them.
    #[serde(default)]
    #[schemars(with = "Vec<Text<Name>>")]
    pub deny: Vec<String>,
    /// Further lists for some callers. A tool must be permitted by every entry that applies to the
    /// caller, and by `allow` and `deny` above.
    #[serde(default)]
    pub access: Vec<ToolAccess>,
    /// Description of the server.
    #[serde(default)]
    pub description: Option<String>,
}

/// Which tools some callers may use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ToolAccess {
    /// Agents that the entry applies to; `*` matches any text. All agents if empty.
    #[serde(default)]
    #[schemars(with = "Vec<Text<Name>>")]
    pub agents: Vec<String>,
    /// Sandboxes that the entry applies to; `*` matches any text. If empty, every caller, in a
    /// sandbox or not.
    #[serde(default)]
    #[schemars(with = "Vec<Text<Name>>")]
    pub sandboxes: Vec<String>,
    /// Names of tools that may be used; `*` matches any text.
    #[serde(default = "any_name")]
    #[schemars(with = "Vec<Text<Name>>")]
    pub allow: Vec<String>,
    /// Names of tools that may not be used, even if `allow` matches them.
    #[serde(default)]
    #[schemars(with = "Vec<Text<Name>>")]
    pub deny: Vec<String>,
}

impl BridgedServer {
    /// The rules for which caller may use which tool of this server.
    pub fn tool_rules(&self) -> ToolRules {
        let wildcards = |list: &[String]| list.iter().map(|text| Wildcard::new(text)).collect();
        let per_caller = self.access.iter().map(|access| CallerToolRules {
            agents: wildcards(&access.agents),
            sandboxes: wildcards(&access.sandboxes),
            names: ToolNameRules::new(&access.allow, &access.deny),
        });
        let names = ToolNameRules::new(&self.allow, &self.deny);
        ToolRules::new(&self.name, names, per_caller.collect())
    }
}

fn any_name() -> Vec<String> {
    vec!["*".to_owned()]
}

/// Where a server runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ToolRuntime {
    /// Kind of runtime: on the host, in a sandbox or at E2B.
    #[serde(rename = "type")]
    pub kind: RuntimeKind,
    /// The E2B template; required with `e2b`.
    #[schemars(with = "Option<Text<Name>>")]
    pub template: Option<String>,
    /// Maximum duration of one call.
    #[serde(with = "leaf::optional")]
    #[schemars(with = "Option<Text<Duration>>")]
    pub timeout: Option<Duration>,
}

/// The kinds of runtime of an MCP server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RuntimeKind {
    /// On the host, as the operator.
    #[default]
    Local,
    /// In a sandbox, behind the gate.
    Sandbox,
    /// In an E2B sandbox.
    E2b,
}

impl RuntimeKind {
    /// The value as written in files and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            RuntimeKind::Local => "local",
            RuntimeKind::Sandbox => "sandbox",
            RuntimeKind::E2b => "e2b",
        }
    }
}
