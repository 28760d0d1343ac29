//! Opening, replacing, abandoning and closing the database.

use std::fs;
use std::path::Path;

use policy::audit::AuditEvent;
use policy::clock::UnixMillis;
use rusqlite::config::DbConfig;

use super::{Command, Writer};
use crate::DATABASE;
use crate::audit::ledger::{LedgerTransaction, MAX_SEQ};
use crate::connection;
use crate::database::Database;
use crate::error::{StoreError, is_corruption};
use crate::files::{self, with_suffix};
use crate::health::State;
use crate::jsonl::{self, Message};
use crate::recovery::{self, Marker, StagedDatabase};
use crate::registry::RegistrySnapshot;
use crate::schema::DatabaseOpenError;

/// The reason if the registry's database has disappeared.
const DATABASE_MISSING: &str = "palisade.db is missing, but this state directory has had a \
                                database; put the file back and restart the gate";

/// Opens the database in `dir`, or creates one if there never was any. Returns None, and the last
/// known number, if the registry is unavailable.
pub(super) fn open(
    dir: &Path,
    state: &State,
    now: UnixMillis,
) -> Result<(Option<Database>, u64), StoreError> {
    recovery::remove_stale(dir);
    let options = state.options.load();
    let known_seq = || {
        let exported = options.jsonl.as_ref();
        let exported = exported.and_then(|options| jsonl::last_seq(&options.path));
        recovery::known_seq(dir, exported.unwrap_or_default(), now)
    };
    if let Some(marker) = Marker::read(dir) {
        tracing::error!(reason = %marker.reason, "the registry is unavailable");
        state.publish(RegistrySnapshot::unavailable(&marker.reason));
        let last_seq = match marker.last_seq {
            1..=MAX_SEQ => marker.last_seq,
            _ => known_seq(),
        };
        return Ok((None, last_seq));
    }
    let path = dir.join(DATABASE);
    let has_wal = fs::metadata(with_suffix(&path, "-wal")).is_ok_and(|m| m.len() > 0);
    let opened = match fs::symlink_metadata(&path) {
        Ok(_) => files::make_private(&path)
            .map_err(DatabaseOpenError::Refused)
            .and_then(|()| Database::open(&path)),
        // Only the WAL is left: the database file was lost.
        Err(_) if has_wal => Err(DatabaseOpenError::Corrupt(
            "its file is missing, but its WAL exists".to_owned(),
        )),
        // Nothing is written, so that putting the file back restores the registry.
        Err(_) if recovery::was_used(dir) => {
            tracing::error!(reason = DATABASE_MISSING, "the registry is unavailable");
            state.publish(RegistrySnapshot::unavailable(DATABASE_MISSING));
            return Ok((None, known_seq()));
        }
        Err(_) => create_first(dir, now)
            .map_err(DatabaseOpenError::Refused)
            .and_then(|()| Database::open(&path)),
    };
    match opened {
        Ok((db, snapshot)) => {
            recovery::write_created_marker(dir)?;
            state.publish(snapshot);
            state.committed.send_replace(db.ledger.last_seq);
            let last_seq = db.ledger.last_seq;
            Ok((Some(db), last_seq))
        }
        Err(DatabaseOpenError::Corrupt(found)) => {
            let last_seq = known_seq();
            let reason = recovery::move_corrupt_aside(dir, &found, last_seq, now);
            state.publish(RegistrySnapshot::unavailable(&reason));
            Ok((None, last_seq))
        }
        Err(DatabaseOpenError::Refused(error)) => Err(error),
    }
}

/// Creates the first database under another name and renames it, so that a file of the final name
/// is always complete.
fn create_first(dir: &Path, now: UnixMillis) -> Result<(), StoreError> {
    let staged = recovery::stage_empty_blocking(dir, now)?;
    move_into_place(&staged, &dir.join(DATABASE))
}

fn move_into_place(staged: &StagedDatabase, path: &Path) -> Result<(), StoreError> {
    fs::rename(&staged.path, path).map_err(|e| StoreError::file(path, e))?;
    files::sync_parent(path)
}

