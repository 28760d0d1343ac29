//! SQLite connections: opening and configuring them, checking a file, checkpointing its WAL,
//! copying it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags};

use crate::error::StoreError;
use crate::files::{create_private, free_name, sync_file, sync_parent, with_suffix};

/// How long a statement waits for a lock.
pub(crate) const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// Configures a connection for writing.
pub(crate) fn configure(conn: &Connection) -> Result<(), rusqlite::Error> {
    conn.busy_timeout(BUSY_TIMEOUT)?;
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, false)?;
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_DEFENSIVE, true)?;
    conn.pragma_update(None, "trusted_schema", false)?;
    conn.pragma_update(None, "cell_size_check", true)?;
    conn.pragma_update_and_check(None, "journal_mode", "wal", |_| Ok(()))?;
    conn.pragma_update(None, "synchronous", "full")?;
    conn.pragma_update_and_check(None, "journal_size_limit", 16 * 1024 * 1024, |_| Ok(()))?;
    // 16 MiB: inserts touch pages all over the indexes.
    conn.pragma_update(None, "cache_size", -16 * 1024)?;
    conn.set_prepared_statement_cache_capacity(32);
    Ok(())
}

/// Opens the running database read-only.
pub(crate) fn connect_read_only(path: &Path) -> Result<Connection, rusqlite::Error> {
    configure_read_only(Connection::open_with_flags(path, READ_ONLY_FLAGS)?)
}

/// Opens a database read-only, also if no gate uses it. A database without a WAL is opened as
/// immutable, so that no `-wal` or `-shm` file appears beside it, and so that it can be on a
/// read-only medium.
pub(crate) fn connect_for_inspection(path: &Path) -> Result<Connection, rusqlite::Error> {
    if with_suffix(path, "-wal").exists() {
        return connect_read_only(path);
    }
    let mut uri = String::from("file:");
    for byte in path.as_os_str().as_encoded_bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'/' | b'.' | b'-' | b'_' => {
                uri.push(char::from(*byte));
            }
            other => uri.push_str(&format!("%{other:02X}")),
        }
    }
    uri.push_str("?immutable=1");
    let flags = READ_ONLY_FLAGS | OpenFlags::SQLITE_OPEN_URI;
    configure_read_only(Connection::open_with_flags(PathBuf::from(uri), flags)?)
}

const READ_ONLY_FLAGS: OpenFlags =
    OpenFlags::SQLITE_OPEN_READ_ONLY.union(OpenFlags::SQLITE_OPEN_NO_MUTEX);

fn configure_read_only(conn: Connection) -> Result<Connection, rusqlite::Error> {
    conn.busy_timeout(BUSY_TIMEOUT)?;
    conn.pragma_update(None, "cell_size_check", true)?;
    conn.pragma_update(None, "trusted_schema", false)?;
    Ok(conn)
}

/// Moves the WAL into the database file and truncates it.
pub(crate) fn checkpoint_wal(conn: &Connection) -> Result<(), rusqlite::Error> {
    conn.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))
}

/// The first error that `pragma` reports: an `integrity_check` or a `quick_check`. None if the
/// database is intact.
pub(crate) fn first_integrity_error(
    conn: &Connection,
    pragma: &str,
) -> Result<Option<String>, rusqlite::Error> {
    let first: String = conn.query_row(pragma, [], |row| row.get(0))?;
    Ok((first != "ok").then_some(first))
}

/// Copies what `conn` reads into a new file at `target`: all of it or nothing.
pub(crate) fn copy_database(conn: &Connection, target: &Path) -> Result<(), StoreError> {
    // Creates the file first, so that nothing is overwritten even in a race.
    create_private(target)?;
    let temp = free_name(&with_suffix(target, ".part"));
    let copied = (|| {
        create_private(&temp)?;
        let name = temp
            .to_str()
            .ok_or_else(|| StoreError::file(&temp, "the name is not UTF-8"))?;
        conn.execute("VACUUM INTO ?1", [name])
            .map_err(|e| StoreError::file(target, e))?;
        let copy = connect_for_inspection(&temp).map_err(|e| StoreError::read(&e))?;
        let found = first_integrity_error(&copy, "PRAGMA integrity_check(1)")
            .map_err(|e| StoreError::read(&e))?;
        if let Some(found) = found {
            return Err(StoreError::Read { reason: found });
        }
        drop(copy);
        sync_file(&temp)?;
        fs::rename(&temp, target).map_err(|e| StoreError::file(target, e))?;
        sync_parent(target)
    })();
    if copied.is_err() {
        let _ = fs::remove_file(&temp);
        let _ = fs::remove_file(target);
    }
    copied
}
