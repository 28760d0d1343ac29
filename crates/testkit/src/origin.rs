//! An HTTP origin server on loopback: HTTP/1.1 and HTTP/2, with or without TLS. It records every
//! request, answers with the replies of the test, and can violate the protocol on purpose.
//!
//! ```no_run
//! use testkit::ca::Ca;
//! use testkit::origin::{OriginServer, OriginReply};
//!
//! let ca = Ca::new("roots of a test");
//! let origin = OriginServer::https(ca.identity(&["api.example"]), |request| match request.path() {
//!     "/hello" => OriginReply::text("hello"),
//!     _ => OriginReply::status(404),
//! });
//! println!("{} received {} requests", origin.address(), origin.requests().len());
//! ```
//! The server has a thread and a runtime of its own, so blocking and asynchronous tests can use it.

mod reply;
pub(crate) mod serve;

use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http::{HeaderMap, Method, Uri, Version};
use tokio::sync::watch;

use crate::ca::TlsIdentity;

pub use self::reply::{Latch, OriginReply};

/// A request that arrived at the server.
#[derive(Clone, Debug)]
pub struct OriginRequest {
    /// The number of the connection, counted from 0.
    pub connection: usize,
    /// The method.
    pub method: Method,
    /// The target of the request line: a path in HTTP/1.1, with scheme and authority in HTTP/2.
    pub uri: Uri,
    /// The version.
    pub version: Version,
    /// The headers.
    pub headers: HeaderMap,
    /// The body, or its first MiB.
    pub body: Bytes,
    /// The length of the body in bytes.
    pub length: u64,
    /// The trailers.
    pub trailers: HeaderMap,
}

impl OriginRequest {
    /// The path alone.
    pub fn path(&self) -> &str {
        self.uri.path()
    }

    /// A header as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

/// Options of the server. The default is HTTP/1.1 without TLS.
#[derive(Clone, Debug, Default)]
pub struct OriginOptions {
    /// The certificate, if the server uses TLS.
    pub tls: Option<TlsIdentity>,
    /// Whether the server also offers HTTP/2 (in TLS).
    pub http2: bool,
    /// The maximum number of concurrent HTTP/2 streams.
    pub streams: Option<u32>,
}

/// A running server. Dropping it stops the server.
pub struct OriginServer {
    address: SocketAddr,
    log: Arc<ServerLog>,
    /// Incremented to close every connection. Dropping the sender stops the server.
    hang_up: watch::Sender<u64>,
}

/// The requests and connections of a server so far.
#[derive(Default)]
struct ServerLog {
    received: Mutex<Vec<OriginRequest>>,
    accepted: AtomicUsize,
    open: AtomicUsize,
    resumed: AtomicUsize,
}

type Handler = dyn Fn(&OriginRequest) -> OriginReply + Send + Sync;

impl OriginServer {
    /// HTTP/1.1 without TLS.
    pub fn http(answer: impl Fn(&OriginRequest) -> OriginReply + Send + Sync + 'static) -> Self {
        Self::start(OriginOptions::default(), answer)
    }

    /// HTTP/1.1 and HTTP/2 with TLS; the client chooses.
    pub fn https(
        identity: TlsIdentity,
        answer: impl Fn(&OriginRequest) -> OriginReply + Send + Sync + 'static,
    ) -> Self {
        let options = OriginOptions {
            tls: Some(identity),
            http2: true,
            streams: None,
        };
        Self::start(options, answer)
    }

    /// HTTP/1.1 with TLS.
    pub fn https_http1(
        identity: TlsIdentity,
        answer: impl Fn(&OriginRequest) -> OriginReply + Send + Sync + 'static,
    ) -> Self {
        let options = OriginOptions {
            tls: Some(identity),
            ..OriginOptions::default()
        };
        Self::start(options, answer)
    }

    /// A server with these options, on a free port.
    pub fn start(
        options: OriginOptions,
        answer: impl Fn(&OriginRequest) -> OriginReply + Send + Sync + 'static,
    ) -> Self {
        serve::start(options, Arc::new(answer))
    }

    /// A TCP server without a protocol: `serve` gets each connection and its number on a thread.
    pub fn raw(serve: impl Fn(TcpStream, usize) + Send + Sync + 'static) -> Self {
        serve::start_raw(Arc::new(serve))
    }

    /// The address of the server.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// All requests so far, ordered by the end of their bodies.
    pub fn requests(&self) -> Vec<OriginRequest> {
        self.log.received().clone()
    }

    /// Connections so far.
    pub fn connections(&self) -> usize {
        self.log.accepted.load(Ordering::SeqCst)
    }

    /// Connections that are open now.
    pub fn open(&self) -> usize {
        self.log.open.load(Ordering::SeqCst)
    }

    /// TLS handshakes that resumed an earlier session.
    pub fn resumed(&self) -> usize {
        self.log.resumed.load(Ordering::SeqCst)
    }

    /// Closes every connection, as a restarting server does.
    pub fn hang_up(&self) {
        self.hang_up.send_modify(|times| *times += 1);
    }
}

impl ServerLog {
    fn received(&self) -> std::sync::MutexGuard<'_, Vec<OriginRequest>> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
