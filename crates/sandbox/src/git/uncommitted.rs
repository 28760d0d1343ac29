//! Copies the operator's uncommitted changes into a new workspace (`--dirty`).
//!
//! Changed, deleted and untracked files are copied: bytes as on disk, links as links, without
//! filters. Files that are ignored by the operator's or the repository's excludes, paths marked
//! assume-unchanged, and nested repositories are not copied. The index is read and never written.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use git2::{IndexEntry, IndexEntryExtendedFlag, IndexEntryFlag, ObjectType, Oid};
use ignore::gitignore::{Gitignore, GitignoreBuilder};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{FchmodatFlags, Mode, fchmodat, mkdirat};
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchownat, symlinkat, unlinkat};

use super::error::{GitError, git, io};
use super::host_repository::HostRepository;
use super::manifest::{FileStamp, Manifest};
use super::names::check_path;
use super::snapshot::{EntryContent, SkipReason, SnapshotBounds, SnapshotSource};
use super::tree::{self, EXECUTABLE, FILE, LINK, Leaf, SUBMODULE};
use super::walk::Walk;
use super::workspace::Owner;
use crate::beneath;

impl HostRepository {
    /// Applies the differences between `commit` and the worktree to a new workspace of that commit.
    /// Returns the number of paths.
    pub(super) fn copy_uncommitted(
        &self,
        commit: Oid,
        workspace: &Path,
        owner: Option<Owner>,
        bounds: &SnapshotBounds,
    ) -> Result<u64, GitError> {
        let repo = self.repo();
        if repo.is_bare() {
            return Ok(0);
        }
        let commit_object = repo.find_commit(commit);
        let commit_object = commit_object.map_err(git(format!("find commit {commit}")))?;
        let odb = repo.odb().map_err(git("open the objects"))?;
        let committed = tree::flatten(&odb, commit_object.tree_id())?;
        let tracked = Tracked::read(self, &committed)?;
        let mut walk = Walk::for_worktree(self.root(), &tracked.known, bounds, self.excludes())?;
        let mut target = WorkspaceWriter {
            root: beneath::open_root(workspace).map_err(io("open", workspace))?,
            path: workspace,
            owner,
            changed: 0,
        };
        let mut seen = BTreeSet::new();
        let mut total = 0;
        while let Some(entry) = walk.next()? {
            let path = entry.path;
            let at = self.root().join(beneath::path_from_bytes(path));
            let (mode, bytes) = match entry.content {
                EntryContent::Skipped(SkipReason::Unreadable) => {
                    let denied = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
                    return Err(io("read", &at)(denied));
                }
                EntryContent::Skipped(_) => continue,
                EntryContent::Unchanged => {
                    seen.insert(path.to_vec());
                    continue;
                }
                EntryContent::Link(text) => (LINK, text.to_vec()),
                EntryContent::File {
                    executable, body, ..
                } => {
                    let mut bytes = Vec::new();
                    body.read_to_end(&mut bytes).map_err(io("read", &at))?;
                    (if executable { EXECUTABLE } else { FILE }, bytes)
                }
            };
            seen.insert(path.to_vec());
            let id = Oid::hash_object(ObjectType::Blob, &bytes).map_err(git("hash a file"))?;
            let same = committed.get(path) == Some(&Leaf { mode, id });
            if same || tracked.not_compared.contains(path) {
                continue;
            }
            check_path(path)?;
            let size = bytes.len() as u64;
            total += size;
            check_size("a file's size", size, bounds.file, path)?;
            check_size("the size of all changed files", total, bounds.total, path)?;
            target.replace_file(path, mode, &bytes)?;
        }
        for (path, leaf) in &committed {
            if leaf.mode != SUBMODULE
                && !seen.contains(path)
                && !tracked.not_compared.contains(path)
            {
                target.remove(path)?;
            }
        }
        Ok(target.changed)
    }

