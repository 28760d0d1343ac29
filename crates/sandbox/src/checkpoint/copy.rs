//! Copies a tree that an agent controlled.
//!
//! First the directories, links and whiteouts, and a list of the files; then the files, on several
//! threads; then the hard links; last the attributes of directories, deepest first, because filling
//! a directory changes its times.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{
    AtFlags, OFlag, OpenHow, ResolveFlag, copy_file_range, openat, openat2, readlinkat,
};
use nix::sys::stat::{FileStat, Mode, SFlag, fchmod, fstat, fstatat, mkdirat, mknodat};
use nix::unistd::{LinkatFlags, Uid, Whence, linkat, lseek64, symlinkat};

use super::attributes::{IdMapping, apply_attributes, apply_attributes_by_name};
use super::{CheckpointBounds, CheckpointError, CopyProgress, CopySummary, io};
use crate::parallel::parallel;

/// Maximum path length of one open call.
const MAX_PATH_BYTES: usize = 3500;

/// Bytes copied between two progress reports.
const PROGRESS_BYTES: usize = 64 << 20;

pub(super) struct TreeCopy {
    from: Root,
    to: Root,
    ids: IdMapping,
    bounds: CheckpointBounds,
    directories: Vec<(Vec<u8>, FileStat)>,
    files: Vec<(Vec<u8>, FileStat)>,
    /// The further names of files with several names, each with the first name.
    hard_links: Vec<(Vec<u8>, Vec<u8>)>,
    /// The first name of each file with several names, by device and inode.
    first_names: HashMap<(u64, u64), Vec<u8>>,
    /// Directories of the source that were opened up for reading, with the modes to restore.
    former_modes: Vec<(Vec<u8>, Mode)>,
    copied: CopySummary,
}

/// A directory below which every path is opened.
struct Root {
    path: PathBuf,
    dir: OwnedFd,
}

impl TreeCopy {
    pub(super) fn begin(
        from: &Path,
        to: &Path,
        ids: IdMapping,
        bounds: CheckpointBounds,
    ) -> Result<Self, CheckpointError> {
        Ok(Self {
            from: Root::new(from)?,
            to: Root::new(to)?,
            ids,
            bounds,
            directories: Vec::new(),
            files: Vec::new(),
            hard_links: Vec::new(),
            first_names: HashMap::new(),
            former_modes: Vec::new(),
            copied: CopySummary {
                entries: 0,
                bytes: 0,
                skipped: 0,
            },
        })
    }

    /// Copies the directories in `parts`, each with the names of its entries to copy; an empty list
    /// means all entries.
    pub(super) fn run(
        mut self,
        parts: &[(&str, &[&str])],
        progress: &(dyn Fn(CopyProgress) + Sync),
    ) -> Result<CopySummary, CheckpointError> {
        let done = self.copy(parts, progress);
        for (path, mode) in self.former_modes.iter().rev() {
            let directory = self.from.open(path, OFlag::O_RDONLY | OFlag::O_DIRECTORY);
            let _ = directory.and_then(|directory| fchmod(&directory, *mode));
        }
        done.map(|()| self.copied)
    }

    fn copy(
        &mut self,
        parts: &[(&str, &[&str])],
        progress: &(dyn Fn(CopyProgress) + Sync),
    ) -> Result<(), CheckpointError> {
        for (part, wanted) in parts {
            let name = CString::new(*part).unwrap_or_default();
            match stat_name(&self.from.dir, &name) {
                Ok(stat) if file_type(&stat) == SFlag::S_IFDIR => {}
                Ok(_) | Err(Errno::ENOENT) => continue,
                Err(errno) => return Err(io("stat", &self.from.path.join(part))(errno)),
            }
            let mut pending = self.copy_directory(part.as_bytes().to_vec(), wanted)?;
            while let Some(directory) = pending.pop() {
                pending.extend(self.copy_directory(directory, &[])?);
            }
        }
        self.copy_files(progress)?;
        for (second, first) in &self.hard_links {
            self.to
                .link(first, second)
                .map_err(io("link", &self.to.full_path(second)))?;
        }
        for (path, stat) in self.directories.iter().rev() {
            let (from, to) = (self.from.directory(path)?, self.to.directory(path)?);
            apply_attributes(from.as_fd(), to.as_fd(), stat, self.ids)
                .map_err(io("set the attributes of", &self.to.full_path(path)))?;
        }
        Ok(())
    }

