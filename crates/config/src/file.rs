//! Reads a regular file with a size limit, safely also if the path is something else, and replaces a
//! file as a whole.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use nix::libc::{O_CLOEXEC, O_NOFOLLOW, O_NONBLOCK};

/// Maximum size of an operator's file: 4 MiB.
pub(crate) const OPERATOR_LIMIT: u64 = 4 * 1024 * 1024;

/// Maximum size of a repository's file: 64 KiB.
pub(crate) const REPOSITORY_LIMIT: u64 = 64 * 1024;

/// Why a file cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub(crate) enum FileReadError {
    /// The file does not exist.
    #[error("no such file")]
    Missing,
    /// A directory, a FIFO, a device, or a link where links are refused.
    #[error("not a regular file")]
    NotRegular,
    /// The file is larger than the limit.
    #[error("larger than {0} bytes")]
    TooLarge(u64),
    /// The system's error.
    #[error("{0}")]
    Io(String),
}

/// Whether the last component of the path may be a symbolic link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Links {
    /// An operator's files may be links: some editors and Kubernetes replace files that way.
    Follow,
    /// A repository's file may not be a link: it could point at any file that the operator can
    /// read.
    Refuse,
}

/// The bytes of the regular file at `path`, at most `limit` of them.
///
/// Opens without blocking, so that a FIFO cannot hang the loader, and checks the descriptor, so
/// that the checked file is the one that is read.
pub(crate) fn read(path: &Path, limit: u64, links: Links) -> Result<Vec<u8>, FileReadError> {
    let flags = match links {
        Links::Follow => O_NONBLOCK | O_CLOEXEC,
        Links::Refuse => O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW,
    };
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)
        .map_err(|error| describe(&error))?;
    let metadata = file.metadata().map_err(|error| describe(&error))?;
    if !metadata.is_file() {
        return Err(FileReadError::NotRegular);
    }
    if metadata.len() > limit {
        return Err(FileReadError::TooLarge(limit));
    }
    let mut bytes = Vec::new();
    file.take(limit + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| describe(&error))?;
    if bytes.len() as u64 > limit {
        return Err(FileReadError::TooLarge(limit));
    }
    Ok(bytes)
}

fn describe(error: &std::io::Error) -> FileReadError {
    match error.raw_os_error() {
        Some(nix::libc::ENOENT | nix::libc::ENOTDIR) => FileReadError::Missing,
        Some(nix::libc::ELOOP | nix::libc::ENXIO) => FileReadError::NotRegular,
        _ => FileReadError::Io(error.kind().to_string()),
    }
}

/// Writes a temporary file and renames it: a reader sees the old file or the new one, also after a
/// crash. The file gets the permissions `mode`.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8], mode: u32) -> std::io::Result<()> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let temporary = directory.join(name);
    // A killed process with the same id may have left the file behind.
    match std::fs::remove_file(&temporary) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let written = (|| {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&temporary)?;
        file.write_all(bytes)?;
        file.set_permissions(Permissions::from_mode(mode))?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)?;
        File::open(directory)?.sync_all()
    })();
    if written.is_err() {
        // The rename may have happened; then only the temporary file is left to remove.
        let _ = std::fs::remove_file(&temporary);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_within_the_limit_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "12345678").unwrap();
        assert_eq!(read(&file, 8, Links::Refuse).unwrap(), b"12345678");
        assert_eq!(
            read(&file, 7, Links::Follow),
            Err(FileReadError::TooLarge(7))
        );
        assert_eq!(
            read(dir.path(), 8, Links::Follow),
            Err(FileReadError::NotRegular)
        );
        assert_eq!(
            read(&dir.path().join("none"), 8, Links::Follow),
            Err(FileReadError::Missing)
        );

        let fifo = dir.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(
            read(&fifo, 8, Links::Follow),
            Err(FileReadError::NotRegular)
        );

        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert_eq!(read(&link, 8, Links::Follow).unwrap(), b"12345678");
        assert_eq!(
            read(&link, 8, Links::Refuse),
            Err(FileReadError::NotRegular)
        );
        assert_eq!(
            read(Path::new("/dev/zero"), 8, Links::Follow),
            Err(FileReadError::NotRegular)
        );
    }
}
