//! One gate, and one watchdog, per state directory.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

use crate::exit::{Exit, Failure};

/// Held for as long as the gate runs; the kernel releases it however the gate ends.
///
/// Two locks: one on the directory itself, which cannot be unlinked, keeps a second gate
/// out; one on a file can be asked for its holder without being taken.
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
            return Err(taken("gate", path, &mut open(path)?));
        }
        Ok(Self {
            _directory: directory,
            _file: lock_file("gate", path)?,
        })
    }
}

/// Held for as long as a watchdog runs. A second watchdog would restart a gate that `gate stop`
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

    /// Whether the locked file is still where other processes look for it: not when the state
    /// directory was removed.
    pub fn is_in_place(&self) -> bool {
        let (Ok(own), Ok(there)) = (self.file.metadata(), self.path.metadata()) else {
            return false;
        };
        (own.dev(), own.ino()) == (there.dev(), there.ino())
    }
}

/// The process that holds the lock on a file, if one does. Only asks: a lock taken to find out
/// would, for a moment, keep a starting gate from its own.
pub fn holder(path: &Path) -> Result<Option<Holder>> {
    if !path.exists() {
        return Ok(None);
    }
    let mut file = open(path)?;
    let mut found = whole_file();
    fcntl(&file, FcntlArg::F_OFD_GETLK(&mut found))
        .with_context(|| format!("cannot ask for the lock on {}", path.display()))?;
    let free = i32::from(found.l_type) == libc::F_UNLCK;
    Ok((!free).then(|| Holder {
        pid: read_pid(&mut file),
    }))
}

/// Locks a file and writes this process's id into it.
fn lock_file(what: &str, path: &Path) -> Result<File> {
    let mut file = open(path)?;
    match fcntl(&file, FcntlArg::F_OFD_SETLK(&whole_file())) {
        Ok(_) => {}
        Err(Errno::EAGAIN | Errno::EACCES) => return Err(taken(what, path, &mut file)),
        Err(error) => {
            return Err(error).with_context(|| format!("cannot lock {}", path.display()));
        }
    }
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}", std::process::id())?;
    Ok(file)
}

fn taken(what: &str, path: &Path, file: &mut File) -> anyhow::Error {
    let place = path.parent().unwrap_or(path).display();
    let who = read_pid(file).map_or_else(String::new, |pid| format!(" (pid {pid})"));
    let message = format!("a {what} already runs in {place}{who}; see: palisade gate status");
    Failure::new(Exit::Exists, message).into()
}

/// Whoever holds the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its process; not yet written in the moment after the lock was taken.
    pub pid: Option<i32>,
}

/// A write lock over the whole file, owned by the open file and not by the process.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the constants are small; the system declares them wider than the fields"
)]
fn whole_file() -> libc::flock {
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
    fn the_second_gate_is_told_who_holds_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        assert_eq!(holder(&path).unwrap(), None);
        let first = StateLock::take(&path).unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        assert_eq!(holder(&path).unwrap(), Some(Holder { pid: Some(own) }));
        let error = StateLock::take(&path).unwrap_err();
        assert!(
            error.to_string().contains(&format!("(pid {own})")),
            "{error}"
        );
        assert_eq!(exit_of(&error), Exit::Exists);
        std::fs::remove_file(&path).unwrap();
        let error = StateLock::take(&path).unwrap_err();
        assert_eq!(
            exit_of(&error),
            Exit::Exists,
            "also without the file: {error}"
        );
        drop(first);
        assert_eq!(holder(&path).unwrap(), None);
        StateLock::take(&path).unwrap();
    }

    #[test]
    fn a_watchdog_sees_that_its_state_directory_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("watchdog.lock");
        let lock = WatchdogLock::take(&path).unwrap();
        assert!(lock.is_in_place());
        assert_eq!(
            exit_of(&WatchdogLock::take(&path).unwrap_err()),
            Exit::Exists
        );
        std::fs::remove_file(&path).unwrap();
        assert!(!lock.is_in_place());
        std::fs::write(&path, "").unwrap();
        assert!(!lock.is_in_place(), "another file");
    }
}