    /// Copies a directory and its links and whiteouts, records its files for later, and returns its
    /// subdirectories.
    fn copy_directory(
        &mut self,
        path: Vec<u8>,
        wanted: &[&str],
    ) -> Result<Vec<Vec<u8>>, CheckpointError> {
        let (from, stat) = self.open_directory(&path)?;
        self.to
            .make_directory(&path)
            .map_err(io("create", &self.to.full_path(&path)))?;
        let to = self.to.directory(&path)?;
        let mut below = Vec::new();
        for name in self.list(&from, &path)? {
            if !wanted.is_empty() && !wanted.iter().any(|kept| kept.as_bytes() == name.to_bytes()) {
                continue;
            }
            let mut full = path.clone();
            full.push(b'/');
            full.extend_from_slice(name.to_bytes());
            self.count_entry(&full)?;
            let stat = match stat_name(&from, &name) {
                Ok(stat) => stat,
                Err(Errno::ENOENT) => return Err(self.changed(&full)),
                Err(errno) => return Err(io("stat", &self.from.full_path(&full))(errno)),
            };
            match file_type(&stat) {
                SFlag::S_IFDIR => below.push(full),
                SFlag::S_IFREG => self.add_file(full, stat)?,
                SFlag::S_IFLNK => self
                    .copy_link(&from, &to, &name, &stat)
                    .map_err(io("copy the link", &self.from.full_path(&full)))?,
                // A whiteout: an overlay's mark for a removed file of the lower layer.
                SFlag::S_IFCHR if stat.st_rdev == 0 => self
                    .copy_whiteout(&to, &name, &stat)
                    .map_err(io("copy the whiteout", &self.from.full_path(&full)))?,
                _ => self.copied.skipped += 1,
            }
        }
        self.directories.push((path, stat));
        Ok(below)
    }

    /// Opens a directory for listing, even without owner permissions, and returns its former stat
    /// data.
    fn open_directory(&mut self, path: &[u8]) -> Result<(OwnedFd, FileStat), CheckpointError> {
        let at = self.from.full_path(path);
        let handle = self.from.open(path, OFlag::O_PATH | OFlag::O_DIRECTORY);
        let handle = handle.map_err(io("open", &at))?;
        let stat = fstat(&handle).map_err(io("stat", &at))?;
        let mode = Mode::from_bits_truncate(stat.st_mode & 0o7777);
        if !mode.contains(Mode::S_IRUSR | Mode::S_IXUSR) && !Uid::effective().is_root() {
            change_mode(&handle, mode | Mode::S_IRWXU).map_err(io("open", &at))?;
            self.former_modes.push((path.to_vec(), mode));
        }
        Ok((self.from.directory(path)?, stat))
    }

