//! Changing the operator's worktree and index: all of it or nothing.
//!
//! ```text
//!   prepare   every changed path must be as HEAD has it, in the index and on disk;
//!             the new files are written into a directory of their own in the worktree
//!   journal   what will be done is written down (journal.rs), for the case of a crash
//!   land      old files move into that directory, new ones out of it (renames only),
//!             then the index, then the branch; a failure takes every step back
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

use super::dirty::{look_at, refuse_dirty};
use super::error::{GitError, git, io};
use super::home::Home;
use super::index::{IndexLock, full_entry, sparse_entry};
use super::journal::{Goal, Journal, READY};
use super::tree::{Change, EXECUTABLE, LINK, Leaf, SUBMODULE};
use crate::beneath;

/// Changes that wait to be made.
pub(super) struct Landing<'a> {
    home: &'a Home,
    root: PathBuf,
    worktree: OwnedFd,
    stage: PathBuf,
    journal: Journal,
    staged: OwnedFd,
    changes: Rc<[Change]>,
    /// What a sparse checkout keeps off the disk: it changes in the index only.
    unseen: Vec<Change>,
    /// What was done, to be undone in reverse.
    done: Vec<Step>,
    /// A step could not be undone, and the stage holds the operator's only copy.
    stuck: bool,
}

enum Step {
    MovedOut(usize),
    RemovedDirectory(Vec<u8>),
    MadeDirectory(Vec<u8>),
    MovedIn(usize),
}