    /// Reads the operator's global excludes and the repository's own.
    fn excludes(&self) -> Gitignore {
        let repo = self.repo();
        let named = repo
            .config()
            .and_then(|config| config.get_path("core.excludesfile"));
        let global = named.ok().or_else(|| {
            let config = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
            let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".config"));
            Some(config.or_else(home)?.join("git/ignore"))
        });
        let own = repo.commondir().join("info/exclude");
        let mut patterns = GitignoreBuilder::new("/");
        for path in global.into_iter().chain([own]) {
            let text = fs::read(path).unwrap_or_default();
            for line in String::from_utf8_lossy(&text).lines() {
                // An invalid pattern ignores nothing, as in git.
                let _ = patterns.add_line(None, line);
            }
        }
        patterns.build().unwrap_or_else(|_| Gitignore::empty())
    }
}

fn check_size(what: &'static str, size: u64, bound: u64, path: &[u8]) -> Result<(), GitError> {
    if size > bound {
        let path = path.to_vec();
        return Err(GitError::TooMuch { what, bound, path });
    }
    Ok(())
}

/// The tracked paths of the operator's index.
struct Tracked {
    /// The index entries. Only an entry that equals the commit's has valid stat data; the others
    /// mark their paths as tracked.
    known: Manifest,
    /// Paths that git does not compare with the disk: those outside a sparse checkout, and those
    /// marked assume-unchanged.
    not_compared: BTreeSet<Vec<u8>>,
}

impl Tracked {
    fn read(
        host_repository: &HostRepository,
        committed: &BTreeMap<Vec<u8>, Leaf>,
    ) -> Result<Self, GitError> {
        let mut index = host_repository
            .repo()
            .index()
            .map_err(git("read the index"))?;
        index.read(true).map_err(git("read the index"))?;
        let written = fs::metadata(host_repository.repo().path().join("index"));
        let mut tracked = Self {
            known: Manifest {
                taken: written.map_or((0, 0), |index| (index.mtime(), index.mtime_nsec())),
                entries: BTreeMap::new(),
            },
            not_compared: BTreeSet::new(),
        };
        for entry in index.iter() {
            let leaf = Leaf {
                mode: entry.mode,
                id: entry.id,
            };
            let as_committed = committed.get(&entry.path) == Some(&leaf);
            let skipped = entry.flags_extended & IndexEntryExtendedFlag::SKIP_WORKTREE.bits();
            let assumed = entry.flags & IndexEntryFlag::VALID.bits();
            if skipped != 0 || assumed != 0 {
                tracked.not_compared.insert(entry.path.clone());
            }
            let stamp = stamp(&entry, as_committed);
            tracked.known.entries.insert(entry.path, stamp);
        }
        Ok(tracked)
    }
}

/// Converts an index entry's stat data. If the content differs from the commit's, the inode is set
/// to 0, so that the stamp matches no file.
fn stamp(entry: &IndexEntry, as_committed: bool) -> FileStamp {
    let time_of =
        |time: git2::IndexTime| (i64::from(time.seconds()), i64::from(time.nanoseconds()));
    FileStamp {
        mode: entry.mode,
        size: u64::from(entry.file_size),
        mtime: time_of(entry.mtime),
        ctime: time_of(entry.ctime),
        ino: if as_committed { entry.ino.into() } else { 0 },
        id: entry.id,
    }
}

/// Writes to the new workspace. The workspace has symbolic links of the operator's repository,
/// which may point anywhere, so every path is opened one component at a time.
struct WorkspaceWriter<'a> {
    root: OwnedFd,
    path: &'a Path,
    owner: Option<Owner>,
    changed: u64,
}

