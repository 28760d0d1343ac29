//! Locks that allow one gate and one watchdog per state directory.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

use crate::exit::{CliError, CliExit};

/// The lock of a running gate; the kernel releases it however the gate ends.
///
/// There are two locks: the lock on the directory, which cannot be unlinked, excludes a second
/// gate; the lock on a file can be queried for its holder without being acquired.
#[derive(Debug)]
pub struct StateLock {
    _directory: File,
    _file: File,
}

impl StateLock {
    /// Takes the lock and writes this process's id into it.
    pub fn take(path: &Path) -> Result<Self> {
        let directory = File::open(path.parent().unwrap_or(path))
            .with_context(|| format!("cannot open the directory of {}", path.display()))?;
        if let Err(TryLockError::WouldBlock) = directory.try_lock() {
            return Err(already_locked("gate", path, &mut open(path)?));
        }
        Ok(Self {
            _directory: directory,
            _file: lock_file("gate", path)?,
        })
    }
}

/// The lock of a running watchdog. A second watchdog would restart a gate that `gate stop`
/// has stopped.
#[derive(Debug)]
pub struct WatchdogLock {
    file: File,
    path: PathBuf,
}

impl WatchdogLock {
    /// Takes the lock and writes this process's id into it.
    pub fn take(path: &Path) -> Result<Self> {
        Ok(Self {
            file: lock_file("watchdog", path)?,
            path: path.to_owned(),
        })
    }

    /// Whether the path still names the locked file. False if the state directory was removed.
    pub fn is_in_place(&self) -> bool {
        let (Ok(own), Ok(current)) = (self.file.metadata(), self.path.metadata()) else {
            return false;
        };
        (own.dev(), own.ino()) == (current.dev(), current.ino())
    }
}

/// The process that holds the lock on a file, if any. Queries the lock without acquiring it,
/// since a probe lock could make a starting gate fail.
pub fn find_holder(path: &Path) -> Result<Option<Holder>> {
    if !path.exists() {
        return Ok(None);
    }
    let mut file = open(path)?;
    let mut found = whole_file_lock();
    fcntl(&file, FcntlArg::F_OFD_GETLK(&mut found))
        .with_context(|| format!("cannot query the lock on {}", path.display()))?;
    let free = i32::from(found.l_type) == libc::F_UNLCK;
    Ok((!free).then(|| Holder {
        pid: read_pid(&mut file),
    }))
}

/// Locks a file and writes this process's id into it.
fn lock_file(what: &str, path: &Path) -> Result<File> {
    let mut file = open(path)?;
    match fcntl(&file, FcntlArg::F_OFD_SETLK(&whole_file_lock())) {
        Ok(_) => {}
        Err(Errno::EAGAIN | Errno::EACCES) => return Err(already_locked(what, path, &mut file)),
        Err(error) => {
            return Err(error).with_context(|| format!("cannot lock {}", path.display()));
        }
    }
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}", std::process::id())?;
    Ok(file)
}

fn already_locked(what: &str, path: &Path, file: &mut File) -> anyhow::Error {
    let directory = path.parent().unwrap_or(path).display();
    let holder = read_pid(file).map_or_else(String::new, |pid| format!(" (pid {pid})"));
    let message =
        format!("a {what} already runs in {directory}{holder}; see: palisade gate status");
    CliError::new(CliExit::Exists, message).into()
}

/// The holder of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The holder's pid; not yet written in the moment after the lock was acquired.
    pub pid: Option<i32>,
}

/// A write lock on the whole file, owned by the open file description and not by the process.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the constants are small; the system declares them wider than the fields"
)]
fn whole_file_lock() -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

fn open(path: &Path) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("cannot open {}", path.display()))
}

fn read_pid(file: &mut File) -> Option<i32> {
    let mut text = String::new();
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok().filter(|pid| *pid > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::exit_of;

    #[test]
    fn second_gate_fails_with_the_pid_of_the_holder() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        assert_eq!(find_holder(&path).unwrap(), None);
        let first = StateLock::take(&path).unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        assert_eq!(find_holder(&path).unwrap(), Some(Holder { pid: Some(own) }));
        let error = StateLock::take(&path).unwrap_err();
        assert!(
            error.to_string().contains(&format!("(pid {own})")),
            "{error}"
        );
        assert_eq!(exit_of(&error), CliExit::Exists);
        std::fs::remove_file(&path).unwrap();
        let error = StateLock::take(&path).unwrap_err();
        assert_eq!(
            exit_of(&error),
            CliExit::Exists,
            "the directory lock also excludes a second gate: {error}"
        );
        drop(first);
        assert_eq!(find_holder(&path).unwrap(), None);
        StateLock::take(&path).unwrap();
    }

    #[test]
    fn watchdog_detects_removal_of_its_state_directory() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("watchdog.lock");
        let lock = WatchdogLock::take(&path).unwrap();
        assert!(lock.is_in_place());
        assert_eq!(
            exit_of(&WatchdogLock::take(&path).unwrap_err()),
            CliExit::Exists
        );
        std::fs::remove_file(&path).unwrap();
        assert!(!lock.is_in_place());
        std::fs::write(&path, "").unwrap();
        assert!(!lock.is_in_place(), "the path names another file");
    }
}
