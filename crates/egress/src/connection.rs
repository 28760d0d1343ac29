//! Serves one client connection: detects TLS, opens CONNECT tunnels, and serves HTTP.
//!
//! Requests to the proxy, transparently intercepted requests and requests inside a tunnel all go
//! through [`pipeline::answer`].

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use decide::decision::{Cx, decide};
use decide::subject::{ConnectFacts, Mode, Subject};
use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use policy::answer::ApprovalAnswers;
use policy::audit::Kind;
use policy::host::{Authority, Host};
use policy::reason::Reason;
use policy::verdict::{Denial, Verdict};
use rustls::AlertDescription;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use crate::alarm::HeadTimer;
use crate::body::{self, MessageBody};
use crate::client_connection::ClientConnection;
use crate::framing::{FramingGuard, GuardHandle, HeadLimits};
use crate::hello::{self, BadHello, Hello, ReplayStream};
use crate::message::Handover;
use crate::passthrough;
use crate::pipeline;
use crate::request::{self, ConnectionInfo, Destination};
use crate::request_cx::RequestCx;
use crate::request_log::RequestLog;
use crate::source::{ConnectionSource, reserve_record};
use crate::stage::Stage;
use crate::websocket;

/// Maximum number of concurrent HTTP/2 streams of a client.
const MAX_STREAMS: u32 = 128;
/// HTTP/2 flow-control window of a stream, in bytes.
const STREAM_WINDOW: u32 = 256 * 1024;
/// HTTP/2 flow-control window of a connection, in bytes.
const CONNECTION_WINDOW: u32 = 1024 * 1024;

/// HTTP/2 send buffer of a stream, in bytes.
const SEND_BUFFER: usize = 64 * 1024;

/// The HTTP/2 connection preface (RFC 9113, 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Buffer size of the first read: the HTTP/2 preface and the settings after it fit.
const FIRST_READ: usize = 512;

/// Largest message head in bytes.
const MAX_HEAD: usize = 64 * 1024;

/// Interval of HTTP/2 pings to an idle client.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(30);
/// Time in which a client must answer an HTTP/2 ping.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// The byte stream below HTTP: a socket, TLS over a socket, or either of them in a tunnel. Boxed,
/// because nested connections need a type of fixed depth, and because the state of a handshake is
/// large and is moved often.
type BoxedStream = Box<dyn ByteStream>;

/// A bidirectional byte stream.
trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<IO: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for IO {}

type ServeFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Spawns a task that serves a connection until it ends or its sandbox stops.
pub fn spawn<IO>(connection: ClientConnection, io: IO)
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (stop, tasks) = (connection.stop.clone(), connection.tasks.clone());
    let served = serve(connection, Box::new(io), Bytes::new());
    tasks.spawn(async move { stop.run_until_cancelled(served).await });
}

/// The HTTP version of a connection.
enum NegotiatedProtocol {
    Http1(BoxedStream),
    Http2(BoxedStream),
}

/// Serves a connection to its end. The future is boxed because a tunnel's future contains another
/// one. The state of the negotiation is freed before HTTP starts: most connections are idle.
fn serve(connection: ClientConnection, io: BoxedStream, already_read: Bytes) -> ServeFuture {
    Box::pin(async move {
        let mut connection = connection;
        match Box::pin(negotiate(&mut connection, io, already_read)).await {
            Ok(Some(NegotiatedProtocol::Http1(stream))) => serve_http1(connection, stream).await,
            Ok(Some(NegotiatedProtocol::Http2(stream))) => serve_http2(connection, stream).await,
            Ok(None) => {}
            // The client gets no answer, but the attempt is recorded.
            Err(NegotiationError { host, denial }) => {
                record_early_end(&connection, host.as_ref(), denial).await;
            }
        }
    })
}

/// A connection that ended before it was ready for a request.
struct NegotiationError {
    /// The destination, as far as the client sent it.
    host: Option<Host>,
    denial: Denial,
}

