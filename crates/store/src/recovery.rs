//! When the file is broken, and the ways back: set aside, back up, restore, start over.
//!
//! ```text
//!            open ok                     damage met
//!   (start) ─────────> Available ─────────────────────────> Unavailable <── (start: marker)
//!                          ^                                     │
//!                          └──────── restore, reset <────────────┘
//! ```
//!
//! The marker file is what makes Unavailable survive a restart. It is written before the
//! database is moved and removed after its successor is open, so a crash at any point in
//! between comes back as Unavailable and never as an empty registry. When it cannot be
//! written, nothing is moved: the broken file is met again by the next start.
//!
//! The witness file says that this directory has had a database. It is empty, written
//! once the first database is in place and never removed; a directory that has it (or
//! anything else only a used one has, see [`was_used`]) and no database has lost it.

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
use crate::schema::{self, Flaw, MIGRATIONS};

/// The name of the marker in the state directory.
pub(crate) const MARKER: &str = "registry.unavailable";

/// The word in the names of databases that are about to be put in place.
const STAGED: &str = "staged";

/// The name of the witness in the state directory.
pub(crate) const WITNESS: &str = "registry.made";

/// What the marker says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Marker {
    /// Why, for the operator.
    pub(crate) reason: String,
    /// The last audit number that is known to have been given out; 0 when none is.
    #[serde(default)]
    pub(crate) last_seq: u64,
}

impl Marker {
    /// The marker in `dir`, if there is one. One that cannot be read still counts.
    pub(crate) fn read(dir: &Path) -> Option<Self> {
        match fs::read(dir.join(MARKER)) {
            Err(e) if e.kind() == ErrorKind::NotFound => None,
            Err(e) => Some(Self {
                reason: format!("{MARKER} is there and cannot be read ({e})"),
                last_seq: 0,
            }),
            Ok(bytes) => Some(serde_json::from_slice(&bytes).unwrap_or_else(|_| Self {
                reason: String::from_utf8_lossy(&bytes).trim().to_owned(),
                last_seq: 0,
            })),
        }
    }

    /// Writes the marker, over an earlier one, and onto the disk.
    pub(crate) fn write(&self, dir: &Path) -> Result<(), StoreError> {
        let (path, temp) = (dir.join(MARKER), dir.join(".registry.unavailable.new"));
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
        let path = dir.join(MARKER);
        match fs::remove_file(&path) {
            Ok(()) => sync_parent(&path),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
            Err(e) => Err(StoreError::file(&path, e)),
        }
    }
}

/// Marks the registry unavailable and moves the broken database out of the way. Gives
/// the reason as the operator will read it.
pub(crate) fn set_aside_broken(dir: &Path, found: &str, last_seq: u64, now: UnixMillis) -> String {
    let aside = free_name(&aside_name(dir, "corrupt", now));
    let reason = format!(
        "the database is broken ({found}) and was set aside as {}",
        aside.file_name().unwrap_or_default().to_string_lossy()
    );
    let marker = Marker {
        reason: reason.clone(),
        last_seq,
    };
    // Moved without a marker it would be gone at the next start, with nothing to say why.
    if let Err(error) = marker.write(dir) {
        tracing::error!(found, %error, "the registry is unavailable and cannot be set aside");
        return format!("the database is broken ({found}) and was left where it is: {error}");
    }
    if let Err(error) = move_database(&dir.join(DATABASE), &aside) {
        tracing::error!(%error, "the broken database could not be moved aside");
    }
    tracing::error!(
        found,
        aside = %aside.display(),
        "the registry is unavailable; run `palisade registry restore` or `reset`"
    );
    reason
}

