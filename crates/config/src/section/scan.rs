//! `scan`: what happens when a secret or an injection is found.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::leaf::{self, Text};

/// The scanner.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ScanSection {
    /// What happens to a secret on its way out. Known secrets and canaries are always
    /// refused.
    pub outbound: ScanAction,
    /// What happens to instructions hidden in what comes back.
    pub injection: ScanAction,
    /// Rule files beside the built-in ones, with gitleaks' TOML fields.
    #[serde(with = "leaf::list")]
    #[schemars(with = "Vec<Text<PathBuf>>")]
    pub rules: Vec<PathBuf>,
    /// How much is looked at.
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

/// How much is looked at before a message counts as too much.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ScanBudget {
    /// Decoded bytes.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<u64>")]
    pub bytes: u64,
    /// Nested encodings.
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

/// What is done about a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ScanAction {
    /// Refuse the message.
    Deny,
    /// Take the finding out and let the rest pass.
    Redact,
    /// Ask the operator.
    Ask,
    /// Write it down and let it pass.
    Note,
    /// Do not look.
    Off,
}

impl ScanAction {
    /// The word in files and rules.
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

/// What is done about a finding in a push. A push cannot be redacted: its objects are
/// named by their hashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum GitAction {
    /// Refuse the push.
    Deny,
    /// Ask the operator.
    Ask,
    /// Write it down and let it pass.
    Note,
    /// Do not look.
    Off,
}
