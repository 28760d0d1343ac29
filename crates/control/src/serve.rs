//! The Unix socket itself: bound privately, opened to one uid, bounded, drained.

use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use policy::clock::Tick;
use policy::window::SlidingWindow;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::dispatch::Gate;
use crate::door;

/// `sun_path` holds 108 bytes, the last a NUL.
pub const MAX_SOCKET_PATH: usize = 107;

/// Connections served at once. The door is for people and their tools, not for traffic.
const MAX_CONNECTIONS: usize = 256;

/// How long a client may take to send a request head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// Before accepting again after a failure.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Writes to the registry that one uid may make within a second.
const WRITES_PER_SECOND: usize = 10;

/// Why the socket could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The path does not fit into a socket address.
    #[error(
        "the control socket's path is {length} bytes long, and {MAX_SOCKET_PATH} is the most the \
         system takes: {path}; choose a shorter one with --control"
    )]
    TooLong {
        /// The path.
        path: PathBuf,
        /// Its length.
        length: usize,
    },
    /// Somebody answers there.
    #[error("another gate already listens on {0}; stop it, or choose another --control")]
    InUse(PathBuf),
    /// There is a file, and it is not a socket.
    #[error("{0} exists and is not a socket; remove it, or choose another --control")]
    NotASocket(PathBuf),
    /// The system refused.
    #[error("cannot listen on {path}: {source}")]
    Io {
        /// The path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// The bound socket. Dropping it removes the file, if it is still this one.
#[derive(Debug)]
pub struct ControlSocket {
    listener: UnixListener,
    path: PathBuf,
    inode: u64,
}

impl ControlSocket {
    /// Binds `path` with mode 0600, taking the place of a socket nobody listens on.
    ///
    /// The socket is bound under a name of its own and renamed into place, so that there
    /// is no moment in which it exists with other permissions.
    pub async fn bind(path: &Path) -> Result<Self, BindError> {
        let length = path.as_os_str().len();
        let temporary = path.with_file_name(format!(".{}", std::process::id()));
        if length.max(temporary.as_os_str().len()) > MAX_SOCKET_PATH {
            return Err(BindError::TooLong {
                path: path.to_owned(),
                length,
            });
        }
        let fail = |source| BindError::Io {
            path: path.to_owned(),
            source,
        };
        match std::fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                return Err(BindError::NotASocket(path.to_owned()));
            }
            Ok(_) if UnixStream::connect(path).await.is_ok() => {
                return Err(BindError::InUse(path.to_owned()));
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(fail(error)),
        }
        // Left behind by a process of the same number that ended in between.
        if std::fs::symlink_metadata(&temporary).is_ok_and(|found| found.file_type().is_socket()) {
            std::fs::remove_file(&temporary).map_err(fail)?;
        }
        let listener = UnixListener::bind(&temporary).map_err(fail)?;
        std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(0o600))
            .and_then(|()| std::fs::rename(&temporary, path))
            .map_err(fail)?;
        let inode = inode_of(path).map_err(fail)?;
        Ok(Self {
            listener,
            path: path.to_owned(),
            inode,
        })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        if inode_of(&self.path).is_ok_and(|inode| inode == self.inode)
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!(%error, "the control socket could not be removed");
        }
    }
}

fn inode_of(path: &Path) -> io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    std::fs::symlink_metadata(path).map(|found| found.ino())
}

/// Serves the door until `stop`, then lets the requests in flight finish. The caller
/// bounds that wait.
pub async fn serve(
    socket: &ControlSocket,
    gate: Arc<Gate>,
    stop: CancellationToken,
) -> io::Result<()> {
    let allowed = nix::unistd::geteuid().as_raw();
    let writes = Arc::new(WriteWindow::default());
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let connections = TaskTracker::new();
    loop {
        let place = tokio::select! {
            () = stop.cancelled() => break,
            place = Arc::clone(&places).acquire_owned() => place.map_err(io::Error::other)?,
        };
        let stream = tokio::select! {
            () = stop.cancelled() => break,
            accepted = socket.listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // Out of descriptors, most likely; those who have one may finish.
                    tracing::warn!(%error, "a control client could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
        };
        let peer = match stream.peer_cred() {
            Ok(credentials) => credentials.uid(),
            Err(error) => {
                tracing::warn!(%error, "a control client without credentials was refused");
                continue;
            }
        };
        let client = Client {
            allowed: peer == allowed,
            writes: Arc::clone(&writes),
        };
        if !client.allowed {
            tracing::warn!(uid = peer, "a control client of another user was refused");
        }
        let (gate, stop) = (Arc::clone(&gate), stop.clone());
        connections.spawn(async move {
            serve_connection(stream, gate, client, stop).await;
            drop(place);
        });
    }
    connections.close();
    connections.wait().await;
    Ok(())
}

async fn serve_connection(
    stream: UnixStream,
    gate: Arc<Gate>,
    client: Client,
    stop: CancellationToken,
) {
    let service = service_fn(|request| door::answer(&gate, &client, request));
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
                    tracing::debug!(%error, "a control connection ended early");
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

/// Who is on the other end of one connection.
#[derive(Debug)]
pub struct Client {
    allowed: bool,
    writes: Arc<WriteWindow>,
}

impl Client {
    /// Whether this uid may speak to this gate at all.
    pub(crate) fn is_allowed(&self) -> bool {
        self.allowed
    }

    /// Counts one write; refused beyond the limit, with the time to wait.
    pub(crate) fn count_write(&self) -> Result<(), Duration> {
        self.writes.take()
    }
}

/// The writes of the last second. The limit is per uid, and only one uid gets this far.
#[derive(Debug)]
struct WriteWindow {
    origin: Instant,
    window: Mutex<SlidingWindow<WRITES_PER_SECOND>>,
}

impl Default for WriteWindow {
    fn default() -> Self {
        let window = Mutex::new(SlidingWindow::new(Duration::from_secs(1)));
        Self {
            origin: Instant::now(),
            window,
        }
    }
}

impl WriteWindow {
    fn take(&self) -> Result<(), Duration> {
        let now = Tick::default() + self.origin.elapsed();
        self.window
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take(now)
    }
}
