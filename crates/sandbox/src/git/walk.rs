//! Walks a workspace and reads only the files that changed.
//!
//! The workspace is untrusted: directories are opened by descriptor, one name at a time and never
//! through a symbolic link; the type of an opened file is checked again; ignore files are used only
//! as patterns; every count is bounded.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use git2::Oid;
use ignore::Match;
use ignore::gitignore::{Gitignore, GitignoreBuilder};
use nix::dir::Dir;
use nix::errno::Errno;
use nix::sys::stat::{FileStat, SFlag, fstat};

use super::error::{GitError, io};
use super::manifest::{FileStamp, FileTime, Manifest, now};
use super::snapshot::{EntryContent, SkipReason, SnapshotBounds, SnapshotEntry, SnapshotSource};
use super::tree::{EXECUTABLE, FILE, LINK, SUBMODULE};
use crate::beneath;

const MAX_IGNORE_FILE_BYTES: u64 = 256 * 1024;
const MAX_IGNORE_BYTES: u64 = 4 * 1024 * 1024;

/// Walks a workspace from the host.
pub struct Walk<'a> {
    root: PathBuf,
    manifest: &'a Manifest,
    bounds: SnapshotBounds,
    started: FileTime,
    stack: Vec<DirectoryLevel>,
    seen: u64,
    ignore_bytes: u64,
    /// The operator's excludes, which ignore files in the tree can override.
    excludes: Option<Gitignore>,
    path: Vec<u8>,
    file: Option<std::io::Take<File>>,
    link: Vec<u8>,
}

/// An open directory of the walk.
struct DirectoryLevel {
    dir: OwnedFd,
    names: std::vec::IntoIter<CString>,
    /// Length of the path prefix of this directory, including the slash.
    prefix: usize,
    patterns: Option<Gitignore>,
    /// Whether a parent is ignored; then only tracked files count.
    ignored: bool,
}

impl<'a> Walk<'a> {
    /// Starts at a workspace's root. `manifest` is its last known state.
    pub fn new(
        root: &Path,
        manifest: &'a Manifest,
        bounds: &SnapshotBounds,
    ) -> Result<Self, GitError> {
        Self::from_open_root(open_root(root)?, root, manifest, bounds)
    }

    /// Starts at an open root directory; `root` is its path in error messages.
    pub(crate) fn from_open_root(
        dir: OwnedFd,
        root: &Path,
        manifest: &'a Manifest,
        bounds: &SnapshotBounds,
    ) -> Result<Self, GitError> {
        let mut walk = Self {
            root: root.to_owned(),
            manifest,
            bounds: bounds.clone(),
            started: now(),
            stack: Vec::new(),
            seen: 0,
            ignore_bytes: 0,
            excludes: None,
            path: Vec::new(),
            file: None,
            link: Vec::new(),
        };
        walk.enter_directory(dir, false)?;
        Ok(walk)
    }

    /// Starts at the operator's worktree. The operator's own excludes apply, unless an ignore file
    /// in the tree overrides them; of a nested repository only the files are read that the
    /// operator's repository tracks.
    pub(super) fn for_worktree(
        root: &Path,
        manifest: &'a Manifest,
        bounds: &SnapshotBounds,
        excludes: Gitignore,
    ) -> Result<Self, GitError> {
        let mut walk = Self::new(root, manifest, bounds)?;
        walk.excludes = Some(excludes);
        Ok(walk)
    }

    fn enter_directory(&mut self, dir: OwnedFd, ignored: bool) -> Result<(), GitError> {
        if self.stack.len() >= self.bounds.depth {
            return Err(self.too_much("the depth of directories", self.bounds.depth as u64));
        }
        let listed = dir.try_clone().map_err(io("list", &self.root))?;
        let mut listed = Dir::from_fd(listed).map_err(io("list", &self.root))?;
        let mut names = Vec::new();
        let (mut has_patterns, mut has_git) = (false, false);
        for entry in listed.iter() {
            let entry = entry.map_err(io("list", &self.root))?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            self.seen += 1;
            if self.seen > self.bounds.entries {
                return Err(self.too_much("the number of files", self.bounds.entries));
            }
            has_patterns |= name.to_bytes() == b".gitignore";
            has_git |= name.to_bytes() == b".git";
            names.push(name.to_owned());
        }
        let patterns = if has_patterns {
            self.read_patterns(&dir)?
        } else {
            None
        };
        names.sort_unstable();
        self.stack.push(DirectoryLevel {
            dir,
            names: names.into_iter(),
            prefix: self.path.len(),
            patterns,
            ignored: ignored || (has_git && self.excludes.is_some()),
        });
        Ok(())
    }

