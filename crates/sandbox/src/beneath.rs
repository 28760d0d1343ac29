//! Opens names below a directory that an agent may have changed: one component at a time, never
//! through a symbolic link, never blocking on a FIFO.

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

/// The type of a directory entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileKind {
    File,
    Directory,
    Symlink,
    Other,
}

pub(crate) fn file_kind(data: &FileStat) -> FileKind {
    match SFlag::from_bits_truncate(data.st_mode) & SFlag::S_IFMT {
        SFlag::S_IFREG => FileKind::File,
        SFlag::S_IFDIR => FileKind::Directory,
        SFlag::S_IFLNK => FileKind::Symlink,
        _ => FileKind::Other,
    }
}

/// Opens `name` below `parent`: the name must not lead out of `parent` or through a link.
fn open_name(parent: impl AsFd, name: &CStr, flags: OFlag, mode: Mode) -> nix::Result<OwnedFd> {
    let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_NOCTTY | OFlag::O_NONBLOCK;
    let how = OpenHow::new()
        .flags(flags)
        .mode(mode)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
    match openat2(parent.as_fd(), name, how) {
        // The call is missing before Linux 5.6 and under old seccomp filters.
        Err(errno @ (Errno::ENOSYS | Errno::EPERM)) => {
            open_without_openat2(parent, name, flags, mode).ok_or(errno)?
        }
        other => other,
    }
}

/// Opens a single name with O_NOFOLLOW, which is equivalent for names without a slash.
fn open_without_openat2(
    parent: impl AsFd,
    name: &CStr,
    flags: OFlag,
    mode: Mode,
) -> Option<nix::Result<OwnedFd>> {
    is_single_component(name).then(|| openat(parent.as_fd(), name, flags | OFlag::O_NOFOLLOW, mode))
}

fn is_single_component(name: &CStr) -> bool {
    !name.to_bytes().contains(&b'/') && !matches!(name.to_bytes(), b"." | b".." | b"")
}

/// Opens a directory by its path. The parents are trusted and may be links; the last component must
/// be no link, because an agent may own the parent directory of its workspace and replace the
/// workspace by a link.
pub(crate) fn open_root(path: &Path) -> nix::Result<OwnedFd> {
    nix::fcntl::open(
        path,
        OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC,
        Mode::empty(),
    )
}

/// Opens a directory.
pub(crate) fn open_directory(parent: impl AsFd, name: &CStr) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
    open_name(parent, name, flags, Mode::empty())
}

/// Opens a file for reading; the caller must check its type.
pub(crate) fn open_file(parent: impl AsFd, name: &CStr) -> nix::Result<File> {
    open_name(parent, name, OFlag::O_RDONLY, Mode::empty()).map(File::from)
}

/// Creates a new file.
pub(crate) fn create_file(parent: impl AsFd, name: &CStr, mode: Mode) -> nix::Result<File> {
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL;
    open_name(parent, name, flags, mode).map(File::from)
}

/// Opens the parent directory of `path` below `root` and returns it with the last component. `None`
/// if a parent is missing or is no directory.
pub(crate) fn parent_of(root: &OwnedFd, path: &[u8]) -> nix::Result<Option<(OwnedFd, CString)>> {
    let mut directory_so_far = root.try_clone().map_err(|_| Errno::EMFILE)?;
    let mut names = path.split(|b| *b == b'/').peekable();
    while let Some(name) = names.next() {
        let name = CString::new(name).map_err(|_| Errno::EINVAL)?;
        if names.peek().is_none() {
            return Ok(Some((directory_so_far, name)));
        }
        directory_so_far = match open_directory(&directory_so_far, &name) {
            Ok(below) => below,
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => return Ok(None),
            Err(other) => return Err(other),
        };
    }
    Ok(None)
}

/// Returns the stat data of a name without following a link; `None` if it does not exist.
pub(crate) fn stat(parent: impl AsFd, name: &CStr) -> nix::Result<Option<FileStat>> {
    match fstatat(parent, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(data) => Ok(Some(data)),
        Err(Errno::ENOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Lists the names in a directory, sorted; `None` if there are more than `max_names` of them.
pub(crate) fn list_names(directory: &OwnedFd, max_names: u64) -> nix::Result<Option<Vec<CString>>> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let mut listing = Dir::openat(directory, ".", flags, Mode::empty())?;
    let max_names = usize::try_from(max_names).unwrap_or(usize::MAX);
    let mut names = Vec::new();
    for entry in listing.iter() {
        let name = entry?.file_name().to_owned();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        if names.len() >= max_names {
            return Ok(None);
        }
        names.push(name);
    }
    names.sort_unstable();
    Ok(Some(names))
}

/// Renames an entry to a directory in which the name is free.
pub(crate) fn rename_no_replace(from: &OwnedFd, to: &OwnedFd, name: &CStr) -> nix::Result<()> {
    match renameat2(from, name, to, name, RenameFlags::RENAME_NOREPLACE) {
        // The file system does not support the flag.
        Err(Errno::EINVAL) => match stat(to, name)? {
            Some(_) => Err(Errno::EEXIST),
            None => renameat(from, name, to, name),
        },
        other => other,
    }
}

/// Converts bytes to a path.
pub(crate) fn path_from_bytes(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_without_openat2_needs_a_single_component() {
        for (name, single) in [
            (c"a", true),
            (c"...", true),
            (c"a/b", false),
            (c"/a", false),
            (c"..", false),
            (c".", false),
            (c"", false),
        ] {
            assert_eq!(is_single_component(name), single, "{name:?}");
        }
    }

    #[test]
    fn symbolic_link_is_not_opened() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("file"), "x").unwrap();
        std::os::unix::fs::symlink("file", directory.path().join("link")).unwrap();
        std::os::unix::fs::symlink(".", directory.path().join("here")).unwrap();
        let directory =
            nix::fcntl::open(directory.path(), OFlag::O_DIRECTORY, Mode::empty()).unwrap();
        assert!(open_file(&directory, c"file").is_ok());
        assert_eq!(open_file(&directory, c"link").unwrap_err(), Errno::ELOOP);
        assert!(open_directory(&directory, c"here").is_err());
        let open_fallback =
            |name| open_without_openat2(&directory, name, OFlag::O_CLOEXEC, Mode::empty());
        assert!(open_fallback(c"file").unwrap().is_ok());
        assert_eq!(open_fallback(c"link").unwrap().unwrap_err(), Errno::ELOOP);
        assert!(open_fallback(c"here/file").is_none());
        assert_eq!(
            create_file(&directory, c"link", Mode::S_IRUSR).unwrap_err(),
            Errno::EEXIST
        );
    }
}