    fn list(&mut self, directory: &OwnedFd, path: &[u8]) -> Result<Vec<CString>, CheckpointError> {
        let at = self.from.full_path(path);
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let mut listing =
            Dir::openat(directory, ".", flags, Mode::empty()).map_err(io("list", &at))?;
        let mut names = Vec::new();
        for entry in listing.iter() {
            let entry = entry.map_err(io("list", &at))?;
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                names.push(entry.file_name().to_owned());
            }
            if names.len() as u64 > self.bounds.entries {
                return Err(self.too_much("the number of files", self.bounds.entries, path));
            }
        }
        Ok(names)
    }

    fn count_entry(&mut self, path: &[u8]) -> Result<(), CheckpointError> {
        self.copied.entries += 1;
        if self.copied.entries > self.bounds.entries {
            return Err(self.too_much("the number of files", self.bounds.entries, path));
        }
        if path.len() > MAX_PATH_BYTES {
            let shown = path.get(..200).unwrap_or_default();
            return Err(self.too_much("the length of a path", MAX_PATH_BYTES as u64, shown));
        }
        Ok(())
    }

    fn add_file(&mut self, path: Vec<u8>, stat: FileStat) -> Result<(), CheckpointError> {
        let inode = (stat.st_dev, stat.st_ino);
        if stat.st_nlink > 1 {
            if let Some(first) = self.first_names.get(&inode) {
                self.hard_links.push((path, first.clone()));
                return Ok(());
            }
            self.first_names.insert(inode, path.clone());
        }
        // The size on disk counts, because a sparse file may claim any size.
        let bytes = u64::try_from(stat.st_blocks).unwrap_or_default() * 512;
        self.copied.bytes = self.copied.bytes.saturating_add(bytes);
        if self.copied.bytes > self.bounds.bytes {
            return Err(self.too_much("the size of all files", self.bounds.bytes, &path));
        }
        self.files.push((path, stat));
        Ok(())
    }

    fn copy_link(
        &self,
        from: &OwnedFd,
        to: &OwnedFd,
        name: &CStr,
        stat: &FileStat,
    ) -> std::io::Result<()> {
        let text = readlinkat(from, name)?;
        symlinkat(text.as_os_str(), to, name)?;
        apply_attributes_by_name(to, name, stat, self.ids)
    }

    /// Creates the character device 0:0, which needs no privilege.
    fn copy_whiteout(&self, to: &OwnedFd, name: &CStr, stat: &FileStat) -> std::io::Result<()> {
        mknodat(to, name, SFlag::S_IFCHR, Mode::empty(), 0)?;
        apply_attributes_by_name(to, name, stat, self.ids)
    }

    fn copy_files(&self, progress: &(dyn Fn(CopyProgress) + Sync)) -> Result<(), CheckpointError> {
        let can_clone = AtomicBool::new(true);
        let (files, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        let report = |file: u64, more: u64| {
            progress(CopyProgress {
                files: files.fetch_add(file, Ordering::Relaxed) + file,
                total: self.files.len() as u64,
                bytes: bytes.fetch_add(more, Ordering::Relaxed) + more,
            });
        };
        parallel(
            &self.files,
            || Ok(()),
            |(), (path, stat)| {
                self.copy_file(path, stat, &can_clone, &|more| report(0, more))?;
                report(1, 0);
                Ok(())
            },
        )?;
        Ok(())
    }

    fn copy_file(
        &self,
        path: &[u8],
        stat: &FileStat,
        can_clone: &AtomicBool,
        report: &dyn Fn(u64),
    ) -> Result<(), CheckpointError> {
        let from = self
            .from
            .open_examined(path, stat)
            .map_err(|errno| match errno {
                Errno::ENOENT | Errno::ELOOP | Errno::ENOTDIR | Errno::ESTALE => self.changed(path),
                errno => io("open", &self.from.full_path(path))(errno),
            })?;
        let to = self.to.create(path);
        let to = to.map_err(io("create", &self.to.full_path(path)))?;
        let size = stat.st_size;
        if !(can_clone.load(Ordering::Relaxed) && clone_file(&from, &to)) {
            can_clone.store(false, Ordering::Relaxed);
            copy_bytes(&from, &to, size, report).map_err(io("copy", &self.from.full_path(path)))?;
        }
        let now = fstat(&from).map_err(io("stat", &self.from.full_path(path)))?;
        if (now.st_size, now.st_mtime, now.st_mtime_nsec)
            != (stat.st_size, stat.st_mtime, stat.st_mtime_nsec)
        {
            return Err(self.changed(path));
        }
        apply_attributes(from.as_fd(), to.as_fd(), stat, self.ids)
            .map_err(io("set the attributes of", &self.to.full_path(path)))
    }

    fn changed(&self, path: &[u8]) -> CheckpointError {
        CheckpointError::Changed(self.from.full_path(path))
    }

    fn too_much(&self, what: &'static str, bound: u64, path: &[u8]) -> CheckpointError {
        CheckpointError::TooMuch {
            what,
            bound,
            path: self.from.full_path(path),
        }
    }
}

