//! Audit records: hash chains that nobody can change unnoticed, the queues in front of them,
//! queries, verification, and the options of the log.

use std::path::PathBuf;

pub mod chain;
pub(crate) mod ledger;
pub(crate) mod merge;
pub mod query;
pub mod queue;
pub mod verify;

/// How the audit log is kept. All of it can change while running.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditOptions {
    /// Where lines are appended, if anywhere.
    pub jsonl: Option<JsonlOptions>,
    /// What happens when a sandbox's queue is full.
    pub on_full: FullQueuePolicy,
    /// About how many bytes of the database records may take.
    pub max_bytes: u64,
}

impl Default for AuditOptions {
    fn default() -> Self {
        Self {
            jsonl: None,
            on_full: FullQueuePolicy::Block,
            max_bytes: 256 * 1024 * 1024,
        }
    }
}

/// Where the lines go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JsonlOptions {
    /// The file.
    pub path: PathBuf,
    /// When it becomes `.1` and a new one begins.
    pub max_bytes: u64,
    /// How many old ones (`.1`, `.2`, …) are kept.
    pub keep: u32,
}

impl JsonlOptions {
    /// Lines to `path`, 64 MiB a file, four old ones.
    pub fn at(path: PathBuf) -> Self {
        Self {
            path,
            max_bytes: 64 * 1024 * 1024,
            keep: 4,
        }
    }
}

/// What happens when a sandbox's queue is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FullQueuePolicy {
    /// Its requests wait.
    #[default]
    Block,
    /// The event is dropped, counted, and the count is written into its chain.
    Drop,
}
