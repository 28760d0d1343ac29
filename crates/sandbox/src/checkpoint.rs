//! A sandbox's files as of now: kept, put back, or given to another sandbox.
//!
//! ```text
//!   fs/root/workspace home tmp var   ──▶  <checkpoint>/fs/root/…      taken
//!   fs/upper/<layer>                 ──▶  <checkpoint>/fs/upper/…     taken
//!   fs/root/run                            what runs, has run: not taken
//!   fs/root/etc dev proc sys, the layers' mount points: made anew by every start
//!   fs/work                                the overlay's own, empty at every start
//!   <checkpoint>/checkpoint.json           whose ids the files have, and how many there are
//! ```
//!
//! Whiteouts and `user.*` attributes are kept, so that an overlay over the same lower layers
//! shows the same files. FIFOs, sockets and devices are left out and counted; setuid and
//! setgid bits of files are dropped, for nothing honours them inside. Owners move to the
//! range of the sandbox that gets the files.
//!
//! The tree is an agent's: every path is opened beneath the root and never through a link,
//! and everything is counted. The caller has stopped the sandbox meanwhile; a file that
//! changes all the same is an error. A copy gets its name when it is whole.

mod attributes;
mod copy;

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use nix::unistd::{Gid, Uid, chown};
use serde::{Deserialize, Serialize};

use crate::namespace::removal::remove_tree;
use attributes::Ids;
use copy::Copying;

/// Parts of `root` that are the sandbox's own to keep.
const KEPT_OF_ROOT: &[&str] = &["home", "tmp", "var", "workspace"];

const RECORD: &str = "checkpoint.json";
const UNFINISHED: &str = ".unfinished-checkpoint-";

/// The version of what is in a checkpoint's directory.
const VERSION: u32 = 1;

static NEXT: AtomicU64 = AtomicU64::new(0);

/// A failure to keep or put back.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// There is one of that name.
    #[error("'{path}' already exists; choose another label, or remove it first", path = .0.display())]
    Exists(PathBuf),
    /// What should be a checkpoint is not one.
    #[error("'{path}' is no checkpoint that this version can read ({why}); make a new one", path = .path.display())]
    Unreadable {
        /// Where.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// One of the bounds that keep an agent from filling the host.
    #[error("{what} is over its bound of {bound} (at '{path}'); remove what is not needed in the sandbox, or raise the bound", path = .path.display())]
    TooMuch {
        /// What there is too much of.
        what: &'static str,
        /// The bound.
        bound: u64,
        /// Where it was noticed.
        path: PathBuf,
    },
    /// Somebody works in the tree.
    #[error("'{path}' changed while it was copied; pause the sandbox first", path = .0.display())]
    Changed(PathBuf),
    /// The file system failed.
    #[error("could not {doing} '{path}': {source}", path = .path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
}

/// How much a checkpoint may hold.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointBounds {
    /// Files, directories and links.
    pub entries: u64,
    /// Bytes that files take on disk.
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

/// How far a copy has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyProgress {
    /// Files copied.
    pub files: u64,
    /// Files to copy.
    pub of: u64,
    /// Bytes copied.
    pub bytes: u64,
}

/// What was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopySummary {
    /// Files, directories and links.
    pub entries: u64,
    /// Bytes that the files take on disk.
    pub bytes: u64,
    /// FIFOs, sockets and devices that were left out.
    pub skipped: u64,
}

/// What a checkpoint says of itself.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    version: u32,
    /// The first id of the sandbox it was taken from; none where there was one id.
    first: Option<u32>,
    copied: CopySummary,
}

/// Keeps a sandbox's files. `from` is its `fs` directory, whose ids start at `first` (none
/// where it has the operator's one id); `to` is the checkpoint's directory, not there yet.
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
    publish(to, |fresh| {
        let fs_dir = fresh.join("fs");
        make_directory(&fs_dir)?;
        let copied = copy_fs(from, &fs_dir, Ids::Kept, bounds, progress)?;
        let record = Record {
            version: VERSION,
            first,
            copied,
        };
        let path = fresh.join(RECORD);
        let text = serde_json::to_vec(&record).map_err(std::io::Error::other);
        text.and_then(|text| fs::write(&path, text))
            .map_err(io("write", &path))?;
        Ok(copied)
    })
}

