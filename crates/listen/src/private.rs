//! A Unix socket that is never accessible to other users.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::{UnixListener, UnixStream};

use crate::connections::Accept;

/// Maximum length of a socket path in bytes: `sun_path` has 108 bytes, including a final NUL.
pub const MAX_SOCKET_PATH: usize = 107;

/// Why a socket could not be bound.
#[derive(Debug, thiserror::Error)]
pub enum PrivateSocketError {
    /// The path does not fit into a socket address.
    #[error(
        "the socket path {path} is {length} bytes long, but the system allows at most \
         {MAX_SOCKET_PATH}; choose a shorter path"
    )]
    TooLong {
        /// The path.
        path: PathBuf,
        /// The length of the path, or of the temporary path if that is longer.
        length: usize,
    },
    /// A file exists at the path that is not a socket.
    #[error("{0} exists and is not a socket; remove it, or choose another path")]
    NotASocket(PathBuf),
    /// Another process listens on the socket.
    #[error("another process already listens on {0}; stop it, or choose another path")]
    InUse(PathBuf),
    /// The system's error.
    #[error("cannot listen on {path}: {source}")]
    Io {
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// A bound socket. Dropping it removes the file, unless the file was replaced.
#[derive(Debug)]
pub struct PrivateSocket {
    listener: UnixListener,
    path: PathBuf,
    inode: u64,
}

impl PrivateSocket {
    /// Binds `path` with the file mode `mode`, and replaces a socket without a listening process.
    ///
    /// The socket is bound under a temporary name and renamed, so that it never exists with other
    /// permissions.
    pub async fn bind(path: &Path, mode: u32) -> Result<Self, PrivateSocketError> {
        let fail = |source| PrivateSocketError::Io {
            path: path.to_owned(),
            source,
        };
        let temporary = path.with_file_name(format!(".{}", std::process::id()));
        let length = path.as_os_str().len().max(temporary.as_os_str().len());
        if length > MAX_SOCKET_PATH {
            return Err(PrivateSocketError::TooLong {
                path: path.to_owned(),
                length,
            });
        }
        match std::fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                return Err(PrivateSocketError::NotASocket(path.to_owned()));
            }
            Ok(_) if UnixStream::connect(path).await.is_ok() => {
                return Err(PrivateSocketError::InUse(path.to_owned()));
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(fail(error)),
        }
        // A killed process with the same process id may have left its temporary socket.
        if std::fs::symlink_metadata(&temporary).is_ok_and(|found| found.file_type().is_socket()) {
            std::fs::remove_file(&temporary).map_err(fail)?;
        }
        let listener = UnixListener::bind(&temporary).map_err(fail)?;
        std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(mode))
            .and_then(|()| std::fs::rename(&temporary, path))
            .map_err(fail)?;
        Ok(Self {
            listener,
            path: path.to_owned(),
            inode: inode_of(path).map_err(fail)?,
        })
    }

    /// The path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Accept for PrivateSocket {
    type Stream = UnixStream;

    async fn accept(&self) -> io::Result<UnixStream> {
        Accept::accept(&self.listener).await
    }
}

impl Drop for PrivateSocket {
    fn drop(&mut self) {
        if inode_of(&self.path).is_ok_and(|inode| inode == self.inode)
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!(%error, "removing the socket failed");
        }
    }
}

fn inode_of(path: &Path) -> io::Result<u64> {
    std::fs::symlink_metadata(path).map(|found| found.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_a_socket_without_a_listener_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let first = PrivateSocket::bind(&path, 0o600).await.unwrap();
        let mode = std::fs::symlink_metadata(&path).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600);
        let error = PrivateSocket::bind(&path, 0o600).await.unwrap_err();
        assert!(matches!(error, PrivateSocketError::InUse(_)), "{error}");
        // As after a kill: the file exists, but no process listens on it.
        let moved = directory.path().join("moved");
        std::fs::rename(&path, &moved).unwrap();
        drop(first);
        std::fs::rename(&moved, &path).unwrap();
        let second = PrivateSocket::bind(&path, 0o660).await.unwrap();
        drop(second);
        assert!(!path.exists());
        std::fs::write(&path, "mine").unwrap();
        let error = PrivateSocket::bind(&path, 0o600).await.unwrap_err();
        assert!(
            matches!(error, PrivateSocketError::NotASocket(_)),
            "{error}"
        );
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    }

    #[tokio::test]
    async fn file_that_replaced_the_socket_is_not_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let socket = PrivateSocket::bind(&path, 0o600).await.unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "replacement").unwrap();
        drop(socket);
        assert_eq!(std::fs::read(&path).unwrap(), b"replacement");
    }

    #[tokio::test]
    async fn too_long_path_is_refused_before_any_file_exists() {
        let directory = tempfile::tempdir().unwrap();
        let max_name = MAX_SOCKET_PATH - directory.path().as_os_str().len() - 1;
        let path = directory.path().join("x".repeat(max_name + 1));
        let error = PrivateSocket::bind(&path, 0o600).await.unwrap_err();
        assert!(
            matches!(error, PrivateSocketError::TooLong { .. }),
            "{error}"
        );
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        let path = directory.path().join("x".repeat(max_name));
        PrivateSocket::bind(&path, 0o600).await.unwrap();
    }
}
