//! The root directory of the workspace, and path resolution below it.
//!
//! Every name is resolved by the kernel from one open directory (`openat2` with
//! RESOLVE_BENEATH) at the moment it is opened, so a symbolic link out of the workspace is refused
//! even if it is swapped in during the call. Files are opened with O_NONBLOCK, so a FIFO cannot
//! block a tool.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat2, readlinkat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat, mkdirat};

use crate::error::ToolError;

/// Maximum number of retries of an openat2 call that fails with EAGAIN because of a concurrent
/// rename.
const MAX_RETRIES: usize = 64;

/// Maximum number of symbolic links in a chain.
const MAX_LINKS: usize = 40;

/// Whether paths may leave the workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathScope {
    /// Paths must stay below the root.
    Workspace,
    /// Paths may be anywhere: the container is the only boundary.
    Everywhere,
}

/// An open workspace.
#[derive(Debug)]
pub struct WorkspaceRoot {
    path: PathBuf,
    directory: OwnedFd,
    scope: PathScope,
}

/// A name in an open directory: the file that a write or an edit replaces.
#[derive(Debug)]
pub(crate) struct WriteTarget {
    pub(crate) directory: OwnedFd,
    pub(crate) name: OsString,
}

impl WorkspaceRoot {
    /// Opens the directory at `path`, which must exist.
    pub fn open(path: &Path, scope: PathScope) -> std::io::Result<Self> {
        let path = std::fs::canonicalize(path)?;
        let flags = OFlag::O_DIRECTORY | OFlag::O_PATH | OFlag::O_CLOEXEC;
        let directory = nix::fcntl::open(&path, flags, Mode::empty())?;
        Ok(Self {
            path,
            directory,
            scope,
        })
    }

    /// The canonical path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of a request, relative to the root: `""`, `.` and `/` are the root, an absolute
    /// path below the root stays the same, and any other path starts at the root.
    pub(crate) fn locate(&self, requested: &str) -> Result<PathBuf, ToolError> {
        let requested = Path::new(requested);
        let below = match requested.strip_prefix(&self.path) {
            Ok(below) => below,
            Err(_) if self.scope == PathScope::Everywhere => return Ok(self.path.join(requested)),
            Err(_) => requested,
        };
        let mut path = PathBuf::new();
        for component in below.components() {
            match component {
                Component::Normal(name) => path.push(name),
                Component::ParentDir if self.scope == PathScope::Everywhere => {
                    return Ok(self.path.join(below));
                }
                Component::ParentDir if !path.pop() => return Err(ToolError::OutsideWorkspace),
                Component::ParentDir
                | Component::RootDir
                | Component::CurDir
                | Component::Prefix(_) => {}
            }
        }
        Ok(path)
    }

    /// Opens a path that [`WorkspaceRoot::locate`] returned.
    pub(crate) fn open_at(&self, path: &Path, flags: OFlag) -> nix::Result<OwnedFd> {
        let resolve = match self.scope {
            PathScope::Workspace => {
                ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS
            }
            PathScope::Everywhere => ResolveFlag::RESOLVE_NO_MAGICLINKS,
        };
        open_beneath(&self.directory, path, flags, Mode::empty(), resolve)
    }

    /// Opens a regular file for reading.
    pub(crate) fn read(&self, requested: &str) -> Result<(File, FileStat), ToolError> {
        let path = self.locate(requested)?;
        let fail = |errno| ToolError::from_errno(requested, errno);
        let file = self.open_at(&path, OFlag::O_RDONLY).map_err(fail)?;
        let data = fstat(&file).map_err(fail)?;
        match kind(&data) {
            SFlag::S_IFREG => Ok((File::from(file), data)),
            SFlag::S_IFDIR => Err(ToolError::IsDirectory(requested.to_owned())),
            _ => Err(ToolError::NotAFile(requested.to_owned())),
        }
    }

    /// Opens a directory for listing.
    pub(crate) fn directory(&self, requested: &str) -> Result<(OwnedFd, PathBuf), ToolError> {
        let path = self.locate(requested)?;
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        let directory = self
            .open_at(&path, flags)
            .map_err(|errno| ToolError::from_errno(requested, errno))?;
        Ok((directory, path))
    }

