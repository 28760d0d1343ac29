//! Handle to the audit log: sends records to the writer, and queries, exports and verifies
//! them.
//!
//! A record counts as written when its transaction has committed. [`AuditLogHandle::record`]
//! adds an event to its sandbox's queue and returns; [`AuditLogHandle::record_durable`] waits
//! for the commit. The database is authoritative; the JSONL file is derived from it.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use policy::audit::AuditEvent;
use policy::clock::UnixMillis;
use tokio::sync::watch;

use crate::audit::query::{self, AuditFilter, AuditRecord};
use crate::audit::queue::Entry;
use crate::audit::verify::{self, ChainFaultKind, VerifyReport};
use crate::audit::{AuditOptions, FullQueuePolicy};
use crate::error::StoreError;
use crate::jsonl;
use crate::writer::{self, Command, Durable, Link};

/// The result of queueing an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueOutcome {
    /// The event will be written with the next batch.
    Queued,
    /// The queue of the event's sandbox was full ([`FullQueuePolicy::Drop`]).
    Dropped,
}

/// A handle to the audit log. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct AuditLogHandle {
    link: Arc<Link>,
}

impl AuditLogHandle {
    pub(crate) fn new(link: Arc<Link>) -> Self {
        Self { link }
    }

    /// Queues an event that happened at `now`. Waits only while the queue of its own sandbox is
    /// full. A crash may lose events that were queued in the last 50 ms.
    pub async fn record(
        &self,
        event: AuditEvent,
        now: UnixMillis,
    ) -> Result<QueueOutcome, StoreError> {
        let state = &self.link.state;
        state.check_available()?;
        let slot = match state.options.load().on_full {
            FullQueuePolicy::Block => None,
            FullQueuePolicy::Drop => match state.queues.try_take_slot(&event.sandbox) {
                Some(slot) => Some(slot),
                None => {
                    state.queues.count_dropped(&event.sandbox);
                    state.counters.dropped.fetch_add(1, Relaxed);
                    return Ok(QueueOutcome::Dropped);
                }
            },
        };
        let slot = match slot {
            Some(slot) => slot,
            None => state
                .queues
                .wait_for_slot(&event.sandbox)
                .await
                .ok_or(StoreError::Closed)?,
        };
        self.link.send(Command::Traffic(Entry {
            event: Box::new(event),
            ts: now,
            slot: Some(slot),
        }))?;
        Ok(QueueOutcome::Queued)
    }

    /// Queues an event that happened at `now`, unless that needs waiting: then the event is
    /// returned, for [`AuditLogHandle::record`].
    pub fn try_record(
        &self,
        event: Box<AuditEvent>,
        now: UnixMillis,
    ) -> Result<QueueOutcome, Box<AuditEvent>> {
        let state = &self.link.state;
        if state.check_available().is_err() {
            return Err(event);
        }
        let Some(slot) = state.queues.try_take_slot(&event.sandbox) else {
            return Err(event);
        };
        let entry = Entry {
            event,
            ts: now,
            slot: Some(slot),
        };
        // A stopped writer has reported its end, and accepts nothing any more.
        match self.link.send(Command::Traffic(entry)) {
            Ok(()) => Ok(QueueOutcome::Queued),
            Err(_) => Ok(QueueOutcome::Dropped),
        }
    }

    /// Writes an event that happened at `now` and returns its number once it is on disk.
    pub async fn record_durable(
        &self,
        event: AuditEvent,
        now: UnixMillis,
    ) -> Result<u64, StoreError> {
        self.link
            .request(|reply| {
                Command::Durable(Durable::Record {
                    event: Box::new(event),
                    now,
                    reply,
                })
            })
            .await
    }

    /// Waits until everything queued before this call is on disk.
    pub async fn flush(&self) -> Result<(), StoreError> {
        self.link.request(Command::Flush).await
    }

    /// Whether [`AuditLogHandle::set_options`] would succeed: the writer runs, and a new JSONL
    /// file can be written. Changes nothing. Blocks.
    pub fn check_options(&self, options: &AuditOptions) -> Result<(), StoreError> {
        if !self.link.is_running() {
            return Err(StoreError::Closed);
        }
        let Some(new) = &options.jsonl else {
            return Ok(());
        };
        let current = self.link.state.options.load().jsonl.clone();
        // A current file that cannot be written is reported by health, and does not refuse a
        // change.
        if current.is_some_and(|current| current.path == new.path) {
            return Ok(());
        }
        jsonl::check_path(&new.path).map_err(|error| StoreError::File {
            path: new.path.clone(),
            reason: error.to_string(),
        })
    }

    /// Changes the options of the audit log.
    pub fn set_options(&self, options: AuditOptions) -> Result<(), StoreError> {
        self.link.send(Command::Options(options))
    }

    /// The number of the newest committed record, as it changes. A follower waits for a change
    /// and then queries the records after its own last one; a slow follower misses no record
    /// and delays no other.
    pub fn follow(&self) -> watch::Receiver<u64> {
        self.link.state.committed.subscribe()
    }

    /// The number of the newest record in the JSONL file, as it changes.
    pub fn follow_jsonl(&self) -> watch::Receiver<u64> {
        self.link.state.exported.subscribe()
    }

    /// The records that match. Blocks; see [`AuditLogHandle::query`].
    pub fn query_blocking(&self, filter: &AuditFilter) -> Result<Vec<AuditRecord>, StoreError> {
        self.link.read(|conn| query::select(conn, filter))
    }

    /// The records that match, read on a thread that may block.
    pub async fn query(&self, filter: AuditFilter) -> Result<Vec<AuditRecord>, StoreError> {
        let log = self.clone();
        writer::run_blocking(move || log.query_blocking(&filter)).await
    }

    /// Writes the lines of the matching records to `out` and returns their number. Reads in
    /// pages, so that neither memory nor the WAL grows while `out` is slow. Blocks.
    pub fn export_blocking(
        &self,
        filter: &AuditFilter,
        out: impl Write,
    ) -> Result<u64, StoreError> {
        let mut out = out;
        query::export(
            |page| self.link.read(|conn| query::select_lines(conn, page)),
            filter,
            &mut out,
        )
    }

    /// Verifies every chain of the running database. Blocks; the writer continues.
    pub fn verify_blocking(&self) -> Result<VerifyReport, StoreError> {
        self.link.state.check_available()?;
        let report = verify::verify_blocking(&self.link.database_path())?;
        if let Some(ChainFaultKind::File(found)) = report.first_broken.as_ref().map(|b| &b.kind) {
            // Corruption found here is reported to the writer, which checks it.
            let _ = self.link.send(Command::CorruptionFound(found.clone()));
        }
        Ok(report)
    }
}