impl NegotiationError {
    fn new(host: Option<&Host>, denial: Denial) -> Self {
        let host = host.cloned();
        Self { host, denial }
    }

    /// A TLS handshake that was refused.
    fn tls(host: Option<&Host>, evidence: impl Into<String>) -> Self {
        Self::new(
            host,
            Denial::new(Reason::TlsClient, "tls").with_evidence(evidence.into()),
        )
    }
}

/// The timeout of a request head and of a handshake.
fn header_timeout(connection: &ClientConnection) -> Duration {
    let snapshot = connection.services.policy().load();
    snapshot.settings.egress.timeouts.header
}

/// The server name in the TLS hello.
fn hello_name(connection: &ClientConnection) -> Option<Host> {
    connection.connection_info.hello.clone().flatten()
}

/// Records a connection that ended before it was ready for a request. A ready connection without a
/// request is not recorded: browsers open such connections in advance.
async fn record_early_end(connection: &ClientConnection, host: Option<&Host>, denial: Denial) {
    let sandbox = connection.source.sandbox();
    let slot = reserve_record(sandbox).await;
    let mut log = RequestLog::begin(&connection.services, sandbox, Kind::Http, slot);
    connection.connection_info.write_destination(&mut log);
    if let Some(host) = host {
        log.event.host = Some(host.to_string());
    }
    log.record_refusal(Stage::Request, &denial);
}

/// The refusal of a client that was too slow.
fn timeout_denial(step: &str) -> Denial {
    Denial::new(Reason::ClientTimeout, "timeouts.header")
        .with_evidence(format!("{step} took too long"))
}

/// The refusal of a connection that starts with an invalid hello.
fn hello_error(error: &BadHello) -> Denial {
    let reason = match error {
        BadHello::Io(_) | BadHello::Cut => Reason::ClientLeft,
        BadHello::NotTls => Reason::NotTls,
        BadHello::TooLong
        | BadHello::Record
        | BadHello::NotHello
        | BadHello::Trailing
        | BadHello::Malformed
        | BadHello::Extensions
        | BadHello::ServerName
        | BadHello::Protocols => Reason::TlsClient,
    };
    Denial::new(reason, "tls").with_evidence(error.to_string())
}

/// The refusal of a handshake that the client ended. A client that does not trust the certificate
/// sends one of a few alerts (RFC 8446, 6.2), or closes the connection.
fn handshake_error(error: &std::io::Error) -> Denial {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref());
    let reason = match tls {
        Some(rustls::Error::AlertReceived(
            AlertDescription::UnknownCA
            | AlertDescription::BadCertificate
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateRevoked,
        )) => Reason::TlsDistrusted,
        Some(_) => Reason::TlsClient,
        None => Reason::ClientLeft,
    };
    Denial::new(reason, "tls").with_evidence(error.to_string())
}

/// Detects the protocol, and terminates TLS. `None` if the connection was passed through without
/// decryption and has ended.
async fn negotiate(
    connection: &mut ClientConnection,
    io: BoxedStream,
    already_read: Bytes,
) -> Result<Option<NegotiatedProtocol>, NegotiationError> {
    let limit = header_timeout(connection);
    match timeout(limit, hello::read_start(io, already_read)).await {
        Ok(Ok(hello::ConnectionStart::Tls { hello, io })) => {
            negotiate_tls(connection, hello, io).await
        }
        Ok(Ok(hello::ConnectionStart::Plain { io })) => {
            Ok(Some(NegotiatedProtocol::Http1(Box::new(io))))
        }
        Ok(Err(error)) => Err(NegotiationError::new(None, hello_error(&error))),
        Err(_) => Err(NegotiationError::new(
            None,
            timeout_denial("the start of the connection"),
        )),
    }
}

