//! Where a workbench is, and the ways there.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

/// How long a TCP connection may take; the kernel would try for two minutes.
const CONNECT: Duration = Duration::from_secs(2);

/// A connection.
pub trait Line: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Line for T {}

/// A way to connect that is neither a path nor a port.
#[async_trait]
pub trait Dial: Send + Sync + std::fmt::Debug {
    /// Connects. What fails here has reached nobody.
    async fn dial(&self) -> io::Result<Box<dyn Line>>;

    /// What it is called in messages.
    fn address(&self) -> String;
}

/// Where a workbench is.
#[derive(Clone, Debug)]
pub enum Address {
    /// At a Unix socket.
    Unix(PathBuf),
    /// At a TCP port.
    Tcp(String, u16),
    /// Somewhere that the caller knows how to reach.
    Way(Arc<dyn Dial>),
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Tcp(host, port) => write!(f, "{host}:{port}"),
            Address::Way(way) => f.write_str(&way.address()),
        }
    }
}

impl Address {
    /// Connects.
    pub(super) async fn connect(&self) -> io::Result<Box<dyn Line>> {
        Ok(match self {
            Address::Unix(path) => Box::new(UnixStream::connect(path).await?),
            Address::Tcp(host, port) => {
                let address = ip_address(host).ok_or(io::ErrorKind::InvalidInput)?;
                let connecting = TcpStream::connect((address, *port));
                let stream = tokio::time::timeout(CONNECT, connecting).await??;
                stream.set_nodelay(true)?;
                Box::new(stream)
            }
            Address::Way(way) => way.dial().await?,
        })
    }
}

/// The static binary asks no resolver.
pub(super) fn ip_address(host: &str) -> Option<IpAddr> {
    match host {
        "localhost" => Some(IpAddr::from([127, 0, 0, 1])),
        host => host.trim_matches(['[', ']']).parse().ok(),
    }
}
