//! Where a workbench is, and the ways there.

use std::io;
use std::net::IpAddr;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

/// How long a TCP connection may take; the kernel would try for two minutes.
const CONNECT: Duration = Duration::from_secs(2);

/// A connection.
pub trait ClientStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> ClientStream for T {}

/// A way to connect that is neither a path nor a port.
#[async_trait]
pub trait Dial: Send + Sync + std::fmt::Debug {
    /// Connects. What fails here has reached nobody.
    async fn dial(&self) -> io::Result<Box<dyn ClientStream>>;

    /// What it is called in messages.
    fn address(&self) -> String;
}

/// Where a workbench is.
#[derive(Clone, Debug)]
pub enum WorkbenchAddress {
    /// At a Unix socket.
    Unix(PathBuf),
    /// At a TCP port.
    Tcp(String, u16),
    /// Somewhere that the caller knows how to reach.
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
                let stream = tokio::time::timeout(CONNECT, connecting).await??;
                stream.set_nodelay(true)?;
                Box::new(stream)
            }
            WorkbenchAddress::Dialer(dialer) => dialer.dial().await?,
        })
    }
}

/// Why connecting to the Unix socket at `path` failed, and what to do about it, where waiting
/// cannot help. A socket that does not exist, or that nothing listens on, may still come.
pub(super) async fn obstacle(path: &Path, error: &io::Error) -> Option<String> {
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
                let directory = closed_directory(path).await;
                let shown = directory.display();
                format!(
                    "permission denied: uid {own} may not enter the directory {shown}; allow it \
                     with chmod o+x {shown}, or use another directory for the socket"
                )
            }
        }),
        // The kernel refuses a connection to any other file in the same way as one to a socket
        // that nothing listens on (unix(7)).
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

/// The directory on the way to `path` that may not be entered: the last one that can be looked at.
async fn closed_directory(path: &Path) -> PathBuf {
    for directory in path.ancestors().skip(1) {
        if tokio::fs::metadata(directory).await.is_ok() {
            return directory.to_owned();
        }
    }
    path.to_owned()
}

/// The static binary asks no resolver.
pub(super) fn ip_address(host: &str) -> Option<IpAddr> {
    match host {
        "localhost" => Some(IpAddr::from([127, 0, 0, 1])),
        host => host.trim_matches(['[', ']']).parse().ok(),
    }
}