/// Makes sure that the witness is there.
pub(crate) fn bear_witness(dir: &Path) -> Result<(), StoreError> {
    let path = dir.join(WITNESS);
    match create_private(&path) {
        Ok(()) => sync_parent(&path),
        Err(StoreError::Exists { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Whether `dir` has had a database: there is the witness, or one that was set aside,
/// replaced or migrated. One that was staged and never put in place does not count. What
/// cannot be looked at counts as used.
pub(crate) fn was_used(dir: &Path) -> bool {
    let is_free = |path: &Path| {
        fs::symlink_metadata(path).is_err_and(|error| error.kind() == ErrorKind::NotFound)
    };
    if !is_free(&dir.join(WITNESS)) {
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

/// A number below which none is to be given out again, for a directory whose database is
/// broken or gone: what its tables say, else [`epoch`]; and the last number that was exported, if
/// that is more. The export alone would not do, because it may lag behind.
pub(crate) fn known_seq(dir: &Path, exported: u64, now: UnixMillis) -> u64 {
    let stored = connection::connect_evidence(&dir.join(DATABASE))
        .ok()
        .and_then(|conn| highest_seq(&conn));
    stored.unwrap_or_else(|| epoch(now)).max(exported)
}

/// The highest number that the tables know of, if they can be read and it makes sense.
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

/// Where numbers go on when nothing is known of those given out: a thousand for every
/// millisecond since 1970. A log that began at 1, or at an earlier epoch, cannot have come
/// so far, since it would have had to write a million records a second all along.
fn epoch(now: UnixMillis) -> u64 {
    let millis = u64::try_from(now.get()).unwrap_or_default();
    millis.saturating_mul(1000).min(MAX_SEQ / 2)
}

/// Where a database goes that is not used any more: `palisade.db.WHY-20260102T030405Z`.
pub(crate) fn aside_name(dir: &Path, why: &str, now: UnixMillis) -> PathBuf {
    let stamp = jiff::Timestamp::from_millisecond(now.get())
        .map(|t| t.strftime("%Y%m%dT%H%M%SZ").to_string())
        .unwrap_or_else(|_| now.get().to_string());
    dir.join(format!("{DATABASE}.{why}-{stamp}"))
}

/// Moves a database with its WAL, so that what is aside can still be opened as it was.
pub(crate) fn move_database(from: &Path, to: &Path) -> Result<(), StoreError> {
    // The main file last: while it is there, the set is not taken for a fresh directory.
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

/// A complete database under another name in the state directory, ready to be put in
/// place. Removed when it is not used.
#[derive(Debug)]
pub(crate) struct Staged {
    pub(crate) path: PathBuf,
}

impl Drop for Staged {
    fn drop(&mut self) {
        for end in ["", "-wal", "-shm"] {
            // Gone already when it was put in place.
            let _ = fs::remove_file(with_suffix(&self.path, end));
        }
    }
}

/// Copies the running database at `source` to `target`.
pub(crate) fn backup_blocking(source: &Path, target: &Path) -> Result<(), StoreError> {
    let conn = connection::connect_read_only(source).map_err(|e| StoreError::read(&e))?;
    connection::copy_database(&conn, target)
}

/// Copies the candidate into the state directory and checks the copy wholly. The
/// candidate itself is only read, byte by byte, and may lie on a read-only medium.
pub(crate) fn stage_restore_blocking(
    source: &Path,
    dir: &Path,
    now: UnixMillis,
) -> Result<Staged, StoreError> {
    let same = |a: &Path, b: &Path| match (fs::canonicalize(a), fs::canonicalize(b)) {
        (Ok(a), Ok(b)) => a == b,
        _ => false,
    };
    if same(source, &dir.join(DATABASE)) {
        return Err(StoreError::unfit(source, "it is the database in use"));
    }
    if !source.is_file() {
        return Err(StoreError::unfit(source, "there is no such file"));
    }
    let staged = stage(dir, now)?;
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
            Err(e) => Err(StoreError::unfit(source, e)),
        }
    };
    // A database that was open when it was copied has part of itself in its WAL.
    copy("")?;
    copy("-wal")?;
    check(&staged.path).map_err(|reason| StoreError::unfit(source, reason))?;
    sync_file(&staged.path)?;
    Ok(staged)
}

/// A fresh, empty database.
pub(crate) fn stage_empty_blocking(dir: &Path, now: UnixMillis) -> Result<Staged, StoreError> {
    let staged = stage(dir, now)?;
    schema::fill(&staged.path, MIGRATIONS)?;
    Ok(staged)
}

/// Takes a name of its own, also when two restores are asked for at once.
fn stage(dir: &Path, now: UnixMillis) -> Result<Staged, StoreError> {
    loop {
        let path = free_name(&aside_name(dir, STAGED, now));
        match create_private(&path) {
            Ok(()) => return Ok(Staged { path }),
            Err(StoreError::Exists { .. }) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Removes what an interrupted restore had staged: copies that nobody will ask for.
pub(crate) fn remove_stale(dir: &Path) {
    let start = format!("{DATABASE}.{STAGED}-");
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    for entry in entries.filter(|e| e.file_name().to_string_lossy().starts_with(&start)) {
        if let Err(error) = fs::remove_file(entry.path()) {
            tracing::warn!(path = %entry.path().display(), %error, "a stale copy stays");
        }
    }
}

/// Everything that must hold of a database before it may replace another. Migrates it
/// and folds its WAL away; it is a copy.
fn check(path: &Path) -> Result<(), String> {
    let conn = match schema::connect(path, MIGRATIONS) {
        Ok(conn) => conn,
        Err(Flaw::Broken(reason)) => return Err(reason),
        Err(Flaw::Refused(error)) => return Err(error.to_string()),
    };
    let report = verify::verify_connection(&conn);
    if let Some(broken) = report.first_broken {
        return Err(format!("its audit log does not verify: {broken}"));
    }
    conn.execute_batch("ROLLBACK").map_err(|e| e.to_string())?;
    connection::fold(&conn).map_err(|e| e.to_string())?;
    drop(conn);
    // What the gate will do with it: load every row.
    match crate::database::Database::open(path) {
        Ok((database, _)) => {
            database.close();
            Ok(())
        }
        Err(Flaw::Broken(reason)) => Err(reason),
        Err(Flaw::Refused(error)) => Err(error.to_string()),
    }
}
