//! `policies`: Rego policy bundles.

use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::leaf::{self, Name, Text};

/// The entrypoint that decides about requests.
pub const REQUESTS: &str = "http/authz";
/// The entrypoint that decides about pushes.
pub const PUSHES: &str = "git/push";
/// The entrypoint that decides about tool calls and their results.
pub const TOOL_CALLS: &str = "mcp/authz";
/// The entrypoint that decides about elicitation requests of an MCP server to its client.
pub const ELICITATIONS: &str = "mcp/elicitation";

/// Every entrypoint that the gate evaluates.
pub const ENTRYPOINTS: [&str; 4] = [REQUESTS, PUSHES, TOOL_CALLS, ELICITATIONS];

/// Policy bundles and how they are evaluated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PoliciesSection {
    /// Maximum duration of one evaluation; a longer one fails, and refuses unless `fail_open` is set.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<Duration>")]
    pub timeout: Duration,
    /// Allow a request if a bundle cannot be evaluated. The health report then shows it.
    pub fail_open: bool,
    /// The bundles, each a directory or an OPA bundle archive.
    pub bundles: Vec<BundleSettings>,
}

impl BundleSettings {
    /// Whether the bundle decides about `entrypoint`: it names that entrypoint, or a rule below it.
    pub fn decides(&self, entrypoint: &str) -> bool {
        let inner = self.entrypoint.strip_prefix(entrypoint);
        inner.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }
}

impl Default for PoliciesSection {
    fn default() -> Self {
        Self {
            timeout: Duration::from_millis(50),
            fail_open: false,
            bundles: Vec::new(),
        }
    }
}

/// One policy bundle.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BundleSettings {
    /// Name of the bundle in verdicts, logs and metrics.
    #[schemars(with = "Text<Name>")]
    pub id: String,
    /// Directory of `.rego` and data files, or a `.tar.gz` archive; relative to this file.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<PathBuf>")]
    pub path: PathBuf,
    /// What the bundle decides: a path into `data` such as `mcp/authz`, `http/authz` or `git/push`.
    #[schemars(with = "Text<Name>")]
    pub entrypoint: String,
    /// Refuse to start if the path does not exist; otherwise a missing path is a warning.
    #[serde(default)]
    pub required: bool,
    /// Whether the bundle's verdict is enforced or only logged.
    #[serde(default)]
    pub mode: BundleMode,
}

/// Whether a bundle's verdict is enforced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum BundleMode {
    /// The verdict decides.
    #[default]
    Enforce,
    /// The verdict is logged and changes nothing.
    Log,
}
