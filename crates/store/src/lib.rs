//! SQLite: the registry and the audit log. The only SQL of the product.
//!
//! One file, `palisade.db`, in the state directory. One thread owns the writing
//! connection and takes commands in batches, one transaction each; readers open
//! a read-only connection of their own. Looking up who a request comes from touches no
//! SQL at all: the registry is a snapshot in memory that is replaced after a commit.
//!
//! ```text
//!   register ─┐                                  ┌─> registry snapshot (ArcSwap)
//!   audit ────┼─> channel ─> writer ─> COMMIT ───┼─> newest seq (watch) ─> followers
//!   restore ──┘                                  └─> JSONL thread (reads the database)
//! ```
//!
//! **Never here:** a decision about traffic, a clock (`now` is a parameter), a secret or
//! a body in a record, SQL on an async thread, an empty registry where a broken one was.

use std::path::PathBuf;
use std::sync::Arc;

use policy::audit::AuditEvent;
use policy::clock::UnixMillis;
use policy::id::SandboxId;
use policy::registration::Registration;

use crate::audit::AuditOptions;
use crate::audit_log::AuditLog;
use crate::error::StoreError;
use crate::health::{StoreHealth, StoreStats};
use crate::registry::{RegistrationOutcome, RegistryReader};
use crate::writer::{Command, Durable, Link, LiveHolder};

pub mod audit;
pub mod audit_log;
pub mod error;
pub mod health;
pub mod registry;

mod connection;
mod database;
mod files;
mod jsonl;
mod recovery;
mod schema;
mod writer;

/// The name of the database in the state directory.
pub const DATABASE: &str = "palisade.db";

/// What a store is opened with.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// The state directory. Made with mode 0700 when it is not there.
    pub dir: PathBuf,
    /// How the audit log is kept.
    pub audit: AuditOptions,
    /// The wall clock at opening; names files that are moved aside.
    pub now: UnixMillis,
}

/// The registry and the audit log behind one handle. Cloning is cheap.
///
/// Dropping the last handle flushes and joins the writer, which blocks for one commit;
/// [`Store::close`] does the same without blocking a runtime.
#[derive(Clone, Debug)]
pub struct Store {
    link: Arc<Link>,
}

impl Store {
    /// Opens the store, making it on the first start. Blocks.
    ///
    /// A broken database is not an error here: it gives a store that refuses everything
    /// ([`StoreError::Unavailable`]) until [`Store::restore`] or [`Store::reset`], because
    /// the gate has to run for the operator to be told. Errors are what only a person can
    /// fix before the gate may start: a newer schema, a directory that cannot be used.
    pub fn open(options: StoreOptions) -> Result<Self, StoreError> {
        Ok(Self {
            link: Arc::new(writer::start(options)?),
        })
    }

    /// The registry's read path.
    pub fn registry(&self) -> RegistryReader {
        RegistryReader::new(Arc::clone(&self.link.state.snapshot))
    }

    /// The audit log.
    pub fn audit(&self) -> AuditLog {
        AuditLog::new(Arc::clone(&self.link))
    }

    /// Writes `row` and `event` in one transaction; both are on disk when this returns.
    ///
    /// The same id again replaces its row. An address that belongs to another live id is
    /// [`StoreError::IpTaken`]; an expired holder makes way, with a record of its own.
    pub async fn register(
        &self,
        row: Registration,
        event: AuditEvent,
        now: UnixMillis,
    ) -> Result<RegistrationOutcome, StoreError> {
        self.put(row, LiveHolder::Keep, event, now).await
    }

    /// The same, except that a live holder of the address makes way as well: its row ends in
    /// the same transaction, with a record of its own.
    pub async fn register_replacing(
        &self,
        row: Registration,
        event: AuditEvent,
        now: UnixMillis,
    ) -> Result<RegistrationOutcome, StoreError> {
        self.put(row, LiveHolder::End, event, now).await
    }