    /// The start of a directory walk: an open directory, and a path below it without symbolic
    /// links. The directory is the root if possible, because the `.gitignore` files of the parent
    /// directories apply too.
    pub(crate) fn walk_start(&self, requested: &str) -> Result<(OwnedFd, PathBuf), ToolError> {
        let (directory, path) = self.directory(requested)?;
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        let base = open_without_links(&self.directory, Path::new(""), flags);
        match (base, open_without_links(&self.directory, &path, flags)) {
            (Ok(base), Ok(_)) => Ok((base, path)),
            _ => Ok((directory, PathBuf::new())),
        }
    }

    /// The directory and name of a file after all symbolic links; the file need not exist. `create_parents` creates missing directories.
    pub(crate) fn write_target(
        &self,
        requested: &str,
        create_parents: bool,
    ) -> Result<WriteTarget, ToolError> {
        let mut path = self.locate(requested)?;
        let fail = |errno| ToolError::from_errno(requested, errno);
        for _ in 0..MAX_LINKS {
            let Some(name) = path.file_name().map(OsStr::to_owned) else {
                return Err(ToolError::IsDirectory(requested.to_owned()));
            };
            let parent = path.parent().unwrap_or(Path::new("")).to_owned();
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
            let directory = match self.open_at(&parent, flags) {
                Err(Errno::ENOENT) if create_parents => {
                    self.create_directories(&parent).map_err(fail)?
                }
                other => other.map_err(fail)?,
            };
            match readlinkat(&directory, name.as_os_str()) {
                Ok(target) => path = parent.join(target),
                // The name is not a symbolic link, or does not exist.
                Err(Errno::EINVAL | Errno::ENOENT) => return Ok(WriteTarget { directory, name }),
                Err(errno) => return Err(fail(errno)),
            }
            if self.scope == PathScope::Workspace && path.is_absolute() {
                return Err(ToolError::OutsideWorkspace);
            }
        }
        Err(fail(Errno::ELOOP))
    }

    /// Creates a directory with its parents, and opens it.
    fn create_directories(&self, path: &Path) -> nix::Result<OwnedFd> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        let mut so_far = PathBuf::new();
        let mut directory = self.open_at(&so_far, flags)?;
        for component in path.components() {
            so_far.push(component);
            directory = match self.open_at(&so_far, flags) {
                Err(Errno::ENOENT) => {
                    let name = component.as_os_str();
                    match mkdirat(&directory, name, Mode::from_bits_truncate(0o777)) {
                        Ok(()) | Err(Errno::EEXIST) => self.open_at(&so_far, flags)?,
                        Err(errno) => return Err(errno),
                    }
                }
                other => other?,
            };
        }
        Ok(directory)
    }
}

