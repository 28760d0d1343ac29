//! The tables, their migrations, and the check of a file's version.

use std::path::Path;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, TransactionBehavior};

use crate::connection::{BUSY_TIMEOUT, checkpoint_wal, configure, copy_database};
use crate::error::{StoreError, is_corruption};
use crate::files::{free_name, sync_file, with_suffix};

/// Every migration, in order. `user_version` is the number of applied migrations; a released
/// migration is never edited, only followed by another.
pub(crate) const MIGRATIONS: &[&str] = &[V1];

/// Marks the file as one of this program, so that an empty file, which SQLite opens as an empty
/// database, is not mistaken for an empty registry.
const APPLICATION_ID: i32 = 0x5041_4c49;

/// The first schema.
///
/// The searchable columns are generated from `body`, the text that was hashed, so no column can
/// differ from its record.
const V1: &str = "
CREATE TABLE registrations (
    id TEXT NOT NULL PRIMARY KEY,
    body TEXT NOT NULL,
    ip TEXT AS (body ->> '$.ip') VIRTUAL
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX registrations_ip ON registrations (ip);

CREATE TABLE audit (
    seq INTEGER NOT NULL PRIMARY KEY,
    body TEXT NOT NULL,
    prev BLOB NOT NULL,
    hash BLOB NOT NULL,
    chain TEXT AS (coalesce(body ->> '$.sandbox', '')) VIRTUAL,
    kind TEXT AS (body ->> '$.kind') VIRTUAL,
    verdict TEXT AS (body ->> '$.verdict') VIRTUAL,
    reason TEXT AS (body ->> '$.reason') VIRTUAL,
    request_id TEXT AS (body ->> '$.request_id') VIRTUAL,
    host TEXT AS (body ->> '$.host') VIRTUAL,
    ts INTEGER AS (body ->> '$.ts') VIRTUAL
) STRICT;
CREATE INDEX audit_chain ON audit (chain);
CREATE INDEX audit_ts ON audit (ts);
CREATE INDEX audit_request ON audit (request_id) WHERE request_id IS NOT NULL;
CREATE INDEX audit_reason ON audit (reason) WHERE reason IS NOT NULL;

-- One row per chain ('' is the gate's own): where it begins now, where it ends, how
-- much of it there is, and how much of that came after its last checkpoint.
CREATE TABLE chains (
    name TEXT NOT NULL PRIMARY KEY,
    base_seq INTEGER NOT NULL,
    base_hash BLOB NOT NULL,
    head_seq INTEGER NOT NULL,
    head_hash BLOB NOT NULL,
    records INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    open_records INTEGER NOT NULL,
    open_bytes INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- The end of each closed segment, and what the segment holds.
CREATE TABLE checkpoints (
    chain TEXT NOT NULL,
    seq INTEGER NOT NULL,
    hash BLOB NOT NULL,
    records INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    PRIMARY KEY (chain, seq)
) STRICT, WITHOUT ROWID;

-- The last number given out, how many numbers no row bears any more, and the last
-- record that stated the heads of the chains.
CREATE TABLE ledger (
    only_row INTEGER NOT NULL PRIMARY KEY CHECK (only_row = 1),
    last_seq INTEGER NOT NULL,
    absent INTEGER NOT NULL,
    stated_seq INTEGER NOT NULL
) STRICT;
INSERT INTO ledger VALUES (1, 0, 0, 0);
";

/// Why a database could not be opened.
#[derive(Debug)]
pub(crate) enum DatabaseOpenError {
    /// The file is corrupt: move it aside and refuse everything.
    Corrupt(String),
    /// A condition that the operator has to correct first; the file is not changed.
    Refused(StoreError),
}

impl DatabaseOpenError {
    pub(crate) fn from_sqlite(path: &Path, error: &rusqlite::Error) -> Self {
        if is_corruption(error) {
            Self::Corrupt(error.to_string())
        } else {
            Self::Refused(StoreError::file(path, error))
        }
    }
}

/// Opens an existing database for writing, after a check of its application id and version.
pub(crate) fn connect(path: &Path, migrations: &[&str]) -> Result<Connection, DatabaseOpenError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut conn = Connection::open_with_flags(path, flags)
        .map_err(|e| DatabaseOpenError::from_sqlite(path, &e))?;
    let version = identify(&conn, path, migrations)?;
    configure(&conn).map_err(|e| DatabaseOpenError::from_sqlite(path, &e))?;
    if version < latest_version(migrations) {
        back_up(&conn, path, latest_version(migrations)).map_err(DatabaseOpenError::Refused)?;
        migrate(&mut conn, migrations).map_err(|e| DatabaseOpenError::from_sqlite(path, &e))?;
    }
    Ok(conn)
}

/// Turns the empty file at `path` into a new database, without a WAL.
pub(crate) fn create_tables(path: &Path, migrations: &[&str]) -> Result<(), StoreError> {
    let created = (|| {
        let mut conn = Connection::open(path)?;
        configure(&conn)?;
        conn.pragma_update(None, "application_id", APPLICATION_ID)?;
        migrate(&mut conn, migrations)?;
        checkpoint_wal(&conn)
    })();
    created.map_err(|e| StoreError::file(path, e))?;
    sync_file(path)
}

/// Checks the application id and returns the version. Reads only.
pub(crate) fn identify(
    conn: &Connection,
    path: &Path,
    migrations: &[&str],
) -> Result<u32, DatabaseOpenError> {
    let read = || -> Result<(i32, u32), rusqlite::Error> {
        conn.busy_timeout(BUSY_TIMEOUT)?;
        // Refusing a newer file must not even checkpoint its WAL.
        conn.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
        let id = conn.pragma_query_value(None, "application_id", |row| row.get(0))?;
        let version = conn.pragma_query_value(None, "user_version", |row| row.get(0))?;
        Ok((id, version))
    };
    let (id, version) = read().map_err(|e| DatabaseOpenError::from_sqlite(path, &e))?;
    if id != APPLICATION_ID || version == 0 {
        return Err(DatabaseOpenError::Corrupt(
            "it is not a database of palisade".to_owned(),
        ));
    }
    if version > latest_version(migrations) {
        return Err(DatabaseOpenError::Refused(StoreError::NewerSchema {
            path: path.to_owned(),
            found: version,
            known: latest_version(migrations),
        }));
    }
    Ok(version)
}

fn latest_version(migrations: &[&str]) -> u32 {
    u32::try_from(migrations.len()).unwrap_or(u32::MAX)
}

fn migrate(conn: &mut Connection, migrations: &[&str]) -> Result<(), rusqlite::Error> {
    let version: usize = conn.pragma_query_value(None, "user_version", |row| {
        Ok(usize::try_from(row.get::<_, u32>(0)?).unwrap_or(usize::MAX))
    })?;
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
    for step in migrations.iter().skip(version) {
        tx.execute_batch(step)?;
    }
    tx.pragma_update(None, "user_version", latest_version(migrations))?;
    tx.commit()
}

/// Copies the database beside the original before it is migrated to `version`.
fn back_up(conn: &Connection, path: &Path, version: u32) -> Result<(), StoreError> {
    let copy = free_name(&with_suffix(path, &format!(".before-v{version}")));
    copy_database(conn, &copy)?;
    tracing::info!(copy = %copy.display(), version, "copied the database before migration");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::connection::connect_for_inspection;
    use crate::files::create_private;

    const V2: &str = "ALTER TABLE registrations ADD COLUMN note TEXT NOT NULL DEFAULT 'none';
                      UPDATE registrations SET note = 'old';";

    fn count(conn: &Connection, sql: &str) -> i64 {
        conn.query_row(sql, [], |row| row.get(0)).unwrap()
    }

    fn file_with_one_row(dir: &Path) -> PathBuf {
        let path = dir.join("palisade.db");
        create_private(&path).unwrap();
        create_tables(&path, MIGRATIONS).unwrap();
        let conn = connect(&path, MIGRATIONS).unwrap();
        conn.execute(
            "INSERT INTO registrations (id, body) VALUES ('a', '{}')",
            [],
        )
        .unwrap();
        path
    }

    #[test]
    fn older_file_is_copied_and_migrated() {
        let dir = tempfile::tempdir().unwrap();
        let path = file_with_one_row(dir.path());
        let conn = connect(&path, &[V1, V2]).unwrap();
        assert_eq!(count(&conn, "PRAGMA user_version"), 2);
        assert_eq!(
            count(
                &conn,
                "SELECT count(*) FROM registrations WHERE note = 'old'"
            ),
            1
        );

        let copy = dir.path().join("palisade.db.before-v2");
        let before = connect_for_inspection(&copy).unwrap();
        assert_eq!(count(&before, "PRAGMA user_version"), 1);
        assert_eq!(count(&before, "SELECT count(*) FROM registrations"), 1);
        assert!(identify(&before, &copy, MIGRATIONS).is_ok());
    }

    #[test]
    fn failed_migration_leaves_the_file_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        let path = file_with_one_row(dir.path());
        let broken = "ALTER TABLE registrations ADD COLUMN note TEXT; SELECT nonsense;";
        assert!(matches!(
            connect(&path, &[V1, broken]),
            Err(DatabaseOpenError::Refused(StoreError::File { .. }))
        ));
        let conn = connect(&path, MIGRATIONS).unwrap();
        assert_eq!(count(&conn, "PRAGMA user_version"), 1);
        assert!(conn.prepare("SELECT note FROM registrations").is_err());
    }

    #[test]
    fn newer_file_is_refused_and_not_changed() {
        let dir = tempfile::tempdir().unwrap();
        let path = file_with_one_row(dir.path());
        drop(connect(&path, &[V1, V2]).unwrap());
        let before = std::fs::read(&path).unwrap();
        match connect(&path, MIGRATIONS) {
            Err(DatabaseOpenError::Refused(StoreError::NewerSchema {
                found: 2, known: 1, ..
            })) => {}
            other => panic!("{other:?}"),
        }
        assert_eq!(std::fs::read(&path).unwrap(), before);
    }

    #[test]
    fn foreign_database_is_not_an_empty_registry() {
        let dir = tempfile::tempdir().unwrap();
        let foreign = dir.path().join("foreign.db");
        Connection::open(&foreign)
            .unwrap()
            .execute_batch("CREATE TABLE t (x)")
            .unwrap();
        let empty = dir.path().join("empty.db");
        std::fs::write(&empty, b"").unwrap();
        for path in [foreign, empty] {
            assert!(matches!(
                connect(&path, MIGRATIONS),
                Err(DatabaseOpenError::Corrupt(_))
            ));
        }
    }
}