    fn too_much(&self, what: &'static str, bound: u64) -> GitError {
        GitError::TooMuch {
            what,
            bound,
            path: self.path.clone(),
        }
    }

    fn read_patterns(&mut self, dir: &OwnedFd) -> Result<Option<Gitignore>, GitError> {
        let Ok(file) = beneath::open_file(dir, c".gitignore") else {
            return Ok(None);
        };
        let regular = fstat(&file).is_ok_and(|stat| file_type(&stat) == SFlag::S_IFREG);
        if !regular {
            return Ok(None);
        }
        let mut text = Vec::new();
        file.take(MAX_IGNORE_FILE_BYTES + 1)
            .read_to_end(&mut text)
            .map_err(io("read an ignore file in", &self.root))?;
        let length = text.len() as u64;
        self.ignore_bytes += length;
        if length > MAX_IGNORE_FILE_BYTES {
            return Err(self.too_much("an ignore file's size", MAX_IGNORE_FILE_BYTES));
        }
        if self.ignore_bytes > MAX_IGNORE_BYTES {
            return Err(self.too_much("the size of all ignore files", MAX_IGNORE_BYTES));
        }
        let mut patterns = GitignoreBuilder::new("/");
        for line in String::from_utf8_lossy(&text).lines() {
            // An invalid pattern ignores nothing, as in git.
            let _ = patterns.add_line(None, line);
        }
        Ok(patterns.build().ok())
    }

    /// Whether the ignore files exclude the current path; the innermost file decides.
    fn is_ignored(&self, is_dir: bool) -> bool {
        for level in self.stack.iter().rev() {
            let below = beneath::path_from_bytes(self.path.get(level.prefix..).unwrap_or_default());
            match level
                .patterns
                .as_ref()
                .map(|patterns| patterns.matched(below, is_dir))
            {
                Some(Match::Ignore(_)) => return true,
                Some(Match::Whitelist(_)) => return false,
                Some(Match::None) | None => {}
            }
        }
        let excludes = self.excludes.as_ref();
        excludes.is_some_and(|all| {
            all.matched(beneath::path_from_bytes(&self.path), is_dir)
                .is_ignore()
        })
    }

    /// Finds the next entry; `None` at the end.
    fn step(&mut self) -> Result<Option<WalkStep>, GitError> {
        loop {
            let Some(level) = self.stack.last_mut() else {
                return Ok(None);
            };
            let Some(name) = level.names.next() else {
                self.stack.pop();
                continue;
            };
            self.path.truncate(level.prefix);
            self.path.extend_from_slice(name.to_bytes());
            let ignored_above = level.ignored;
            if name.to_bytes() == b".git" {
                if self.stack.len() == 1 {
                    continue;
                }
                return Ok(Some(WalkStep::Skipped(SkipReason::Repository)));
            }
            let stat = match beneath::stat(level.dir.as_fd(), &name) {
                Ok(Some(stat)) => stat,
                // The entry was removed after it was listed.
                Ok(None) => continue,
                Err(error) => return Err(io("stat", &self.current_path())(error)),
            };
            let is_dir = file_type(&stat) == SFlag::S_IFDIR;
            let known = self.manifest.entries.get(&self.path).copied();
            let ignored = ignored_above || self.is_ignored(is_dir);
            if is_dir {
                if known.is_some_and(|stamp| stamp.mode == SUBMODULE) {
                    return Ok(Some(WalkStep::Unchanged));
                }
                if ignored && !self.manifest.has_below(&self.path) {
                    continue;
                }
                if self.descend(&name, ignored)? {
                    continue;
                }
                return Ok(Some(WalkStep::Skipped(SkipReason::Unreadable)));
            }
            if ignored && known.is_none() {
                continue;
            }
            if let Some(step) = self.examine_file(&name, &stat, known)? {
                return Ok(Some(step));
            }
        }
    }

    /// Enters a directory; `false` if permission is denied.
    fn descend(&mut self, name: &CStr, ignored: bool) -> Result<bool, GitError> {
        let Some(level) = self.stack.last() else {
            return Ok(true);
        };
        match beneath::open_directory(level.dir.as_fd(), name) {
            Ok(dir) => {
                self.path.push(b'/');
                self.enter_directory(dir, ignored)?;
                Ok(true)
            }
            // The entry was replaced after it was examined; the next snapshot sees it.
            Err(Errno::ENOENT | Errno::ELOOP | Errno::ENOTDIR) => Ok(true),
            Err(Errno::EACCES) => Ok(false),
            Err(error) => Err(io("open", &self.current_path())(error)),
        }
    }

