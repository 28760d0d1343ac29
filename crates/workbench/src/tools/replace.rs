//! Atomic replacement of files: a reader sees the old or the new content, a full disk leaves the
//! old content, and other hard links of the file keep the old content.

use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, RenameFlags, renameat, renameat2};
use nix::poll::{PollTimeout, poll};
use nix::sys::stat::{FileStat, Mode, SFlag, fchmod, fstat};
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchown, unlinkat};

use crate::error::ToolError;
use crate::request::{WriteRequest, WriteResult};
use crate::root::{WorkspaceRoot, WriteTarget, kind, new_file};
use crate::truncation::as_u64;

/// Number of locks; names with the same hash share a lock.
const LOCK_COUNT: usize = 64;

/// Maximum number of attempts to find a free name for a temporary file.
const MAX_NAME_ATTEMPTS: usize = 32;

/// Maximum wait for a directory's lock. A replacement holds the lock for microseconds; a
/// longer lock belongs to an unrelated program.
const MAX_LOCK_WAIT: Duration = Duration::from_secs(5);

/// Interval between attempts to lock, in milliseconds; flock has no timeout.
const LOCK_POLL_MS: u8 = 1;

/// One lock per file name, which serializes changes within this server. The inode number cannot
/// be the key, because every change creates a new file.
#[derive(Debug)]
pub(super) struct Locks {
    locks: [Mutex<()>; LOCK_COUNT],
    hasher: RandomState,
}

impl Default for Locks {
    fn default() -> Self {
        Self {
            locks: std::array::from_fn(|_| Mutex::new(())),
            hasher: RandomState::new(),
        }
    }
}

impl Locks {
    pub(super) fn lock(&self, write_target: &WriteTarget) -> nix::Result<MutexGuard<'_, ()>> {
        let directory = fstat(&write_target.directory)?;
        let name = (directory.st_dev, directory.st_ino, &write_target.name);
        let index = usize::try_from(self.hasher.hash_one(name) % as_u64(LOCK_COUNT)).unwrap_or(0);
        let lock = self.locks.get(index).ok_or(Errno::EINVAL)?;
        Ok(lock.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

pub(super) fn write(
    root: &WorkspaceRoot,
    locks: &Locks,
    request: &WriteRequest,
) -> Result<WriteResult, ToolError> {
    let requested = request.path.as_str();
    let fail = |errno| ToolError::from_errno(requested, errno);
    let write_target = root.write_target(requested, true)?;
    let _lock = locks.lock(&write_target).map_err(fail)?;
    let old = write_target.stat().map_err(fail)?;
    if let Some(old) = &old {
        refuse_other_than_file(requested, old)?;
    }
    let temp_file =
        TempFile::make(&write_target, request.content.as_bytes(), old.as_ref()).map_err(fail)?;
    temp_file.replace().map_err(fail)?;
    let path = root.locate(requested)?;
    let path = path.strip_prefix(root.path()).unwrap_or(&path);
    Ok(WriteResult {
        ok: true,
        path: path.to_string_lossy().into_owned(),
        bytes: as_u64(request.content.len()),
    })
}

pub(super) fn refuse_other_than_file(requested: &str, data: &FileStat) -> Result<(), ToolError> {
    match kind(data) {
        SFlag::S_IFREG => Ok(()),
        SFlag::S_IFDIR => Err(ToolError::IsDirectory(requested.to_owned())),
        _ => Err(ToolError::NotAFile(requested.to_owned())),
    }
}

/// A temporary file with the new content in the directory of the target. Dropping it removes the
/// file.
pub(super) struct TempFile<'a> {
    write_target: &'a WriteTarget,
    name: String,
    /// Whether the temporary file still has to be removed.
    exists: bool,
}

impl<'a> TempFile<'a> {
    /// Writes and syncs the content, with owner and mode of the old file.
    pub(super) fn make(
        write_target: &'a WriteTarget,
        content: &[u8],
        old: Option<&FileStat>,
    ) -> nix::Result<Self> {
        let (mut file, name) = create_beside(write_target)?;
        let temp_file = Self {
            write_target,
            name,
            exists: true,
        };
        let errno =
            |error: std::io::Error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
        file.write_all(content).map_err(errno)?;
        if let Some(old) = old {
            keep_owner_and_mode(&file, old)?;
        }
        file.sync_all().map_err(errno)?;
        Ok(temp_file)
    }

