//! The writing connection, together with the loaded content of the database.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use policy::id::SandboxId;
use policy::registration::Registration;
use rusqlite::{Connection, TransactionBehavior, params};

use crate::audit::ledger::{Changes, Ledger, LedgerTransaction, invalid_cell};
use crate::connection;
use crate::registry::RegistrySnapshot;
use crate::schema::{self, DatabaseOpenError};

/// An open, healthy database. Only the writer thread has one.
pub(crate) struct Database {
    pub(crate) conn: Connection,
    pub(crate) ledger: Ledger,
    path: PathBuf,
}

impl Database {
    /// Opens the file, checks the small tables and loads them. The audit rows are many and are
    /// checked by `verify`; corruption there is found when it is read.
    pub(crate) fn open(path: &Path) -> Result<(Self, RegistrySnapshot), DatabaseOpenError> {
        let conn = schema::connect(path, schema::MIGRATIONS)?;
        let load = || {
            for table in ["registrations", "chains", "checkpoints", "ledger"] {
                if let Some(found) = connection::first_integrity_error(
                    &conn,
                    &format!("PRAGMA quick_check({table})"),
                )? {
                    return Ok(Err(format!("the table {table} is damaged: {found}")));
                }
            }
            let ledger = Ledger::load(&conn)?;
            if let Some(found) = ledger.contradiction(&conn)? {
                return Ok(Err(found));
            }
            Ok(Ok((ledger, load_registrations(&conn)?)))
        };
        match load() {
            Ok(Ok((ledger, snapshot))) => {
                let path = path.to_owned();
                Ok((Self { conn, ledger, path }, snapshot))
            }
            Ok(Err(found)) => Err(DatabaseOpenError::Corrupt(found)),
            Err(error) if is_corrupt_content(&error) => {
                Err(DatabaseOpenError::Corrupt(error.to_string()))
            }
            Err(error) => Err(DatabaseOpenError::from_sqlite(path, &error)),
        }
    }

    /// Runs `work` in one transaction: all of it is on disk when this returns, or none. The state
    /// in memory is valid only as long as no other process writes.
    pub(crate) fn transact<T>(
        &mut self,
        max_bytes: u64,
        work: impl FnOnce(&mut LedgerTransaction<'_>) -> Result<T, rusqlite::Error>,
    ) -> Result<(T, Totals), rusqlite::Error> {
        let tx = self
            .conn
            .transaction_with_behavior(TransactionBehavior::Immediate)?;
        self.ledger.check_unchanged(&tx)?;
        let mut ledger_tx = LedgerTransaction::new(&tx, &mut self.ledger, max_bytes);
        let result = work(&mut ledger_tx).and_then(|value| ledger_tx.save().map(|()| value));
        let changes = ledger_tx.finish();
        match result.and_then(|value| tx.commit().map(|()| value)) {
            Ok(value) => Ok((value, Totals::from_changes(&changes))),
            Err(error) => {
                self.ledger.undo(changes);
                Err(error)
            }
        }
    }

    /// Checkpoints the WAL and closes the database.
    pub(crate) fn close(self) {
        if let Err(error) = connection::checkpoint_wal(&self.conn) {
            tracing::warn!(path = %self.path.display(), %error, "checkpointing the WAL failed");
        }
        if let Err((_, error)) = self.conn.close() {
            tracing::warn!(path = %self.path.display(), %error, "closing the database failed");
        }
    }
}

/// The changes of a transaction, for the counters.
pub(crate) struct Totals {
    pub(crate) written: Vec<(policy::audit::Kind, u64)>,
    pub(crate) rotated: u64,
}

impl Totals {
    fn from_changes(changes: &Changes) -> Self {
        Self {
            written: changes.written.iter().map(|(k, n)| (*k, *n)).collect(),
            rotated: changes.rotated,
        }
    }
}

/// Inserts a row, or replaces the row of the same id.
pub(crate) fn put_registration(
    conn: &Connection,
    row: &Registration,
) -> Result<(), rusqlite::Error> {
    let body = serde_json::to_string(row)
        .map_err(|e| rusqlite::Error::ToSqlConversionFailure(e.into()))?;
    conn.prepare_cached(
        "INSERT INTO registrations (id, body) VALUES (?1, ?2) \
         ON CONFLICT (id) DO UPDATE SET body = excluded.body",
    )?
    .execute(params![row.id.as_str(), body])
    .map(drop)
}

/// Removes a row.
pub(crate) fn delete_registration(
    conn: &Connection,
    id: &SandboxId,
) -> Result<(), rusqlite::Error> {
    conn.prepare_cached("DELETE FROM registrations WHERE id = ?1")?
        .execute([id.as_str()])
        .map(drop)
}

/// Reads every row. If one row cannot be read, the whole registry is unreadable: without that row,
/// another sandbox could register its address.
fn load_registrations(conn: &Connection) -> Result<RegistrySnapshot, rusqlite::Error> {
    let mut snapshot = RegistrySnapshot::default();
    let mut rows = conn.prepare("SELECT id, body FROM registrations")?;
    let mut rows = rows.query([])?;
    while let Some(row) = rows.next()? {
        let id: String = row.get(0)?;
        let body: String = row.get(1)?;
        let row: Registration = serde_json::from_str(&body).map_err(|e| invalid_cell(1, e))?;
        if row.id.as_str() != id {
            return Err(invalid_cell(
                0,
                format!(
                    "the row with the id {id} contains the registration of {}",
                    row.id
                ),
            ));
        }
        snapshot.insert(Arc::new(row));
    }
    Ok(snapshot)
}

/// Reads every row from the file, and checks the pages of the table.
pub(crate) fn check_registrations(conn: &Connection) -> Result<(), rusqlite::Error> {
    if let Some(found) =
        connection::first_integrity_error(conn, "PRAGMA quick_check(registrations)")?
    {
        let corrupt = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CORRUPT);
        return Err(rusqlite::Error::SqliteFailure(corrupt, Some(found)));
    }
    load_registrations(conn).map(drop)
}

/// Whether an error while loading means corruption; unlike elsewhere, invalid content does.
fn is_corrupt_content(error: &rusqlite::Error) -> bool {
    crate::error::is_corruption(error)
        || matches!(
            error,
            rusqlite::Error::FromSqlConversionFailure(..)
                | rusqlite::Error::InvalidColumnType(..)
                | rusqlite::Error::Utf8Error(..)
                | rusqlite::Error::QueryReturnedNoRows
        )
        // A table or column is missing, or a body is not JSON.
        || error.sqlite_error_code() == Some(rusqlite::ErrorCode::Unknown)
}
