//! `audit`: the log of every decision.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::leaf::{self, Text};

/// The audit log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AuditSection {
    /// A file to which every record is also appended, as one line of JSON.
    #[serde(with = "leaf::optional")]
    #[schemars(with = "Option<Text<PathBuf>>")]
    pub jsonl: Option<PathBuf>,
    /// What happens to requests while records cannot be written fast enough: `block` makes them
    /// wait, `drop` loses and counts records.
    pub on_full: OnFullSetting,
    /// Maximum size of the audit log; beyond it the oldest segments are deleted.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<u64>")]
    pub max_bytes: u64,
}

impl Default for AuditSection {
    fn default() -> Self {
        Self {
            jsonl: None,
            on_full: OnFullSetting::Block,
            max_bytes: 1 << 30,
        }
    }
}

/// What happens when the queue of records is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnFullSetting {
    /// Requests wait.
    Block,
    /// Records are dropped and counted.
    Drop,
}