    /// Replaces the target unconditionally.
    pub(super) fn replace(self) -> nix::Result<()> {
        let _lock = lock_directory(self.write_target)?;
        self.rename()
    }

    fn rename(mut self) -> nix::Result<()> {
        renameat(
            &self.write_target.directory,
            self.name.as_str(),
            &self.write_target.directory,
            self.write_target.name.as_os_str(),
        )?;
        self.exists = false;
        Ok(())
    }

    /// Replaces the target if it is still `old`. Returns false, without a change, if another
    /// program changed the target first.
    pub(super) fn replace_if_unchanged(self, old: &FileStat) -> nix::Result<bool> {
        let _lock = lock_directory(self.write_target)?;
        if !self
            .write_target
            .stat()?
            .is_some_and(|now| is_same(&now, old))
        {
            return Ok(false);
        }
        match self.exchange() {
            Ok(()) => {}
            // The file system has no exchange; the check above was the last one.
            Err(Errno::EINVAL | Errno::ENOSYS) => return self.rename().map(|()| true),
            Err(Errno::ENOENT) => return Ok(false),
            Err(errno) => return Err(errno),
        }
        // The exchange moved the replaced file here. A newer file than `old` is moved back; only a
        // program that does not lock the directory (an editor) can have written it.
        let aside = WriteTarget {
            directory: self
                .write_target
                .directory
                .try_clone()
                .map_err(|_| Errno::EMFILE)?,
            name: self.name.clone().into(),
        };
        if aside.stat()?.is_some_and(|was| is_same(&was, old)) {
            return Ok(true);
        }
        self.exchange()?;
        Ok(false)
    }

    fn exchange(&self) -> nix::Result<()> {
        renameat2(
            &self.write_target.directory,
            self.name.as_str(),
            &self.write_target.directory,
            self.write_target.name.as_os_str(),
            RenameFlags::RENAME_EXCHANGE,
        )
    }
}

impl Drop for TempFile<'_> {
    fn drop(&mut self) {
        if self.exists {
            let _ = unlinkat(
                &self.write_target.directory,
                self.name.as_str(),
                UnlinkatFlags::NoRemoveDir,
            );
        }
    }
}

/// Locks the directory against other servers on the same workspace, so that no server reads content
/// that is about to be moved back. Returns `None` on file systems without directory locks.
fn lock_directory(write_target: &WriteTarget) -> nix::Result<Option<Flock<OwnedFd>>> {
    let until = Instant::now() + MAX_LOCK_WAIT;
    let mut directory = write_target
        .directory
        .try_clone()
        .map_err(|_| Errno::EMFILE)?;
    loop {
        match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(Some(lock)),
            Err((again, Errno::EWOULDBLOCK)) if Instant::now() < until => directory = again,
            Err((_, Errno::EWOULDBLOCK)) => return Err(Errno::EBUSY),
            Err((again, Errno::EINTR)) => {
                directory = again;
                continue;
            }
            Err(_) => return Ok(None),
        }
        let _ = poll(&mut [], PollTimeout::from(LOCK_POLL_MS));
    }
}

/// Whether a file is the same and unchanged. The change time is not compared, because a rename
/// updates it.
fn is_same(now: &FileStat, then: &FileStat) -> bool {
    let identity = |data: &FileStat| {
        (
            data.st_dev,
            data.st_ino,
            data.st_size,
            data.st_mtime,
            data.st_mtime_nsec,
        )
    };
    identity(now) == identity(then)
}

/// Creates a temporary file in the same directory under a free name.
fn create_beside(write_target: &WriteTarget) -> nix::Result<(File, String)> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    for _ in 0..MAX_NAME_ATTEMPTS {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!(".palisade-{}-{number}.tmp", std::process::id());
        match new_file(
            &write_target.directory,
            &name,
            Mode::from_bits_truncate(0o666),
        ) {
            Ok(file) => return Ok((file, name)),
            Err(Errno::EEXIST) => {}
            Err(errno) => return Err(errno),
        }
    }
    Err(Errno::EEXIST)
}

