//! Audit records: tamper-evident hash chains, the queues in front of them, queries, verification,
//! and the options of the log.

use std::path::PathBuf;

pub mod chain;
pub(crate) mod ledger;
pub(crate) mod merge;
pub mod query;
pub mod queue;
pub mod verify;

/// Options of the audit log. All of them can change at run time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditOptions {
    /// The JSONL file to which records are also appended, if any.
    pub jsonl: Option<JsonlOptions>,
    /// What happens when a sandbox's queue is full.
    pub on_full: FullQueuePolicy,
    /// Approximate maximum size of the records in the database.
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

/// Options of the JSONL file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JsonlOptions {
    /// Path of the file.
    pub path: PathBuf,
    /// Size at which the file is renamed to `.1` and a new one is started.
    pub max_bytes: u64,
    /// How many rotated files (`.1`, `.2`, …) are kept.
    pub keep: u32,
}

impl JsonlOptions {
    /// A file at `path`, rotated at 64 MiB, with four rotated files.
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
    /// Requests of the sandbox wait.
    #[default]
    Block,
    /// The event is dropped and counted, and the count is written into the sandbox's chain.
    Drop,
}
