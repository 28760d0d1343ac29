//! Checks that an update would not overwrite the operator's uncommitted changes.

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
use super::host_repository::HostRepository;
use super::index::full_entry;
use super::tree::{Change, Leaf, SUBMODULE};
use super::walk::stamp;
use crate::beneath;

/// Fails unless every path to change is the same as in HEAD, and no file exists at a new path.
/// Returns the indices of the changes outside a sparse checkout.
pub(super) fn refuse_dirty(
    host_repository: &HostRepository,
    worktree: &OwnedFd,
    changes: &[Change],
) -> Result<BTreeSet<usize>, GitError> {
    let mut index = host_repository
        .repo()
        .index()
        .map_err(git("read the index"))?;
    index.read(true).map_err(git("read the index"))?;
    if index.has_conflicts() {
        return Err(GitError::Busy {
            path: host_repository.root().to_owned(),
            state: "unresolved conflicts".to_owned(),
        });
    }
    let index_mtime = fs::metadata(host_repository.repo().path().join("index"));
    let index_mtime = index_mtime.map_or(0, |index| index.mtime());
    let mut dirty = Vec::new();
    let mut sparse = BTreeSet::new();
    for (number, change) in changes.iter().enumerate() {
        let entry = index.get_path(beneath::path_from_bytes(&change.path), 0);
        let staged = entry.as_ref().map(|entry| Leaf {
            mode: entry.mode,
            id: entry.id,
        });
        let full_path = host_repository
            .root()
            .join(beneath::path_from_bytes(&change.path));
        let clean = staged == change.old
            && match change.old {
                Some(old) => {
                    let seen = stat_path(worktree, &change.path).map_err(io("stat", &full_path))?;
                    if seen.is_none() && entry.as_ref().is_some_and(is_sparse) {
                        sparse.insert(number);
                        continue;
                    }
                    matches_index_stat(entry.as_ref(), seen.as_ref(), index_mtime)
                        || matches_blob(worktree, &change.path, old)
                            .map_err(io("stat", &full_path))?
                        || is_clean_for_git(host_repository, entry.as_ref())
                }
                None => is_free(worktree, &change.path, changes).map_err(io("stat", &full_path))?,
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

/// Whether the file's stat data still matches its index entry. With line ending conversion or
/// filters the bytes differ from the blob's, so stat data is the only evidence. A file that is as
/// recent as the index may have changed again within the same second, so its stat data is not
/// trusted.
fn matches_index_stat(
    entry: Option<&IndexEntry>,
    seen: Option<&FileStat>,
    index_mtime: i64,
) -> bool {
    let (Some(entry), Some(seen)) = (entry, seen) else {
        return false;
    };
    let current = full_entry(
        &entry.path,
        Leaf {
            mode: entry.mode,
            id: entry.id,
        },
        seen,
    );
    let same = (entry.mtime, entry.ctime, entry.ino, entry.file_size)
        == (current.mtime, current.ctime, current.ino, current.file_size);
    same && i64::from(entry.mtime.seconds()) < index_mtime
}

/// Whether the path is outside a sparse checkout.
fn is_sparse(entry: &IndexEntry) -> bool {
    entry.flags_extended & IndexEntryExtendedFlag::SKIP_WORKTREE.bits() != 0
}

/// Whether the file differs from its blob only by line endings, as the operator's configuration
/// converts them. libgit2 converts line endings itself and runs no configured filter.
fn is_clean_for_git(host_repository: &HostRepository, entry: Option<&IndexEntry>) -> bool {
    // libgit2 reports a path that is marked assume-unchanged as clean, even if it has changed.
    let is_compared =
        |entry: &&IndexEntry| entry.flags & IndexEntryFlag::VALID.bits() == 0 && !is_sparse(entry);
    let Some(entry) = entry.filter(is_compared) else {
        return false;
    };
    let status = host_repository
        .repo()
        .status_file(beneath::path_from_bytes(&entry.path));
    status.is_ok_and(|status| status == Status::CURRENT)
}

/// Whether the file on disk equals the blob byte for byte.
pub(super) fn matches_blob(
    worktree: &OwnedFd,
    path: &[u8],
    leaf: Leaf,
) -> Result<bool, std::io::Error> {
    if leaf.mode == SUBMODULE {
        return Ok(true);
    }
    let Some((dir, name)) = beneath::parent_of(worktree, path)? else {
        return Ok(false);
    };
    let Some(stat) = beneath::stat(dir.as_fd(), &name)? else {
        return Ok(false);
    };
    let file_type = stat.st_mode & SFlag::S_IFMT.bits();
    let bytes = if file_type == SFlag::S_IFLNK.bits() {
        nix::fcntl::readlinkat(&dir, name.as_c_str())?
            .as_bytes()
            .to_vec()
    } else if file_type == SFlag::S_IFREG.bits() {
        let mut bytes = Vec::new();
        beneath::open_file(dir.as_fd(), &name)?.read_to_end(&mut bytes)?;
        bytes
    } else {
        return Ok(false);
    };
    let id = Oid::hash_object(ObjectType::Blob, &bytes).map_err(std::io::Error::other)?;
    Ok(id == leaf.id && stamp(&stat).mode == leaf.mode)
}

/// Whether the path of a new file is free, or is freed by these changes.
fn is_free(worktree: &OwnedFd, path: &[u8], changes: &[Change]) -> Result<bool, Errno> {
    let is_removed = |path: &[u8]| {
        let found = changes.binary_search_by(|change| change.path.as_slice().cmp(path));
        found.is_ok_and(|at| changes.get(at).is_some_and(|change| change.new.is_none()))
    };
    for (slash, _) in path.iter().enumerate().filter(|(_, b)| **b == b'/') {
        let parent = path.get(..slash).unwrap_or_default();
        match stat_path(worktree, parent)? {
            None => return Ok(true),
            Some(stat) if is_dir(&stat) => {}
            Some(_) => return Ok(is_removed(parent)),
        }
    }
    let mut below = path.to_vec();
    below.push(b'/');
    Ok(match stat_path(worktree, path)? {
        None => true,
        Some(stat) if is_dir(&stat) => {
            let mut changes_below = changes
                .iter()
                .filter(|change| change.path.starts_with(&below));
            changes_below.any(|change| change.old.is_some() && change.new.is_none())
        }
        Some(_) => false,
    })
}

fn is_dir(stat: &FileStat) -> bool {
    stat.st_mode & SFlag::S_IFMT.bits() == SFlag::S_IFDIR.bits()
}

/// Returns the stat data of a path of the worktree; `None` if it does not exist.
pub(super) fn stat_path(worktree: &OwnedFd, path: &[u8]) -> Result<Option<FileStat>, Errno> {
    let Some((dir, name)) = beneath::parent_of(worktree, path)? else {
        return Ok(None);
    };
    beneath::stat(dir.as_fd(), &name)
}
