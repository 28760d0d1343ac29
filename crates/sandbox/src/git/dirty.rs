//! Whether the operator's own work is in the way.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;

use git2::{IndexEntry, IndexEntryExtendedFlag, IndexEntryFlag, ObjectType, Oid, Status};
use nix::errno::Errno;
use nix::sys::stat::{FileStat, SFlag};

use super::error::{GitError, git, io};
use super::home::Home;
use super::index::full_entry;
use super::tree::{Change, Leaf, SUBMODULE};
use super::walk::stamp;
use crate::beneath;

/// Every path to be changed must be as HEAD has it, and every new one free. Returns those
/// that a sparse checkout keeps off the disk, by their number.
pub(super) fn refuse_dirty(
    home: &Home,
    worktree: &OwnedFd,
    changes: &[Change],
) -> Result<BTreeSet<usize>, GitError> {
    let mut index = home.repo().index().map_err(git("read the index"))?;
    index.read(true).map_err(git("read the index"))?;
    if index.has_conflicts() {
        return Err(GitError::Busy {
            path: home.root().to_owned(),
            state: "unresolved conflicts".to_owned(),
        });
    }
    let written = fs::metadata(home.repo().path().join("index"));
    let written = written.map_or(0, |index| index.mtime());
    let mut dirty = Vec::new();
    let mut sparse = BTreeSet::new();
    for (number, change) in changes.iter().enumerate() {
        let entry = index.get_path(beneath::path(&change.path), 0);
        let staged = entry.as_ref().map(|entry| Leaf {
            mode: entry.mode,
            id: entry.id,
        });
        let at = home.root().join(beneath::path(&change.path));
        let clean = staged == change.old
            && match change.old {
                Some(old) => {
                    let seen = look_at(worktree, &change.path).map_err(io("look at", &at))?;
                    if seen.is_none() && entry.as_ref().is_some_and(is_sparse) {
                        sparse.insert(number);
                        continue;
                    }
                    is_as_git_left_it(entry.as_ref(), seen.as_ref(), written)
                        || holds(worktree, &change.path, old).map_err(io("look at", &at))?
                        || is_clean_in_gits_eyes(home, entry.as_ref())
                }
                None => is_free(worktree, &change.path, changes).map_err(io("look at", &at))?,
            };
        if !clean {
            dirty.push(change.path.clone());
        }
    }
    if dirty.is_empty() {
        Ok(sparse)
    } else {
        Err(GitError::Dirty(dirty))
    }
}

/// Whether the file has not been touched since git wrote its index entry. Where line endings
/// or filters are in play its bytes are not the blob's, and this is all one can know. A file
/// as young as the index may have been touched within the same second.
fn is_as_git_left_it(entry: Option<&IndexEntry>, seen: Option<&FileStat>, written: i64) -> bool {
    let (Some(entry), Some(seen)) = (entry, seen) else {
        return false;
    };
    let fresh = full_entry(
        &entry.path,
        Leaf {
            mode: entry.mode,
            id: entry.id,
        },
        seen,
    );
    let same = (entry.mtime, entry.ctime, entry.ino, entry.file_size)
        == (fresh.mtime, fresh.ctime, fresh.ino, fresh.file_size);
    same && i64::from(entry.mtime.seconds()) < written
}

/// Whether a sparse checkout leaves the path out of the worktree.
fn is_sparse(entry: &IndexEntry) -> bool {
    entry.flags_extended & IndexEntryExtendedFlag::SKIP_WORKTREE.bits() != 0
}

/// Whether only line endings tell the file from its blob, as the operator's configuration
/// has it. libgit2 converts those itself and runs no filter that a configuration names.
fn is_clean_in_gits_eyes(home: &Home, entry: Option<&IndexEntry>) -> bool {
    // What git was told not to look at would seem clean, whatever it holds.
    let looked_at =
        |entry: &&IndexEntry| entry.flags & IndexEntryFlag::VALID.bits() == 0 && !is_sparse(entry);
    let Some(entry) = entry.filter(looked_at) else {
        return false;
    };
    let status = home.repo().status_file(beneath::path(&entry.path));
    status.is_ok_and(|status| status == Status::CURRENT)
}

/// Whether the file on disk is what git stores, byte for byte.
pub(super) fn holds(worktree: &OwnedFd, path: &[u8], leaf: Leaf) -> Result<bool, std::io::Error> {
    if leaf.mode == SUBMODULE {
        return Ok(true);
    }
    let Some((dir, name)) = beneath::parent_of(worktree, path)? else {
        return Ok(false);
    };
    let Some(stat) = beneath::look(dir.as_fd(), &name)? else {
        return Ok(false);
    };
    let regular = stat.st_mode & SFlag::S_IFMT.bits();
    let bytes = if regular == SFlag::S_IFLNK.bits() {
        nix::fcntl::readlinkat(&dir, name.as_c_str())?
            .as_bytes()
            .to_vec()
    } else if regular == SFlag::S_IFREG.bits() {
        let mut bytes = Vec::new();
        beneath::file(dir.as_fd(), &name)?.read_to_end(&mut bytes)?;
        bytes
    } else {
        return Ok(false);
    };
    let id = Oid::hash_object(ObjectType::Blob, &bytes).map_err(std::io::Error::other)?;
    Ok(id == leaf.id && stamp(&stat).mode == leaf.mode)
}

/// Whether nothing is where a new file goes, or only what these changes take away.
fn is_free(worktree: &OwnedFd, path: &[u8], changes: &[Change]) -> Result<bool, Errno> {
    let goes = |path: &[u8]| {
        let found = changes.binary_search_by(|change| change.path.as_slice().cmp(path));
        found.is_ok_and(|at| changes.get(at).is_some_and(|change| change.new.is_none()))
    };
    for (slash, _) in path.iter().enumerate().filter(|(_, b)| **b == b'/') {
        let parent = path.get(..slash).unwrap_or_default();
        match look_at(worktree, parent)? {
            None => return Ok(true),
            Some(stat) if is_dir(&stat) => {}
            Some(_) => return Ok(goes(parent)),
        }
    }
    let mut below = path.to_vec();
    below.push(b'/');
    Ok(match look_at(worktree, path)? {
        None => true,
        Some(stat) if is_dir(&stat) => {
            let mut inside = changes
                .iter()
                .filter(|change| change.path.starts_with(&below));
            inside.any(|change| change.old.is_some() && change.new.is_none())
        }
        Some(_) => false,
    })
}

fn is_dir(stat: &FileStat) -> bool {
    stat.st_mode & SFlag::S_IFMT.bits() == SFlag::S_IFDIR.bits()
}

/// What is at a path of the worktree, if anything.
pub(super) fn look_at(worktree: &OwnedFd, path: &[u8]) -> Result<Option<FileStat>, Errno> {
    let Some((dir, name)) = beneath::parent_of(worktree, path)? else {
        return Ok(None);
    };
    beneath::look(dir.as_fd(), &name)
}