async fn negotiate_tls(
    connection: &mut ClientConnection,
    hello: Hello,
    io: ReplayStream<BoxedStream>,
) -> Result<Option<NegotiatedProtocol>, NegotiationError> {
    if connection.connection_info.hello.is_some() {
        // TLS inside of terminated TLS could not be inspected.
        return Err(NegotiationError::tls(None, "TLS inside TLS"));
    }
    let name = hello.server_name.as_deref().map(Host::parse).transpose();
    let name = name.map_err(|error| NegotiationError::tls(None, error.to_string()))?;
    connection.connection_info.hello = Some(name.clone());
    let Some(sandbox) = connection.source.sandbox().cloned() else {
        // An unregistered client does not trust the gate's certificates.
        return Err(NegotiationError::tls(
            name.as_ref(),
            "the client is not registered",
        ));
    };
    if let Ok(Some((host, Some(port)))) = connection.connection_info.agreed_host_and_port()
        && RequestCx::new(&connection.services, &sandbox)
            .snapshot
            .passes_unread(&host)
    {
        let tls = true;
        let destination = Destination { host, port, tls };
        passthrough::serve(connection, &sandbox, destination, &hello, io).await;
        return Ok(None);
    }
    // The certificate is for the name in the hello, so that the client can read the refusal: a name
    // that differs from the tunnel's is refused by the pipeline.
    let tunnel = connection
        .connection_info
        .tunnel
        .as_ref()
        .map(|(host, _)| host.clone());
    let original_destination = connection
        .connection_info
        .original_destination
        .map(|address| Host::Ip(address.ip()));
    let Some(certificate_host) = name.or(tunnel).or(original_destination) else {
        return Err(NegotiationError::tls(
            None,
            "the connection has no host name",
        ));
    };
    let now = connection.services.clock().wall();
    let handshake = sandbox.certificates.server_config(&certificate_host, now);
    let handshake = handshake
        .map_err(|error| NegotiationError::tls(Some(&certificate_host), error.to_string()))?;
    let accepting = TlsAcceptor::from(handshake).accept(io);
    let stream = match timeout(header_timeout(connection), accepting).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            return Err(NegotiationError::new(
                Some(&certificate_host),
                handshake_error(&error),
            ));
        }
        Err(_) => {
            return Err(NegotiationError::new(
                Some(&certificate_host),
                timeout_denial("the handshake"),
            ));
        }
    };
    let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    let stream: BoxedStream = Box::new(stream);
    Ok(Some(if is_http2 {
        NegotiatedProtocol::Http2(stream)
    } else {
        NegotiatedProtocol::Http1(stream)
    }))
}

async fn serve_http1(connection: ClientConnection, stream: BoxedStream) {
    let limit = header_timeout(&connection);
    let (io, guard_handle) = FramingGuard::new(stream, HeadLimits::default());
    let ordinals = AtomicU64::new(0);
    let service = service_fn(|request: Request<Incoming>| {
        let ordinal = ordinals.fetch_add(1, Ordering::Relaxed);
        let (connection, guard_handle) = (&connection, &guard_handle);
        // Boxed, because an idle connection keeps the memory of its last request's future.
        Box::pin(async move {
            Ok::<_, Infallible>(answer_http1(connection, guard_handle, ordinal, request).await)
        })
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(HeadTimer::default())
        .header_read_timeout(limit)
        .max_buf_size(MAX_HEAD + 8 * 1024)
        .serve_connection(TokioIo::new(io), service)
        .with_upgrades()
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "client connection ended with an error");
        // hyper ends a connection whose head stays incomplete, often raw TCP that starts like
        // HTTP, without calling the service.
        if guard_handle.is_inside_head() {
            let denial = if error.is_timeout() {
                timeout_denial("the request's head")
            } else {
                Denial::new(Reason::ClientLeft, "framing").with_evidence(error.to_string())
            };
            record_early_end(&connection, hello_name(&connection).as_ref(), denial).await;
        }
    }
}

