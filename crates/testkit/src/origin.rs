//! A server of the internet, on loopback: HTTP/1.1 and HTTP/2, with TLS or without. It keeps
//! what it was asked, answers as it is told, and misbehaves on request.
//!
//! ```no_run
//! use testkit::ca::Ca;
//! use testkit::origin::{OriginServer, OriginReply};
//!
//! let ca = Ca::new("roots of a test");
//! let origin = OriginServer::https(ca.identity(&["api.example"]), |asked| match asked.path() {
//!     "/hello" => OriginReply::text("hello"),
//!     _ => OriginReply::status(404),
//! });
//! println!("{} was asked {} times", origin.address(), origin.requests().len());
//! ```
//! It has a thread and a runtime of its own: tests of either kind can use it, and a test that
//! blocks does not stop it.

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

/// What arrived.
#[derive(Clone, Debug)]
pub struct OriginRequest {
    /// The connection it came on, counted from 0.
    pub connection: usize,
    /// The method.
    pub method: Method,
    /// The target as it was written: a path in HTTP/1.1, with scheme and authority in HTTP/2.
    pub uri: Uri,
    /// The version.
    pub version: Version,
    /// The headers.
    pub headers: HeaderMap,
    /// The body, or its first MiB.
    pub body: Bytes,
    /// How long the body was.
    pub length: u64,
    /// What followed the body.
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

/// What kind of server it is. The default speaks HTTP/1.1 without TLS.
#[derive(Clone, Debug, Default)]
pub struct OriginOptions {
    /// Its certificate, if it speaks TLS.
    pub tls: Option<TlsIdentity>,
    /// Whether it also offers HTTP/2 (in TLS).
    pub http2: bool,
    /// How many HTTP/2 streams it allows at once.
    pub streams: Option<u32>,
}

/// A running server. It stops when it is dropped.
pub struct OriginServer {
    address: SocketAddr,
    book: Arc<Book>,
    /// Its value rises when every connection is to be closed; dropped, it ends the server.
    hang_up: watch::Sender<u64>,
}

/// What a server remembers.
#[derive(Default)]
struct Book {
    received: Mutex<Vec<OriginRequest>>,
    accepted: AtomicUsize,
    open: AtomicUsize,
    resumed: AtomicUsize,
}

type Answer = dyn Fn(&OriginRequest) -> OriginReply + Send + Sync;

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
        let kind = OriginOptions {
            tls: Some(identity),
            http2: true,
            streams: None,
        };
        Self::start(kind, answer)
    }

    /// HTTP/1.1 with TLS.
    pub fn https_one(
        identity: TlsIdentity,
        answer: impl Fn(&OriginRequest) -> OriginReply + Send + Sync + 'static,
    ) -> Self {
        let kind = OriginOptions {
            tls: Some(identity),
            ..OriginOptions::default()
        };
        Self::start(kind, answer)
    }

    /// Any kind, on a free port.
    pub fn start(
        kind: OriginOptions,
        answer: impl Fn(&OriginRequest) -> OriginReply + Send + Sync + 'static,
    ) -> Self {
        serve::start(kind, Arc::new(answer))
    }

    /// No protocol at all: `serve` has each connection, and its number, on a thread.
    pub fn raw(serve: impl Fn(TcpStream, usize) + Send + Sync + 'static) -> Self {
        serve::start_raw(Arc::new(serve))
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// All that was asked so far, in the order in which bodies ended.
    pub fn requests(&self) -> Vec<OriginRequest> {
        self.book.received().clone()
    }

    /// Connections so far.
    pub fn connections(&self) -> usize {
        self.book.accepted.load(Ordering::SeqCst)
    }

    /// Connections that are open now.
    pub fn open(&self) -> usize {
        self.book.open.load(Ordering::SeqCst)
    }

    /// TLS handshakes that took up an earlier session.
    pub fn resumed(&self) -> usize {
        self.book.resumed.load(Ordering::SeqCst)
    }

    /// Closes every connection, as a server does that restarts.
    pub fn hang_up(&self) {
        self.hang_up.send_modify(|times| *times += 1);
    }
}

impl Book {
    fn received(&self) -> std::sync::MutexGuard<'_, Vec<OriginRequest>> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
