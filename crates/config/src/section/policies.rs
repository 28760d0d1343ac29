//! `policies`: Rego bundles.

use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::leaf::{self, Name, Text};

/// The entrypoint that decides about requests.
pub const REQUESTS: &str = "http/authz";
/// The entrypoint that decides about pushes.
pub const PUSHES: &str = "git/push";
/// The entrypoint that decides about tool calls and their answers.
pub const TOOL_CALLS: &str = "mcp/authz";
/// The entrypoint that decides about questions of a tool's server to the client.
pub const ELICITATIONS: &str = "mcp/elicitation";

/// Every entrypoint that something evaluates.
pub const ENTRYPOINTS: [&str; 4] = [REQUESTS, PUSHES, TOOL_CALLS, ELICITATIONS];

/// Policy bundles and how they are evaluated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PoliciesSection {
    /// How long one evaluation may take; a longer one blocks.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<Duration>")]
    pub timeout: Duration,
    /// Let a request pass when a bundle cannot decide. Health then says so.
    pub fail_open: bool,
    /// The bundles, each a directory or an OPA bundle archive.
    pub bundles: Vec<BundleSettings>,
}

impl BundleSettings {
    /// Whether it decides about `entrypoint`: it names that, or a rule below it.
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
    /// Its name in verdicts, logs and metrics.
    #[schemars(with = "Text<Name>")]
    pub id: String,
    /// Directory of `.rego` and data files, or a `.tar.gz`; relative to this file.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<PathBuf>")]
    pub path: PathBuf,
    /// What it decides: a path into `data` such as `mcp/authz`, `http/authz` or `git/push`.
    #[schemars(with = "Text<Name>")]
    pub entrypoint: String,
    /// Whether a missing path stops the start; otherwise it is a warning.
    #[serde(default)]
    pub required: bool,
    /// Whether the verdict counts.
    #[serde(default)]
    pub mode: BundleMode,
}

/// What a bundle's verdict does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum BundleMode {
    /// It decides.
    #[default]
    Enforce,
    /// It is written down and changes nothing.
    Log,
}
