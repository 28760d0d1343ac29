//! What a landing is about to do, kept until it is done: a crash in the middle is put right
//! by the next one.
//!
//! ```text
//!   .git/palisade-landing-<n>           the journal, locked while its landing lives
//!   .git/palisade-landing-<n>.index     the index before
//!   .git/palisade-landing-<n>.fresh     the index after
//!   .git/palisade-landing-<n>.next      the same while it is written
//!   <worktree>/.palisade-landing-<n>/   the files on their way: new-<k> in, old-<k> out
//! ```
//!
//! The journal is in `.git`, where nothing of an agent's ever comes: a directory in the
//! worktree that only looks like ours is left alone.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use git2::Oid;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, RenameFlags, renameat2};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};
use serde::{Deserialize, Serialize};

use super::dirty::{holds, look_at};
use super::error::{GitError, io};
use super::home::Home;
use super::objects::unique;
use super::tree::{Change, Leaf, SUBMODULE};
use crate::beneath;

const NAME: &str = "palisade-landing-";

/// In the stage when all new files are: nothing moves before.
pub(super) const READY: &str = "ready";

/// When a landing has arrived.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Goal {
    /// All files are in place.
    Files,
    /// A branch, or a detached HEAD, is there or further.
    Reference { name: String, commit: String },
    /// HEAD is on a branch.
    Head { branch: String },
}

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    goal: Goal,
    changes: Vec<Row>,
}

/// A change as it is written down: modes and ids, since paths need not be text.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    path: Vec<u8>,
    old: Option<(u32, String)>,
    new: Option<(u32, String)>,
}

impl Row {
    fn of(change: &Change) -> Self {
        let written = |leaf: Leaf| (leaf.mode, leaf.id.to_string());
        Self {
            path: change.path.clone(),
            old: change.old.map(written),
            new: change.new.map(written),
        }
    }

    fn read(&self) -> Option<Change> {
        let leaf = |written: &Option<(u32, String)>| match written {
            None => Some(None),
            Some((mode, id)) => {
                let (mode, id) = (*mode, Oid::from_str(id).ok()?);
                Some(Some(Leaf { mode, id }))
            }
        };
        Some(Change {
            path: self.path.clone(),
            old: leaf(&self.old)?,
            new: leaf(&self.new)?,
        })
    }
}

/// The journal of a landing that lives. Dropped, it is closed: the landing has arrived, or
/// has taken everything back.
pub(super) struct Journal {
    path: PathBuf,
    _lock: Flock<File>,
    kept: bool,
}

impl Journal {
    /// Writes down what will be done. Returns the directory for the files too, which is not
    /// made yet.
    pub(super) fn open(
        home: &Home,
        goal: Goal,
        changes: &[Change],
    ) -> Result<(Self, PathBuf), GitError> {
        let name = unique(NAME);
        let path = home.repo().path().join(&name);
        let file = OpenOptions::new().write(true).create_new(true).open(&path);
        let file = file.map_err(io("create", &path))?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock);
        let mut lock = lock.map_err(|(_, errno)| io("lock", &path)(errno))?;
        let record = Record {
            goal,
            changes: changes.iter().map(Row::of).collect(),
        };
        let text = serde_json::to_vec(&record).map_err(std::io::Error::other);
        text.and_then(|text| lock.write_all(&text))
            .and_then(|()| lock.sync_all())
            .map_err(io("write", &path))?;
        let stage = home.root().join(format!(".{name}"));
        let journal = Self {
            path,
            _lock: lock,
            kept: false,
        };
        Ok((journal, stage))
    }

    /// What index.lock says of whom it belongs to.
    pub(super) fn mark(&self) -> String {
        mark(&self.path)
    }

    /// Where the new index is written.
    pub(super) fn next_index(&self) -> PathBuf {
        let [_, _, next] = indexes(&self.path);
        next
    }

    /// Keeps the index as it is, before `fresh` takes its place.
    pub(super) fn keep_index(&self, index: &Path, fresh: &Path) -> Result<(), GitError> {
        let [old, new, _] = indexes(&self.path);
        if index.exists() {
            fs::copy(fresh, &new).map_err(io("copy", fresh))?;
            fs::copy(index, &old).map_err(io("copy", index))?;
        }
        Ok(())
    }

    /// Leaves it for the next landing to deal with.
    pub(super) fn leave(&mut self) {
        self.kept = true;
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        if !self.kept {
            close(&self.path);
        }
    }
}

fn mark(journal: &Path) -> String {
    let name = journal.file_name().unwrap_or_default();
    format!("{}\n", name.to_string_lossy())
}

fn indexes(journal: &Path) -> [PathBuf; 3] {
    ["index", "fresh", "next"].map(|end| journal.with_extension(end))
}

fn close(journal: &Path) {
    for path in indexes(journal) {
        let _ = fs::remove_file(path);
    }
    let _ = fs::remove_file(journal);
}

