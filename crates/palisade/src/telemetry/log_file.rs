//! `gate.log`: an append-only log file with rotation, which also receives stderr.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Maximum size of a file before rotation.
const MAX_BYTES: u64 = 16 * 1024 * 1024;

/// Number of rotated files; `gate.log.1` is the newest.
const MAX_ROTATED: u32 = 3;

/// A log of at most [`MAX_BYTES`] × ([`MAX_ROTATED`] + 1) bytes.
#[derive(Debug)]
pub struct LogFile {
    path: PathBuf,
    file: File,
    size: u64,
    max: u64,
}

impl LogFile {
    /// Opens `path` for appending and redirects stderr to it, so that output of libraries is
    /// kept, too.
    pub fn open(path: &Path) -> io::Result<Self> {
        let log = Self::open_bounded(path, MAX_BYTES)?;
        nix::unistd::dup2_stderr(&log.file)?;
        Ok(log)
    }

    fn open_bounded(path: &Path, max: u64) -> io::Result<Self> {
        let file = append(path)?;
        let size = file.metadata()?.len();
        Ok(Self {
            path: path.to_owned(),
            file,
            size,
            max,
        })
    }

    /// Appends one line; rotates the file first if it is full.
    pub fn write_line(&mut self, line: &[u8]) -> io::Result<()> {
        let length = line.len() as u64;
        if self.size > 0 && self.size + length > self.max {
            self.rotate()?;
        }
        self.file.write_all(line)?;
        self.size += length;
        Ok(())
    }

    fn rotate(&mut self) -> io::Result<()> {
        for number in (1..MAX_ROTATED).rev() {
            rename_if_exists(
                &numbered(&self.path, number),
                &numbered(&self.path, number + 1),
            )?;
        }
        rename_if_exists(&self.path, &numbered(&self.path, 1))?;
        let is_stderr = same_file(&self.file, &io::stderr());
        self.file = append(&self.path)?;
        self.size = 0;
        if is_stderr {
            nix::unistd::dup2_stderr(&self.file)?;
        }
        Ok(())
    }
}

/// `gate.log.1` for `gate.log`.
pub fn numbered(path: &Path, number: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{number}"));
    name.into()
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)
}

fn rename_if_exists(from: &Path, to: &Path) -> io::Result<()> {
    match std::fs::rename(from, to) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn same_file(file: &File, other: &impl std::os::fd::AsFd) -> bool {
    let id = |fd: std::os::fd::BorrowedFd<'_>| {
        nix::sys::stat::fstat(fd)
            .ok()
            .map(|found| (found.st_dev, found.st_ino))
    };
    use std::os::fd::AsFd;
    id(file.as_fd()).is_some_and(|own| id(other.as_fd()) == Some(own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_log_is_rotated_and_the_oldest_file_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gate.log");
        let mut log = LogFile::open_bounded(&path, 10).unwrap();
        for line in [
            "one\n",
            "two\n",
            "three\n",
            "fourfour\n",
            "fivefive\n",
            "six\n",
            "longer than ten\n",
        ] {
            log.write_line(line.as_bytes()).unwrap();
        }
        let read = |path: &Path| std::fs::read_to_string(path).unwrap();
        assert_eq!(read(&path), "longer than ten\n");
        assert_eq!(read(&numbered(&path, 1)), "six\n");
        assert_eq!(read(&numbered(&path, 2)), "fivefive\n");
        assert_eq!(read(&numbered(&path, 3)), "fourfour\n");
        assert!(!numbered(&path, 4).exists());
    }

    #[test]
    fn reopened_log_is_appended_to() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gate.log");
        LogFile::open_bounded(&path, 100)
            .unwrap()
            .write_line(b"one\n")
            .unwrap();
        LogFile::open_bounded(&path, 100)
            .unwrap()
            .write_line(b"two\n")
            .unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "one\ntwo\n");
    }
}