impl Root {
    fn new(at: &Path) -> Result<Self, CheckpointError> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let dir = nix::fcntl::open(at, flags, Mode::empty()).map_err(io("open", at))?;
        Ok(Self {
            path: at.to_owned(),
            dir,
        })
    }

    fn full_path(&self, path: &[u8]) -> PathBuf {
        self.path.join(std::ffi::OsStr::from_bytes(path))
    }

    /// Opens a path beneath this directory and through no link.
    fn open(&self, path: &[u8], flags: OFlag) -> Result<OwnedFd, Errno> {
        open_beneath(&self.dir, path, flags)
    }

    fn directory(&self, path: &[u8]) -> Result<OwnedFd, CheckpointError> {
        self.open(path, OFlag::O_RDONLY | OFlag::O_DIRECTORY)
            .map_err(io("open", &self.full_path(path)))
    }

    fn parent<'p>(&self, path: &'p [u8]) -> Result<(OwnedFd, &'p std::ffi::OsStr), Errno> {
        let cut = path.iter().rposition(|b| *b == b'/');
        let (parent, name) = match cut {
            Some(slash) => (
                path.get(..slash).unwrap_or_default(),
                path.get(slash + 1..).unwrap_or_default(),
            ),
            None => (b".".as_slice(), path),
        };
        let parent = self.open(parent, OFlag::O_PATH | OFlag::O_DIRECTORY)?;
        Ok((parent, std::ffi::OsStr::from_bytes(name)))
    }

    fn make_directory(&self, path: &[u8]) -> Result<(), Errno> {
        let (parent, name) = self.parent(path)?;
        mkdirat(&parent, name, Mode::S_IRWXU)
    }

    fn create(&self, path: &[u8]) -> Result<File, Errno> {
        let (parent, name) = self.parent(path)?;
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
        openat(&parent, name, flags, Mode::from_bits_truncate(0o600)).map(File::from)
    }

    fn link(&self, first: &[u8], second: &[u8]) -> Result<(), Errno> {
        let (from, old) = self.parent(first)?;
        let (to, new) = self.parent(second)?;
        linkat(&from, old, &to, new, LinkatFlags::empty())
    }

    /// Opens the examined file, even without owner permissions; fails with `ESTALE` if it was
    /// replaced.
    fn open_examined(&self, path: &[u8], examined: &FileStat) -> Result<File, Errno> {
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let file = match self.open(path, flags) {
            Err(Errno::EACCES) => {
                let handle = self.open(path, OFlag::O_PATH)?;
                let mode = Mode::from_bits_truncate(examined.st_mode & 0o7777);
                change_mode(&handle, mode | Mode::S_IRUSR)?;
                let file = self.open(path, flags)?;
                fchmod(&file, mode)?;
                file
            }
            other => other?,
        };
        let found = fstat(&file)?;
        let same = (found.st_dev, found.st_ino) == (examined.st_dev, examined.st_ino);
        if !same || file_type(&found) != SFlag::S_IFREG {
            return Err(Errno::ESTALE);
        }
        Ok(File::from(file))
    }
}