/// Rotates out one segment, or leaves the transaction as it was and returns why. A failing disk or
/// a corrupt file fail the transaction; a row that cannot be removed for another reason must not
/// prevent other records from being written.
pub(super) fn rotate(
    ledger_tx: &mut LedgerTransaction<'_>,
) -> Result<Result<(), rusqlite::Error>, rusqlite::Error> {
    ledger_tx.conn().execute_batch("SAVEPOINT rotation")?;
    match ledger_tx.rotate_one() {
        Ok(()) => ledger_tx.conn().execute_batch("RELEASE rotation").map(Ok),
        Err(error) if is_fatal(&error) => Err(error),
        Err(error) => {
            ledger_tx
                .conn()
                .execute_batch("ROLLBACK TO rotation; RELEASE rotation")?;
            Ok(Err(error))
        }
    }
}

/// Whether the whole transaction must fail: the disk or the file is damaged, or memory is
/// exhausted.
fn is_fatal(error: &rusqlite::Error) -> bool {
    is_corruption(error)
        || matches!(
            error.sqlite_error_code(),
            Some(
                rusqlite::ErrorCode::DiskFull
                    | rusqlite::ErrorCode::SystemIoFailure
                    | rusqlite::ErrorCode::OutOfMemory
            )
        )
}

impl Writer {
    /// Handles commands that are not writes.
    pub(super) fn control(&mut self, command: Command) {
        match command {
            Command::Flush(reply) => {
                self.write_pending(false);
                let _ = reply.send(self.outcome());
            }
            Command::Options(options) => {
                self.rotation_failed = false;
                self.state.update_failures(|t| t.rotation = None);
                self.jsonl.send(Message::Options(options.jsonl.clone()));
                self.state.options.store(options.into());
            }
            Command::Swap {
                staged,
                event,
                now,
                reply,
            } => {
                self.last_ts = self.last_ts.max(now);
                let _ = reply.send(self.swap(&staged, &event, now));
            }
            Command::CorruptionFound(found) => self.check_reported_corruption(&found),
            #[cfg(test)]
            Command::Test(act) => act(self),
            // Handled where batches are collected.
            Command::Traffic(_) | Command::Durable(_) | Command::Close(_) => {}
        }
    }

    /// Writes the pending entries now, even if the pause before the next retry is not over.
    fn write_pending(&mut self, closing: bool) {
        if closing || !self.pending.is_empty() {
            if let Some((at, _)) = &mut self.retry {
                *at = std::time::Instant::now();
            }
            self.commit(Vec::new(), closing);
        }
    }

    fn outcome(&self) -> Result<(), StoreError> {
        self.state.check_available()?;
        match self.pending.len() {
            0 => Ok(()),
            left => Err(StoreError::Write {
                reason: self.state.health().error.unwrap_or_default()
                    + &format!("; {left} audit records are not written yet"),
                full: false,
            }),
        }
    }

    /// Flushes and stops all threads.
    pub(super) fn shut_down(&mut self) -> Result<(), StoreError> {
        self.write_pending(true);
        let outcome = match self.pending.is_empty() {
            true => Ok(()),
            false => self.outcome(),
        };
        self.lose_pending();
        // The JSONL thread reads the database a last time before its WAL is checkpointed.
        self.jsonl.close();
        if let Some(db) = self.db.take() {
            db.close();
        }
        outcome
    }

    /// Checks whether the database has the corruption that a reader reported: the reader may have
    /// read a database that has been replaced since. Uses a separate connection, because the writer's has cached pages from
    /// before the corruption.
    fn check_reported_corruption(&mut self, found: &str) {
        if self.db.is_none() {
            return;
        }
        let checked = connection::connect_read_only(&self.dir.join(DATABASE))
            .and_then(|conn| connection::first_integrity_error(&conn, "PRAGMA quick_check(1)"));
        match checked {
            Ok(None) => {
                tracing::warn!(found, "corruption report not confirmed by integrity check");
            }
            Ok(Some(corruption)) => drop(self.abandon_database(&corruption)),
            Err(error) if is_corruption(&error) => drop(self.abandon_database(&error.to_string())),
            Err(error) => tracing::warn!(%error, "checking the database failed"),
        }
    }

