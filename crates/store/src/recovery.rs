//! Recovery from a corrupt database: moving it aside, backup, restore, reset.
//!
//! ```text
//!            open ok                     corruption
//!   (start) ─────────> Available ─────────────────────────> Unavailable <── (start: marker)
//!                          ^                                     │
//!                          └──────── restore, reset <────────────┘
//! ```
//!
//! The marker file makes Unavailable survive a restart. It is written before the database is moved
//! and removed after its replacement is open, so a crash at any point in between leads to
//! Unavailable and never to an empty registry. If it cannot be written, nothing is moved: the next
//! start finds the corrupt file again.
//!
//! The created marker records that this directory has had a database. It is an empty file, written
//! after the first database is in place and never removed. If a directory has this file (or another
//! file that only a used directory has, see [`was_used`]) and no database, the database was lost.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use policy::clock::UnixMillis;
use rusqlite::Connection;
use serde::{Deserialize, Serialize};

use crate::DATABASE;
use crate::audit::ledger::MAX_SEQ;
use crate::audit::verify;
use crate::connection;
use crate::error::StoreError;
use crate::files::{create_private, free_name, sync_file, sync_parent, with_suffix};
use crate::schema::{self, DatabaseOpenError, MIGRATIONS};

/// File name of the marker of an unavailable registry, in the state directory.
pub(crate) const UNAVAILABLE_MARKER: &str = "registry.unavailable";

/// Part of the file names of databases that are about to be put in place.
const STAGED: &str = "staged";

/// File name of the marker of a directory that has had a database.
pub(crate) const CREATED_MARKER: &str = "registry.made";

/// The content of the marker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Marker {
    /// The reason, for the operator.
    pub(crate) reason: String,
    /// The last audit number that is known to be in use; 0 if unknown.
    #[serde(default)]
    pub(crate) last_seq: u64,
}

impl Marker {
    /// The marker in `dir`, if there is one. A marker that cannot be read still counts.
    pub(crate) fn read(dir: &Path) -> Option<Self> {
        match fs::read(dir.join(UNAVAILABLE_MARKER)) {
            Err(e) if e.kind() == ErrorKind::NotFound => None,
            Err(e) => Some(Self {
                reason: format!("{UNAVAILABLE_MARKER} exists but cannot be read ({e})"),
                last_seq: 0,
            }),
            Ok(bytes) => Some(serde_json::from_slice(&bytes).unwrap_or_else(|_| Self {
                reason: String::from_utf8_lossy(&bytes).trim().to_owned(),
                last_seq: 0,
            })),
        }
    }

    /// Writes the marker, replacing an earlier one, and flushes it to the disk.
    pub(crate) fn write(&self, dir: &Path) -> Result<(), StoreError> {
        let (path, temp) = (
            dir.join(UNAVAILABLE_MARKER),
            dir.join(".registry.unavailable.new"),
        );
        let text = serde_json::to_vec(self).unwrap_or_default();
        let write = || -> std::io::Result<()> {
            let mut file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&temp)?;
            file.write_all(&text)?;
            file.sync_all()?;
            fs::rename(&temp, &path)?;
            File::open(dir)?.sync_all()
        };
        write().map_err(|e| StoreError::file(&path, e))
    }

    /// Removes the marker.
    pub(crate) fn remove(dir: &Path) -> Result<(), StoreError> {
        let path = dir.join(UNAVAILABLE_MARKER);
        match fs::remove_file(&path) {
            Ok(()) => sync_parent(&path),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
            Err(e) => Err(StoreError::file(&path, e)),
        }
    }
}

/// Marks the registry unavailable and moves the corrupt database aside. Returns the reason for the
/// operator.
pub(crate) fn move_corrupt_aside(
    dir: &Path,
    found: &str,
    last_seq: u64,
    now: UnixMillis,
) -> String {
    let aside = free_name(&aside_name(dir, "corrupt", now));
    let reason = format!(
        "the database is corrupt ({found}) and was moved aside as {}",
        aside.file_name().unwrap_or_default().to_string_lossy()
    );
    let marker = Marker {
        reason: reason.clone(),
        last_seq,
    };
    // If the file were moved without a marker, the next start would find no database and no reason.
    if let Err(error) = marker.write(dir) {
        tracing::error!(found, %error, "the registry is unavailable and moving the corrupt database aside failed");
        return format!("the database is corrupt ({found}) and could not be moved aside: {error}");
    }
    if let Err(error) = move_database(&dir.join(DATABASE), &aside) {
        tracing::error!(%error, "moving the corrupt database aside failed");
    }
    tracing::error!(
        corruption = found,
        moved_to = %aside.display(),
        "the database is corrupt and the registry unavailable; run `palisade registry restore` or `palisade registry reset`"
    );
    reason
}

