//! Packs a tree into an archive.

use std::ffi::CStr;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, open, readlinkat};
use nix::sys::stat::{FileStat, Mode, fstat, stat};

use super::path::{MAX_DEPTH, MAX_PATH_BYTES};
use super::writer::{Entry, Writer};
use super::{MemberRefusal, TransferError, skip};
use crate::beneath::{self, FileKind};
use crate::contract::{TransferBounds, TransferSummary};
use crate::git::names::is_dot_git;

const CHUNK_BYTES: usize = 64 << 10;

/// Packs files and trees into one archive.
pub(super) struct Packer<'a> {
    writer: Writer<'a>,
    bounds: TransferBounds,
    entries: u64,
    summary: TransferSummary,
    /// The skipped directory, by device and inode.
    skipped_directory: Option<(u64, u64)>,
    /// Whether every `.git` is skipped.
    skips_repositories: bool,
    progress: &'a mut dyn FnMut(u64),
    buffer: Vec<u8>,
}

impl<'a> Packer<'a> {
    pub(super) fn new(
        into: &'a mut dyn Write,
        bounds: &TransferBounds,
        progress: &'a mut dyn FnMut(u64),
    ) -> Self {
        Self {
            writer: Writer::new(into),
            bounds: *bounds,
            entries: 0,
            summary: TransferSummary::default(),
            skipped_directory: None,
            skips_repositories: false,
            progress,
            buffer: vec![0; CHUNK_BYTES],
        }
    }

    /// Skips a directory, which need not exist.
    pub(super) fn skip(&mut self, directory: &Path) -> Result<(), TransferError> {
        self.skipped_directory = match stat(directory) {
            Ok(data) => Some(identity(&data)),
            Err(Errno::ENOENT) => None,
            Err(errno) => return Err(TransferError::system("stat of", directory)(errno)),
        };
        Ok(())
    }

    /// Skips every `.git` below a source.
    pub(super) fn skip_repositories(&mut self) {
        self.skips_repositories = true;
    }

    /// Adds an open directory under a name; with an empty name, its entries.
    pub(super) fn add_tree(&mut self, tree: &OwnedFd, name: &[u8]) -> Result<(), TransferError> {
        self.pack_tree(tree, &mut name.to_vec())
    }

    /// Adds an open file under a name.
    pub(super) fn add_file(&mut self, file: File, name: &[u8]) -> Result<(), TransferError> {
        self.pack_file(file, name)
    }

    /// Fails if a parent of the source is the skipped directory.
    fn refuse_skipped_parent(&self, source: &Path) -> Result<(), TransferError> {
        let Some(skipped_directory) = self.skipped_directory else {
            return Ok(());
        };
        let system = TransferError::system("finding", source);
        let real = std::fs::canonicalize(source).map_err(system)?;
        for above in real.ancestors() {
            let data = stat(above).map_err(TransferError::system("stat of", above))?;
            if identity(&data) == skipped_directory {
                let path = source.as_os_str().as_bytes();
                return Err(TransferError::refused(path, MemberRefusal::StateDirectory));
            }
        }
        Ok(())
    }

    /// Adds a file or a tree under its own name, or without one for `/` and `.`.
    pub(super) fn add(&mut self, source: &Path) -> Result<(), TransferError> {
        let missing = |errno| match errno {
            Errno::ENOENT => TransferError::Missing(source.to_string_lossy().into_owned()),
            errno => TransferError::system("opening", source)(errno),
        };
        let mut path = source
            .file_name()
            .map(|name| name.as_bytes().to_vec())
            .unwrap_or_default();
        // The type is checked before opening, because opening a device may have effects.
        let kind = beneath::file_kind(&stat(source).map_err(missing)?);
        let type_flags = match kind {
            FileKind::Directory => OFlag::O_DIRECTORY,
            FileKind::File => OFlag::empty(),
            FileKind::Symlink | FileKind::Other => {
                return Err(TransferError::refused(&path, MemberRefusal::Unknown));
            }
        };
        self.refuse_skipped_parent(source)?;
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
        let opened = open(source, flags | type_flags, Mode::empty()).map_err(missing)?;
        if kind == FileKind::Directory {
            self.pack_tree(&opened, &mut path)
        } else {
            self.pack_file(File::from(opened), &path)
        }
    }

    pub(super) fn finish(self) -> Result<TransferSummary, TransferError> {
        self.writer
            .finish()
            .map_err(TransferError::system("writing", "archive"))?;
        Ok(self.summary)
    }

