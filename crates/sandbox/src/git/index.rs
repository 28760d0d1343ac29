//! Updates the operator's index file as git does: takes its lock, writes a new file and renames it.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use git2::{Index, IndexEntry, IndexEntryExtendedFlag, IndexTime};
use nix::sys::stat::FileStat;

use super::error::{GitError, git, io};
use super::host_repository::HostRepository;
use super::journal::Journal;
use super::manifest::FileStamp;
use super::tree::Leaf;
use super::walk::stamp;
use crate::beneath;

/// A held `index.lock`.
pub(super) struct IndexLock {
    index: PathBuf,
    lock: PathBuf,
    new_index: PathBuf,
}

impl IndexLock {
    /// Creates `index.lock` with the journal's name as content, by which recovery after a crash
    /// recognises the file.
    pub(super) fn acquire(
        host_repository: &HostRepository,
        journal: &Journal,
    ) -> Result<Self, GitError> {
        let dir = host_repository.repo().path();
        let lock = dir.join("index.lock");
        match OpenOptions::new().write(true).create_new(true).open(&lock) {
            Ok(mut file) => {
                let taken = Self {
                    index: dir.join("index"),
                    lock,
                    new_index: journal.next_index(),
                };
                file.write_all(journal.lock_content().as_bytes())
                    .map_err(io("write", &taken.lock))?;
                Ok(taken)
            }
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                Err(GitError::Busy {
                    path: host_repository.root().to_owned(),
                    state: format!(
                        "another git process holds index.lock; if none is running, it crashed: \
                         remove '{}'",
                        lock.display()
                    ),
                })
            }
            Err(error) => Err(io("create", &lock)(error)),
        }
    }

    /// Writes a copy of the index without the paths `removed` and with `entries`; returns its path.
    pub(super) fn write(
        &self,
        host_repository: &HostRepository,
        removed: &[&[u8]],
        entries: &[IndexEntry],
    ) -> Result<PathBuf, GitError> {
        let failed = || {
            git(format!(
                "write the index of '{}'",
                host_repository.root().display()
            ))
        };
        if self.index.exists() {
            fs::copy(&self.index, &self.new_index).map_err(io("copy", &self.index))?;
        }
        let mut index = Index::open(&self.new_index).map_err(failed())?;
        for path in removed {
            index
                .remove(beneath::path_from_bytes(path), 0)
                .map_err(failed())?;
        }
        for entry in entries {
            index.add(entry).map_err(failed())?;
        }
        index.write().map_err(failed())?;
        Ok(self.new_index.clone())
    }

    /// The path of the current index.
    pub(super) fn index(&self) -> &Path {
        &self.index
    }

    /// Puts the new index in place and returns the old one's bytes.
    pub(super) fn swap(&self, new_index: &PathBuf) -> Result<Option<Vec<u8>>, GitError> {
        let old = fs::read(&self.index).ok();
        fs::rename(new_index, &self.index).map_err(io("replace", &self.index))?;
        Ok(old)
    }

    /// Restores the old index.
    pub(super) fn swap_back(&self, old: Option<&[u8]>) {
        let _ = match old {
            Some(bytes) => fs::write(&self.new_index, bytes)
                .and_then(|()| fs::rename(&self.new_index, &self.index)),
            None => fs::remove_file(&self.index),
        };
    }
}

impl Drop for IndexLock {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.new_index);
        let _ = fs::remove_file(&self.lock);
    }
}

/// Builds an index entry with the stat data that git compares.
pub(super) fn index_entry(path: &[u8], stamp: &FileStamp) -> IndexEntry {
    let time = |(seconds, nanos): (i64, i64)| {
        IndexTime::new(
            i32::try_from(seconds).unwrap_or(i32::MAX),
            u32::try_from(nanos).unwrap_or_default(),
        )
    };
    IndexEntry {
        ctime: time(stamp.ctime),
        mtime: time(stamp.mtime),
        dev: 0,
        // Git, too, records only the low 32 bits of the inode and the size.
        ino: u32::try_from(stamp.ino & 0xffff_ffff).unwrap_or_default(),
        mode: stamp.mode,
        uid: 0,
        gid: 0,
        file_size: u32::try_from(stamp.size & 0xffff_ffff).unwrap_or_default(),
        id: stamp.id,
        flags: 0,
        flags_extended: 0,
        path: path.to_vec(),
    }
}

/// Builds an index entry of a path outside a sparse checkout.
pub(super) fn sparse_entry(path: &[u8], leaf: Leaf) -> IndexEntry {
    let blank = FileStamp {
        mode: leaf.mode,
        size: 0,
        mtime: (0, 0),
        ctime: (0, 0),
        ino: 0,
        id: leaf.id,
    };
    let mut entry = index_entry(path, &blank);
    entry.flags_extended = IndexEntryExtendedFlag::SKIP_WORKTREE.bits();
    entry
}

/// Builds an index entry with all stat data that git records.
#[allow(
    clippy::cast_possible_truncation,
    reason = "an index keeps the low 32 bits, as git does"
)]
pub(super) fn full_entry(path: &[u8], leaf: Leaf, stat: &FileStat) -> IndexEntry {
    let mut file_stamp = stamp(stat);
    (file_stamp.mode, file_stamp.id) = (leaf.mode, leaf.id);
    let mut entry = index_entry(path, &file_stamp);
    entry.dev = stat.st_dev as u32;
    (entry.uid, entry.gid) = (stat.st_uid, stat.st_gid);
    entry
}
