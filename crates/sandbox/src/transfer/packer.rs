//! Walks a tree and writes it down.

use std::ffi::CStr;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, open, readlinkat};
use nix::sys::stat::{FileStat, Mode, fstat, stat};

use super::path::{DEEPEST, LONGEST};
use super::writer::{Entry, Writer};
use super::{Refusal, TransferError, leave_out};
use crate::beneath::{self, FileKind};
use crate::contract::{Moved, Transfer};
use crate::git::names::is_dot_git;

const CHUNK: usize = 64 << 10;

pub(super) struct Packer<'a> {
    writer: Writer<'a>,
    bounds: Transfer,
    entries: u64,
    moved: Moved,
    /// A directory that is left out, by device and inode.
    without: Option<(u64, u64)>,
    /// Whether what is a `.git` is left out.
    without_repositories: bool,
    progress: &'a mut dyn FnMut(u64),
    buffer: Vec<u8>,
}

impl<'a> Packer<'a> {
    pub(super) fn new(
        into: &'a mut dyn Write,
        bounds: &Transfer,
        progress: &'a mut dyn FnMut(u64),
    ) -> Self {
        Self {
            writer: Writer::new(into),
            bounds: *bounds,
            entries: 0,
            moved: Moved::default(),
            without: None,
            without_repositories: false,
            progress,
            buffer: vec![0; CHUNK],
        }
    }

    /// Has a directory left out, which need not be there.
    pub(super) fn leave_out(&mut self, directory: &Path) -> Result<(), TransferError> {
        self.without = match stat(directory) {
            Ok(data) => Some(identity(&data)),
            Err(Errno::ENOENT) => None,
            Err(errno) => return Err(TransferError::system("looking at", directory)(errno)),
        };
        Ok(())
    }

    /// Has every `.git` below a source left out.
    pub(super) fn leave_out_repositories(&mut self) {
        self.without_repositories = true;
    }

    /// Adds a tree that is open, under a name; under none its content.
    pub(super) fn add_tree(&mut self, tree: &OwnedFd, name: &[u8]) -> Result<(), TransferError> {
        self.tree(tree, &mut name.to_vec())
    }

    /// Adds a file that is open, under a name.
    pub(super) fn add_file(&mut self, file: File, name: &[u8]) -> Result<(), TransferError> {
        self.file(file, name)
    }

    /// A source is within what is left out where one of the directories above it is that.
    fn refuse_within(&self, source: &Path) -> Result<(), TransferError> {
        let Some(without) = self.without else {
            return Ok(());
        };
        let system = TransferError::system("finding", source);
        let real = std::fs::canonicalize(source).map_err(system)?;
        for above in real.ancestors() {
            let data = stat(above).map_err(TransferError::system("looking at", above))?;
            if identity(&data) == without {
                let path = source.as_os_str().as_bytes();
                return Err(TransferError::refused(path, Refusal::OurOwn));
            }
        }
        Ok(())
    }

    /// Adds a file or a tree, under its own name. What has none (`/`, `.`) is added without.
    pub(super) fn add(&mut self, source: &Path) -> Result<(), TransferError> {
        let missing = |errno| match errno {
            Errno::ENOENT => TransferError::Missing(source.to_string_lossy().into_owned()),
            errno => TransferError::system("opening", source)(errno),
        };
        let mut path = source
            .file_name()
            .map(|name| name.as_bytes().to_vec())
            .unwrap_or_default();
        // Looked at before it is opened: opening a device may do something.
        let kind = beneath::file_kind(&stat(source).map_err(missing)?);
        let more = match kind {
            FileKind::Directory => OFlag::O_DIRECTORY,
            FileKind::File => OFlag::empty(),
            FileKind::Symlink | FileKind::Other => {
                return Err(TransferError::refused(&path, Refusal::Unknown));
            }
        };
        self.refuse_within(source)?;
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
        let opened = open(source, flags | more, Mode::empty()).map_err(missing)?;
        if kind == FileKind::Directory {
            self.tree(&opened, &mut path)
        } else {
            self.file(File::from(opened), &path)
        }
    }

    pub(super) fn finish(self) -> Result<Moved, TransferError> {
        self.writer
            .finish()
            .map_err(TransferError::system("writing", "archive"))?;
        Ok(self.moved)
    }