fn open_beneath(root: &OwnedFd, path: &[u8], flags: OFlag) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let how = OpenHow::new()
        .flags(flags)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
    match openat2(root, std::ffi::OsStr::from_bytes(path), how) {
        // openat2 is missing before Linux 5.6 and under old seccomp filters; then the components
        // are opened one by one.
        Err(Errno::ENOSYS | Errno::EPERM) => {}
        other => return other,
    }
    let mut here = root.try_clone().map_err(|_| Errno::EMFILE)?;
    let mut names = path.split(|b| *b == b'/').peekable();
    while let Some(name) = names.next() {
        let step = if names.peek().is_some() {
            OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC
        } else {
            flags
        };
        let name = std::ffi::OsStr::from_bytes(name);
        here = openat(&here, name, step, Mode::empty())?;
    }
    Ok(here)
}

/// Changes the mode of the file behind an `O_PATH` descriptor, independent of its name.
fn change_mode(handle: &OwnedFd, mode: Mode) -> Result<(), Errno> {
    let path = format!("/proc/self/fd/{}", handle.as_raw_fd());
    let flags = nix::sys::stat::FchmodatFlags::FollowSymlink;
    nix::sys::stat::fchmodat(nix::fcntl::AT_FDCWD, path.as_str(), mode, flags)
}

fn stat_name(directory: &OwnedFd, name: &CStr) -> Result<FileStat, Errno> {
    fstatat(directory, name, AtFlags::AT_SYMLINK_NOFOLLOW)
}

fn file_type(stat: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT
}

/// Clones the blocks of one file to another as copy-on-write (btrfs, XFS, bcachefs).
fn clone_file(from: &File, to: &File) -> bool {
    // SAFETY: FICLONE takes a descriptor by value and accesses no memory of this process; both
    // descriptors are open for as long as the borrows last.
    unsafe { libc::ioctl(to.as_raw_fd(), libc::FICLONE, from.as_raw_fd()) == 0 }
}

/// Copies the content of a file and keeps its holes.
fn copy_bytes(from: &File, to: &File, size: i64, report: &dyn Fn(u64)) -> std::io::Result<()> {
    to.set_len(u64::try_from(size).unwrap_or_default())?;
    let mut at = 0;
    while at < size {
        let data = match lseek64(from, at, Whence::SeekData) {
            Ok(data) => data,
            // The rest of the file is a hole.
            Err(Errno::ENXIO) => break,
            Err(errno) => return Err(errno.into()),
        };
        let end = lseek64(from, data, Whence::SeekHole)?.min(size);
        at = copy_range(from, to, data, end, report)?;
        if at <= data {
            break;
        }
    }
    Ok(())
}

fn copy_range(
    from: &File,
    to: &File,
    start: i64,
    end: i64,
    report: &dyn Fn(u64),
) -> std::io::Result<i64> {
    let (mut read, mut written) = (start, start);
    while read < end {
        let left = usize::try_from(end - read)
            .unwrap_or(PROGRESS_BYTES)
            .min(PROGRESS_BYTES);
        match copy_file_range(from, Some(&mut read), to, Some(&mut written), left) {
            Ok(0) => break,
            Ok(count) => report(count as u64),
            Err(Errno::EINTR) => {}
            // The call does not support this pair of file systems.
            Err(Errno::EXDEV | Errno::ENOSYS | Errno::EOPNOTSUPP | Errno::EINVAL) => {
                let count = copy_with_buffer(from, to, read, left)?;
                if count == 0 {
                    break;
                }
                report(count as u64);
                let step = i64::try_from(count).unwrap_or_default();
                (read, written) = (read + step, written + step);
            }
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(read)
}

fn copy_with_buffer(from: &File, to: &File, at: i64, max_bytes: usize) -> std::io::Result<usize> {
    use std::os::unix::fs::FileExt;
    let at = u64::try_from(at).unwrap_or_default();
    let mut buffer = vec![0; max_bytes.min(1 << 20)];
    let count = from.read_at(&mut buffer, at)?;
    to.write_all_at(buffer.get(..count).unwrap_or_default(), at)?;
    Ok(count)
}
