//! The sockets: a Unix socket or a TCP port, opened with care and served until told to stop.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::door::Door;

/// Connections served at once.
const MAX_CONNECTIONS: usize = 256;

/// How long a client may take to send a request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// Before accepting again after a failure.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long requests may take to finish when the server stops: as long as their commands may
/// take to be ended.
const LAST_REQUESTS: Duration = Duration::from_secs(12);

/// `sun_path` holds 108 bytes, the last a NUL.
const MAX_SOCKET_PATH: usize = 107;

/// Why a socket could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The path does not fit into a socket address.
    #[error("the socket's path is longer than {MAX_SOCKET_PATH} bytes: {0}")]
    TooLong(PathBuf),
    /// There is something, and it is not a socket.
    #[error("{0} exists and is not a socket; remove it, or choose another path")]
    NotASocket(PathBuf),
    /// Another server is there.
    #[error("somebody already listens on {0}; stop it, or choose another path")]
    InUse(PathBuf),
    /// The system refused.
    #[error("cannot listen on {address}: {source}")]
    Io {
        /// Where.
        address: String,
        /// What it said.
        source: io::Error,
    },
}

/// A listening socket. Dropping it removes a Unix socket's file, if it is still this one.
#[derive(Debug)]
pub enum Listener {
    /// A file.
    Unix(UnixListener, Option<SocketFile>),
    /// A port.
    Tcp(TcpListener),
}

/// The file of a Unix socket.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    inode: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_ours =
            std::fs::symlink_metadata(&self.path).is_ok_and(|found| found.ino() == self.inode);
        if is_ours && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(%error, "the socket could not be removed");
        }
    }
}

impl Listener {
    /// Binds a Unix socket with this mode, in the place of one that nobody listens on. Its
    /// directory is made if it is not there.
    ///
    /// It is bound under another name and moved, so that it never exists with other rights.
    pub async fn unix(path: &Path, mode: u32) -> Result<Self, BindError> {
        let fail = |source| BindError::Io {
            address: format!("unix:{}", path.display()),
            source,
        };
        let temporary = path.with_file_name(format!(".{}.sock", std::process::id()));
        let longest = path.as_os_str().len().max(temporary.as_os_str().len());
        if longest > MAX_SOCKET_PATH {
            return Err(BindError::TooLong(path.to_owned()));
        }
        match std::fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                return Err(BindError::NotASocket(path.to_owned()));
            }
            Ok(_) if tokio::net::UnixStream::connect(path).await.is_ok() => {
                return Err(BindError::InUse(path.to_owned()));
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if let Some(directory) = path.parent() {
                    std::fs::create_dir_all(directory).map_err(fail)?;
                }
            }
            Err(error) => return Err(fail(error)),
        }
        if std::fs::symlink_metadata(&temporary).is_ok_and(|found| found.file_type().is_socket()) {
            std::fs::remove_file(&temporary).map_err(fail)?;
        }
        let listener = UnixListener::bind(&temporary).map_err(fail)?;
        std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(mode))
            .and_then(|()| std::fs::rename(&temporary, path))
            .map_err(fail)?;
        let inode = std::fs::symlink_metadata(path).map_err(fail)?.ino();
        let file = SocketFile {
            path: path.to_owned(),
            inode,
        };
        Ok(Listener::Unix(listener, Some(file)))
    }

    /// The listening Unix socket that this process has as its standard input.
    pub fn inherited() -> io::Result<Self> {
        let socket = io::stdin().as_fd().try_clone_to_owned()?;
        let listener = std::os::unix::net::UnixListener::from(socket);
        listener.set_nonblocking(true)?;
        // A file has no address.
        listener.local_addr()?;
        Ok(Listener::Unix(UnixListener::from_std(listener)?, None))
    }

    /// Binds a TCP port.
    pub async fn tcp(host: &str, port: u16) -> Result<Self, BindError> {
        let bound = TcpListener::bind((host, port)).await;
        bound.map(Listener::Tcp).map_err(|source| BindError::Io {
            address: format!("{host}:{port}"),
            source,
        })
    }

    /// Where it listens, for people.
    pub fn address(&self) -> String {
        match self {
            Listener::Unix(_, Some(file)) => format!("unix:{}", file.path.display()),
            Listener::Unix(_, None) => "unix:".to_owned(),
            Listener::Tcp(listener) => {
                let address = listener.local_addr();
                address.map_or_else(
                    |error| error.to_string(),
                    |address: SocketAddr| address.to_string(),
                )
            }
        }
    }
}

/// Serves until `stop`: requests in flight have a moment to finish, commands are ended by the
/// leash's own token.
pub async fn serve(listener: Listener, door: Arc<Door>, stop: CancellationToken) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let connections = TaskTracker::new();
    loop {
        let place = tokio::select! {
            () = stop.cancelled() => break,
            place = Arc::clone(&places).acquire_owned() => place,
        };
        let accepted = async {
            match &listener {
                Listener::Unix(listener, _) => {
                    let (stream, _) = listener.accept().await?;
                    Ok(Either::Unix(stream))
                }
                Listener::Tcp(listener) => {
                    let (stream, _) = listener.accept().await?;
                    let _ = stream.set_nodelay(true);
                    Ok::<_, io::Error>(Either::Tcp(stream))
                }
            }
        };
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = accepted => accepted,
        };
        let (door, stop) = (Arc::clone(&door), stop.clone());
        match accepted {
            Ok(Either::Unix(stream)) => {
                connections.spawn(serve_connection(stream, door, stop, place.ok()));
            }
            Ok(Either::Tcp(stream)) => {
                connections.spawn(serve_connection(stream, door, stop, place.ok()));
            }
            Err(error) => {
                // Out of descriptors, most likely; those who have one may finish.
                tracing::warn!(%error, "a client could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    // From here on whoever connects is told at once that nobody is there.
    drop(listener);
    connections.close();
    let _ = tokio::time::timeout(LAST_REQUESTS, connections.wait()).await;
}

enum Either {
    Unix(tokio::net::UnixStream),
    Tcp(tokio::net::TcpStream),
}

/// Serves one connection to its end.
pub async fn serve_connection<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    door: Arc<Door>,
    stop: CancellationToken,
    _place: Option<OwnedSemaphorePermit>,
) {
    let service = service_fn(|request| door.answer(request));
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(64 * 1024)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let mut stopping = false;
    loop {
        tokio::select! {
            result = connection.as_mut() => {
                if let Err(error) = result {
                    tracing::debug!(%error, "a connection ended early");
                }
                return;
            }
            () = stop.cancelled(), if !stopping => {
                stopping = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}
