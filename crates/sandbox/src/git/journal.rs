//! Recovery journal of worktree updates: the next update repairs what a crash interrupted.
//!
//! ```text
//!   .git/palisade-landing-<n>           the journal, locked while its update runs
//!   .git/palisade-landing-<n>.index     the index before the update
//!   .git/palisade-landing-<n>.fresh     the index after the update
//!   .git/palisade-landing-<n>.next      the new index while it is written
//!   <worktree>/.palisade-landing-<n>/   the staging directory with new-<k>, the new files,
//!                                       and old-<k>, the replaced files
//! ```
//!
//! The journal is in `.git`, which no agent can write: a directory in the worktree with the name of
//! a staging directory, but without a journal, is ignored.

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

use super::dirty::{matches_blob, stat_path};
use super::error::{GitError, io};
use super::host_repository::HostRepository;
use super::quarantine::unique_name;
use super::tree::{Change, Leaf, SUBMODULE};
use crate::beneath;

/// The start of the name of a journal.
const NAME_PREFIX: &str = "palisade-landing-";

/// A file that is created in the staging directory when all new files are written. No file is moved
/// earlier.
pub(super) const READY: &str = "ready";

/// The state in which an update is complete.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Goal {
    /// All files are in place.
    Files,
    /// A branch, or a detached HEAD, points to this commit or a descendant.
    Reference { name: String, commit: String },
    /// HEAD is on a branch.
    Head { branch: String },
}

#[derive(Debug, Serialize, Deserialize)]
struct JournalRecord {
    goal: Goal,
    changes: Vec<ChangeRecord>,
}

/// A change as recorded in the journal: modes and ids, with paths as bytes.
#[derive(Debug, Serialize, Deserialize)]
struct ChangeRecord {
    path: Vec<u8>,
    old: Option<(u32, String)>,
    new: Option<(u32, String)>,
}

impl ChangeRecord {
    fn from_change(change: &Change) -> Self {
        let written = |leaf: Leaf| (leaf.mode, leaf.id.to_string());
        Self {
            path: change.path.clone(),
            old: change.old.map(written),
            new: change.new.map(written),
        }
    }

    fn to_change(&self) -> Option<Change> {
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

/// The open journal of a running update. Dropping it removes the journal: the update is complete or
/// rolled back.
pub(super) struct Journal {
    path: PathBuf,
    _lock: Flock<File>,
    kept: bool,
}

impl Journal {
    /// Writes the journal. Also returns the path of the staging directory, which is not created
    /// yet.
    pub(super) fn open(
        host_repository: &HostRepository,
        goal: Goal,
        changes: &[Change],
    ) -> Result<(Self, PathBuf), GitError> {
        let name = unique_name(NAME_PREFIX);
        let path = host_repository.repo().path().join(&name);
        let file = OpenOptions::new().write(true).create_new(true).open(&path);
        let file = file.map_err(io("create", &path))?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock);
        let mut lock = lock.map_err(|(_, errno)| io("lock", &path)(errno))?;
        let record = JournalRecord {
            goal,
            changes: changes.iter().map(ChangeRecord::from_change).collect(),
        };
        let text = serde_json::to_vec(&record).map_err(std::io::Error::other);
        text.and_then(|text| lock.write_all(&text))
            .and_then(|()| lock.sync_all())
            .map_err(io("write", &path))?;
        let stage = host_repository.root().join(format!(".{name}"));
        let journal = Self {
            path,
            _lock: lock,
            kept: false,
        };
        Ok((journal, stage))
    }

    /// The content of index.lock, which names its owner.
    pub(super) fn lock_content(&self) -> String {
        lock_content(&self.path)
    }

    /// The path at which the new index is written.
    pub(super) fn next_index(&self) -> PathBuf {
        let [_, _, next] = index_paths(&self.path);
        next
    }

    /// Saves the current index before `fresh` replaces it.
    pub(super) fn keep_index(&self, index: &Path, fresh: &Path) -> Result<(), GitError> {
        let [old, new, _] = index_paths(&self.path);
        if index.exists() {
            fs::copy(fresh, &new).map_err(io("copy", fresh))?;
            fs::copy(index, &old).map_err(io("copy", index))?;
        }
        Ok(())
    }

    /// Keeps the journal on drop, so that the next update recovers.
    pub(super) fn keep(&mut self) {
        self.kept = true;
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        if !self.kept {
            remove_journal(&self.path);
        }
    }
}

fn lock_content(journal: &Path) -> String {
    let name = journal.file_name().unwrap_or_default();
    format!("{}\n", name.to_string_lossy())
}

fn index_paths(journal: &Path) -> [PathBuf; 3] {
    ["index", "fresh", "next"].map(|end| journal.with_extension(end))
}

fn remove_journal(journal: &Path) {
    for path in index_paths(journal) {
        let _ = fs::remove_file(path);
    }
    let _ = fs::remove_file(journal);
}

impl HostRepository {
    /// Recovers from a crash in the middle of a merge, an apply or a checkout: rolls the update
    /// back, or completes it if only clean-up was missing. Returns a message for each recovered
    /// update.
    pub fn recover(&self) -> Result<Vec<String>, GitError> {
        let dir = self.repo().path();
        let mut messages = Vec::new();
        for entry in fs::read_dir(dir).map_err(io("list", dir))?.flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if !name.starts_with(NAME_PREFIX) || name.contains('.') {
                continue;
            }
            let journal = entry.path();
            let Ok(file) = File::open(&journal) else {
                continue;
            };
            // A locked journal belongs to a running process.
            if let Ok(mut lock) = Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                messages.extend(self.recover_journal(&journal, &mut lock)?);
            }
        }
        Ok(messages)
    }

    fn recover_journal(&self, journal: &Path, file: &mut File) -> Result<Option<String>, GitError> {
        let name = journal.file_name().unwrap_or_default().to_string_lossy();
        let stage = self.root().join(format!(".{name}"));
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(io("read", journal))?;
        let record = serde_json::from_slice::<JournalRecord>(&text).ok();
        let message = match record.filter(|_| stage.join(READY).exists()) {
            // No file has moved yet.
            None => None,
            Some(record) => {
                let changes = record
                    .changes
                    .iter()
                    .filter_map(ChangeRecord::to_change)
                    .collect();
                let left = InterruptedUpdate {
                    host_repository: self,
                    worktree: beneath::open_root(self.root()).map_err(io("open", self.root()))?,
                    stage: &stage,
                    changes,
                };
                Some(if left.is_complete(&record.goal)? {
                    "an earlier merge was interrupted after its last step; it is complete"
                } else {
                    left.roll_back(journal)?;
                    "an earlier merge was interrupted; your files and index are as they were before it"
                })
            }
        };
        let lock = self.repo().path().join("index.lock");
        if fs::read(&lock).is_ok_and(|text| text == lock_content(journal).into_bytes()) {
            fs::remove_file(&lock).map_err(io("remove", &lock))?;
        }
        if stage.is_dir() && !stage.is_symlink() {
            fs::remove_dir_all(&stage).map_err(io("remove", &stage))?;
        }
        remove_journal(journal);
        Ok(message.map(str::to_owned))
    }
}