impl<'a> Landing<'a> {
    /// Refuses where the operator's own changes are in the way; else writes the new files
    /// next to the worktree's, where a rename reaches.
    pub(super) fn prepare(
        home: &'a Home,
        changes: &[Change],
        goal: Goal,
    ) -> Result<Self, GitError> {
        let root = home.root().to_owned();
        let worktree = beneath::root(&root).map_err(io("open", &root))?;
        let sparse = refuse_dirty(home, &worktree, changes)?;
        let (mut seen, mut unseen) = (Vec::new(), Vec::new());
        for (number, change) in changes.iter().enumerate() {
            match (sparse.contains(&number), &goal) {
                (false, _) => seen.push(change.clone()),
                // Without an index to change, there is only the disk to put it on.
                (true, Goal::Files) => seen.push(Change {
                    old: None,
                    ..change.clone()
                }),
                (true, Goal::Reference { .. } | Goal::Head { .. }) => unseen.push(change.clone()),
            }
        }
        let changes: Rc<[Change]> = seen.into();
        let (journal, stage) = Journal::open(home, goal, &changes)?;
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&stage)
            .map_err(io("create", &stage))?;
        let staged = beneath::root(&stage).map_err(io("open", &stage))?;
        let landing = Self {
            home,
            root,
            worktree,
            stage,
            journal,
            staged,
            changes,
            unseen,
            done: Vec::new(),
            stuck: false,
        };
        landing.write_new_files()?;
        let ready = landing.stage.join(READY);
        fs::write(&ready, b"").map_err(io("create", &ready))?;
        Ok(landing)
    }

    fn write_new_files(&self) -> Result<(), GitError> {
        let odb = self.home.repo().odb().map_err(git("open the objects"))?;
        for (number, change) in self.changes.iter().enumerate() {
            let Some(leaf) = change.new.filter(|leaf| leaf.mode != SUBMODULE) else {
                continue;
            };
            let blob = odb
                .read(leaf.id)
                .map_err(git(format!("read the blob {}", leaf.id)))?;
            let path = self.stage.join(format!("new-{number}"));
            if leaf.mode == LINK {
                std::os::unix::fs::symlink(beneath::path(blob.data()), &path)
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

    /// Changes the files only.
    pub(super) fn land(mut self) -> Result<(), GitError> {
        self.change_files().inspect_err(|_| self.take_back())
    }

    /// Changes the files and the index, and then calls `last`, which moves the branch.
    pub(super) fn land_with_index(
        mut self,
        last: impl FnOnce() -> Result<(), GitError>,
    ) -> Result<(), GitError> {
        let lock = IndexLock::take(self.home, &self.journal)?;
        let landed = self.change_files().and_then(|()| {
            let gone = self.changes.iter().chain(&self.unseen);
            let gone = gone.filter(|change| change.new.is_none());
            let gone: Vec<&[u8]> = gone.map(|change| change.path.as_slice()).collect();
            let fresh = lock.write(self.home, &gone, &self.entries()?)?;
            self.journal.keep_index(lock.index(), &fresh)?;
            let old = lock.swap(&fresh)?;
            last().inspect_err(|_| lock.swap_back(old.as_deref()))
        });
        landed.inspect_err(|_| self.take_back())
    }

    fn change_files(&mut self) -> Result<(), GitError> {
        let changes = Rc::clone(&self.changes);
        for (number, change) in changes.iter().enumerate() {
            if change.old.is_some_and(|leaf| leaf.mode != SUBMODULE) {
                self.move_out(number, &change.path)
                    .map_err(io("move away", &self.at(&change.path)))?;
            }
        }
        for change in changes.iter().filter(|change| change.new.is_none()) {
            self.remove_empty_parents(&change.path);
        }
        for (number, change) in changes.iter().enumerate() {
            if change.new.is_some_and(|leaf| leaf.mode != SUBMODULE) {
                self.move_in(number, &change.path)
                    .map_err(io("put in place", &self.at(&change.path)))?;
            }
        }
        Ok(())
    }

    fn at(&self, path: &[u8]) -> PathBuf {
        self.root.join(beneath::path(path))
    }

    fn move_out(&mut self, number: usize, path: &[u8]) -> Result<(), Errno> {
        let (dir, name) = beneath::parent_of(&self.worktree, path)?.ok_or(Errno::ENOENT)?;
        let kept = name_of("old", number)?;
        renameat2(
            &dir,
            name.as_c_str(),
            &self.staged,
            kept.as_c_str(),
            RenameFlags::RENAME_NOREPLACE,
        )?;
        self.done.push(Step::MovedOut(number));
        Ok(())
    }

    fn move_in(&mut self, number: usize, path: &[u8]) -> Result<(), Errno> {
        self.make_parents(path)?;
        let (dir, name) = beneath::parent_of(&self.worktree, path)?.ok_or(Errno::ENOENT)?;
        let fresh = name_of("new", number)?;
        renameat2(
            &self.staged,
            fresh.as_c_str(),
            &dir,
            name.as_c_str(),
            RenameFlags::RENAME_NOREPLACE,
        )?;
        self.done.push(Step::MovedIn(number));
        Ok(())
    }

    fn make_parents(&mut self, path: &[u8]) -> Result<(), Errno> {
        for (slash, _) in path.iter().enumerate().filter(|(_, b)| **b == b'/') {
            let parent = path.get(..slash).unwrap_or_default();
            let (dir, name) = beneath::parent_of(&self.worktree, parent)?.ok_or(Errno::ENOENT)?;
            match mkdirat(&dir, name.as_c_str(), Mode::from_bits_truncate(0o777)) {
                Ok(()) => self.done.push(Step::MadeDirectory(parent.to_vec())),
                Err(Errno::EEXIST) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// As git does: a directory goes with its last file.
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
            self.done.push(Step::RemovedDirectory(below.to_vec()));
        }
    }

    /// Undoes what was done. A step that cannot be undone leaves the operator's file in the
    /// stage, which then stays.
    fn take_back(&mut self) {
        while let Some(step) = self.done.pop() {
            if self.undo(&step).is_err() {
                self.stuck = true;
                return;
            }
        }
    }

    fn undo(&self, step: &Step) -> Result<(), Errno> {
        let path = match step {
            Step::MovedOut(number) | Step::MovedIn(number) => self
                .changes
                .get(*number)
                .map(|change| change.path.as_slice()),
            Step::MadeDirectory(path) | Step::RemovedDirectory(path) => Some(path.as_slice()),
        };
        let path = path.ok_or(Errno::ENOENT)?;
        let (dir, name) = beneath::parent_of(&self.worktree, path)?.ok_or(Errno::ENOENT)?;
        match step {
            Step::MovedOut(number) => {
                let kept = name_of("old", *number)?;
                renameat2(
                    &self.staged,
                    kept.as_c_str(),
                    &dir,
                    name.as_c_str(),
                    RenameFlags::RENAME_NOREPLACE,
                )
            }
            Step::MovedIn(_) => unlinkat(&dir, name.as_c_str(), UnlinkatFlags::NoRemoveDir),
            Step::MadeDirectory(_) => unlinkat(&dir, name.as_c_str(), UnlinkatFlags::RemoveDir),
            Step::RemovedDirectory(_) => {
                mkdirat(&dir, name.as_c_str(), Mode::from_bits_truncate(0o777))
            }
        }
    }

    /// The index entries of the new files.
    fn entries(&self) -> Result<Vec<IndexEntry>, GitError> {
        let entry = |(change, leaf): (&Change, Leaf)| {
            let stat = look_at(&self.worktree, &change.path)
                .and_then(|stat| stat.ok_or(Errno::ENOENT))
                .map_err(io("look at", &self.at(&change.path)))?;
            Ok(full_entry(&change.path, leaf, &stat))
        };
        let unseen = self.unseen.iter();
        let unseen = unseen.filter_map(|change| Some(sparse_entry(&change.path, change.new?)));
        self.changes
            .iter()
            .filter_map(|change| Some((change, change.new?)))
            .map(entry)
            .chain(unseen.map(Ok))
            .collect()
    }
}

impl Drop for Landing<'_> {
    fn drop(&mut self) {
        if self.stuck {
            self.journal.leave();
        } else {
            let _ = fs::remove_dir_all(&self.stage);
        }
    }
}

fn name_of(kind: &str, number: usize) -> Result<CString, Errno> {
    CString::new(format!("{kind}-{number}")).map_err(|_| Errno::EINVAL)
}