    /// Moves a corrupt database aside and refuses everything from now on.
    pub(super) fn abandon_database(&mut self, found: &str) -> StoreError {
        if let Some(db) = self.db.take() {
            // Another process may have written, and used more numbers.
            let stored = recovery::highest_seq(&db.conn).unwrap_or_default();
            self.known_seq = db.ledger.last_seq.max(stored);
            // Closing must not write into the corrupt file, which is evidence.
            let _ = db
                .conn
                .set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true);
        }
        let reason = recovery::move_corrupt_aside(&self.dir, found, self.known_seq, self.last_ts);
        self.state.publish(RegistrySnapshot::unavailable(&reason));
        self.retry = None;
        self.lose_pending();
        StoreError::Unavailable { reason }
    }

    /// Replaces the database by `staged` and moves the old one aside; if that fails, everything
    /// stays as it was.
    fn swap(
        &mut self,
        staged: &StagedDatabase,
        event: &AuditEvent,
        now: UnixMillis,
    ) -> Result<(), StoreError> {
        let before = Marker::read(&self.dir);
        let last_seq = match &self.db {
            Some(db) => db.ledger.last_seq,
            None => self.known_seq,
        };
        Marker {
            reason: "a restore or reset was interrupted".to_owned(),
            last_seq,
        }
        .write(&self.dir)?;
        if let Some(db) = self.db.take() {
            db.close();
        }
        let path = self.dir.join(DATABASE);
        let aside = files::free_name(&recovery::aside_name(&self.dir, "replaced", now));
        let max_bytes = self.state.options.load().max_bytes;
        let replaced = recovery::move_database(&path, &aside)
            .and_then(|()| move_into_place(staged, &path))
            .and_then(|()| open_replacement(&path, last_seq, event, now, max_bytes))
            .and_then(|replacement| Marker::remove(&self.dir).map(|()| replacement));
        match replaced {
            Ok((db, snapshot)) => {
                self.use_database(db, snapshot);
                tracing::warn!(aside = %aside.display(), "replaced the database; the old one was moved aside");
                Ok(())
            }
            Err(error) => {
                self.undo_swap(&aside, before);
                Err(error)
            }
        }
    }

    fn use_database(&mut self, db: Database, snapshot: RegistrySnapshot) {
        self.state.publish(snapshot);
        self.state.committed.send_replace(db.ledger.last_seq);
        self.state
            .update_failures(|t| (t.audit, t.rotation) = (None, None));
        self.retry = None;
        self.rotation_failed = false;
        self.db = Some(db);
        self.jsonl.send(Message::Replaced);
    }

    fn undo_swap(&mut self, aside: &Path, before: Option<Marker>) {
        let path = self.dir.join(DATABASE);
        if aside.exists() {
            for end in ["", "-wal", "-shm"] {
                // The file is only a copy of the staged database.
                let _ = fs::remove_file(with_suffix(&path, end));
            }
            if let Err(error) = recovery::move_database(aside, &path) {
                tracing::error!(%error, "moving the database back failed");
            }
        }
        let opened = match before {
            Some(marker) => marker.write(&self.dir).and(Err(StoreError::Unavailable {
                reason: marker.reason,
            })),
            None if !path.exists() => Marker::remove(&self.dir).and_then(|()| {
                Err(StoreError::Unavailable {
                    reason: DATABASE_MISSING.to_owned(),
                })
            }),
            None => Database::open(&path)
                .map_err(|flaw| match flaw {
                    DatabaseOpenError::Corrupt(reason) => StoreError::Unavailable { reason },
                    DatabaseOpenError::Refused(error) => error,
                })
                .and_then(|opened| Marker::remove(&self.dir).map(|()| opened)),
        };
        match opened {
            Ok((db, snapshot)) => self.use_database(db, snapshot),
            Err(error) => {
                let reason = match error {
                    StoreError::Unavailable { reason } => reason,
                    other => other.to_string(),
                };
                self.state.publish(RegistrySnapshot::unavailable(&reason));
            }
        }
    }
}

/// Opens a database that was just put in place, and records the replacement.
fn open_replacement(
    path: &Path,
    last_seq: u64,
    event: &AuditEvent,
    now: UnixMillis,
    max_bytes: u64,
) -> Result<(Database, RegistrySnapshot), StoreError> {
    let (mut db, snapshot) = Database::open(path).map_err(|flaw| match flaw {
        DatabaseOpenError::Corrupt(reason) => StoreError::invalid_backup(path, reason),
        DatabaseOpenError::Refused(error) => error,
    })?;
    db.transact(max_bytes, |ledger_tx| {
        ledger_tx.skip_to(last_seq);
        ledger_tx.append(event, now)
    })
    .map_err(|e| StoreError::write(&e))?;
    Ok((db, snapshot))
}
