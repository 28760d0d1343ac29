//! From a route to a connection that speaks HTTP.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::Version;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use policy::host::Host;
use policy::id::SandboxId;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;

use super::body::Departing;
use super::driven::Driven;
use super::error::{DialError, Step, said};
use super::{Rules, Timings, socket};
use crate::outgoing::Route;

/// The most an HTTP/1 upstream may send as the head of a response. How much of it is kept
/// while the connection is unused is for [`super::tap`] to say.
const MOST_HEAD: usize = 64 * 1024;

/// The same of an HTTP/2 upstream.
const MOST_HEADERS: u32 = 64 * 1024;

/// HTTP/2 windows: what may be on its way to us unread, per stream and per connection.
const STREAM_WINDOW: u32 = 512 * 1024;
const LINE_WINDOW: u32 = 1024 * 1024;

/// What a stream may have written and not sent.
const SEND_BUFFER: usize = 64 * 1024;

/// An HTTP/2 peer that is silent for so long while it owes an answer is asked whether it is
/// there.
const PING_AFTER: Duration = Duration::from_secs(30);
const PONG_WITHIN: Duration = Duration::from_secs(20);

/// A TCP connection, with TLS or without.
pub(super) type Wire = Either<TcpStream, TlsStream<TcpStream>>;

/// What a connection is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// Requests one after the other: with the sandbox's sessions and a choice of protocol.
    Often,
    /// One request that may become something else.
    Once,
}

/// A time by which something must be done, and for whom.
pub(super) struct Deadline<'a> {
    pub(super) host: &'a Host,
    pub(super) at: Instant,
    pub(super) after: Duration,
}

/// A connection nobody has used.
pub(super) enum Line {
    Http1(Driven),
    Http2 {
        sender: http2::SendRequest<Departing>,
        /// What the peer allows at once.
        most: Arc<AtomicUsize>,
        /// Makes the connection's task look what that is now.
        look: Arc<Notify>,
    },
}

impl<'a> Deadline<'a> {
    pub(super) fn new(host: &'a Host, since: Instant, after: Duration) -> Self {
        Self {
            host,
            at: since + after,
            after,
        }
    }

    /// Ends `connecting` when it is time.
    pub(super) async fn hold<T>(
        &self,
        connecting: impl Future<Output = Result<T, DialError>>,
    ) -> Result<T, DialError> {
        match timeout_at(self.at, connecting).await {
            Ok(done) => done,
            Err(_) => Err(DialError::TimedOut {
                host: self.host.clone(),
                step: Step::Connect,
                after: self.after,
            }),
        }
    }
}

impl Rules {
    /// A TCP connection to a checked address.
    pub(super) async fn reach(
        &self,
        sandbox: &SandboxId,
        host: &Host,
        port: u16,
    ) -> Result<(TcpStream, Timings), DialError> {
        let began = Instant::now();
        let addresses = self.addresses.find(sandbox, host, port).await?;
        let resolve = began.elapsed();
        let (stream, peer) =
            socket::connect(&addresses)
                .await
                .map_err(|detail| DialError::Unreachable {
                    host: host.clone(),
                    port,
                    detail,
                })?;
        let timings = Timings {
            resolve,
            connect: began.elapsed() - resolve,
            tls: Duration::ZERO,
            reused: false,
            peer,
            version: Version::HTTP_11,
        };
        Ok((stream, timings))
    }

    /// The same, with TLS where the route has it.
    pub(super) async fn wire(
        &self,
        sandbox: &SandboxId,
        route: &Route,
        for_what: Use,
    ) -> Result<(Wire, Timings), DialError> {
        let (stream, mut timings) = self.reach(sandbox, &route.host, route.port).await?;
        if !route.tls {
            return Ok((Either::Left(stream), timings));
        }
        let began = Instant::now();
        let sessions = (for_what == Use::Often).then_some(sandbox);
        let stream = self.trust.shake(sessions, &route.host, stream).await?;
        timings.tls = began.elapsed();
        if stream.get_ref().1.alpn_protocol() == Some(b"h2") {
            timings.version = Version::HTTP_2;
        }
        Ok((Either::Right(stream), timings))
    }

    /// A connection that takes requests, in the version the upstream chose.
    pub(super) async fn line(
        &self,
        route: &Route,
        sandbox: &SandboxId,
    ) -> Result<(Line, Timings), DialError> {
        let (wire, timings) = self.wire(sandbox, route, Use::Often).await?;
        let line = if timings.version == Version::HTTP_2 {
            begin_http2(wire, timings.peer).await
        } else {
            Driven::begin(wire, timings.peer).await.map(Line::Http1)
        };
        let line = line.map_err(|error| broken(&route.host, &error))?;
        Ok((line, timings))
    }
}

/// Settings of every HTTP/1 connection.
pub(super) fn http1() -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder.max_buf_size(MOST_HEAD);
    builder
}

/// What a broken connection said.
pub(super) fn broken(host: &Host, error: &hyper::Error) -> DialError {
    let host = host.clone();
    if error.is_parse_too_large() {
        return DialError::LongHead { host };
    }
    DialError::Broken {
        host,
        detail: said(error),
    }
}

async fn begin_http2(wire: Wire, peer: SocketAddr) -> hyper::Result<Line> {
    let (sender, connection) = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .adaptive_window(false)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(LINE_WINDOW)
        .max_header_list_size(MOST_HEADERS)
        .max_send_buf_size(SEND_BUFFER)
        .keep_alive_interval(PING_AFTER)
        .keep_alive_timeout(PONG_WITHIN)
        .handshake(TokioIo::new(wire))
        .await?;
    let most = Arc::new(AtomicUsize::new(connection.current_max_send_streams()));
    let look = Arc::new(Notify::new());
    let line = Line::Http2 {
        sender,
        most: Arc::clone(&most),
        look: Arc::clone(&look),
    };
    tokio::spawn(async move {
        let mut connection = pin!(connection);
        loop {
            let ended = tokio::select! {
                ended = &mut connection => Some(ended),
                () = look.notified() => None,
            };
            most.store(connection.current_max_send_streams(), Ordering::Relaxed);
            match ended {
                None => {}
                Some(Ok(())) => return,
                Some(Err(error)) => {
                    tracing::debug!(%peer, error = said(&error), "an upstream connection ended");
                    return;
                }
            }
        }
    });
    Ok(line)
}