    fn pack_tree(&mut self, directory: &OwnedFd, path: &mut Vec<u8>) -> Result<(), TransferError> {
        let data = fstat(directory).map_err(TransferError::system("stat of", os_path(path)))?;
        if self.skipped_directory == Some(identity(&data)) {
            skip(&mut self.summary, path, "palisade's own state directory");
            return Ok(());
        }
        let length = path.len();
        if !path.is_empty() {
            path.push(b'/');
            self.begin_member(path, &data, Entry::Directory)?;
        }
        let left = self.bounds.entries - self.entries;
        let names = beneath::list_names(directory, left)
            .map_err(TransferError::system("listing", os_path(path)))?
            .ok_or(TransferError::TooMany(self.bounds.entries))?;
        let prefix_length = path.len();
        for name in names {
            path.truncate(prefix_length);
            path.extend_from_slice(name.to_bytes());
            self.pack_entry(directory, &name, path)?;
        }
        path.truncate(length);
        Ok(())
    }

    fn pack_entry(
        &mut self,
        directory: &OwnedFd,
        name: &CStr,
        path: &mut Vec<u8>,
    ) -> Result<(), TransferError> {
        let depth = path.iter().filter(|&&byte| byte == b'/').count();
        if path.len() > MAX_PATH_BYTES || depth >= MAX_DEPTH {
            skip(&mut self.summary, path, "it is too deep");
            return Ok(());
        }
        if self.skips_repositories && is_dot_git(name.to_bytes()) {
            skip(&mut self.summary, path, "a '.git' is not packed");
            return Ok(());
        }
        let found = beneath::stat(directory, name);
        let kind = match &found {
            Ok(Some(data)) => beneath::file_kind(data),
            // The entry was removed after it was listed.
            Ok(None) => return Ok(()),
            Err(errno) => {
                skip(&mut self.summary, path, errno.desc());
                return Ok(());
            }
        };
        match kind {
            FileKind::File => match beneath::open_file(directory, name) {
                Ok(file) => self.pack_file(file, path)?,
                Err(errno) => skip(&mut self.summary, path, errno.desc()),
            },
            FileKind::Directory => match beneath::open_directory(directory, name) {
                Ok(tree) => self.pack_tree(&tree, path)?,
                Err(errno) => skip(&mut self.summary, path, errno.desc()),
            },
            FileKind::Symlink => match (readlinkat(directory, name), found) {
                (Ok(text), Ok(Some(data))) => {
                    self.begin_member(path, &data, Entry::Symlink(text.as_bytes()))?;
                    self.summary.files += 1;
                }
                _ => skip(&mut self.summary, path, "it changed while it was read"),
            },
            FileKind::Other => skip(&mut self.summary, path, "a socket, FIFO or device"),
        }
        Ok(())
    }

    fn pack_file(&mut self, mut file: File, path: &[u8]) -> Result<(), TransferError> {
        let data = fstat(&file).map_err(TransferError::system("stat of", os_path(path)))?;
        if beneath::file_kind(&data) != FileKind::File {
            skip(&mut self.summary, path, "it changed while it was read");
            return Ok(());
        }
        let size = u64::try_from(data.st_size).unwrap_or_default();
        if size > self.bounds.bytes - self.summary.bytes {
            return Err(TransferError::TooLarge(self.bounds.bytes));
        }
        let modified = u64::try_from(data.st_mtime).unwrap_or_default();
        self.begin_member(path, &data, Entry::File { size, modified })?;
        let (mut left, mut was_truncated) = (size, false);
        while left > 0 {
            let length_limit = usize::try_from(left).unwrap_or(usize::MAX).min(CHUNK_BYTES);
            let chunk = self.buffer.get_mut(..length_limit).unwrap_or_default();
            let length = match file.read(chunk) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(TransferError::system("reading", os_path(path))(error)),
                // The file became shorter than the size in its header.
                Ok(0) => {
                    if !was_truncated {
                        skip(&mut self.summary, path, "truncated while it was read");
                    }
                    was_truncated = true;
                    chunk.fill(0);
                    length_limit
                }
                Ok(length) => length,
            };
            let chunk = self.buffer.get(..length).unwrap_or_default();
            self.writer
                .content(chunk)
                .map_err(TransferError::system("writing", "archive"))?;
            left -= length as u64;
            self.summary.bytes += length as u64;
            (self.progress)(self.summary.bytes);
        }
        self.summary.files += 1;
        self.writer
            .pad(size)
            .map_err(TransferError::system("writing", "archive"))
    }

    fn begin_member(
        &mut self,
        path: &[u8],
        data: &FileStat,
        entry: Entry<'_>,
    ) -> Result<(), TransferError> {
        if self.entries >= self.bounds.entries {
            return Err(TransferError::TooMany(self.bounds.entries));
        }
        self.entries += 1;
        self.writer
            .begin(path, data.st_mode & 0o777, entry)
            .map_err(TransferError::system("writing", "archive"))
    }
}

/// Identifies a file by device and inode.
fn identity(data: &FileStat) -> (u64, u64) {
    (data.st_dev, data.st_ino)
}

fn os_path(path: &[u8]) -> &std::ffi::OsStr {
    std::ffi::OsStr::from_bytes(path)
}