    async fn put(
        &self,
        row: Registration,
        live_holder: LiveHolder,
        event: AuditEvent,
        now: UnixMillis,
    ) -> Result<RegistrationOutcome, StoreError> {
        self.link
            .ask(|reply| {
                Command::Durable(Durable::Register {
                    row: Box::new(row),
                    live_holder,
                    event: Box::new(event),
                    now,
                    reply,
                })
            })
            .await
    }

    /// Reads the registry from the file, past the snapshot in memory. A damaged file is set
    /// aside, as it is wherever a reader meets the damage.
    pub async fn check_registry(&self) -> Result<(), StoreError> {
        let link = Arc::clone(&self.link);
        writer::off_thread(move || link.read(database::check_registrations)).await
    }

    /// Removes `id` and writes `event` in one transaction. Gives the row that was there.
    pub async fn unregister(
        &self,
        id: &SandboxId,
        event: AuditEvent,
        now: UnixMillis,
    ) -> Result<Arc<Registration>, StoreError> {
        let id = id.clone();
        self.link
            .ask(|reply| {
                Command::Durable(Durable::Unregister {
                    id,
                    event: Box::new(event),
                    now,
                    reply,
                })
            })
            .await
    }

    /// Removes every row that has expired at `now`, each with a record in its own chain.
    pub async fn prune_expired(&self, now: UnixMillis) -> Result<Vec<SandboxId>, StoreError> {
        self.link
            .ask(|reply| Command::Durable(Durable::Prune { now, reply }))
            .await
    }

    /// Copies the running database to `path` (mode 0600), which must not exist yet.
    pub async fn backup(&self, path: PathBuf, now: UnixMillis) -> Result<(), StoreError> {
        self.link.state.check_available()?;
        let source = self.link.database_path();
        let target = path.clone();
        writer::off_thread(move || recovery::backup_blocking(&source, &target)).await?;
        let mut event = AuditEvent::lifecycle("registry_backed_up", None);
        event.path = Some(path.display().to_string());
        self.audit().record_durable(event, now).await.map(drop)
    }

    /// Puts a copy of the backup at `path` in the place of the running database, which is
    /// kept aside. The candidate is checked wholly first and never changed.
    pub async fn restore(&self, path: PathBuf, now: UnixMillis) -> Result<(), StoreError> {
        let dir = self.link.dir.clone();
        let source = path.clone();
        let staged =
            writer::off_thread(move || recovery::stage_restore_blocking(&source, &dir, now))
                .await?;
        let mut event = AuditEvent::lifecycle("registry_restored", None);
        event.path = Some(path.display().to_string());
        self.swap(staged, event, now).await
    }

    /// Starts over with an empty database; the one that was there is kept aside.
    pub async fn reset(&self, now: UnixMillis) -> Result<(), StoreError> {
        let dir = self.link.dir.clone();
        let staged = writer::off_thread(move || recovery::stage_empty_blocking(&dir, now)).await?;
        let event = AuditEvent::lifecycle("registry_reset", None);
        self.swap(staged, event, now).await
    }

    async fn swap(
        &self,
        staged: recovery::Staged,
        event: AuditEvent,
        now: UnixMillis,
    ) -> Result<(), StoreError> {
        self.link
            .ask(|reply| Command::Swap {
                staged,
                event: Box::new(event),
                now,
                reply,
            })
            .await
    }

    /// Flushes everything, folds the WAL into the database and ends the writer.
    /// Every handle answers [`StoreError::Closed`] afterwards.
    pub async fn close(&self) -> Result<(), StoreError> {
        let outcome = self.link.ask(Command::Close).await;
        let link = Arc::clone(&self.link);
        writer::off_thread(move || {
            link.join_blocking();
            Ok(())
        })
        .await?;
        outcome
    }

    /// How the store is doing right now.
    pub fn health(&self) -> StoreHealth {
        self.link.state.health()
    }

    /// Counters for metrics.
    pub fn stats(&self) -> StoreStats {
        self.link.state.stats()
    }
}
