//! `scan`: the reaction to secrets and prompt injections that the scanner finds.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::leaf::{self, Text};

/// The scanner of requests and responses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ScanSection {
    /// What happens to a request that contains a secret. Known secrets and canaries are always
    /// refused.
    pub outbound: ScanAction,
    /// What happens to a response that contains hidden instructions for the agent.
    pub injection: ScanAction,
    /// Rule files in addition to the built-in rules, with the TOML fields of gitleaks.
    #[serde(with = "leaf::list")]
    #[schemars(with = "Vec<Text<PathBuf>>")]
    pub rules: Vec<PathBuf>,
    /// How much of one message is scanned.
    pub budget: ScanBudget,
}

impl Default for ScanSection {
    fn default() -> Self {
        Self {
            outbound: ScanAction::Deny,
            injection: ScanAction::Note,
            rules: Vec::new(),
            budget: ScanBudget::default(),
        }
    }
}

/// How much of one message is scanned before the message counts as too large.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ScanBudget {
    /// Maximum number of bytes after decoding.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<u64>")]
    pub bytes: u64,
    /// Maximum depth of nested encodings.
    #[schemars(range(min = 1, max = 16))]
    pub depth: u32,
}

impl Default for ScanBudget {
    fn default() -> Self {
        Self {
            bytes: 64 << 20,
            depth: 4,
        }
    }
}

/// The reaction to a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ScanAction {
    /// Refuse the message.
    Deny,
    /// Remove the finding and forward the rest.
    Redact,
    /// Request the operator's approval.
    Ask,
    /// Record the finding and forward the message.
    Note,
    /// Do not scan.
    Off,
}

impl ScanAction {
    /// The value as written in files and rules.
    pub const fn as_str(self) -> &'static str {
        match self {
            ScanAction::Deny => "deny",
            ScanAction::Redact => "redact",
            ScanAction::Ask => "ask",
            ScanAction::Note => "note",
            ScanAction::Off => "off",
        }
    }
}

/// The reaction to a finding in a push. A push cannot be redacted: its objects are named by their
/// hashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum GitAction {
    /// Refuse the push.
    Deny,
    /// Request the operator's approval.
    Ask,
    /// Record the finding and forward the push.
    Note,
    /// Do not scan.
    Off,
}
