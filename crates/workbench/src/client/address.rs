//! Addresses of a workbench, and connecting to them.

use std::io;
use std::net::IpAddr;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

/// Timeout of a TCP connect; the kernel's own timeout is two minutes.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// A byte stream to a workbench.
pub trait ClientStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> ClientStream for T {}

/// Connects to a workbench in a way that the caller implements.
#[async_trait]
pub trait Dial: Send + Sync + std::fmt::Debug {
    /// Connects. After an error no request can have reached the workbench.
    async fn dial(&self) -> io::Result<Box<dyn ClientStream>>;

    /// The address as it appears in messages.
    fn address(&self) -> String;
}

/// The address of a workbench.
#[derive(Clone, Debug)]
pub enum WorkbenchAddress {
    /// A Unix socket.
    Unix(PathBuf),
    /// A TCP host and port.
    Tcp(String, u16),
    /// A dialer of the caller.
    Dialer(Arc<dyn Dial>),
}

impl std::fmt::Display for WorkbenchAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            WorkbenchAddress::Unix(path) => write!(f, "unix:{}", path.display()),
            WorkbenchAddress::Tcp(host, port) => write!(f, "{host}:{port}"),
            WorkbenchAddress::Dialer(dialer) => f.write_str(&dialer.address()),
        }
    }
}

impl WorkbenchAddress {
    /// Connects.
    pub(super) async fn connect(&self) -> io::Result<Box<dyn ClientStream>> {
        Ok(match self {
            WorkbenchAddress::Unix(path) => Box::new(UnixStream::connect(path).await?),
            WorkbenchAddress::Tcp(host, port) => {
                let address = ip_address(host).ok_or(io::ErrorKind::InvalidInput)?;
                let connecting = TcpStream::connect((address, *port));
                let stream = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await??;
                stream.set_nodelay(true)?;
                Box::new(stream)
            }
            WorkbenchAddress::Dialer(dialer) => dialer.dial().await?,
        })
    }
}

/// Explains an error of connecting to the Unix socket at `path` that waiting does not resolve, and
/// how to fix it. None if waiting may help: the socket or its listener may still appear.
pub(super) async fn explain_permanent_error(path: &Path, error: &io::Error) -> Option<String> {
    let found = tokio::fs::metadata(path).await;
    let own = nix::unistd::geteuid();
    match error.kind() {
        io::ErrorKind::PermissionDenied => Some(match found {
            Ok(found) => format!(
                "permission denied: uid {own} may not write to the socket, which belongs to uid \
                 {} and has mode {:o}; start the workbench as uid {own}, or with --socket-mode 666",
                found.uid(),
                found.mode() & 0o777,
            ),
            Err(_) => {
                let directory = inaccessible_directory(path).await;
                let shown = directory.display();
                format!(
                    "permission denied: uid {own} may not enter the directory {shown}; allow it \
                     with chmod o+x {shown}, or use another directory for the socket"
                )
            }
        }),
        // The kernel refuses a connection to a file that is not a socket in the same way as a
        // connection to a socket that nothing listens on (unix(7)).
        io::ErrorKind::ConnectionRefused => {
            let kind = found.ok()?.file_type();
            (!kind.is_socket()).then(|| {
                let what = if kind.is_dir() { "directory" } else { "file" };
                format!(
                    "it is a {what} and not a socket; socket_path must be the path that the \
                     workbench was started with (SOCKET_PATH)"
                )
            })
        }
        _ => None,
    }
}

/// The directory above `path` that this process may not enter: the deepest directory that stat can
/// read.
async fn inaccessible_directory(path: &Path) -> PathBuf {
    for directory in path.ancestors().skip(1) {
        if tokio::fs::metadata(directory).await.is_ok() {
            return directory.to_owned();
        }
    }
    path.to_owned()
}

/// Parses an IP address or `localhost`; the static binary has no DNS resolver.
pub(super) fn ip_address(host: &str) -> Option<IpAddr> {
    match host {
        "localhost" => Some(IpAddr::from([127, 0, 0, 1])),
        host => host.trim_matches(['[', ']']).parse().ok(),
    }
}
