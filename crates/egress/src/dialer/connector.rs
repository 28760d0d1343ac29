//! Connector: opens TCP, TLS and HTTP connections for a route.

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

use super::body::OutgoingBody;
use super::error::{DialError, DialStep, error_chain};
use super::http1_connection::Http1Connection;
use super::{DialConfig, Timings, socket};
use crate::outgoing::Route;

/// Largest response head of an HTTP/1 upstream. [`super::io_tap`] keeps hyper's read buffer
/// smaller than this on idle connections.
const MAX_HTTP1_HEAD: usize = 64 * 1024;

/// Largest header list of an HTTP/2 upstream.
const MAX_HTTP2_HEADERS: u32 = 64 * 1024;

/// HTTP/2 flow-control window of a stream: maximum number of unread response bytes.
const STREAM_WINDOW: u32 = 512 * 1024;
/// HTTP/2 flow-control window of a connection.
const CONNECTION_WINDOW: u32 = 1024 * 1024;

/// Bytes that one HTTP/2 stream may have buffered and not sent.
const SEND_BUFFER: usize = 64 * 1024;

/// An HTTP/2 peer that sends nothing for this long while a response is due gets a PING.
const PING_AFTER: Duration = Duration::from_secs(30);
/// Time in which the peer must answer a PING.
const PONG_TIMEOUT: Duration = Duration::from_secs(20);

/// A TCP connection, with or without TLS.
pub(super) type TcpOrTlsStream = Either<TcpStream, TlsStream<TcpStream>>;

/// Whether a connection is pooled or serves one request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Many requests: uses the sandbox's TLS sessions and negotiates HTTP/2 or HTTP/1.1.
    Pooled,
    /// One request that may upgrade the protocol.
    SingleUse,
}

/// Connect deadline for a host.
pub(super) struct Deadline<'a> {
    pub(super) host: &'a Host,
    /// The deadline.
    pub(super) at: Instant,
    /// The timeout that ends at the deadline, for the error message.
    pub(super) after: Duration,
}

/// A new connection that has not carried a request yet.
pub(super) enum NewConnection {
    Http1(Http1Connection),
    Http2 {
        sender: http2::SendRequest<OutgoingBody>,
        /// Concurrent streams that the peer allows.
        max_streams: Arc<AtomicUsize>,
        /// Makes the connection's task update `max_streams`.
        refresh: Arc<Notify>,
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

    /// Fails `connecting` with a timeout error at the deadline.
    pub(super) async fn enforce<T>(
        &self,
        connecting: impl Future<Output = Result<T, DialError>>,
    ) -> Result<T, DialError> {
        match timeout_at(self.at, connecting).await {
            Ok(done) => done,
            Err(_) => Err(DialError::TimedOut {
                host: self.host.clone(),
                step: DialStep::Connect,
                after: self.after,
            }),
        }
    }
}

impl DialConfig {
    /// Opens a TCP connection to a checked address.
    pub(super) async fn connect_tcp(
        &self,
        sandbox: &SandboxId,
        host: &Host,
        port: u16,
    ) -> Result<(TcpStream, Timings), DialError> {
        let start = Instant::now();
        let addresses = self.addresses.find(sandbox, host, port).await?;
        let resolve = start.elapsed();
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
            connect: start.elapsed() - resolve,
            tls: Duration::ZERO,
            reused: false,
            peer,
            version: Version::HTTP_11,
        };
        Ok((stream, timings))
    }

    /// Opens a TCP connection, with TLS where the route uses it.
    pub(super) async fn connect_stream(
        &self,
        sandbox: &SandboxId,
        route: &Route,
        purpose: Purpose,
    ) -> Result<(TcpOrTlsStream, Timings), DialError> {
        let (stream, mut timings) = self.connect_tcp(sandbox, &route.host, route.port).await?;
        if !route.tls {
            return Ok((Either::Left(stream), timings));
        }
        let start = Instant::now();
        let sessions = (purpose == Purpose::Pooled).then_some(sandbox);
        let stream = self.trust.handshake(sessions, &route.host, stream).await?;
        timings.tls = start.elapsed();
        if stream.get_ref().1.alpn_protocol() == Some(b"h2") {
            timings.version = Version::HTTP_2;
        }
        Ok((Either::Right(stream), timings))
    }

    /// Opens an HTTP connection in the version that the upstream chose.
    pub(super) async fn connect_http(
        &self,
        route: &Route,
        sandbox: &SandboxId,
    ) -> Result<(NewConnection, Timings), DialError> {
        let (stream, timings) = self.connect_stream(sandbox, route, Purpose::Pooled).await?;
        let connected = if timings.version == Version::HTTP_2 {
            begin_http2(stream, timings.peer).await
        } else {
            Http1Connection::begin(stream, timings.peer)
                .await
                .map(NewConnection::Http1)
        };
        let connection = connected.map_err(|error| connection_error(&route.host, &error))?;
        Ok((connection, timings))
    }
}

/// hyper settings of every HTTP/1 connection.
pub(super) fn http1() -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder.max_buf_size(MAX_HTTP1_HEAD);
    builder
}

/// The error for a connection that failed.
pub(super) fn connection_error(host: &Host, error: &hyper::Error) -> DialError {
    let host = host.clone();
    if error.is_parse_too_large() {
        return DialError::LongHead { host };
    }
    DialError::ConnectionFailed {
        host,
        detail: error_chain(error),
    }
}

async fn begin_http2(stream: TcpOrTlsStream, peer: SocketAddr) -> hyper::Result<NewConnection> {
    let (sender, connection) = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .adaptive_window(false)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(MAX_HTTP2_HEADERS)
        .max_send_buf_size(SEND_BUFFER)
        .keep_alive_interval(PING_AFTER)
        .keep_alive_timeout(PONG_TIMEOUT)
        .handshake(TokioIo::new(stream))
        .await?;
    let max_streams = Arc::new(AtomicUsize::new(connection.current_max_send_streams()));
    let refresh = Arc::new(Notify::new());
    let new_connection = NewConnection::Http2 {
        sender,
        max_streams: Arc::clone(&max_streams),
        refresh: Arc::clone(&refresh),
    };
    tokio::spawn(async move {
        let mut connection = pin!(connection);
        loop {
            let ended = tokio::select! {
                ended = &mut connection => Some(ended),
                () = refresh.notified() => None,
            };
            max_streams.store(connection.current_max_send_streams(), Ordering::Relaxed);
            match ended {
                None => {}
                Some(Ok(())) => return,
                Some(Err(error)) => {
                    let error = error_chain(&error);
                    tracing::debug!(%peer, error, "upstream connection failed");
                    return;
                }
            }
        }
    });
    Ok(new_connection)
}