    /// Compares an entry that is no directory with its stamp, and opens it if it changed.
    fn examine_file(
        &mut self,
        name: &CStr,
        stat: &FileStat,
        known: Option<FileStamp>,
    ) -> Result<Option<WalkStep>, GitError> {
        let skip_reason = match file_type(stat) {
            SFlag::S_IFREG | SFlag::S_IFLNK => None,
            SFlag::S_IFIFO => Some(SkipReason::Fifo),
            SFlag::S_IFSOCK => Some(SkipReason::Socket),
            _ => Some(SkipReason::Device),
        };
        if let Some(skip_reason) = skip_reason {
            return Ok(Some(WalkStep::Skipped(skip_reason)));
        }
        let stamp = stamp(stat);
        if known.is_some_and(|known| known.matches(&stamp, self.manifest.taken)) {
            return Ok(Some(WalkStep::Unchanged));
        }
        let Some(level) = self.stack.last() else {
            return Ok(None);
        };
        if stamp.mode == LINK {
            let text = match nix::fcntl::readlinkat(level.dir.as_fd(), name) {
                Ok(text) => text,
                Err(Errno::ENOENT | Errno::EINVAL) => return Ok(None),
                Err(error) => return Err(io("read the link", &self.current_path())(error)),
            };
            self.link = text.as_bytes().to_vec();
            return Ok(Some(WalkStep::Link(stamp)));
        }
        let file = match beneath::open_file(level.dir.as_fd(), name) {
            Ok(file) => file,
            Err(Errno::ENOENT | Errno::ELOOP) => return Ok(None),
            Err(Errno::EACCES) => return Ok(Some(WalkStep::Skipped(SkipReason::Unreadable))),
            Err(error) => return Err(io("open", &self.current_path())(error)),
        };
        // The type of the opened file is checked again, because the name may refer to another file
        // now.
        let stat = fstat(&file).map_err(io("stat", &self.current_path()))?;
        if file_type(&stat) != SFlag::S_IFREG {
            return Ok(None);
        }
        let stamp = self::stamp(&stat);
        self.file = Some(file.take(self.bounds.file.saturating_add(1)));
        Ok(Some(WalkStep::File(stamp)))
    }

    fn current_path(&self) -> PathBuf {
        self.root.join(beneath::path_from_bytes(&self.path))
    }
}

/// Opens a workspace's root.
pub(crate) fn open_root(root: &Path) -> Result<OwnedFd, GitError> {
    beneath::open_root(root).map_err(io("open", root))
}

/// The next entry of a walk.
enum WalkStep {
    Unchanged,
    File(FileStamp),
    Link(FileStamp),
    Skipped(SkipReason),
}

impl SnapshotSource for Walk<'_> {
    fn start_time(&self) -> FileTime {
        self.started
    }

    fn next(&mut self) -> Result<Option<SnapshotEntry<'_>>, GitError> {
        let Some(step) = self.step()? else {
            return Ok(None);
        };
        let (content, stamp) = match step {
            WalkStep::Unchanged => (EntryContent::Unchanged, None),
            WalkStep::Skipped(reason) => (EntryContent::Skipped(reason), None),
            WalkStep::Link(stamp) => (EntryContent::Link(&self.link), Some(stamp)),
            WalkStep::File(stamp) => match &mut self.file {
                Some(file) => {
                    let executable = stamp.mode == EXECUTABLE;
                    let content = EntryContent::File {
                        executable,
                        size: stamp.size,
                        body: file,
                    };
                    (content, Some(stamp))
                }
                None => (EntryContent::Unchanged, None),
            },
        };
        Ok(Some(SnapshotEntry {
            path: &self.path,
            content,
            stamp,
        }))
    }
}

fn file_type(stat: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT
}

/// Converts stat data; the blob is not known yet.
pub(super) fn stamp(stat: &FileStat) -> FileStamp {
    let mode = match file_type(stat) {
        SFlag::S_IFLNK => LINK,
        _ if stat.st_mode & 0o100 != 0 => EXECUTABLE,
        _ => FILE,
    };
    FileStamp {
        mode,
        size: u64::try_from(stat.st_size).unwrap_or_default(),
        mtime: (stat.st_mtime, stat.st_mtime_nsec),
        ctime: (stat.st_ctime, stat.st_ctime_nsec),
        ino: stat.st_ino,
        id: Oid::ZERO_SHA1,
    }
}
