//! Opening paths that an agent may have shaped: one component at a time, never through a
//! link, never blocking on a FIFO.

use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat, openat2};
use nix::sys::stat::{FileStat, Mode, fstatat};

/// Opens one component below `parent`.
fn open_one(parent: impl AsFd, name: &CStr, flags: OFlag) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_NOCTTY;
    let how = OpenHow::new()
        .flags(flags)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
    match openat2(parent.as_fd(), name, how) {
        // Before Linux 5.6, and under old seccomp filters. A single name with O_NOFOLLOW is
        // as good, as long as it is a single name.
        Err(Errno::ENOSYS | Errno::EPERM)
            if !name.to_bytes().contains(&b'/') && name.to_bytes() != b".." =>
        {
            openat(parent.as_fd(), name, flags, Mode::empty())
        }
        other => other,
    }
}

/// Opens a directory below `parent` for listing.
pub(super) fn directory(parent: impl AsFd, name: &CStr) -> Result<OwnedFd, Errno> {
    open_one(parent, name, OFlag::O_RDONLY | OFlag::O_DIRECTORY)
}

/// Opens a file below `parent` for reading; what it is must be asked of the result.
pub(super) fn file(parent: impl AsFd, name: &CStr) -> Result<File, Errno> {
    open_one(parent, name, OFlag::O_RDONLY | OFlag::O_NONBLOCK).map(File::from)
}

/// Opens a directory. The way to it is ours and may have links; itself it must be none: an
/// agent may own what its workspace lies in, and put a link in the workspace's place.
pub(super) fn root(path: &Path) -> Result<OwnedFd, Errno> {
    nix::fcntl::open(
        path,
        OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC,
        Mode::empty(),
    )
}

/// Walks from `root` down to the directory of `path` and returns it with the last name.
/// `None` when a directory on the way is missing, or is no directory.
pub(super) fn parent_of(root: &OwnedFd, path: &[u8]) -> Result<Option<(OwnedFd, CString)>, Errno> {
    let mut here = root.try_clone().map_err(|_| Errno::EMFILE)?;
    let mut names = path.split(|b| *b == b'/').peekable();
    while let Some(name) = names.next() {
        let name = CString::new(name).map_err(|_| Errno::EINVAL)?;
        if names.peek().is_none() {
            return Ok(Some((here, name)));
        }
        here = match directory(&here, &name) {
            Ok(below) => below,
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => return Ok(None),
            Err(other) => return Err(other),
        };
    }
    Ok(None)
}

/// What a name is, itself and not what it points to.
pub(super) fn look(parent: impl AsFd, name: &CStr) -> Result<FileStat, Errno> {
    fstatat(parent, name, AtFlags::AT_SYMLINK_NOFOLLOW)
}

/// A path from bytes.
pub(super) fn path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}