/// The state that an interrupted update left.
struct InterruptedUpdate<'a> {
    host_repository: &'a HostRepository,
    worktree: OwnedFd,
    stage: &'a Path,
    changes: Vec<Change>,
}

impl InterruptedUpdate<'_> {
    fn is_complete(&self, goal: &Goal) -> Result<bool, GitError> {
        let repo = self.host_repository.repo();
        Ok(match goal {
            Goal::Files => self.changes.iter().enumerate().all(|(number, change)| {
                let (new, old) = (change.new.filter(is_file), change.old.filter(is_file));
                (new.is_none() || !self.is_staged("new", number))
                    && (old.is_none() || self.is_staged("old", number))
            }),
            Goal::Reference { name, commit } => {
                let now = repo.refname_to_id(name).ok();
                match (now, Oid::from_str(commit).ok()) {
                    (Some(now), Some(commit)) => {
                        self.host_repository.is_or_descends_from(now, commit)?
                    }
                    _ => false,
                }
            }
            Goal::Head { branch } => self.host_repository.head()?.branch.as_ref() == Some(branch),
        })
    }

    fn is_staged(&self, kind: &str, number: usize) -> bool {
        let path = self.stage.join(format!("{kind}-{number}"));
        path.symlink_metadata().is_ok()
    }

    /// Rolls back the completed steps, which it derives from the existing files. If the operator
    /// has changed a path since, the path is kept, and the rollback ends with an error.
    fn roll_back(&self, journal: &Path) -> Result<(), GitError> {
        let interrupted = |path: &[u8]| GitError::Interrupted {
            path: path.to_vec(),
            stage: self.stage.to_owned(),
        };
        let staged = beneath::open_root(self.stage).map_err(io("open", self.stage))?;
        for (number, change) in self.changes.iter().enumerate() {
            let Some(new) = change.new.filter(is_file) else {
                continue;
            };
            if self.is_staged("new", number) {
                continue;
            }
            let at = self
                .host_repository
                .root()
                .join(beneath::path_from_bytes(&change.path));
            // The new file may be absent, removed since, or replaced by the old one.
            if matches_blob(&self.worktree, &change.path, new).map_err(io("stat", &at))? {
                self.unlink(&change.path).map_err(io("remove", &at))?;
            }
        }
        for (number, change) in self.changes.iter().enumerate() {
            if change.old.filter(is_file).is_some() && self.is_staged("old", number) {
                self.move_back(&staged, number, &change.path)
                    .map_err(|_| interrupted(&change.path))?;
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
            if stat_path(&self.worktree, parent)?.is_none() {
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

    /// Restores the old index if the current index was written by the update.
    fn restore_index(&self, journal: &Path) -> Result<(), GitError> {
        let [old, new, _] = index_paths(journal);
        let index = self.host_repository.repo().path().join("index");
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
