//! Transactional update of the operator's worktree and index.
//!
//! ```text
//!   prepare   every changed path must be the same as in HEAD, in the index and on disk;
//!             the new files are written into a staging directory in the worktree
//!   journal   the planned changes are recorded (journal.rs), for recovery after a crash
//!   run       old files move into that directory, new ones out of it (renames only),
//!             then the index, then the branch; a failure rolls every step back
//! ```

use std::ffi::CString;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::PathBuf;
use std::rc::Rc;

use git2::IndexEntry;
use nix::errno::Errno;
use nix::fcntl::{RenameFlags, renameat2};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::dirty::{refuse_dirty, stat_path};
use super::error::{GitError, git, io};
use super::host_repository::HostRepository;
use super::index::{IndexLock, full_entry, sparse_entry};
use super::journal::{Goal, Journal, READY};
use super::tree::{Change, EXECUTABLE, LINK, Leaf, SUBMODULE};
use crate::beneath;

/// Prepared changes to the operator's worktree.
pub(super) struct WorktreeUpdate<'a> {
    host_repository: &'a HostRepository,
    root: PathBuf,
    worktree: OwnedFd,
    stage: PathBuf,
    journal: Journal,
    staged: OwnedFd,
    changes: Rc<[Change]>,
    /// Changes of paths outside a sparse checkout, which are made in the index only.
    index_only: Vec<Change>,
    /// Completed steps, for the rollback in reverse order.
    done: Vec<UpdateStep>,
    /// Whether the rollback failed and the staging directory holds the operator's only copy.
    rollback_failed: bool,
}

enum UpdateStep {
    MovedOut(usize),
    RemovedDirectory(Vec<u8>),
    MadeDirectory(Vec<u8>),
    MovedIn(usize),
}