/// Creates the created marker if it does not exist.
pub(crate) fn write_created_marker(dir: &Path) -> Result<(), StoreError> {
    let path = dir.join(CREATED_MARKER);
    match create_private(&path) {
        Ok(()) => sync_parent(&path),
        Err(StoreError::Exists { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Whether `dir` has had a database: it has the created marker, or a database that was moved aside,
/// replaced or migrated. A database that was staged and never put in place does not count. A
/// directory that cannot be read counts as used.
pub(crate) fn was_used(dir: &Path) -> bool {
    let is_free = |path: &Path| {
        fs::symlink_metadata(path).is_err_and(|error| error.kind() == ErrorKind::NotFound)
    };
    if !is_free(&dir.join(CREATED_MARKER)) {
        return true;
    }
    let Ok(entries) = fs::read_dir(dir) else {
        return true;
    };
    entries.flatten().any(|entry| {
        let name = entry.file_name();
        let end = name.to_str().and_then(|name| name.strip_prefix(DATABASE));
        end.is_some_and(|end| {
            [".corrupt-", ".replaced-", ".before-v"]
                .iter()
                .any(|why| end.starts_with(why))
        })
    })
}

/// The lowest number after which new audit numbers may start, for a directory whose database is
/// corrupt or lost: the highest number of its tables, else [`fallback_seq`]; or the last exported
/// number, if that is higher. The export alone would not be enough, because it may lag behind.
pub(crate) fn known_seq(dir: &Path, exported: u64, now: UnixMillis) -> u64 {
    let stored = connection::connect_for_inspection(&dir.join(DATABASE))
        .ok()
        .and_then(|conn| highest_seq(&conn));
    stored.unwrap_or_else(|| fallback_seq(now)).max(exported)
}

/// The highest number in the tables; None if they cannot be read or the number is implausible.
pub(crate) fn highest_seq(conn: &Connection) -> Option<u64> {
    let highest: i64 = conn
        .query_row(
            "SELECT max(last_seq, coalesce((SELECT max(seq) FROM audit), 0), \
                    coalesce((SELECT max(head_seq) FROM chains), 0)) FROM ledger",
            [],
            |row| row.get(0),
        )
        .ok()?;
    u64::try_from(highest).ok().filter(|seq| *seq <= MAX_SEQ)
}

/// The first number to use if the used numbers are unknown: a thousand for every millisecond since
/// 1970. A log that started at 1, or at an earlier number of this kind, cannot have reached it: it
/// would have had to write a million records per second without interruption.
fn fallback_seq(now: UnixMillis) -> u64 {
    let millis = u64::try_from(now.get()).unwrap_or_default();
    millis.saturating_mul(1000).min(MAX_SEQ / 2)
}

/// The path of a database that is moved aside: `palisade.db.WHY-20260102T030405Z`.
pub(crate) fn aside_name(dir: &Path, why: &str, now: UnixMillis) -> PathBuf {
    let stamp = jiff::Timestamp::from_millisecond(now.get())
        .map(|t| t.strftime("%Y%m%dT%H%M%SZ").to_string())
        .unwrap_or_else(|_| now.get().to_string());
    dir.join(format!("{DATABASE}.{why}-{stamp}"))
}

/// Moves a database with its WAL, so that it can still be opened.
pub(crate) fn move_database(from: &Path, to: &Path) -> Result<(), StoreError> {
    // The main file last: while it exists, the directory does not look unused.
    for end in ["-wal", "-shm", ""] {
        let (from, to) = (with_suffix(from, end), with_suffix(to, end));
        match fs::rename(&from, &to) {
            Ok(()) => {}
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(StoreError::file(&from, e)),
        }
    }
    sync_parent(from)
}

/// A complete database under another name in the state directory, ready to be put in place. Removed
/// if it is not used.
#[derive(Debug)]
pub(crate) struct StagedDatabase {
    pub(crate) path: PathBuf,
}

impl Drop for StagedDatabase {
    fn drop(&mut self) {
        for end in ["", "-wal", "-shm"] {
            // The file does not exist any more if it was put in place.
            let _ = fs::remove_file(with_suffix(&self.path, end));
        }
    }
}

/// Copies the running database at `source` to `target`.
pub(crate) fn backup_blocking(source: &Path, target: &Path) -> Result<(), StoreError> {
    let conn = connection::connect_read_only(source).map_err(|e| StoreError::read(&e))?;
    connection::copy_database(&conn, target)
}

/// Copies the backup into the state directory and verifies the copy completely. The backup itself
/// is only read, byte by byte, and may be on a read-only medium.
pub(crate) fn stage_restore_blocking(
    source: &Path,
    dir: &Path,
    now: UnixMillis,
) -> Result<StagedDatabase, StoreError> {
    let is_same_file = |a: &Path, b: &Path| match (fs::canonicalize(a), fs::canonicalize(b)) {
        (Ok(a), Ok(b)) => a == b,
        _ => false,
    };
    if is_same_file(source, &dir.join(DATABASE)) {
        return Err(StoreError::invalid_backup(
            source,
            "it is the database in use",
        ));
    }
    if !source.is_file() {
        return Err(StoreError::invalid_backup(source, "there is no such file"));
    }
    let staged = create_staged(dir, now)?;
    let copy = |end: &str| {
        let copied = File::open(with_suffix(source, end)).and_then(|mut from| {
            let mut to = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(with_suffix(&staged.path, end))?;
            std::io::copy(&mut from, &mut to)
        });
        match copied {
            Ok(_) => Ok(()),
            Err(e) if e.kind() == ErrorKind::NotFound && !end.is_empty() => Ok(()),
            Err(e) => Err(StoreError::invalid_backup(source, e)),
        }
    };
    // A database that was open when it was copied has part of its content in its WAL.
    copy("")?;
    copy("-wal")?;
    check_staged(&staged.path).map_err(|reason| StoreError::invalid_backup(source, reason))?;
    sync_file(&staged.path)?;
    Ok(staged)
}

/// A new, empty database.
pub(crate) fn stage_empty_blocking(
    dir: &Path,
    now: UnixMillis,
) -> Result<StagedDatabase, StoreError> {
    let staged = create_staged(dir, now)?;
    schema::create_tables(&staged.path, MIGRATIONS)?;
    Ok(staged)
}

/// Creates an empty file for a staged database, under a unique name even if two restores run at
/// once.
fn create_staged(dir: &Path, now: UnixMillis) -> Result<StagedDatabase, StoreError> {
    loop {
        let path = free_name(&aside_name(dir, STAGED, now));
        match create_private(&path) {
            Ok(()) => return Ok(StagedDatabase { path }),
            Err(StoreError::Exists { .. }) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Removes the copies that an interrupted restore had staged.
pub(crate) fn remove_stale(dir: &Path) {
    let start = format!("{DATABASE}.{STAGED}-");
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    for entry in entries.filter(|e| e.file_name().to_string_lossy().starts_with(&start)) {
        if let Err(error) = fs::remove_file(entry.path()) {
            tracing::warn!(path = %entry.path().display(), %error, "removing a stale staged copy failed");
        }
    }
}

/// Checks that a staged copy may replace the database. Migrates the copy and checkpoints its WAL.
fn check_staged(path: &Path) -> Result<(), String> {
    let conn = match schema::connect(path, MIGRATIONS) {
        Ok(conn) => conn,
        Err(DatabaseOpenError::Corrupt(reason)) => return Err(reason),
        Err(DatabaseOpenError::Refused(error)) => return Err(error.to_string()),
    };
    let report = verify::verify_connection(&conn);
    if let Some(broken) = report.first_broken {
        return Err(format!("its audit log does not verify: {broken}"));
    }
    conn.execute_batch("ROLLBACK").map_err(|e| e.to_string())?;
    connection::checkpoint_wal(&conn).map_err(|e| e.to_string())?;
    drop(conn);
    // Loads every row, as the gate will.
    match crate::database::Database::open(path) {
        Ok((database, _)) => {
            database.close();
            Ok(())
        }
        Err(DatabaseOpenError::Corrupt(reason)) => Err(reason),
        Err(DatabaseOpenError::Refused(error)) => Err(error.to_string()),
    }
}
