//! Parallel walk of a directory that skips files ignored by `.gitignore`.
//!
//! Directories are opened relative to the start of the walk and never through a symbolic link, so
//! a directory that is moved or replaced meanwhile cannot redirect the walk. A `.gitignore` is read
//! only if it is a regular file, up to a size limit: an agent may have made it a FIFO.

use std::ffi::OsStr;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use ignore::Match;
use ignore::gitignore::{Gitignore, GitignoreBuilder};
use ignore::overrides::Override;
use nix::dir::{Dir, Type};
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{SFlag, fstat, fstatat};

use super::Cancelled;
use crate::root::{kind, open_name, open_without_links};

/// Maximum number of threads; more threads would only wait for each other.
const MAX_THREADS: usize = 12;

/// Maximum number of bytes that are read from a file of ignore patterns.
const MAX_PATTERN_FILE: u64 = 1 << 20;

/// A walk of a directory.
pub(super) struct Walk<'a> {
    /// The directory that paths are relative to.
    pub(super) base: &'a OwnedFd,
    /// The start of the walk, relative to the base.
    pub(super) top: &'a Path,
    /// Globs that take precedence over ignore rules.
    pub(super) overrides: Override,
    /// Stops the walk when set.
    pub(super) cancelled: &'a Cancelled,
}

/// A file that was found.
pub(super) struct FoundFile<'a> {
    /// The open parent directory.
    pub(super) directory: &'a OwnedFd,
    /// The name in that directory.
    pub(super) name: &'a OsStr,
    /// The path relative to the base.
    pub(super) path: &'a Path,
    /// Whether the entry is a regular file, not a symbolic link or special file.
    pub(super) is_file: bool,
}

/// Whether the walk continues.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum WalkControl {
    Continue,
    Stop,
}

impl Walk<'_> {
    /// Calls a visitor for every file; `make` creates one visitor per thread.
    pub(super) fn run<V: FnMut(FoundFile<'_>) -> WalkControl>(&self, make: impl Fn() -> V + Sync) {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let queue = WorkQueue::new(self.first_task());
        std::thread::scope(|scope| {
            for _ in 1..threads.min(MAX_THREADS) {
                scope.spawn(|| self.run_worker(&queue, make()));
            }
            self.run_worker(&queue, make());
        });
    }

    /// The first directory, with the ignore rules of its parents.
    fn first_task(&self) -> Task {
        let mut rules = None;
        let parents: Vec<&Path> = self.top.ancestors().skip(1).collect();
        for path in parents.into_iter().rev() {
            if let Ok(directory) = open_directory(self.base, path) {
                rules = Rules::load(&directory, path, rules);
            }
        }
        Task {
            path: self.top.to_owned(),
            rules,
        }
    }

    fn run_worker<V: FnMut(FoundFile<'_>) -> WalkControl>(&self, queue: &WorkQueue, mut visit: V) {
        while let Some(task) = queue.next() {
            let mut below = Vec::new();
            let next = if self.cancelled.is_cancelled() {
                WalkControl::Stop
            } else {
                self.list(&task, &mut below, &mut visit)
            };
            queue.finish_task(below, next);
        }
    }

    fn list<V: FnMut(FoundFile<'_>) -> WalkControl>(
        &self,
        task: &Task,
        below: &mut Vec<Task>,
        visit: &mut V,
    ) -> WalkControl {
        // A removed or unreadable directory is skipped.
        let Ok(directory) = open_directory(self.base, &task.path) else {
            return WalkControl::Continue;
        };
        let rules = Rules::load(&directory, &task.path, task.rules.clone());
        let Ok(mut listing) = directory
            .try_clone()
            .map_err(|_| nix::errno::Errno::EMFILE)
            .and_then(Dir::from_fd)
        else {
            return WalkControl::Continue;
        };
        for entry in listing.iter() {
            let Ok(entry) = entry else { break };
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if matches!(name.as_bytes(), b"." | b".." | b".git") {
                continue;
            }
            let found = entry
                .file_type()
                .or_else(|| stat_type(&directory, name))
                .unwrap_or(Type::File);
            let is_directory = found == Type::Directory;
            let path = task.path.join(name);
            if self.is_ignored(&path, is_directory, rules.as_deref()) {
                continue;
            }
            if is_directory {
                below.push(Task {
                    path,
                    rules: rules.clone(),
                });
                continue;
            }
            let found = FoundFile {
                directory: &directory,
                name,
                path: &path,
                is_file: found == Type::File,
            };
            if visit(found) == WalkControl::Stop {
                return WalkControl::Stop;
            }
        }
        WalkControl::Continue
    }

    /// Whether a path is ignored. Globs of the request take precedence, then the closest
    /// `.gitignore`.
    fn is_ignored(&self, path: &Path, is_directory: bool, rules: Option<&Rules>) -> bool {
        match self.overrides.matched(path, is_directory) {
            Match::Ignore(_) => return true,
            Match::Whitelist(_) => return false,
            Match::None => {}
        }
        let mut next = rules;
        while let Some(rules) = next {
            match rules.own.matched(path, is_directory) {
                Match::Ignore(_) => return true,
                Match::Whitelist(_) => return false,
                Match::None => next = rules.parents.as_deref(),
            }
        }
        false
    }
}

