//! SQLite database of the registry and the audit log. The only SQL of the product.
//!
//! One file, `palisade.db`, in the state directory. One thread owns the writing connection and
//! takes commands in batches, one transaction each; readers open read-only connections of their
//! own. The lookup of a request's sandbox needs no SQL: the registry is a snapshot in memory that
//! is replaced after a commit.
//!
//! ```text
//!   register ─┐                                  ┌─> registry snapshot (ArcSwap)
//!   audit ────┼─> channel ─> writer ─> COMMIT ───┼─> newest seq (watch) ─> followers
//!   restore ──┘                                  └─> JSONL thread (reads the database)
//! ```
//!
//! **Never here:** a decision about traffic, a clock (`now` is a parameter), a secret or a body in
//! a record, SQL on an async thread, an empty registry in place of a corrupt one.

use std::path::PathBuf;
use std::sync::Arc;

use policy::audit::AuditEvent;
use policy::clock::UnixMillis;
use policy::id::SandboxId;
use policy::registration::Registration;

use crate::audit::AuditOptions;
use crate::audit_log::AuditLogHandle;
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

/// File name of the database in the state directory.
pub const DATABASE: &str = "palisade.db";

/// Options for opening a store.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// The state directory. Created with mode 0700 if it does not exist.
    pub dir: PathBuf,
    /// Options of the audit log.
    pub audit: AuditOptions,
    /// The wall clock at opening, for the names of files that are moved aside.
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
    /// Opens the store, and creates it on the first start. Blocks.
    ///
    /// A corrupt database is not an error here: the store then refuses everything
    /// ([`StoreError::Unavailable`]) until [`Store::restore`] or [`Store::reset`], because the gate
    /// has to run to report it to the operator. Errors are conditions that the operator has to
    /// correct before the gate can start: a newer schema, a directory that cannot be used.
    pub fn open(options: StoreOptions) -> Result<Self, StoreError> {
        Ok(Self {
            link: Arc::new(writer::start(options)?),
        })
    }

    /// Read access to the registry.
    pub fn registry(&self) -> RegistryReader {
        RegistryReader::new(Arc::clone(&self.link.state.snapshot))
    }

    /// Access to the audit log.
    pub fn audit(&self) -> AuditLogHandle {
        AuditLogHandle::new(Arc::clone(&self.link))
    }

    /// Writes `row` and `event` in one transaction; both are on disk when this returns.
    ///
    /// A second registration of the same id replaces its row. An address that belongs to another
    /// live id is [`StoreError::IpTaken`]; an expired holder is removed, with a record of its own.
    pub async fn register(
        &self,
        row: Registration,
        event: AuditEvent,
        now: UnixMillis,
    ) -> Result<RegistrationOutcome, StoreError> {
        self.put(row, LiveHolder::Keep, event, now).await
    }

    /// As [`Store::register`], but also removes a live holder of the address: its row is removed in
    /// the same transaction, with a record of its own.
    pub async fn register_replacing(
        &self,
        row: Registration,
        event: AuditEvent,
        now: UnixMillis,
    ) -> Result<RegistrationOutcome, StoreError> {
        self.put(row, LiveHolder::Remove, event, now).await
    }

    async fn put(
        &self,
        row: Registration,
        live_holder: LiveHolder,
        event: AuditEvent,
        now: UnixMillis,
    ) -> Result<RegistrationOutcome, StoreError> {
        self.link
            .request(|reply| {
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

    /// Reads the registry from the file instead of the snapshot in memory. A corrupt file is moved
    /// aside, as it is whenever a reader finds corruption.
    pub async fn check_registry(&self) -> Result<(), StoreError> {
        let link = Arc::clone(&self.link);
        writer::run_blocking(move || link.read(database::check_registrations)).await
    }

    /// Removes `id` and writes `event` in one transaction. Returns the row that was removed.
    pub async fn unregister(
        &self,
        id: &SandboxId,
        event: AuditEvent,
        now: UnixMillis,
    ) -> Result<Arc<Registration>, StoreError> {
        let id = id.clone();
        self.link
            .request(|reply| {
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
            .request(|reply| Command::Durable(Durable::Prune { now, reply }))
            .await
    }

    /// Copies the running database to `path` (mode 0600), which must not exist yet.
    pub async fn backup(&self, path: PathBuf, now: UnixMillis) -> Result<(), StoreError> {
        self.link.state.check_available()?;
        let source = self.link.database_path();
        let target = path.clone();
        writer::run_blocking(move || recovery::backup_blocking(&source, &target)).await?;
        let mut event = AuditEvent::lifecycle("registry_backed_up", None);
        event.path = Some(path.display().to_string());
        self.audit().record_durable(event, now).await.map(drop)
    }

    /// Replaces the running database, which is moved aside, by a copy of the backup at `path`. The
    /// backup is verified completely first and never changed.
    pub async fn restore(&self, path: PathBuf, now: UnixMillis) -> Result<(), StoreError> {
        let dir = self.link.dir.clone();
        let source = path.clone();
        let staged =
            writer::run_blocking(move || recovery::stage_restore_blocking(&source, &dir, now))
                .await?;
        let mut event = AuditEvent::lifecycle("registry_restored", None);
        event.path = Some(path.display().to_string());
        self.swap(staged, event, now).await
    }

    /// Starts with an empty database; the previous one is moved aside.
    pub async fn reset(&self, now: UnixMillis) -> Result<(), StoreError> {
        let dir = self.link.dir.clone();
        let staged =
            writer::run_blocking(move || recovery::stage_empty_blocking(&dir, now)).await?;
        let event = AuditEvent::lifecycle("registry_reset", None);
        self.swap(staged, event, now).await
    }

    async fn swap(
        &self,
        staged: recovery::StagedDatabase,
        event: AuditEvent,
        now: UnixMillis,
    ) -> Result<(), StoreError> {
        self.link
            .request(|reply| Command::Swap {
                staged,
                event: Box::new(event),
                now,
                reply,
            })
            .await
    }

    /// Flushes everything, checkpoints the WAL and stops the writer. Every handle returns
    /// [`StoreError::Closed`] afterwards.
    pub async fn close(&self) -> Result<(), StoreError> {
        let outcome = self.link.request(Command::Close).await;
        let link = Arc::clone(&self.link);
        writer::run_blocking(move || {
            link.join_blocking();
            Ok(())
        })
        .await?;
        outcome
    }

    /// The current health of the store.
    pub fn health(&self) -> StoreHealth {
        self.link.state.health()
    }

    /// Counters for metrics.
    pub fn stats(&self) -> StoreStats {
        self.link.state.stats()
    }
}