/// Makes the `fs` directory of a sandbox from a checkpoint: of the one it was taken from, or
/// of another (a fork) whose ids start at `first`. `to` is not there yet, or empty.
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
    let record = fs::read(from.join(RECORD)).map_err(|error| unreadable(error.to_string()))?;
    let record: Record =
        serde_json::from_slice(&record).map_err(|error| unreadable(error.to_string()))?;
    if record.version != VERSION {
        return Err(unreadable(format!("version {}", record.version)));
    }
    let ids = Ids::between(record.first, first);
    publish(to, |fresh| {
        let copied = copy_fs(&from.join("fs"), fresh, ids, bounds, progress)?;
        if let Some(first) = first {
            let (user, group) = (Uid::from_raw(first), Gid::from_raw(first));
            chown(fresh, Some(user), Some(group)).map_err(io("give away", fresh))?;
        }
        Ok(copied)
    })
}

/// Gives one sandbox's files to another without keeping a checkpoint: a fork.
pub fn fork(
    from: &Path,
    from_first: Option<u32>,
    to: &Path,
    to_first: Option<u32>,
    bounds: CheckpointBounds,
    progress: &(dyn Fn(CopyProgress) + Sync),
) -> Result<CopySummary, CheckpointError> {
    let ids = Ids::between(from_first, to_first);
    publish(to, |fresh| {
        let copied = copy_fs(from, fresh, ids, bounds, progress)?;
        if let Some(first) = to_first {
            let (user, group) = (Uid::from_raw(first), Gid::from_raw(first));
            chown(fresh, Some(user), Some(group)).map_err(io("give away", fresh))?;
        }
        Ok(copied)
    })
}

/// How a tree is removed that may hold files of other ids.
pub type Remover<'a> = &'a dyn Fn(&Path) -> std::io::Result<()>;

/// Removes a checkpoint.
pub fn remove(checkpoint: &Path, remove_tree: Remover<'_>) -> Result<(), CheckpointError> {
    let gone = beside(checkpoint);
    match fs::rename(checkpoint, &gone) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other
            .and_then(|()| remove_tree(&gone))
            .map_err(io("remove", checkpoint)),
    }
}

/// Removes what a crash left unfinished in a directory of checkpoints. Nobody may be making
/// one there.
pub fn clear_unfinished(directory: &Path, remove_tree: Remover<'_>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if name.as_encoded_bytes().starts_with(UNFINISHED.as_bytes()) {
            let _ = remove_tree(&entry.path());
        }
    }
}

fn copy_fs(
    from: &Path,
    to: &Path,
    ids: Ids,
    bounds: CheckpointBounds,
    progress: &(dyn Fn(CopyProgress) + Sync),
) -> Result<CopySummary, CheckpointError> {
    Copying::begin(from, to, ids, bounds)?.run(&[("root", KEPT_OF_ROOT), ("upper", &[])], progress)
}

/// A name next to another, for what is not whole yet.
fn beside(path: &Path) -> PathBuf {
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    path.with_file_name(format!("{UNFINISHED}{}-{next}", std::process::id()))
}

/// Fills a directory under another name and gives it its own when it is whole.
fn publish(
    to: &Path,
    fill: impl FnOnce(&Path) -> Result<CopySummary, CheckpointError>,
) -> Result<CopySummary, CheckpointError> {
    let fresh = beside(to);
    make_directory(&fresh)?;
    let done = fill(&fresh).and_then(|copied| match fs::rename(&fresh, to) {
        Ok(()) => Ok(copied),
        Err(error) if error.kind() == std::io::ErrorKind::DirectoryNotEmpty => {
            Err(CheckpointError::Exists(to.to_owned()))
        }
        Err(error) => Err(io("publish", to)(error)),
    });
    if done.is_err() {
        let _ = remove_tree(&fresh);
    }
    done
}

fn make_directory(path: &Path) -> Result<(), CheckpointError> {
    let made = DirBuilder::new().mode(0o700).create(path);
    made.map_err(io("create", path))
}

/// For `map_err` on the standard library's and nix's results.
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
