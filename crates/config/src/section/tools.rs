//! `tools`: MCP servers behind the bridge.

use std::path::PathBuf;
use std::time::Duration;

use policy::toolbox::{Names, Narrower, Toolbox, Wildcard};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::leaf::{self, EnvEntry, Name, Text};

/// One stdio MCP server served over HTTP.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BridgedServer {
    /// Its name in URLs, verdicts and metrics.
    #[schemars(with = "Text<Name>")]
    pub name: String,
    /// The program and its arguments.
    #[schemars(length(min = 1))]
    pub command: Vec<String>,
    /// The directory it is started in; relative to this file.
    #[serde(default, with = "leaf::maybe")]
    #[schemars(with = "Option<Text<PathBuf>>")]
    pub work_dir: Option<PathBuf>,
    /// Environment entries, each `NAME=value`.
    #[serde(default, with = "leaf::list")]
    #[schemars(with = "Vec<Text<EnvEntry>>")]
    pub env: Vec<EnvEntry>,
    /// Where it runs.
    #[serde(default)]
    pub runtime: ToolRuntime,
    /// Whether agents in sandboxes may use it although it runs outside (`local`).
    #[serde(default)]
    pub expose: bool,
    /// One process for all sessions instead of one each.
    #[serde(default)]
    pub shared: bool,
    /// Names of its tools that are let through; `*` stands for any text.
    #[serde(default = "everything")]
    #[schemars(with = "Vec<Text<Name>>")]
    pub allow: Vec<String>,
    /// Names that are not, whatever `allow` says.
    #[serde(default)]
    #[schemars(with = "Vec<Text<Name>>")]
    pub deny: Vec<String>,
    /// Lists for some callers, beside those for all: each that concerns a caller counts.
    #[serde(default)]
    pub access: Vec<ToolAccess>,
    /// What it is for.
    #[serde(default)]
    pub description: Option<String>,
}

/// Which tools some callers may use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ToolAccess {
    /// The agents it concerns; `*` stands for any text. Without any: all of them.
    #[serde(default)]
    #[schemars(with = "Vec<Text<Name>>")]
    pub agents: Vec<String>,
    /// The sandboxes it concerns. Without any: every caller, in a sandbox or not.
    #[serde(default)]
    #[schemars(with = "Vec<Text<Name>>")]
    pub sandboxes: Vec<String>,
    /// Names of tools that are let through.
    #[serde(default = "everything")]
    #[schemars(with = "Vec<Text<Name>>")]
    pub allow: Vec<String>,
    /// Names that are not, whatever `allow` says.
    #[serde(default)]
    #[schemars(with = "Vec<Text<Name>>")]
    pub deny: Vec<String>,
}

impl BridgedServer {
    /// Who may use which of its tools.
    pub fn toolbox(&self) -> Toolbox {
        let wildcards = |list: &[String]| list.iter().map(|text| Wildcard::new(text)).collect();
        let narrower = self.access.iter().map(|access| Narrower {
            agents: wildcards(&access.agents),
            sandboxes: wildcards(&access.sandboxes),
            names: Names::new(&access.allow, &access.deny),
        });
        let names = Names::new(&self.allow, &self.deny);
        Toolbox::new(&self.name, names, narrower.collect())
    }
}

fn everything() -> Vec<String> {
    vec!["*".to_owned()]
}

/// Where a tool runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ToolRuntime {
    /// The kind of place.
    #[serde(rename = "type")]
    pub kind: RuntimeKind,
    /// The E2B template; required with `e2b`.
    #[schemars(with = "Option<Text<Name>>")]
    pub template: Option<String>,
    /// How long one call may take.
    #[serde(with = "leaf::maybe")]
    #[schemars(with = "Option<Text<Duration>>")]
    pub timeout: Option<Duration>,
}

/// The kinds of places a tool can run in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RuntimeKind {
    /// On this machine, as the operator.
    #[default]
    Local,
    /// Inside a sandbox, behind the gate.
    Sandbox,
    /// In an E2B sandbox.
    E2b,
}

impl RuntimeKind {
    /// The word used in files and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            RuntimeKind::Local => "local",
            RuntimeKind::Sandbox => "sandbox",
            RuntimeKind::E2b => "e2b",
        }
    }
}
