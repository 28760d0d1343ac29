//! Checkpoints: copies of a sandbox's files, to be restored or given to another sandbox.
//!
//! ```text
//!   fs/root/workspace home tmp var   ──▶  <checkpoint>/fs/root/…      copied
//!   fs/upper/<layer>                 ──▶  <checkpoint>/fs/upper/…     copied
//!   fs/root/run                            runtime files: not copied
//!   fs/root/etc dev proc sys, the layers' mount points: created by every start
//!   fs/work                                the overlay's work directory, empty at every start
//!   <checkpoint>/checkpoint.json           the owner ids and the number of files
//! ```
//!
//! Whiteouts and `user.*` attributes are kept, so that an overlay over the same lower layers shows
//! the same files. FIFOs, sockets and devices are skipped and counted; setuid and setgid bits of
//! files are dropped, because nothing in a sandbox honours them. Owners are mapped to the id range
//! of the target sandbox.
//!
//! The tree is untrusted: every path is opened beneath the root and never through a link, and
//! everything is counted. The caller has paused the sandbox; a file that changes nevertheless is an
//! error. A copy gets its final name when it is complete.

mod attributes;
mod copy;

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use nix::unistd::{Gid, Uid, chown};
use serde::{Deserialize, Serialize};

use crate::namespace::removal::remove_tree;
use attributes::IdMapping;
use copy::TreeCopy;

/// The directories of `root` that are copied.
const COPIED_BELOW_ROOT: &[&str] = &["home", "tmp", "var", "workspace"];

/// The file with the metadata of a checkpoint.
const RECORD_FILE: &str = "checkpoint.json";
/// The start of the name of a checkpoint that is not complete.
const UNFINISHED_PREFIX: &str = ".unfinished-checkpoint-";

/// The format version of a checkpoint's directory.
const VERSION: u32 = 1;

/// The number in the next temporary name of this process.
static NEXT_TEMPORARY: AtomicU64 = AtomicU64::new(0);

/// An error of a checkpoint operation.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A checkpoint of that name exists.
    #[error("'{path}' already exists; choose another label, or remove it first", path = .0.display())]
    Exists(PathBuf),
    /// The directory is no valid checkpoint.
    #[error("'{path}' is no checkpoint that this version can read ({why}); create a new one", path = .path.display())]
    Unreadable {
        /// The path.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// A limit that keeps an agent from filling the host.
    #[error("{what} exceeds the limit of {bound} (at '{path}'); remove files in the sandbox that are not needed", path = .path.display())]
    TooMuch {
        /// The limited quantity.
        what: &'static str,
        /// The limit.
        bound: u64,
        /// The path at which the limit was exceeded.
        path: PathBuf,
    },
    /// A file changed while it was copied.
    #[error("'{path}' changed while it was copied; pause the sandbox first", path = .0.display())]
    Changed(PathBuf),
    /// The file system failed.
    #[error("could not {doing} '{path}': {source}", path = .path.display())]
    Io {
        /// The failed operation.
        doing: &'static str,
        /// The path.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
}

/// Limits of a checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointBounds {
    /// Files, directories and links.
    pub entries: u64,
    /// Bytes that the files use on disk.
    pub bytes: u64,
}

impl Default for CheckpointBounds {
    fn default() -> Self {
        Self {
            entries: 2_000_000,
            bytes: 20 << 30,
        }
    }
}

/// The progress of a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyProgress {
    /// Files copied.
    pub files: u64,
    /// Files to copy.
    pub total: u64,
    /// Bytes copied.
    pub bytes: u64,
}

/// The result of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopySummary {
    /// Files, directories and links.
    pub entries: u64,
    /// Bytes that the files use on disk.
    pub bytes: u64,
    /// Skipped FIFOs, sockets and devices.
    pub skipped: u64,
}

/// The metadata of a checkpoint.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    version: u32,
    /// The first id of the source sandbox; `None` for a single id.
    first: Option<u32>,
    copied: CopySummary,
}

/// Saves a sandbox's files. `from` is its `fs` directory, whose ids start at `first` (`None` for
/// the operator's single id); `to` is the checkpoint's directory, which does not exist yet.
pub fn save(
    from: &Path,
    to: &Path,
    first: Option<u32>,
    bounds: CheckpointBounds,
    progress: &(dyn Fn(CopyProgress) + Sync),
) -> Result<CopySummary, CheckpointError> {
    if to.symlink_metadata().is_ok() {
        return Err(CheckpointError::Exists(to.to_owned()));
    }
    publish(to, |temporary| {
        let fs_dir = temporary.join("fs");
        make_directory(&fs_dir)?;
        let copied = copy_fs(from, &fs_dir, IdMapping::Keep, bounds, progress)?;
        let record = Record {
            version: VERSION,
            first,
            copied,
        };
        let path = temporary.join(RECORD_FILE);
        let text = serde_json::to_vec(&record).map_err(std::io::Error::other);
        text.and_then(|text| fs::write(&path, text))
            .map_err(io("write", &path))?;
        Ok(copied)
    })
}

