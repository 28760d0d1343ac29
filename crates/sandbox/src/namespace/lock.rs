//! Files that say by their lock that somebody is at work.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::{Flock, FlockArg};

use crate::contract::SandboxError;

/// A lock's file, made if it is not there.
pub(super) fn open_lock(path: &Path) -> std::io::Result<File> {
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .read(true)
        .mode(0o600)
        .open(path)
}

pub(super) fn lock(path: &Path) -> Result<Flock<File>, SandboxError> {
    let take = || {
        loop {
            let locked = Flock::lock(open_lock(path)?, FlockArg::LockExclusive)
                .map_err(|(_, errno)| Error::from(errno))?;
            // Whoever had it may have removed it, and another may be in its place.
            if is_at(&locked, path)? {
                return Ok(locked);
            }
        }
    };
    take().map_err(SandboxError::system::<Error>("taking a lock"))
}

/// Whether this file is still the one under that name.
pub(super) fn is_at(file: &File, path: &Path) -> std::io::Result<bool> {
    let (held, there) = (file.metadata()?, path.metadata());
    Ok(there.is_ok_and(|there| (there.dev(), there.ino()) == (held.dev(), held.ino())))
}

/// `None` when somebody has it.
pub(super) fn try_lock(path: &Path) -> Result<Option<Flock<File>>, SandboxError> {
    let file = match open_lock(path) {
        // Deleted since it was listed.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        other => other.map_err(SandboxError::system("taking a lock"))?,
    };
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(locked) => Ok(Some(locked)),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, errno)) => Err(SandboxError::system("taking a lock")(errno)),
    }
}