impl WriteTarget {
    /// The metadata of the entry, without following a link.
    pub(crate) fn stat(&self) -> nix::Result<Option<FileStat>> {
        let found = fstatat(
            &self.directory,
            self.name.as_os_str(),
            AtFlags::AT_SYMLINK_NOFOLLOW,
        );
        match found {
            Ok(data) => Ok(Some(data)),
            Err(Errno::ENOENT) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// Opens the file for reading.
    pub(crate) fn read(&self) -> nix::Result<File> {
        open_name(&self.directory, &self.name, OFlag::O_RDONLY).map(File::from)
    }
}

/// Opens one name in a directory; the name must not be a symbolic link.
pub(crate) fn open_name(directory: impl AsFd, name: &OsStr, flags: OFlag) -> nix::Result<OwnedFd> {
    let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS;
    open_beneath(directory, Path::new(name), flags, Mode::empty(), resolve)
}

/// Opens a path below a directory; no component may be a symbolic link.
pub(crate) fn open_without_links(
    directory: impl AsFd,
    path: &Path,
    flags: OFlag,
) -> nix::Result<OwnedFd> {
    let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS;
    open_beneath(directory, path, flags, Mode::empty(), resolve)
}

/// Creates a file that must not exist.
pub(crate) fn new_file(directory: impl AsFd, name: &str, mode: Mode) -> nix::Result<File> {
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL;
    let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS;
    open_beneath(directory, Path::new(name), flags, mode, resolve).map(File::from)
}

fn open_beneath(
    directory: impl AsFd,
    path: &Path,
    flags: OFlag,
    mode: Mode,
    resolve: ResolveFlag,
) -> nix::Result<OwnedFd> {
    let path = if path.as_os_str().is_empty() {
        Path::new(".")
    } else {
        path
    };
    let always = OFlag::O_CLOEXEC | OFlag::O_NOCTTY | OFlag::O_NONBLOCK;
    let mut tries = 0;
    loop {
        let how = OpenHow::new()
            .flags(flags | always)
            .mode(mode)
            .resolve(resolve);
        match openat2(directory.as_fd(), path, how) {
            // A concurrent rename: the kernel cannot rule out that the path left the root
            // (openat2(2)).
            Err(Errno::EAGAIN) if tries < MAX_RETRIES => tries += 1,
            other => return other,
        }
    }
}

/// The file type.
pub(crate) fn kind(data: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(data.st_mode) & SFlag::S_IFMT
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn workspace() -> (tempfile::TempDir, WorkspaceRoot) {
        let workspace = tempfile::tempdir().unwrap();
        let inside = workspace.path().join("root");
        std::fs::create_dir_all(inside.join("a")).unwrap();
        std::fs::write(workspace.path().join("outside"), "secret").unwrap();
        std::fs::write(inside.join("a/file"), "x").unwrap();
        let root = WorkspaceRoot::open(&inside, PathScope::Workspace).unwrap();
        (workspace, root)
    }

    #[test]
    fn request_paths_are_resolved_from_the_root() {
        let (_workspace, root) = workspace();
        let absolute = root.path().join("a/file");
        for (requested, path) in [
            ("", ""),
            (".", ""),
            ("/", ""),
            ("a//./file", "a/file"),
            ("/a/file", "a/file"),
            ("a/../b", "b"),
            ("/etc/passwd", "etc/passwd"),
            (absolute.to_str().unwrap(), "a/file"),
            (root.path().to_str().unwrap(), ""),
        ] {
            assert_eq!(
                root.locate(requested),
                Ok(PathBuf::from(path)),
                "{requested}"
            );
        }
        for requested in ["..", "../x", "a/../../x", "/..", "/a/../../etc/passwd"] {
            assert_eq!(
                root.locate(requested),
                Err(ToolError::OutsideWorkspace),
                "{requested}"
            );
        }
    }

    #[test]
    fn symbolic_links_out_of_the_root_are_refused() {
        let (_workspace, root) = workspace();
        let at = |name: &str| root.path().join(name);
        symlink("../outside", at("relative")).unwrap();
        symlink("/etc/passwd", at("absolute")).unwrap();
        symlink("..", at("up")).unwrap();
        symlink("/proc/self/root", at("magic")).unwrap();
        symlink("a/file", at("inside")).unwrap();
        symlink("inside", at("twice")).unwrap();
        symlink("loop", at("loop")).unwrap();
        for requested in ["relative", "absolute", "up/outside", "magic/etc/passwd"] {
            assert_eq!(
                root.read(requested).unwrap_err(),
                ToolError::OutsideWorkspace,
                "{requested}"
            );
            assert_eq!(
                root.write_target(requested, true).unwrap_err(),
                ToolError::OutsideWorkspace
            );
        }
        assert!(root.read("twice").is_ok());
        assert_eq!(root.write_target("twice", false).unwrap().name, "file");
        assert!(root.read("loop").is_err());
        assert!(root.write_target("loop", true).is_err());
    }

    #[test]
    fn only_regular_files_are_read_without_blocking() {
        let (_workspace, root) = workspace();
        nix::unistd::mkfifo(&root.path().join("pipe"), Mode::S_IRWXU).unwrap();
        assert_eq!(
            root.read("pipe").unwrap_err(),
            ToolError::NotAFile("pipe".into())
        );
        assert_eq!(
            root.read("a").unwrap_err(),
            ToolError::IsDirectory("a".into())
        );
        assert_eq!(root.read("b").unwrap_err(), ToolError::NotFound("b".into()));
        assert_eq!(
            root.directory("a/file").unwrap_err(),
            ToolError::NotADirectory("a/file".into())
        );
    }

    #[test]
    fn directories_are_created_only_below_the_root() {
        let (workspace, root) = workspace();
        let write_target = root.write_target("b/c/d/file", true).unwrap();
        assert_eq!(write_target.name, "file");
        assert!(root.path().join("b/c/d").is_dir());
        symlink("../away", root.path().join("away")).unwrap();
        assert!(root.write_target("away/b/file", true).is_err());
        assert!(!workspace.path().join("away").exists());
    }

    #[test]
    fn scope_everywhere_reads_paths_outside_the_root() {
        let (workspace, root) = workspace();
        let root = WorkspaceRoot::open(root.path(), PathScope::Everywhere).unwrap();
        let outside = workspace.path().join("outside");
        assert!(root.read(outside.to_str().unwrap()).is_ok());
        assert!(root.read("../outside").is_ok());
        assert!(root.read("a/file").is_ok());
    }
}