    fn tree(&mut self, directory: &OwnedFd, path: &mut Vec<u8>) -> Result<(), TransferError> {
        let data = fstat(directory).map_err(TransferError::system("looking at", shown(path)))?;
        if self.without == Some(identity(&data)) {
            leave_out(&mut self.moved, path, "palisade's own state directory");
            return Ok(());
        }
        let length = path.len();
        if !path.is_empty() {
            path.push(b'/');
            self.begin(path, &data, Entry::Directory)?;
        }
        let left = self.bounds.entries - self.entries;
        let names = beneath::list_names(directory, left)
            .map_err(TransferError::system("listing", shown(path)))?
            .ok_or(TransferError::TooMany(self.bounds.entries))?;
        let below = path.len();
        for name in names {
            path.truncate(below);
            path.extend_from_slice(name.to_bytes());
            self.entry(directory, &name, path)?;
        }
        path.truncate(length);
        Ok(())
    }

    fn entry(
        &mut self,
        directory: &OwnedFd,
        name: &CStr,
        path: &mut Vec<u8>,
    ) -> Result<(), TransferError> {
        let depth = path.iter().filter(|&&byte| byte == b'/').count();
        if path.len() > LONGEST || depth >= DEEPEST {
            leave_out(&mut self.moved, path, "it is too deep");
            return Ok(());
        }
        if self.without_repositories && is_dot_git(name.to_bytes()) {
            leave_out(&mut self.moved, path, "a '.git' stays where it is");
            return Ok(());
        }
        let looked = beneath::stat(directory, name);
        let kind = match &looked {
            Ok(Some(data)) => beneath::file_kind(data),
            // Gone since it was listed.
            Ok(None) => return Ok(()),
            Err(errno) => {
                leave_out(&mut self.moved, path, errno.desc());
                return Ok(());
            }
        };
        match kind {
            FileKind::File => match beneath::open_file(directory, name) {
                Ok(file) => self.file(file, path)?,
                Err(errno) => leave_out(&mut self.moved, path, errno.desc()),
            },
            FileKind::Directory => match beneath::open_directory(directory, name) {
                Ok(below) => self.tree(&below, path)?,
                Err(errno) => leave_out(&mut self.moved, path, errno.desc()),
            },
            FileKind::Symlink => match (readlinkat(directory, name), looked) {
                (Ok(text), Ok(Some(data))) => {
                    self.begin(path, &data, Entry::Symlink(text.as_bytes()))?;
                    self.moved.files += 1;
                }
                _ => leave_out(&mut self.moved, path, "it changed while it was read"),
            },
            FileKind::Other => leave_out(&mut self.moved, path, "a socket, FIFO or device"),
        }
        Ok(())
    }

    fn file(&mut self, mut file: File, path: &[u8]) -> Result<(), TransferError> {
        let data = fstat(&file).map_err(TransferError::system("looking at", shown(path)))?;
        if beneath::file_kind(&data) != FileKind::File {
            leave_out(&mut self.moved, path, "it changed while it was read");
            return Ok(());
        }
        let size = u64::try_from(data.st_size).unwrap_or_default();
        if size > self.bounds.bytes - self.moved.bytes {
            return Err(TransferError::TooLarge(self.bounds.bytes));
        }
        let modified = u64::try_from(data.st_mtime).unwrap_or_default();
        self.begin(path, &data, Entry::File { size, modified })?;
        let (mut left, mut cut) = (size, false);
        while left > 0 {
            let most = usize::try_from(left).unwrap_or(usize::MAX).min(CHUNK);
            let chunk = self.buffer.get_mut(..most).unwrap_or_default();
            let length = match file.read(chunk) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(TransferError::system("reading", shown(path))(error)),
                // Shorter than it was: the archive has promised a size.
                Ok(0) => {
                    if !cut {
                        leave_out(&mut self.moved, path, "its end, cut while it was read");
                    }
                    cut = true;
                    chunk.fill(0);
                    most
                }
                Ok(length) => length,
            };
            let chunk = self.buffer.get(..length).unwrap_or_default();
            self.writer
                .content(chunk)
                .map_err(TransferError::system("writing", "archive"))?;
            left -= length as u64;
            self.moved.bytes += length as u64;
            (self.progress)(self.moved.bytes);
        }
        self.moved.files += 1;
        self.writer
            .pad(size)
            .map_err(TransferError::system("writing", "archive"))
    }

    fn begin(
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

/// What a file is, whatever it is called.
fn identity(data: &FileStat) -> (u64, u64) {
    (data.st_dev, data.st_ino)
}

fn shown(path: &[u8]) -> &std::ffi::OsStr {
    std::ffi::OsStr::from_bytes(path)
}
