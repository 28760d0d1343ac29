//! The sockets: a Unix socket or a TCP port, opened with care and served until told to stop.

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

/// Connections served at once.
const MAX_CONNECTIONS: usize = 256;

/// How long requests may take to finish when the server stops: as long as their commands may
/// take to be ended.
const LAST_REQUESTS: Duration = Duration::from_secs(12);

/// Why nobody listens.
#[derive(Debug, thiserror::Error)]
pub enum WorkbenchBindError {
    /// A Unix socket could not be opened.
    #[error(transparent)]
    Unix(listen::BindError),
    /// A Unix socket could not be created.
    #[error(
        "cannot create the socket {path}: {source}; uid {uid} must be able to create files in \
         {directory}{rights}"
    )]
    Create {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
        /// Whose process this is.
        uid: nix::unistd::Uid,
        /// The directory that it cannot be created in.
        directory: PathBuf,
        /// Owner and mode of the directory, where they can be read.
        rights: String,
    },
    /// A port could not be.
    #[error("cannot listen on {address}: {source}")]
    Tcp {
        /// Where.
        address: String,
        /// What the system said.
        source: io::Error,
    },
}

impl WorkbenchBindError {
    /// A socket that could not be created. What stands in the way is the last directory of its
    /// path that exists: the next one could not be made in it, or the socket itself.
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
    /// A file, which goes with it.
    Unix(PrivateSocket),
    /// A socket that somebody else has opened.
    Inherited(UnixListener),
    /// A port.
    Tcp(TcpListener),
}

impl WorkbenchListener {
    /// Binds a Unix socket with this mode, in the place of one that nobody listens on. Its
    /// directory is made if it is not there.
    pub async fn unix(path: &Path, mode: u32) -> Result<Self, WorkbenchBindError> {
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory)
                .map_err(|source| WorkbenchBindError::create(path, source))?;
        }
        let bound = PrivateSocket::bind(path, mode).await;
        let bound = bound.map_err(|error| match error {
            listen::BindError::Io { path, source } => WorkbenchBindError::create(&path, source),
            other => WorkbenchBindError::Unix(other),
        })?;
        Ok(WorkbenchListener::Unix(bound))
    }

    /// The listening Unix socket that this process has as its standard input.
    pub fn inherited() -> io::Result<Self> {
        let socket = io::stdin().as_fd().try_clone_to_owned()?;
        let listener = std::os::unix::net::UnixListener::from(socket);
        listener.set_nonblocking(true)?;
        // A file has no address.
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

    /// Where it listens, for people.
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

/// Serves until `stop`: requests in flight have a moment to finish, commands are ended by the
/// leash's own token.
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
    let left = listen::accept_all(&listener, MAX_CONNECTIONS, &stop, begin).await;
    // From here on whoever connects is told at once that nobody is there.
    drop(listener);
    let _ = tokio::time::timeout(LAST_REQUESTS, left.wait()).await;
}
