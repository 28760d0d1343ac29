//! Names below an open directory that an agent may have shaped: one at a time, never through
//! a link, never waiting for a FIFO.

use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, RenameFlags, ResolveFlag, openat, openat2};
use nix::fcntl::{renameat, renameat2};
use nix::sys::stat::{FileStat, Mode, SFlag, fstatat};

/// What there can be under a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    Directory,
    Symlink,
    Other,
}

pub(crate) fn kind(data: &FileStat) -> Kind {
    match SFlag::from_bits_truncate(data.st_mode) & SFlag::S_IFMT {
        SFlag::S_IFREG => Kind::File,
        SFlag::S_IFDIR => Kind::Directory,
        SFlag::S_IFLNK => Kind::Symlink,
        _ => Kind::Other,
    }
}

fn open_name(parent: impl AsFd, name: &CStr, flags: OFlag, mode: Mode) -> nix::Result<OwnedFd> {
    let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_NOCTTY | OFlag::O_NONBLOCK;
    let how = OpenHow::new()
        .flags(flags)
        .mode(mode)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
    match openat2(parent.as_fd(), name, how) {
        // Before Linux 5.6, and under old seccomp filters.
        Err(errno @ (Errno::ENOSYS | Errno::EPERM)) => {
            open_plainly(parent, name, flags, mode).ok_or(errno)?
        }
        other => other,
    }
}

/// A single name with O_NOFOLLOW is as good, as long as it is a single name.
fn open_plainly(
    parent: impl AsFd,
    name: &CStr,
    flags: OFlag,
    mode: Mode,
) -> Option<nix::Result<OwnedFd>> {
    is_single(name).then(|| openat(parent.as_fd(), name, flags | OFlag::O_NOFOLLOW, mode))
}

fn is_single(name: &CStr) -> bool {
    !name.to_bytes().contains(&b'/') && !matches!(name.to_bytes(), b"." | b".." | b"")
}

/// Opens a directory by its path. The way to it is ours and may have links; itself it must
/// be none: an agent may own what its workspace lies in, and put a link in the workspace's
/// place.
pub(crate) fn root(path: &Path) -> nix::Result<OwnedFd> {
    nix::fcntl::open(
        path,
        OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC,
        Mode::empty(),
    )
}

/// Opens a directory.
pub(crate) fn directory(parent: impl AsFd, name: &CStr) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
    open_name(parent, name, flags, Mode::empty())
}

/// Opens a file for reading; what it is must be asked of the result.
pub(crate) fn file(parent: impl AsFd, name: &CStr) -> nix::Result<File> {
    open_name(parent, name, OFlag::O_RDONLY, Mode::empty()).map(File::from)
}

/// Makes a file that was not there.
pub(crate) fn new_file(parent: impl AsFd, name: &CStr, mode: Mode) -> nix::Result<File> {
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL;
    open_name(parent, name, flags, mode).map(File::from)
}

/// Walks from `root` down to the directory of `path` and returns it with the last name.
/// `None` when a directory on the way is missing, or is no directory.
pub(crate) fn parent_of(root: &OwnedFd, path: &[u8]) -> nix::Result<Option<(OwnedFd, CString)>> {
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

/// What a name is, itself and not what it points to. `None` when nothing is there.
pub(crate) fn look(parent: impl AsFd, name: &CStr) -> nix::Result<Option<FileStat>> {
    match fstatat(parent, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(data) => Ok(Some(data)),
        Err(Errno::ENOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// The names in a directory, in order; `None` when there are more than `most`.
pub(crate) fn list(directory: &OwnedFd, most: u64) -> nix::Result<Option<Vec<CString>>> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let mut listing = Dir::openat(directory, ".", flags, Mode::empty())?;
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    let mut names = Vec::new();
    for entry in listing.iter() {
        let name = entry?.file_name().to_owned();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        if names.len() >= most {
            return Ok(None);
        }
        names.push(name);
    }
    names.sort_unstable();
    Ok(Some(names))
}

/// Moves a name where none is.
pub(crate) fn move_new(from: &OwnedFd, to: &OwnedFd, name: &CStr) -> nix::Result<()> {
    match renameat2(from, name, to, name, RenameFlags::RENAME_NOREPLACE) {
        // File systems without the flag.
        Err(Errno::EINVAL) => match look(to, name)? {
            Some(_) => Err(Errno::EEXIST),
            None => renameat(from, name, to, name),
        },
        other => other,
    }
}

/// A path from bytes.
pub(crate) fn path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_single_name_may_be_opened_without_openat2() {
        for (name, single) in [
            (c"a", true),
            (c"...", true),
            (c"a/b", false),
            (c"/a", false),
            (c"..", false),
            (c".", false),
            (c"", false),
        ] {
            assert_eq!(is_single(name), single, "{name:?}");
        }
    }

    #[test]
    fn a_link_is_not_opened() {
        let place = tempfile::tempdir().unwrap();
        std::fs::write(place.path().join("file"), "x").unwrap();
        std::os::unix::fs::symlink("file", place.path().join("link")).unwrap();
        std::os::unix::fs::symlink(".", place.path().join("here")).unwrap();
        let place = nix::fcntl::open(place.path(), OFlag::O_DIRECTORY, Mode::empty()).unwrap();
        assert!(file(&place, c"file").is_ok());
        assert_eq!(file(&place, c"link").unwrap_err(), Errno::ELOOP);
        assert!(directory(&place, c"here").is_err());
        let plainly = |name| open_plainly(&place, name, OFlag::O_CLOEXEC, Mode::empty());
        assert!(plainly(c"file").unwrap().is_ok());
        assert_eq!(plainly(c"link").unwrap().unwrap_err(), Errno::ELOOP);
        assert!(plainly(c"here/file").is_none());
        assert_eq!(
            new_file(&place, c"link", Mode::S_IRUSR).unwrap_err(),
            Errno::EEXIST
        );
    }
}
