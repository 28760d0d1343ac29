//! Listening sockets of the workbench, and the accept loop.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hyper::service::service_fn;
use listen::{Accept, PrivateSocket};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_util::either::Either;
use tokio_util::sync::CancellationToken;

use crate::http_service::WorkbenchService;

/// Maximum number of concurrent connections.
const MAX_CONNECTIONS: usize = 256;

/// Grace period of requests in flight when the server stops: the time that it may take to end their
/// commands.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(12);

/// Why a socket could not be bound.
#[derive(Debug, thiserror::Error)]
pub enum WorkbenchBindError {
    /// A Unix socket could not be opened.
    #[error(transparent)]
    Unix(listen::PrivateSocketError),
    /// A Unix socket could not be created.
    #[error(
        "cannot create the socket {path}: {source}; uid {uid} must be able to create files in \
         {directory}{rights}"
    )]
    Create {
        /// The socket.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
        /// The user id of this process.
        uid: nix::unistd::Uid,
        /// The directory in which the socket cannot be created.
        directory: PathBuf,
        /// Owner and mode of the directory, where they can be read.
        rights: String,
    },
    /// A TCP port could not be bound.
    #[error("cannot listen on {address}: {source}")]
    Tcp {
        /// Host and port.
        address: String,
        /// The error of the system.
        source: io::Error,
    },
}

impl WorkbenchBindError {
    /// A socket that could not be created. The error names the deepest existing directory of the
    /// path, in which the next directory or the socket could not be created.
    fn create(path: &Path, source: io::Error) -> Self {
        let mut directories = path.ancestors().skip(1);
        let found = directories.find_map(|directory| {
            let directory = if directory.as_os_str().is_empty() {
                Path::new(".")
            } else {
                directory
            };
            let found = std::fs::metadata(directory).ok()?;
            let (owner, mode) = (found.uid(), found.mode() & 0o7777);
            let rights = format!(" (owner uid {owner}, mode {mode:o})");
            Some((directory.to_owned(), rights))
        });
        let (directory, rights) = found.unwrap_or_default();
        Self::Create {
            path: path.to_owned(),
            source,
            uid: nix::unistd::geteuid(),
            directory,
            rights,
        }
    }
}

/// A listening socket.
#[derive(Debug)]
pub enum WorkbenchListener {
    /// A Unix socket, whose file is removed with it.
    Unix(PrivateSocket),
    /// A socket that the parent process opened.
    Inherited(UnixListener),
    /// A TCP port.
    Tcp(TcpListener),
}

impl WorkbenchListener {
    /// Binds a Unix socket with this mode. Replaces a stale socket, and creates a missing
    /// directory.
    pub async fn unix(path: &Path, mode: u32) -> Result<Self, WorkbenchBindError> {
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory)
                .map_err(|source| WorkbenchBindError::create(path, source))?;
        }
        let bound = PrivateSocket::bind(path, mode).await;
        let bound = bound.map_err(|error| match error {
            listen::PrivateSocketError::Io { path, source } => {
                WorkbenchBindError::create(&path, source)
            }
            other => WorkbenchBindError::Unix(other),
        })?;
        Ok(WorkbenchListener::Unix(bound))
    }

    /// The listening Unix socket that the parent process passed as standard input.
    pub fn from_stdin() -> io::Result<Self> {
        let socket = io::stdin().as_fd().try_clone_to_owned()?;
        let listener = std::os::unix::net::UnixListener::from(socket);
        listener.set_nonblocking(true)?;
        // Fails if standard input is not a socket.
        listener.local_addr()?;
        Ok(WorkbenchListener::Inherited(UnixListener::from_std(
            listener,
        )?))
    }

    /// Binds a TCP port.
    pub async fn tcp(host: &str, port: u16) -> Result<Self, WorkbenchBindError> {
        let bound = TcpListener::bind((host, port)).await;
        bound
            .map(WorkbenchListener::Tcp)
            .map_err(|source| WorkbenchBindError::Tcp {
                address: format!("{host}:{port}"),
                source,
            })
    }

    /// The address as it appears in messages.
    pub fn address(&self) -> String {
        match self {
            WorkbenchListener::Unix(socket) => format!("unix:{}", socket.path().display()),
            WorkbenchListener::Inherited(_) => "unix:".to_owned(),
            WorkbenchListener::Tcp(listener) => {
                let address = listener.local_addr();
                address.map_or_else(
                    |error| error.to_string(),
                    |address: SocketAddr| address.to_string(),
                )
            }
        }
    }
}

impl Accept for WorkbenchListener {
    type Stream = Either<UnixStream, TcpStream>;

    async fn accept(&self) -> io::Result<Self::Stream> {
        match self {
            WorkbenchListener::Unix(socket) => Accept::accept(socket).await.map(Either::Left),
            WorkbenchListener::Inherited(listener) => {
                Accept::accept(listener).await.map(Either::Left)
            }
            WorkbenchListener::Tcp(listener) => Accept::accept(listener).await.map(Either::Right),
        }
    }
}

/// Serves until `stop`. Requests in flight then have a grace period; commands end by the stop
/// token of [`crate::tools::bash::GuardProgram`].
pub async fn serve(
    listener: WorkbenchListener,
    service: Arc<WorkbenchService>,
    stop: CancellationToken,
) {
    let begin = |stream| {
        let (service, stop) = (Arc::clone(&service), stop.clone());
        Some(async move {
            let service = service_fn(|request| service.respond_to(request));
            listen::http1(stream, service, &stop, None).await;
        })
    };
    let connections = listen::accept_all(&listener, MAX_CONNECTIONS, &stop, begin).await;
    // New connections are refused from here on.
    drop(listener);
    let _ = tokio::time::timeout(SHUTDOWN_GRACE, connections.wait()).await;
}