async fn answer_http1(
    connection: &ClientConnection,
    guard_handle: &GuardHandle,
    ordinal: u64,
    request: Request<Incoming>,
) -> Response<MessageBody> {
    let ClientConnection {
        services,
        source,
        connection_info,
        ..
    } = connection;
    if let Some(fault) = guard_handle.take_fault(ordinal) {
        let denial = request::framing_denial(&fault.to_string());
        return pipeline::answer_fault(services, source, connection_info, denial).await;
    }
    let response = if request.method() == Method::CONNECT {
        Box::pin(open_tunnel(connection, request)).await
    } else {
        let (mut head, body) = request.into_parts();
        head.extensions.insert(Handover::new(guard_handle, ordinal));
        pipeline::answer(services, source, connection_info, Box::new(head), body).await
    };
    let switched = response.status() == StatusCode::SWITCHING_PROTOCOLS
        || response.extensions().get::<Tunnel>().is_some();
    if !switched {
        // The next message follows. After a switch, the new owner of the stream also takes the
        // bytes that the framing guard has not passed on.
        guard_handle.resume(ordinal);
    }
    response
}

/// Response extension that marks an opened tunnel.
#[derive(Clone, Copy)]
struct Tunnel;

/// Answers CONNECT. Requests inside the tunnel are decided one by one, and the client can read each
/// refusal. A client that does not trust the gate's certificates could not read them, so for such a
/// client the tunnel itself is decided.
async fn open_tunnel(
    connection: &ClientConnection,
    request: Request<Incoming>,
) -> Response<MessageBody> {
    let (mut head, _) = request.into_parts();
    let trusts_gate_root = trusts_gate_root(connection);
    let tunnel_target = read_tunnel_target(&connection.connection_info, head.uri.authority());
    let ClientConnection {
        services,
        source,
        connection_info,
        ..
    } = connection;
    let decided = pipeline::answer_tunnel(services, source, connection_info, &head, || {
        let (host, port) = tunnel_target.as_ref().map_err(Clone::clone)?;
        if trusts_gate_root || host.is_gate() {
            return Ok(());
        }
        decide_tunnel(connection, host, *port)
    });
    if let Err(refused) = decided.await {
        return refused;
    }
    let (Ok(tunnel_target), Some(upgrade)) = (tunnel_target, head.extensions.remove::<OnUpgrade>())
    else {
        let denial = request::framing_denial("this connection does not support CONNECT");
        return pipeline::answer_fault(services, source, connection_info, denial).await;
    };
    let mut tunnel_connection = connection.clone();
    tunnel_connection.connection_info.tunnel = Some(tunnel_target);
    let (stop, tasks) = (
        tunnel_connection.stop.clone(),
        tunnel_connection.tasks.clone(),
    );
    let tunnel = async move {
        let Ok(upgraded) = upgrade.await else { return };
        // The stream itself, without the HTTP layers.
        match upgraded.downcast::<TokioIo<FramingGuard<BoxedStream>>>() {
            Ok(parts) => {
                let (io, rest) = parts.io.into_inner().into_inner();
                let already_read = [parts.read_buf, rest].concat().into();
                serve(tunnel_connection, io, already_read).await;
            }
            Err(upgraded) => {
                serve(
                    tunnel_connection,
                    Box::new(TokioIo::new(upgraded)),
                    Bytes::new(),
                )
                .await;
            }
        }
    };
    tasks.spawn(async move { stop.run_until_cancelled(tunnel).await });
    let mut response = Response::new(body::empty());
    response.extensions_mut().insert(Tunnel);
    response
}

