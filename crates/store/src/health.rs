//! State that the threads share with the handles: the registry snapshot, health, and counters.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use policy::audit::Kind;
use tokio::sync::watch;

use crate::audit::AuditOptions;
use crate::audit::queue::Queues;
use crate::error::StoreError;
use crate::registry::RegistrySnapshot;

/// The health of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreHealth {
    /// Whether sandboxes can be looked up and registered.
    pub registry_accessible: bool,
    /// Whether audit records are written to the database.
    pub audit_writing: bool,
    /// Whether lines are written to the JSONL file; true if none is configured.
    pub jsonl_writing: bool,
    /// Whether the audit log stays within its size limit.
    pub audit_rotating: bool,
    /// The most severe failure, in a sentence.
    pub error: Option<String>,
    /// Records that wait to be written.
    pub queued: usize,
}

/// Counters since the store was opened, and two gauges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreStats {
    /// Records written, by kind, in the order of [`Kind::ALL`].
    pub records: Vec<(Kind, u64)>,
    /// Events that were merged into the count of another event.
    pub merged: u64,
    /// Events dropped because their sandbox's queue was full.
    pub dropped: u64,
    /// Events lost because the database was unavailable or the store ended first.
    pub lost: u64,
    /// Records rotated out.
    pub rotated: u64,
    /// Transactions committed.
    pub batches: u64,
    /// Transactions that failed.
    pub failed_batches: u64,
    /// Time spent in committed transactions, from BEGIN to COMMIT.
    pub commit_time: Duration,
    /// Attempts to write the JSONL file that failed.
    pub jsonl_errors: u64,
    /// Records that wait to be written.
    pub queued: usize,
    /// Rows in the registry.
    pub registered: usize,
}

/// The counters of [`StoreStats`], which all threads update.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) http: AtomicU64,
    pub(crate) dns: AtomicU64,
    pub(crate) git: AtomicU64,
    pub(crate) mcp: AtomicU64,
    pub(crate) approval: AtomicU64,
    pub(crate) lifecycle: AtomicU64,
    pub(crate) config: AtomicU64,
    pub(crate) alert: AtomicU64,
    pub(crate) merged: AtomicU64,
    pub(crate) dropped: AtomicU64,
    pub(crate) lost: AtomicU64,
    pub(crate) rotated: AtomicU64,
    pub(crate) batches: AtomicU64,
    pub(crate) failed_batches: AtomicU64,
    pub(crate) commit_nanos: AtomicU64,
    pub(crate) jsonl_errors: AtomicU64,
    pub(crate) queued: AtomicUsize,
}

impl Counters {
    /// The counter of written records of this kind.
    pub(crate) fn records(&self, kind: Kind) -> &AtomicU64 {
        match kind {
            Kind::Http => &self.http,
            Kind::Dns => &self.dns,
            Kind::Git => &self.git,
            Kind::Mcp => &self.mcp,
            Kind::Approval => &self.approval,
            Kind::Lifecycle => &self.lifecycle,
            Kind::Config => &self.config,
            Kind::Alert => &self.alert,
        }
    }
}

/// The current failures of the audit log, the JSONL file and the rotation; None means no failure.
#[derive(Debug, Default)]
pub(crate) struct CurrentFailures {
    pub(crate) audit: Option<String>,
    pub(crate) jsonl: Option<String>,
    pub(crate) rotation: Option<String>,
}

/// Shared by the handles, the writer and the JSONL thread. Has no connection.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) snapshot: Arc<ArcSwap<RegistrySnapshot>>,
    pub(crate) options: ArcSwap<AuditOptions>,
    pub(crate) queues: Queues,
    pub(crate) counters: Counters,
    /// The newest committed record.
    pub(crate) committed: watch::Sender<u64>,
    /// The newest record in the JSONL file.
    pub(crate) exported: watch::Sender<u64>,
    failures: Mutex<CurrentFailures>,
}

impl State {
    pub(crate) fn new(options: AuditOptions) -> Self {
        Self {
            snapshot: Arc::new(ArcSwap::from_pointee(RegistrySnapshot::unavailable(
                "the database is being opened",
            ))),
            options: ArcSwap::from_pointee(options),
            queues: Queues::default(),
            counters: Counters::default(),
            committed: watch::Sender::new(0),
            exported: watch::Sender::new(0),
            failures: Mutex::new(CurrentFailures::default()),
        }
    }

    /// Returns the reason as an error if the registry is unavailable.
    pub(crate) fn check_available(&self) -> Result<(), StoreError> {
        self.snapshot.load().check_available()
    }

    /// Changes the current failures.
    pub(crate) fn update_failures(&self, change: impl FnOnce(&mut CurrentFailures)) {
        change(&mut self.failures.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn publish(&self, snapshot: RegistrySnapshot) {
        self.snapshot.store(Arc::new(snapshot));
    }

    pub(crate) fn health(&self) -> StoreHealth {
        let unavailable = self.snapshot.load().unavailable.clone();
        let failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        StoreHealth {
            registry_accessible: unavailable.is_none(),
            audit_writing: unavailable.is_none() && failures.audit.is_none(),
            jsonl_writing: failures.jsonl.is_none(),
            audit_rotating: failures.rotation.is_none(),
            error: unavailable
                .map(|reason| format!("registry: {reason}"))
                .or_else(|| failures.audit.as_ref().map(|e| format!("audit: {e}")))
                .or_else(|| failures.rotation.as_ref().map(|e| format!("rotation: {e}")))
                .or_else(|| failures.jsonl.as_ref().map(|e| format!("jsonl: {e}"))),
            queued: self.counters.queued.load(Relaxed),
        }
    }

    pub(crate) fn stats(&self) -> StoreStats {
        let c = &self.counters;
        StoreStats {
            records: Kind::ALL
                .iter()
                .map(|kind| (*kind, c.records(*kind).load(Relaxed)))
                .collect(),
            merged: c.merged.load(Relaxed),
            dropped: c.dropped.load(Relaxed),
            lost: c.lost.load(Relaxed),
            rotated: c.rotated.load(Relaxed),
            batches: c.batches.load(Relaxed),
            failed_batches: c.failed_batches.load(Relaxed),
            commit_time: Duration::from_nanos(c.commit_nanos.load(Relaxed)),
            jsonl_errors: c.jsonl_errors.load(Relaxed),
            queued: c.queued.load(Relaxed),
            registered: self.snapshot.load().len(),
        }
    }
}
