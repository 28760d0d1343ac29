//! The tables, their migrations, and the check of a file's version.

use std::path::Path;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, TransactionBehavior};

use crate::connection::{BUSY, copy_database, fold, prepare};
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
pub(crate) enum Flaw {
    /// The file is corrupt: move it aside and refuse everything.
    Broken(String),
    /// A condition that the operator has to correct first; the file is not changed.
    Refused(StoreError),
}

impl Flaw {
    pub(crate) fn of(path: &Path, error: &rusqlite::Error) -> Self {
        if is_corruption(error) {
            Self::Broken(error.to_string())
        } else {
            Self::Refused(StoreError::file(path, error))
        }
    }
}

/// Opens an existing database for writing, after a check of its application id and version.
pub(crate) fn connect(path: &Path, migrations: &[&str]) -> Result<Connection, Flaw> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut conn = Connection::open_with_flags(path, flags).map_err(|e| Flaw::of(path, &e))?;
    let version = identify(&conn, path, migrations)?;
    prepare(&conn).map_err(|e| Flaw::of(path, &e))?;
    if version < known(migrations) {
        keep_copy(&conn, path, known(migrations)).map_err(Flaw::Refused)?;
        migrate(&mut conn, migrations).map_err(|e| Flaw::of(path, &e))?;
    }
    Ok(conn)
}

/// Turns the empty file at `path` into a new database, without a WAL.
pub(crate) fn fill(path: &Path, migrations: &[&str]) -> Result<(), StoreError> {
    let made = (|| {
        let mut conn = Connection::open(path)?;
        prepare(&conn)?;
        conn.pragma_update(None, "application_id", APPLICATION_ID)?;
        migrate(&mut conn, migrations)?;
        fold(&conn)
    })();
    made.map_err(|e| StoreError::file(path, e))?;
    sync_file(path)
}

/// Checks the application id and returns the version. Reads only.
pub(crate) fn identify(conn: &Connection, path: &Path, migrations: &[&str]) -> Result<u32, Flaw> {
    let look = || -> Result<(i32, u32), rusqlite::Error> {
        conn.busy_timeout(BUSY)?;
        // Refusing a newer file must not even checkpoint its WAL.
        conn.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
        let id = conn.pragma_query_value(None, "application_id", |row| row.get(0))?;
        let version = conn.pragma_query_value(None, "user_version", |row| row.get(0))?;
        Ok((id, version))
    };
    let (id, version) = look().map_err(|e| Flaw::of(path, &e))?;
    if id != APPLICATION_ID || version == 0 {
        return Err(Flaw::Broken("it is not a database of palisade".to_owned()));
    }
    if version > known(migrations) {
        return Err(Flaw::Refused(StoreError::NewerSchema {
            path: path.to_owned(),
            found: version,
            known: known(migrations),
        }));
    }
    Ok(version)
}

fn known(migrations: &[&str]) -> u32 {
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
    tx.pragma_update(None, "user_version", known(migrations))?;
    tx.commit()
}

/// Copies the file as it was before version `version`, beside it.
fn keep_copy(conn: &Connection, path: &Path, version: u32) -> Result<(), StoreError> {
    let copy = free_name(&with_suffix(path, &format!(".before-v{version}")));
    copy_database(conn, &copy)?;
    tracing::info!(copy = %copy.display(), version, "copied the database before migration");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::connection::connect_evidence;
    use crate::files::create_private;

    const V2: &str = "ALTER TABLE registrations ADD COLUMN note TEXT NOT NULL DEFAULT 'none';
                      UPDATE registrations SET note = 'old';";

    fn count(conn: &Connection, sql: &str) -> i64 {
        conn.query_row(sql, [], |row| row.get(0)).unwrap()
    }

    fn file_with_one_row(dir: &Path) -> PathBuf {
        let path = dir.join("palisade.db");
        create_private(&path).unwrap();
        fill(&path, MIGRATIONS).unwrap();
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
        let before = connect_evidence(&copy).unwrap();
        assert_eq!(count(&before, "PRAGMA user_version"), 1);
        assert_eq!(count(&before, "SELECT count(*) FROM registrations"), 1);
        assert!(identify(&before, &copy, MIGRATIONS).is_ok());
    }

    #[test]
    fn a_migration_that_fails_leaves_the_file_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let path = file_with_one_row(dir.path());
        let broken = "ALTER TABLE registrations ADD COLUMN note TEXT; SELECT nonsense;";
        assert!(matches!(
            connect(&path, &[V1, broken]),
            Err(Flaw::Refused(StoreError::File { .. }))
        ));
        let conn = connect(&path, MIGRATIONS).unwrap();
        assert_eq!(count(&conn, "PRAGMA user_version"), 1);
        assert!(conn.prepare("SELECT note FROM registrations").is_err());
    }

    #[test]
    fn a_newer_file_is_refused_and_not_touched() {
        let dir = tempfile::tempdir().unwrap();
        let path = file_with_one_row(dir.path());
        drop(connect(&path, &[V1, V2]).unwrap());
        let before = std::fs::read(&path).unwrap();
        match connect(&path, MIGRATIONS) {
            Err(Flaw::Refused(StoreError::NewerSchema {
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
            assert!(matches!(connect(&path, MIGRATIONS), Err(Flaw::Broken(_))));
        }
    }
}
