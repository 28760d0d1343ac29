//! Lock files.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::{Flock, FlockArg};

use crate::contract::SandboxError;

/// Opens a lock file, and creates it if it does not exist.
pub(super) fn open_lock(path: &Path) -> std::io::Result<File> {
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .read(true)
        .mode(0o600)
        .open(path)
}

/// Takes a lock, and waits while another process holds it.
pub(super) fn lock(path: &Path) -> Result<Flock<File>, SandboxError> {
    let take = || {
        loop {
            let locked = Flock::lock(open_lock(path)?, FlockArg::LockExclusive)
                .map_err(|(_, errno)| Error::from(errno))?;
            // The previous holder may have removed the file, and another file may exist at the
            // path.
            if is_file_at(&locked, path)? {
                return Ok(locked);
            }
        }
    };
    take().map_err(SandboxError::system::<Error>("taking a lock"))
}

/// Whether the path still names this file.
pub(super) fn is_file_at(file: &File, path: &Path) -> std::io::Result<bool> {
    let (held, current) = (file.metadata()?, path.metadata());
    Ok(current.is_ok_and(|current| (current.dev(), current.ino()) == (held.dev(), held.ino())))
}

/// Tries to take a lock; `None` if it is held.
pub(super) fn try_lock(path: &Path) -> Result<Option<Flock<File>>, SandboxError> {
    let file = match open_lock(path) {
        // The file was deleted after it was listed.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        other => other.map_err(SandboxError::system("taking a lock"))?,
    };
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(locked) => Ok(Some(locked)),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, errno)) => Err(SandboxError::system("taking a lock")(errno)),
    }
}