/// Sets the old file's owner, if permitted, and its mode. If the owner cannot be kept, the setuid
/// and setgid bits are removed.
fn keep_owner_and_mode(file: &File, old: &FileStat) -> nix::Result<()> {
    let new = fstat(file)?;
    let mut mode = Mode::from_bits_truncate(old.st_mode);
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid) {
        let (uid, gid) = (Uid::from_raw(old.st_uid), Gid::from_raw(old.st_gid));
        if fchown(file.as_fd(), Some(uid), Some(gid)).is_err() {
            mode.remove(Mode::S_ISUID | Mode::S_ISGID);
        }
    }
    fchmod(file, mode)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::root::PathScope;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    fn workspace() -> (tempfile::TempDir, WorkspaceRoot) {
        let workspace = tempfile::tempdir().unwrap();
        let root = WorkspaceRoot::open(workspace.path(), PathScope::Workspace).unwrap();
        (workspace, root)
    }

    fn put(root: &WorkspaceRoot, path: &str, content: &str) -> Result<WriteResult, ToolError> {
        let request = WriteRequest {
            path: path.to_owned(),
            content: content.to_owned(),
        };
        write(root, &Locks::default(), &request)
    }

    fn names(workspace: &tempfile::TempDir) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(workspace.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn replaced_file_keeps_its_mode() {
        let (workspace, root) = workspace();
        let result = put(&root, "/a/b.sh", "one").unwrap();
        assert_eq!((result.path.as_str(), result.bytes), ("a/b.sh", 3));
        let file = workspace.path().join("a/b.sh");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o751)).unwrap();
        let before = std::fs::metadata(&file).unwrap();
        put(&root, "a/b.sh", "two").unwrap();
        let after = std::fs::metadata(&file).unwrap();
        assert_eq!(after.mode(), before.mode());
        assert_ne!(after.ino(), before.ino());
        assert_eq!(std::fs::read(&file).unwrap(), b"two");
    }

    #[test]
    fn hard_link_outside_keeps_its_content() {
        let (workspace, root) = workspace();
        let outside = tempfile::tempdir_in(workspace.path().parent().unwrap()).unwrap();
        let secret = outside.path().join("secret");
        std::fs::write(&secret, "before").unwrap();
        std::fs::hard_link(&secret, workspace.path().join("link")).unwrap();
        put(&root, "link", "after").unwrap();
        assert_eq!(std::fs::read(&secret).unwrap(), b"before");
        assert_eq!(
            std::fs::read(workspace.path().join("link")).unwrap(),
            b"after"
        );
    }

    #[test]
    fn only_regular_files_are_replaced() {
        let (workspace, root) = workspace();
        nix::unistd::mkfifo(&workspace.path().join("pipe"), Mode::S_IRWXU).unwrap();
        std::fs::create_dir(workspace.path().join("directory")).unwrap();
        assert_eq!(
            put(&root, "pipe", "x").unwrap_err(),
            ToolError::NotAFile("pipe".into())
        );
        for path in ["directory", ".", "/"] {
            assert!(matches!(
                put(&root, path, "x").unwrap_err(),
                ToolError::IsDirectory(_)
            ));
        }
        assert_eq!(names(&workspace), ["directory", "pipe"]);
    }

    #[test]
    fn locked_directory_is_an_error_and_changes_nothing() {
        let (workspace, root) = workspace();
        put(&root, "file", "before").unwrap();
        let held = File::open(workspace.path()).unwrap();
        held.lock().unwrap();
        let busy = ToolError::Busy("file".into());
        assert_eq!(put(&root, "file", "after").unwrap_err(), busy);
        assert_eq!(
            std::fs::read(workspace.path().join("file")).unwrap(),
            b"before"
        );
        assert_eq!(names(&workspace), ["file"]);
        drop(held);
        put(&root, "file", "after").unwrap();
    }

    #[test]
    fn concurrent_change_is_not_overwritten() {
        let (workspace, root) = workspace();
        let file = workspace.path().join("file");
        let write_target = root.write_target("file", false).unwrap();
        std::fs::write(&file, "read").unwrap();
        let read = write_target.stat().unwrap().unwrap();
        let temp_file = TempFile::make(&write_target, b"mine", Some(&read)).unwrap();
        put(&root, "file", "theirs").unwrap();
        assert!(!temp_file.replace_if_unchanged(&read).unwrap());
        assert_eq!(std::fs::read(&file).unwrap(), b"theirs");
        let read = write_target.stat().unwrap().unwrap();
        let temp_file = TempFile::make(&write_target, b"mine", Some(&read)).unwrap();
        assert!(temp_file.replace_if_unchanged(&read).unwrap());
        assert_eq!(std::fs::read(&file).unwrap(), b"mine");
        assert_eq!(names(&workspace), ["file"]);
    }
}