/// Creates the `fs` directory of a sandbox from a checkpoint: of the same sandbox, or of a fork
/// whose ids start at `first`. `to` does not exist, or is empty.
pub fn restore(
    from: &Path,
    to: &Path,
    first: Option<u32>,
    bounds: CheckpointBounds,
    progress: &(dyn Fn(CopyProgress) + Sync),
) -> Result<CopySummary, CheckpointError> {
    let unreadable = |why: String| CheckpointError::Unreadable {
        path: from.to_owned(),
        why,
    };
    let record = fs::read(from.join(RECORD_FILE)).map_err(|error| unreadable(error.to_string()))?;
    let record: Record =
        serde_json::from_slice(&record).map_err(|error| unreadable(error.to_string()))?;
    if record.version != VERSION {
        return Err(unreadable(format!("version {}", record.version)));
    }
    let ids = IdMapping::between(record.first, first);
    publish(to, |temporary| {
        let copied = copy_fs(&from.join("fs"), temporary, ids, bounds, progress)?;
        if let Some(first) = first {
            let (user, group) = (Uid::from_raw(first), Gid::from_raw(first));
            chown(temporary, Some(user), Some(group))
                .map_err(io("change the owner of", temporary))?;
        }
        Ok(copied)
    })
}

/// Copies one sandbox's files to another without a checkpoint.
pub fn fork(
    from: &Path,
    from_first: Option<u32>,
    to: &Path,
    to_first: Option<u32>,
    bounds: CheckpointBounds,
    progress: &(dyn Fn(CopyProgress) + Sync),
) -> Result<CopySummary, CheckpointError> {
    let ids = IdMapping::between(from_first, to_first);
    publish(to, |temporary| {
        let copied = copy_fs(from, temporary, ids, bounds, progress)?;
        if let Some(first) = to_first {
            let (user, group) = (Uid::from_raw(first), Gid::from_raw(first));
            chown(temporary, Some(user), Some(group))
                .map_err(io("change the owner of", temporary))?;
        }
        Ok(copied)
    })
}

/// Removes a tree that may hold files of other ids.
pub type Remover<'a> = &'a dyn Fn(&Path) -> std::io::Result<()>;

/// Removes a checkpoint.
pub fn remove(checkpoint: &Path, remove_tree: Remover<'_>) -> Result<(), CheckpointError> {
    let removed = temporary_sibling(checkpoint);
    match fs::rename(checkpoint, &removed) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other
            .and_then(|()| remove_tree(&removed))
            .map_err(io("remove", checkpoint)),
    }
}

/// Removes incomplete checkpoints that a crash left. No checkpoint may be in progress in this
/// directory.
pub fn clear_unfinished(directory: &Path, remove_tree: Remover<'_>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if name
            .as_encoded_bytes()
            .starts_with(UNFINISHED_PREFIX.as_bytes())
        {
            let _ = remove_tree(&entry.path());
        }
    }
}

fn copy_fs(
    from: &Path,
    to: &Path,
    ids: IdMapping,
    bounds: CheckpointBounds,
    progress: &(dyn Fn(CopyProgress) + Sync),
) -> Result<CopySummary, CheckpointError> {
    TreeCopy::begin(from, to, ids, bounds)?
        .run(&[("root", COPIED_BELOW_ROOT), ("upper", &[])], progress)
}

/// Returns a temporary name in the same directory.
fn temporary_sibling(path: &Path) -> PathBuf {
    let next = NEXT_TEMPORARY.fetch_add(1, Ordering::Relaxed);
    path.with_file_name(format!("{UNFINISHED_PREFIX}{}-{next}", std::process::id()))
}

/// Fills a directory under a temporary name and renames it when it is complete.
fn publish(
    to: &Path,
    fill: impl FnOnce(&Path) -> Result<CopySummary, CheckpointError>,
) -> Result<CopySummary, CheckpointError> {
    let temporary = temporary_sibling(to);
    make_directory(&temporary)?;
    let done = fill(&temporary).and_then(|copied| match fs::rename(&temporary, to) {
        Ok(()) => Ok(copied),
        Err(error) if error.kind() == std::io::ErrorKind::DirectoryNotEmpty => {
            Err(CheckpointError::Exists(to.to_owned()))
        }
        Err(error) => Err(io("publish", to)(error)),
    });
    if done.is_err() {
        let _ = remove_tree(&temporary);
    }
    done
}

fn make_directory(path: &Path) -> Result<(), CheckpointError> {
    let made = DirBuilder::new().mode(0o700).create(path);
    made.map_err(io("create", path))
}

/// Converts an error of the standard library or nix, for `map_err`.
fn io<E: Into<std::io::Error>>(
    doing: &'static str,
    path: &Path,
) -> impl FnOnce(E) -> CheckpointError + use<E> {
    let path = path.to_owned();
    move |source| CheckpointError::Io {
        doing,
        path,
        source: source.into(),
    }
}