/// Decides about a CONNECT on a shared network, where the client's program cannot be looked up. If
/// the rules require an approval and an operator can answer, the tunnel is opened, and the
/// connection inside the tunnel waits for the approval.
fn decide_tunnel(connection: &ClientConnection, host: &Host, port: u16) -> Result<(), Denial> {
    let sandbox = connection.source.sandbox();
    let snapshot = connection.services.snapshot_for(sandbox.map(AsRef::as_ref));
    let facts = ConnectFacts {
        sandbox: sandbox.map(|sandbox| sandbox.id()),
        host,
        port,
    };
    let answers = ApprovalAnswers::default();
    let cx = Cx {
        snapshot: &snapshot,
        answers: &answers,
        grants: sandbox.map(|sandbox| sandbox.grants.as_ref()),
        now: connection.services.clock().tick(),
    };
    let decided = decide(Subject::Connect(facts), Mode::Live, cx).into_outcome();
    match decided.verdict {
        Verdict::Ask(_) if connection.services.questions().is_attended() => Ok(()),
        _ => decided.refusal().map(drop),
    }
}

/// Reads host and port of a CONNECT target.
fn read_tunnel_target(
    connection_info: &ConnectionInfo,
    authority: Option<&http::uri::Authority>,
) -> Result<(Host, u16), Denial> {
    if connection_info.tunnel.is_some() || connection_info.hello.is_some() {
        return Err(request::framing_denial(
            "CONNECT is not supported inside a tunnel or a TLS connection",
        ));
    }
    let authority = authority
        .ok_or_else(|| request::framing_denial("a CONNECT target must have a host and a port"))?;
    let Authority { host, port } =
        Authority::parse(authority.as_str()).map_err(request::bad_host_denial)?;
    let port = port
        .ok_or_else(|| request::framing_denial("a CONNECT target must have a host and a port"))?;
    Ok((host, port))
}

/// Whether the client trusts the gate's root: sandboxes do, and containers whose registration has
/// `trusts_ca`.
fn trusts_gate_root(connection: &ClientConnection) -> bool {
    match &connection.source {
        ConnectionSource::Listener(_) => true,
        ConnectionSource::Address(..) => match connection.source.look_up(&connection.services) {
            policy::identity::RegistrationLookup::Found(row) => row
                .metadata
                .get("trusts_ca")
                .and_then(serde_json::Value::as_bool)
                .unwrap_or(false),
            _ => false,
        },
    }
}

async fn serve_http2(connection: ClientConnection, mut stream: BoxedStream) {
    // hyper has no timeout for the preface.
    let mut first = BytesMut::with_capacity(FIRST_READ);
    match timeout(header_timeout(&connection), stream.read_buf(&mut first)).await {
        Ok(Ok(length)) if length > 0 => {}
        Ok(_) | Err(_) => return,
    }
    // hyper closes a connection with another preface without calling the service.
    if first
        .iter()
        .zip(PREFACE)
        .any(|(byte, expected)| byte != expected)
    {
        let denial =
            request::framing_denial("the connection does not start with the HTTP/2 preface");
        return record_early_end(&connection, hello_name(&connection).as_ref(), denial).await;
    }
    let io = ReplayStream::new(stream, first.freeze());
    let connection = Arc::new(connection);
    let service = service_fn(move |request: Request<Incoming>| {
        let connection = Arc::clone(&connection);
        async move {
            let (mut head, body) = request.into_parts();
            let ClientConnection {
                services,
                source,
                connection_info,
                ..
            } = &*connection;
            let is_connect = head.method == Method::CONNECT;
            let response = match websocket::from_http2(&mut head) {
                Ok(()) => {
                    pipeline::answer(services, source, connection_info, Box::new(head), body).await
                }
                Err(denial) => {
                    pipeline::answer_fault(services, source, connection_info, denial).await
                }
            };
            Ok::<_, Infallible>(websocket::to_http2(response, is_connect))
        }
    });
    let served = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(SEND_BUFFER)
        .max_header_list_size(u32::try_from(MAX_HEAD).unwrap_or(u32::MAX))
        .keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .enable_connect_protocol()
        .serve_connection(TokioIo::new(io), service)
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "client connection ended with an error");
    }
}