impl<'a> WorktreeUpdate<'a> {
    /// Fails if the operator's own changes conflict; otherwise writes the new files to a staging
    /// directory on the worktree's file system.
    pub(super) fn prepare(
        host_repository: &'a HostRepository,
        changes: &[Change],
        goal: Goal,
    ) -> Result<Self, GitError> {
        let root = host_repository.root().to_owned();
        let worktree = beneath::open_root(&root).map_err(io("open", &root))?;
        let sparse = refuse_dirty(host_repository, &worktree, changes)?;
        let (mut on_disk, mut index_only) = (Vec::new(), Vec::new());
        for (number, change) in changes.iter().enumerate() {
            match (sparse.contains(&number), &goal) {
                (false, _) => on_disk.push(change.clone()),
                // This goal does not change the index, so the path must be written to disk.
                (true, Goal::Files) => on_disk.push(Change {
                    old: None,
                    ..change.clone()
                }),
                (true, Goal::Reference { .. } | Goal::Head { .. }) => {
                    index_only.push(change.clone());
                }
            }
        }
        let changes: Rc<[Change]> = on_disk.into();
        let (journal, stage) = Journal::open(host_repository, goal, &changes)?;
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&stage)
            .map_err(io("create", &stage))?;
        let staged = beneath::open_root(&stage).map_err(io("open", &stage))?;
        let worktree_update = Self {
            host_repository,
            root,
            worktree,
            stage,
            journal,
            staged,
            changes,
            index_only,
            done: Vec::new(),
            rollback_failed: false,
        };
        worktree_update.write_new_files()?;
        let ready = worktree_update.stage.join(READY);
        fs::write(&ready, b"").map_err(io("create", &ready))?;
        Ok(worktree_update)
    }

    fn write_new_files(&self) -> Result<(), GitError> {
        let odb = self
            .host_repository
            .repo()
            .odb()
            .map_err(git("open the objects"))?;
        for (number, change) in self.changes.iter().enumerate() {
            let Some(leaf) = change.new.filter(|leaf| leaf.mode != SUBMODULE) else {
                continue;
            };
            let blob = odb
                .read(leaf.id)
                .map_err(git(format!("read the blob {}", leaf.id)))?;
            let path = self.stage.join(format!("new-{number}"));
            if leaf.mode == LINK {
                std::os::unix::fs::symlink(beneath::path_from_bytes(blob.data()), &path)
                    .map_err(io("create the link", &path))?;
                continue;
            }
            let mode = if leaf.mode == EXECUTABLE {
                0o777
            } else {
                0o666
            };
            let mut file = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(mode)
                .open(&path)
                .map_err(io("create", &path))?;
            file.write_all(blob.data()).map_err(io("write", &path))?;
        }
        Ok(())
    }

    /// Updates the files only.
    pub(super) fn run(mut self) -> Result<(), GitError> {
        self.change_files().inspect_err(|_| self.roll_back())
    }

    /// Updates the files and the index, and then calls `move_branch`, which moves the branch.
    pub(super) fn run_with_index(
        mut self,
        move_branch: impl FnOnce() -> Result<(), GitError>,
    ) -> Result<(), GitError> {
        let lock = IndexLock::acquire(self.host_repository, &self.journal)?;
        let result = self.change_files().and_then(|()| {
            let removed = self.changes.iter().chain(&self.index_only);
            let removed = removed.filter(|change| change.new.is_none());
            let removed: Vec<&[u8]> = removed.map(|change| change.path.as_slice()).collect();
            let fresh = lock.write(self.host_repository, &removed, &self.entries()?)?;
            self.journal.keep_index(lock.index(), &fresh)?;
            let old = lock.swap(&fresh)?;
            move_branch().inspect_err(|_| lock.swap_back(old.as_deref()))
        });
        result.inspect_err(|_| self.roll_back())
    }

    fn change_files(&mut self) -> Result<(), GitError> {
        let changes = Rc::clone(&self.changes);
        for (number, change) in changes.iter().enumerate() {
            if change.old.is_some_and(|leaf| leaf.mode != SUBMODULE) {
                self.move_out(number, &change.path)
                    .map_err(io("move away", &self.full_path(&change.path)))?;
            }
        }
        for change in changes.iter().filter(|change| change.new.is_none()) {
            self.remove_empty_parents(&change.path);
        }
        for (number, change) in changes.iter().enumerate() {
            if change.new.is_some_and(|leaf| leaf.mode != SUBMODULE) {
                self.move_in(number, &change.path)
                    .map_err(io("put in place", &self.full_path(&change.path)))?;
            }
        }
        Ok(())
    }

    fn full_path(&self, path: &[u8]) -> PathBuf {
        self.root.join(beneath::path_from_bytes(path))
    }

    fn move_out(&mut self, number: usize, path: &[u8]) -> Result<(), Errno> {
        let (dir, name) = beneath::parent_of(&self.worktree, path)?.ok_or(Errno::ENOENT)?;
        let kept = staged_name("old", number)?;
        renameat2(
            &dir,
            name.as_c_str(),
            &self.staged,
            kept.as_c_str(),
            RenameFlags::RENAME_NOREPLACE,
        )?;
        self.done.push(UpdateStep::MovedOut(number));
        Ok(())
    }

    fn move_in(&mut self, number: usize, path: &[u8]) -> Result<(), Errno> {
        self.make_parents(path)?;
        let (dir, name) = beneath::parent_of(&self.worktree, path)?.ok_or(Errno::ENOENT)?;
        let fresh = staged_name("new", number)?;
        renameat2(
            &self.staged,
            fresh.as_c_str(),
            &dir,
            name.as_c_str(),
            RenameFlags::RENAME_NOREPLACE,
        )?;
        self.done.push(UpdateStep::MovedIn(number));
        Ok(())
    }

    fn make_parents(&mut self, path: &[u8]) -> Result<(), Errno> {
        for (slash, _) in path.iter().enumerate().filter(|(_, b)| **b == b'/') {
            let parent = path.get(..slash).unwrap_or_default();
            let (dir, name) = beneath::parent_of(&self.worktree, parent)?.ok_or(Errno::ENOENT)?;
            match mkdirat(&dir, name.as_c_str(), Mode::from_bits_truncate(0o777)) {
                Ok(()) => self.done.push(UpdateStep::MadeDirectory(parent.to_vec())),
                Err(Errno::EEXIST) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Removes directories that became empty, as git does.
    fn remove_empty_parents(&mut self, path: &[u8]) {
        let mut below = path;
        while let Some(slash) = below.iter().rposition(|b| *b == b'/') {
            below = below.get(..slash).unwrap_or_default();
            let Ok(Some((dir, name))) = beneath::parent_of(&self.worktree, below) else {
                return;
            };
            if unlinkat(&dir, name.as_c_str(), UnlinkatFlags::RemoveDir).is_err() {
                return;
            }
            self.done.push(UpdateStep::RemovedDirectory(below.to_vec()));
        }
    }

    /// Rolls the completed steps back. If a step cannot be rolled back, the staging directory with
    /// the operator's file is kept.
    fn roll_back(&mut self) {
        while let Some(step) = self.done.pop() {
            if self.undo(&step).is_err() {
                self.rollback_failed = true;
                return;
            }
        }
    }

    fn undo(&self, step: &UpdateStep) -> Result<(), Errno> {
        let path = match step {
            UpdateStep::MovedOut(number) | UpdateStep::MovedIn(number) => self
                .changes
                .get(*number)
                .map(|change| change.path.as_slice()),
            UpdateStep::MadeDirectory(path) | UpdateStep::RemovedDirectory(path) => {
                Some(path.as_slice())
            }
        };
        let path = path.ok_or(Errno::ENOENT)?;
        let (dir, name) = beneath::parent_of(&self.worktree, path)?.ok_or(Errno::ENOENT)?;
        match step {
            UpdateStep::MovedOut(number) => {
                let kept = staged_name("old", *number)?;
                renameat2(
                    &self.staged,
                    kept.as_c_str(),
                    &dir,
                    name.as_c_str(),
                    RenameFlags::RENAME_NOREPLACE,
                )
            }
            UpdateStep::MovedIn(_) => unlinkat(&dir, name.as_c_str(), UnlinkatFlags::NoRemoveDir),
            UpdateStep::MadeDirectory(_) => {
                unlinkat(&dir, name.as_c_str(), UnlinkatFlags::RemoveDir)
            }
            UpdateStep::RemovedDirectory(_) => {
                mkdirat(&dir, name.as_c_str(), Mode::from_bits_truncate(0o777))
            }
        }
    }

    /// Builds the index entries of the new files.
    fn entries(&self) -> Result<Vec<IndexEntry>, GitError> {
        let entry = |(change, leaf): (&Change, Leaf)| {
            let stat = stat_path(&self.worktree, &change.path)
                .and_then(|stat| stat.ok_or(Errno::ENOENT))
                .map_err(io("stat", &self.full_path(&change.path)))?;
            Ok(full_entry(&change.path, leaf, &stat))
        };
        let index_only = self.index_only.iter();
        let index_only =
            index_only.filter_map(|change| Some(sparse_entry(&change.path, change.new?)));
        self.changes
            .iter()
            .filter_map(|change| Some((change, change.new?)))
            .map(entry)
            .chain(index_only.map(Ok))
            .collect()
    }
}

impl Drop for WorktreeUpdate<'_> {
    fn drop(&mut self) {
        if self.rollback_failed {
            self.journal.keep();
        } else {
            let _ = fs::remove_dir_all(&self.stage);
        }
    }
}

fn staged_name(kind: &str, number: usize) -> Result<CString, Errno> {
    CString::new(format!("{kind}-{number}")).map_err(|_| Errno::EINVAL)
}