impl WorkspaceWriter<'_> {
    fn replace_file(&mut self, path: &[u8], mode: u32, bytes: &[u8]) -> Result<(), GitError> {
        self.changed += 1;
        self.write(path, mode, bytes)
            .map_err(io("write", &self.path.join(beneath::path_from_bytes(path))))
    }

    fn write(&self, path: &[u8], mode: u32, bytes: &[u8]) -> std::io::Result<()> {
        self.make_parents(path)?;
        let (dir, name) = beneath::parent_of(&self.root, path)?.ok_or(Errno::ENOENT)?;
        match unlinkat(&dir, name.as_c_str(), UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => {}
            Err(Errno::EISDIR) => {
                // A directory is replaced by a file. No other process uses this workspace, and the
                // parents were opened without following links.
                fs::remove_dir_all(self.path.join(beneath::path_from_bytes(path)))?;
            }
            Err(errno) => return Err(errno.into()),
        }
        if mode == LINK {
            symlinkat(beneath::path_from_bytes(bytes), &dir, name.as_c_str())?;
        } else {
            let flags = OFlag::O_WRONLY
                | OFlag::O_CREAT
                | OFlag::O_EXCL
                | OFlag::O_NOFOLLOW
                | OFlag::O_CLOEXEC;
            let bits = if mode == EXECUTABLE { 0o755 } else { 0o644 };
            let file = openat(&dir, name.as_c_str(), flags, Mode::from_bits_truncate(bits))?;
            File::from(file).write_all(bytes)?;
        }
        self.chown(&dir, &name)?;
        Ok(())
    }

    fn make_parents(&self, path: &[u8]) -> Result<(), Errno> {
        for (slash, _) in path.iter().enumerate().filter(|(_, b)| **b == b'/') {
            let parent = path.get(..slash).unwrap_or_default();
            let (dir, name) = beneath::parent_of(&self.root, parent)?.ok_or(Errno::ENOENT)?;
            match beneath::open_directory(dir.as_fd(), &name) {
                Ok(_) => continue,
                // A file or a link is replaced by a directory.
                Err(Errno::ENOTDIR | Errno::ELOOP) => {
                    unlinkat(&dir, name.as_c_str(), UnlinkatFlags::NoRemoveDir)?;
                }
                Err(Errno::ENOENT) => {}
                Err(errno) => return Err(errno),
            }
            let mode = Mode::from_bits_truncate(0o755);
            mkdirat(&dir, name.as_c_str(), mode)?;
            // The mode must not depend on the gate's umask. The directory was just created, so the
            // name is no link.
            fchmodat(&dir, name.as_c_str(), mode, FchmodatFlags::FollowSymlink)?;
            self.chown(&dir, &name)?;
        }
        Ok(())
    }

    fn chown(&self, dir: &OwnedFd, name: &std::ffi::CStr) -> Result<(), Errno> {
        let Some((user, group)) = self.owner else {
            return Ok(());
        };
        let (user, group) = (Some(Uid::from_raw(user)), Some(Gid::from_raw(group)));
        fchownat(dir, name, user, group, AtFlags::AT_SYMLINK_NOFOLLOW)
    }

    /// Removes a file, and directories with their last file, as git does.
    fn remove(&mut self, path: &[u8]) -> Result<(), GitError> {
        self.changed += 1;
        let at = self.path.join(beneath::path_from_bytes(path));
        let mut below = path;
        let mut flags = UnlinkatFlags::NoRemoveDir;
        loop {
            let Some((dir, name)) =
                beneath::parent_of(&self.root, below).map_err(io("remove", &at))?
            else {
                return Ok(());
            };
            match unlinkat(&dir, name.as_c_str(), flags) {
                Ok(()) => {}
                // The path was replaced by a directory, or its directory by a file.
                Err(Errno::ENOENT | Errno::EISDIR | Errno::ENOTDIR | Errno::ENOTEMPTY) => {
                    return Ok(());
                }
                Err(errno) => return Err(io("remove", &at)(errno)),
            }
            let Some(slash) = below.iter().rposition(|b| *b == b'/') else {
                return Ok(());
            };
            below = below.get(..slash).unwrap_or_default();
            flags = UnlinkatFlags::RemoveDir;
        }
    }
}
