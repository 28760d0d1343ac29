//! `audit`: the record of what was decided.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::leaf::{self, Text};

/// The audit log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AuditSection {
    /// A file that also gets every record as a line of JSON.
    #[serde(with = "leaf::maybe")]
    #[schemars(with = "Option<Text<PathBuf>>")]
    pub jsonl: Option<PathBuf>,
    /// What happens to requests when records cannot be written fast enough.
    pub on_full: OnFullSetting,
    /// How much is kept before the oldest segments go.
    #[serde(with = "leaf::one")]
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
    /// Records are lost, and counted.
    Drop,
}