fn open_directory(base: &OwnedFd, path: &Path) -> nix::Result<OwnedFd> {
    open_without_links(base, path, OFlag::O_RDONLY | OFlag::O_DIRECTORY)
}

/// The type of an entry, for file systems that do not report it in a listing.
fn stat_type(directory: &OwnedFd, name: &OsStr) -> Option<Type> {
    let data = fstatat(directory, name, AtFlags::AT_SYMLINK_NOFOLLOW).ok()?;
    Some(match kind(&data) {
        SFlag::S_IFREG => Type::File,
        SFlag::S_IFDIR => Type::Directory,
        SFlag::S_IFLNK => Type::Symlink,
        _ => Type::Fifo,
    })
}

/// The ignore patterns of a directory and its parents.
struct Rules {
    /// The patterns of the directory itself.
    own: Gitignore,
    parents: Option<Arc<Rules>>,
}

impl Rules {
    fn load(directory: &OwnedFd, path: &Path, parents: Option<Arc<Self>>) -> Option<Arc<Self>> {
        let mut rules = parents;
        // A nested repository does not inherit the patterns of its parents.
        if fstatat(directory, ".git", AtFlags::AT_SYMLINK_NOFOLLOW).is_ok() {
            rules = None;
            let exclude = Path::new(".git/info/exclude");
            if let Ok(file) = open_without_links(directory, exclude, OFlag::O_RDONLY) {
                rules = Self::read(file, path, rules);
            }
        }
        match open_name(directory, OsStr::new(".gitignore"), OFlag::O_RDONLY) {
            Ok(file) => Self::read(file, path, rules),
            Err(_) => rules,
        }
    }

    fn read(file: OwnedFd, path: &Path, parents: Option<Arc<Self>>) -> Option<Arc<Self>> {
        if !fstat(file.as_fd()).is_ok_and(|data| kind(&data) == SFlag::S_IFREG) {
            return parents;
        }
        let mut bytes = Vec::new();
        let file = std::fs::File::from(file);
        if file.take(MAX_PATTERN_FILE).read_to_end(&mut bytes).is_err() {
            return parents;
        }
        let text = String::from_utf8_lossy(&bytes);
        let text = text.trim_start_matches('\u{feff}');
        let mut builder = GitignoreBuilder::new(path);
        for line in text.lines() {
            // An invalid pattern matches nothing, as in git.
            let _ = builder.add_line(None, line);
        }
        match builder.build() {
            Ok(own) if !own.is_empty() => Some(Arc::new(Self { own, parents })),
            _ => parents,
        }
    }
}

/// A directory to list.
struct Task {
    path: PathBuf,
    rules: Option<Arc<Rules>>,
}

/// Queue of directories, shared by the threads.
struct WorkQueue {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    waiting: Vec<Task>,
    busy: usize,
    stopped: bool,
}

impl WorkQueue {
    fn new(first: Task) -> Self {
        Self {
            state: Mutex::new(State {
                waiting: vec![first],
                busy: 0,
                stopped: false,
            }),
            changed: Condvar::new(),
        }
    }

    /// The next directory; `None` when the queue is empty and no thread can add to it.
    fn next(&self) -> Option<Task> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if state.stopped {
                return None;
            }
            if let Some(task) = state.waiting.pop() {
                state.busy += 1;
                return Some(task);
            }
            if state.busy == 0 {
                self.changed.notify_all();
                return None;
            }
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn finish_task(&self, below: Vec<Task>, next: WalkControl) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.busy -= 1;
        state.waiting.extend(below);
        state.stopped |= next == WalkControl::Stop;
        drop(state);
        self.changed.notify_all();
    }
}