impl Home {
    /// Puts right what a crash in the middle of a merge, an apply or a checkout left: takes it
    /// back, or finishes where only cleaning was left to do. Returns a sentence for each.
    pub fn recover(&self) -> Result<Vec<String>, GitError> {
        let dir = self.repo().path();
        let mut said = Vec::new();
        for entry in fs::read_dir(dir).map_err(io("list", dir))?.flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if !name.starts_with(NAME) || name.contains('.') {
                continue;
            }
            let journal = entry.path();
            let Ok(file) = File::open(&journal) else {
                continue;
            };
            // Whoever holds it is alive.
            if let Ok(mut lock) = Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                said.extend(self.put_right(&journal, &mut lock)?);
            }
        }
        Ok(said)
    }

    fn put_right(&self, journal: &Path, file: &mut File) -> Result<Option<String>, GitError> {
        let name = journal.file_name().unwrap_or_default().to_string_lossy();
        let stage = self.root().join(format!(".{name}"));
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(io("read", journal))?;
        let record = serde_json::from_slice::<Record>(&text).ok();
        let said = match record.filter(|_| stage.join(READY).exists()) {
            // Nothing has moved yet.
            None => None,
            Some(record) => {
                let changes = record.changes.iter().filter_map(Row::read).collect();
                let left = Left {
                    home: self,
                    worktree: beneath::root(self.root()).map_err(io("open", self.root()))?,
                    stage: &stage,
                    changes,
                };
                Some(if left.has_arrived(&record.goal)? {
                    "an earlier merge was interrupted after its last step; it is complete"
                } else {
                    left.take_back(journal)?;
                    "an earlier merge was interrupted; your files and index are as they were before it"
                })
            }
        };
        let lock = self.repo().path().join("index.lock");
        if fs::read(&lock).is_ok_and(|text| text == mark(journal).into_bytes()) {
            fs::remove_file(&lock).map_err(io("remove", &lock))?;
        }
        if stage.is_dir() && !stage.is_symlink() {
            fs::remove_dir_all(&stage).map_err(io("remove", &stage))?;
        }
        close(journal);
        Ok(said.map(str::to_owned))
    }
}

/// What an interrupted landing left.
struct Left<'a> {
    home: &'a Home,
    worktree: OwnedFd,
    stage: &'a Path,
    changes: Vec<Change>,
}

impl Left<'_> {
    fn has_arrived(&self, goal: &Goal) -> Result<bool, GitError> {
        let repo = self.home.repo();
        Ok(match goal {
            Goal::Files => self.changes.iter().enumerate().all(|(number, change)| {
                let (new, old) = (change.new.filter(is_file), change.old.filter(is_file));
                (new.is_none() || !self.is_staged("new", number))
                    && (old.is_none() || self.is_staged("old", number))
            }),
            Goal::Reference { name, commit } => {
                let now = repo.refname_to_id(name).ok();
                match (now, Oid::from_str(commit).ok()) {
                    (Some(now), Some(commit)) => self.home.follows(now, commit)?,
                    _ => false,
                }
            }
            Goal::Head { branch } => self.home.head()?.branch.as_ref() == Some(branch),
        })
    }

    fn is_staged(&self, kind: &str, number: usize) -> bool {
        let path = self.stage.join(format!("{kind}-{number}"));
        path.symlink_metadata().is_ok()
    }

    /// Undoes what was done, as far as the files show it. What the operator changed since is
    /// not touched, and then stops it.
    fn take_back(&self, journal: &Path) -> Result<(), GitError> {
        let stuck = |path: &[u8]| GitError::Interrupted {
            path: path.to_vec(),
            stage: self.stage.to_owned(),
        };
        let staged = beneath::root(self.stage).map_err(io("open", self.stage))?;
        for (number, change) in self.changes.iter().enumerate() {
            let Some(new) = change.new.filter(is_file) else {
                continue;
            };
            if self.is_staged("new", number) {
                continue;
            }
            let at = self.home.root().join(beneath::path(&change.path));
            // Not there yet, or gone since, or swapped for the old one.
            if holds(&self.worktree, &change.path, new).map_err(io("look at", &at))? {
                self.unlink(&change.path).map_err(io("remove", &at))?;
            }
        }
        for (number, change) in self.changes.iter().enumerate() {
            if change.old.filter(is_file).is_some() && self.is_staged("old", number) {
                self.move_back(&staged, number, &change.path)
                    .map_err(|_| stuck(&change.path))?;
            }
        }
        self.restore_index(journal)
    }

    fn unlink(&self, path: &[u8]) -> Result<(), Errno> {
        let mut below = path;
        let mut flags = UnlinkatFlags::NoRemoveDir;
        while let Some((dir, name)) = beneath::parent_of(&self.worktree, below)? {
            match unlinkat(&dir, name.as_c_str(), flags) {
                Err(Errno::ENOTEMPTY | Errno::EEXIST) => break,
                other => other?,
            }
            let Some(slash) = below.iter().rposition(|b| *b == b'/') else {
                break;
            };
            below = below.get(..slash).unwrap_or_default();
            flags = UnlinkatFlags::RemoveDir;
        }
        Ok(())
    }

    fn move_back(&self, staged: &OwnedFd, number: usize, path: &[u8]) -> Result<(), Errno> {
        for (slash, _) in path.iter().enumerate().filter(|(_, b)| **b == b'/') {
            let parent = path.get(..slash).unwrap_or_default();
            if look_at(&self.worktree, parent)?.is_none() {
                let (dir, name) =
                    beneath::parent_of(&self.worktree, parent)?.ok_or(Errno::ENOENT)?;
                mkdirat(&dir, name.as_c_str(), Mode::from_bits_truncate(0o777))?;
            }
        }
        let (dir, name) = beneath::parent_of(&self.worktree, path)?.ok_or(Errno::ENOENT)?;
        let kept = format!("old-{number}");
        let flags = RenameFlags::RENAME_NOREPLACE;
        renameat2(staged, kept.as_str(), &dir, name.as_c_str(), flags)
    }

    /// Puts the old index back, if what is there is what the landing put there.
    fn restore_index(&self, journal: &Path) -> Result<(), GitError> {
        let [old, new, _] = indexes(journal);
        let index = self.home.repo().path().join("index");
        let (Ok(now), Ok(new)) = (fs::read(&index), fs::read(&new)) else {
            return Ok(());
        };
        if now == new && old.exists() {
            fs::rename(&old, &index).map_err(io("restore", &index))?;
        }
        Ok(())
    }
}

fn is_file(leaf: &Leaf) -> bool {
    leaf.mode != SUBMODULE
}
