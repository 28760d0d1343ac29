//! One client connection, from its first byte: TLS or not, a tunnel or not, and then HTTP.
//!
//! Explicit proxying, a program that knows no proxy, and whatever is inside a tunnel all
//! meet in [`pipeline::answer`]; there is no other way for a request.

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
use policy::answer::Answers;
use policy::audit::Kind;
use policy::host::{Authority, Host};
use policy::reason::Reason;
use policy::verdict::{Denial, Verdict};
use rustls::AlertDescription;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use crate::alarm::HeadTimer;
use crate::body::{self, Content};
use crate::client_connection::ClientConnection;
use crate::framing::{Faults, Guarded, Limits};
use crate::hello::{self, BadHello, Hello, Replay};
use crate::message::Handover;
use crate::passthrough;
use crate::pipeline;
use crate::request::{self, ConnectionInfo, Destination};
use crate::request_cx::RequestCx;
use crate::request_log::RequestLog;
use crate::source::{Source, reserve_record};
use crate::stage::Stage;
use crate::websocket;

/// HTTP/2 from a client: what it may have open, and on its way to us unread.
const MOST_STREAMS: u32 = 128;
const STREAM_WINDOW: u32 = 256 * 1024;
const LINE_WINDOW: u32 = 1024 * 1024;

/// What an answer's stream may have written and not sent.
const SEND_BUFFER: usize = 64 * 1024;

/// How HTTP/2 begins (RFC 9113, 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The preface of HTTP/2 and the settings after it fit.
const FIRST_READ: usize = 512;

/// The largest head.
const MOST_HEAD: usize = 64 * 1024;

/// An HTTP/2 client that is silent for so long is asked whether it is there.
const PING_AFTER: Duration = Duration::from_secs(30);
const PONG_WITHIN: Duration = Duration::from_secs(20);

/// What HTTP is spoken over: a socket, TLS over one, or either of them in a tunnel. In a box,
/// because a connection inside a connection needs a type that does not grow, and because it
/// moves from hand to hand while a handshake's state is large.
type Line = Box<dyn Stream>;

/// Bytes both ways.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<IO: AsyncRead + AsyncWrite + Send + Unpin> Stream for IO {}

type Served = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Begins to serve a connection. It ends by itself, or with its sandbox.
pub fn begin<IO>(visit: ClientConnection, io: IO)
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (stop, tasks) = (visit.stop.clone(), visit.tasks.clone());
    let served = serve(visit, Box::new(io), Bytes::new());
    tasks.spawn(async move { stop.run_until_cancelled(served).await });
}

/// What was agreed on before the first request.
enum NegotiatedProtocol {
    Http1(Line),
    Http2(Line),
}

/// Serves a connection to its end. The future is boxed because a tunnel's holds another, and
/// what it needs until HTTP is spoken is given back then: most connections lie idle.
fn serve(visit: ClientConnection, io: Line, already: Bytes) -> Served {
    Box::pin(async move {
        let mut visit = visit;
        match Box::pin(negotiate(&mut visit, io, already)).await {
            Ok(Some(NegotiatedProtocol::Http1(line))) => serve_http1(visit, line).await,
            Ok(Some(NegotiatedProtocol::Http2(line))) => serve_http2(visit, line).await,
            Ok(None) => {}
            // Whoever says nothing is told nothing, but it is on record where it went.
            Err(NegotiationError { host, denial }) => {
                record_end(&visit, host.as_ref(), denial).await;
            }
        }
    })
}

/// A connection that ended before it was ready for a request.
struct NegotiationError {
    /// Where it went, as far as it said.
    host: Option<Host>,
    denial: Denial,
}

impl NegotiationError {
    fn new(host: Option<&Host>, denial: Denial) -> Self {
        let host = host.cloned();
        Self { host, denial }
    }

    /// A handshake that did not come about.
    fn tls(host: Option<&Host>, evidence: impl Into<String>) -> Self {
        Self::new(
            host,
            Denial::new(Reason::TlsClient, "tls").because(evidence.into()),
        )
    }
}

/// How long a client may take for a head or a handshake.
fn header_patience(visit: &ClientConnection) -> Duration {
    let snapshot = visit.services.policy().load();
    snapshot.settings.egress.timeouts.header
}

/// The name in the TLS hello, where there was one.
fn hello_name(visit: &ClientConnection) -> Option<Host> {
    visit.connection_info.hello.clone().flatten()
}

/// Records a connection that ended before it was ready for a request. One that was, and on which
/// nothing was asked, is what browsers keep in store: it is no record.
async fn record_end(visit: &ClientConnection, host: Option<&Host>, denial: Denial) {
    let sandbox = visit.source.sandbox();
    let slot = reserve_record(sandbox).await;
    let mut trail = RequestLog::begin(&visit.services, sandbox, Kind::Http, slot);
    visit.connection_info.note(&mut trail);
    if let Some(host) = host {
        trail.event.host = Some(host.to_string());
    }
    trail.refused(Stage::Request, &denial);
}

/// A client that did not get to its end in time.
fn late(what: &str) -> Denial {
    Denial::new(Reason::ClientTimeout, "timeouts.header").because(format!("{what} took too long"))
}

/// A client whose first words were not understood.
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
    Denial::new(reason, "tls").because(error.to_string())
}

/// A client that ended the handshake. Whoever does not trust a certificate says so in one
/// of a few words (RFC 8446, 6.2), or leaves without one.
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
    Denial::new(reason, "tls").because(error.to_string())
}

/// Finds out what is spoken, and ends TLS. None where nothing is left to do, because it passed
/// unread.
async fn negotiate(
    visit: &mut ClientConnection,
    io: Line,
    already: Bytes,
) -> Result<Option<NegotiatedProtocol>, NegotiationError> {
    let patience = header_patience(visit);
    match timeout(patience, hello::open(io, already)).await {
        Ok(Ok(hello::ConnectionInfo::Tls { hello, io })) => negotiate_tls(visit, hello, io).await,
        Ok(Ok(hello::ConnectionInfo::Plain { io })) => {
            Ok(Some(NegotiatedProtocol::Http1(Box::new(io))))
        }
        Ok(Err(error)) => Err(NegotiationError::new(None, hello_error(&error))),
        Err(_) => Err(NegotiationError::new(None, late("the first words"))),
    }
}

async fn negotiate_tls(
    visit: &mut ClientConnection,
    hello: Hello,
    io: Replay<Line>,
) -> Result<Option<NegotiatedProtocol>, NegotiationError> {
    if visit.connection_info.hello.is_some() {
        // TLS inside the TLS that we ended: nobody needs it, and nobody could look inside.
        return Err(NegotiationError::tls(None, "TLS inside TLS"));
    }
    let name = hello.server_name.as_deref().map(Host::parse).transpose();
    let name = name.map_err(|error| NegotiationError::tls(None, error.to_string()))?;
    visit.connection_info.hello = Some(name.clone());
    let Some(sandbox) = visit.source.sandbox().cloned() else {
        // Nobody we know trusts our certificates.
        return Err(NegotiationError::tls(name.as_ref(), "an unknown source"));
    };
    if let Ok(Some((host, Some(port)))) = visit.connection_info.agreed()
        && RequestCx::new(&visit.services, &sandbox)
            .snapshot
            .passes_unread(&host)
    {
        let tls = true;
        let destination = Destination { host, port, tls };
        passthrough::pass(visit, &sandbox, destination, &hello, io).await;
        return Ok(None);
    }
    // A certificate for the name in the hello, so that the client can read the refusal; a name
    // that does not agree with the tunnel is refused inside.
    let tunnel = visit
        .connection_info
        .tunnel
        .as_ref()
        .map(|(host, _)| host.clone());
    let meant = visit
        .connection_info
        .meant
        .map(|meant| Host::Ip(meant.ip()));
    let Some(shown) = name.or(tunnel).or(meant) else {
        return Err(NegotiationError::tls(None, "no name"));
    };
    let now = visit.services.clock().wall();
    let handshake = sandbox.leaves.handshake(&shown, now);
    let handshake =
        handshake.map_err(|error| NegotiationError::tls(Some(&shown), error.to_string()))?;
    let accepting = TlsAcceptor::from(handshake).accept(io);
    let stream = match timeout(header_patience(visit), accepting).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return Err(NegotiationError::new(Some(&shown), handshake_error(&error))),
        Err(_) => return Err(NegotiationError::new(Some(&shown), late("the handshake"))),
    };
    let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    let line: Line = Box::new(stream);
    Ok(Some(if is_http2 {
        NegotiatedProtocol::Http2(line)
    } else {
        NegotiatedProtocol::Http1(line)
    }))
}

async fn serve_http1(visit: ClientConnection, line: Line) {
    let patience = header_patience(&visit);
    let (io, faults) = Guarded::new(line, Limits::default());
    let ordinals = AtomicU64::new(0);
    let service = service_fn(|request: Request<Incoming>| {
        let ordinal = ordinals.fetch_add(1, Ordering::Relaxed);
        let (visit, faults) = (&visit, &faults);
        // An idle connection keeps the room of its last request's future, so that is a box.
        Box::pin(
            async move { Ok::<_, Infallible>(answer_http1(visit, faults, ordinal, request).await) },
        )
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(HeadTimer::default())
        .header_read_timeout(patience)
        .max_buf_size(MOST_HEAD + 8 * 1024)
        .serve_connection(TokioIo::new(io), service)
        .with_upgrades()
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "a client's connection ended");
        // The library gives up by itself on a head that does not end: raw TCP that happens to
        // begin like HTTP, as often as not.
        if faults.is_inside_head() {
            let denial = if error.is_timeout() {
                late("the request's head")
            } else {
                Denial::new(Reason::ClientLeft, "framing").because(error.to_string())
            };
            record_end(&visit, hello_name(&visit).as_ref(), denial).await;
        }
    }
}

async fn answer_http1(
    visit: &ClientConnection,
    faults: &Faults,
    ordinal: u64,
    request: Request<Incoming>,
) -> Response<Content> {
    let ClientConnection {
        services,
        source,
        connection_info,
        ..
    } = visit;
    if let Some(fault) = faults.take(ordinal) {
        let denial = request::framing(&fault.to_string());
        return pipeline::answer_fault(services, source, connection_info, denial).await;
    }
    let response = if request.method() == Method::CONNECT {
        Box::pin(open_tunnel(visit, request)).await
    } else {
        let (mut head, body) = request.into_parts();
        head.extensions.insert(Handover::new(faults, ordinal));
        pipeline::answer(services, source, connection_info, Box::new(head), body).await
    };
    let switched = response.status() == StatusCode::SWITCHING_PROTOCOLS
        || response.extensions().get::<Tunnel>().is_some();
    if !switched {
        // What follows is the next message. After a switch whoever takes the stream over
        // takes what the guard holds as well.
        faults.resume(ordinal);
    }
    response
}

/// Marks the answer that opens a tunnel.
#[derive(Clone, Copy)]
struct Tunnel;

/// Answers CONNECT. What the tunnel is used for is judged inside it, request by request,
/// where the client can read why not; a client that does not trust our certificates could
/// not read that, and is told now.
async fn open_tunnel(visit: &ClientConnection, request: Request<Incoming>) -> Response<Content> {
    let (mut head, _) = request.into_parts();
    let trusts = trusts_our_certificates(visit);
    let meant = read_tunnel(&visit.connection_info, head.uri.authority());
    let ClientConnection {
        services,
        source,
        connection_info,
        ..
    } = visit;
    let decided = pipeline::answer_tunnel(services, source, connection_info, &head, || {
        let (host, port) = meant.as_ref().map_err(Clone::clone)?;
        if trusts || host.is_gate() {
            return Ok(());
        }
        decide_tunnel(visit, host, *port)
    });
    if let Err(refused) = decided.await {
        return refused;
    }
    let (Ok(meant), Some(upgrade)) = (meant, head.extensions.remove::<OnUpgrade>()) else {
        let denial = request::framing("a tunnel cannot be opened here");
        return pipeline::answer_fault(services, source, connection_info, denial).await;
    };
    let mut inside = visit.clone();
    inside.connection_info.tunnel = Some(meant);
    let (stop, tasks) = (inside.stop.clone(), inside.tasks.clone());
    let tunnel = async move {
        let Ok(upgraded) = upgrade.await else { return };
        // The stream itself, without the layers that HTTP needed.
        match upgraded.downcast::<TokioIo<Guarded<Line>>>() {
            Ok(parts) => {
                let (io, rest) = parts.io.into_inner().into_inner();
                let already = [parts.read_buf, rest].concat().into();
                serve(inside, io, already).await;
            }
            Err(upgraded) => {
                serve(inside, Box::new(TokioIo::new(upgraded)), Bytes::new()).await;
            }
        }
    };
    tasks.spawn(async move { stop.run_until_cancelled(tunnel).await });
    let mut response = Response::new(body::empty());
    response.extensions_mut().insert(Tunnel);
    response
}

/// Decides about a tunnel on a shared network, where no program is known. Where the operator
/// answers questions, what is inside the tunnel asks.
fn decide_tunnel(visit: &ClientConnection, host: &Host, port: u16) -> Result<(), Denial> {
    let sandbox = visit.source.sandbox();
    let snapshot = visit.services.snapshot_for(sandbox.map(AsRef::as_ref));
    let facts = ConnectFacts {
        sandbox: sandbox.map(|sandbox| sandbox.id()),
        host,
        port,
    };
    let answers = Answers::default();
    let cx = Cx {
        snapshot: &snapshot,
        answers: &answers,
        grants: sandbox.map(|sandbox| sandbox.grants.as_ref()),
        now: visit.services.clock().tick(),
    };
    let decided = decide(Subject::Connect(facts), Mode::Live, cx).now();
    match decided.verdict {
        Verdict::Ask(_) if visit.services.questions().is_attended() => Ok(()),
        _ => decided.refusal().map(drop),
    }
}

fn read_tunnel(
    connection_info: &ConnectionInfo,
    authority: Option<&http::uri::Authority>,
) -> Result<(Host, u16), Denial> {
    if connection_info.tunnel.is_some() || connection_info.hello.is_some() {
        return Err(request::framing("a tunnel inside a tunnel"));
    }
    let authority = authority.ok_or_else(|| request::framing("a tunnel names host and port"))?;
    let Authority { host, port } =
        Authority::parse(authority.as_str()).map_err(request::bad_host)?;
    let port = port.ok_or_else(|| request::framing("a tunnel names host and port"))?;
    Ok((host, port))
}

/// Whether the client was told to trust our root: our own sandboxes were, and a registered
/// container where the registration says so.
fn trusts_our_certificates(visit: &ClientConnection) -> bool {
    match &visit.source {
        Source::Listener(_) => true,
        Source::Address(..) => match visit.source.look_up(&visit.services) {
            policy::identity::Lookup::Found(row) => row
                .metadata
                .get("trusts_ca")
                .and_then(serde_json::Value::as_bool)
                .unwrap_or(false),
            _ => false,
        },
    }
}

async fn serve_http2(visit: ClientConnection, mut line: Line) {
    // The library waits for its preface for as long as it takes.
    let mut first = BytesMut::with_capacity(FIRST_READ);
    match timeout(header_patience(&visit), line.read_buf(&mut first)).await {
        Ok(Ok(length)) if length > 0 => {}
        Ok(_) | Err(_) => return,
    }
    // The library closes such a connection without a word to the service.
    if first.iter().zip(PREFACE).any(|(byte, known)| byte != known) {
        let denial = request::framing("the connection does not begin with the HTTP/2 preface");
        return record_end(&visit, hello_name(&visit).as_ref(), denial).await;
    }
    let io = Replay::new(line, first.freeze());
    let visit = Arc::new(visit);
    let service = service_fn(move |request: Request<Incoming>| {
        let visit = Arc::clone(&visit);
        async move {
            let (mut head, body) = request.into_parts();
            let ClientConnection {
                services,
                source,
                connection_info,
                ..
            } = &*visit;
            let asked = head.method == Method::CONNECT;
            let response = match websocket::from_http2(&mut head) {
                Ok(()) => {
                    pipeline::answer(services, source, connection_info, Box::new(head), body).await
                }
                Err(denial) => {
                    pipeline::answer_fault(services, source, connection_info, denial).await
                }
            };
            Ok::<_, Infallible>(websocket::to_http2(response, asked))
        }
    });
    let served = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(MOST_STREAMS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(LINE_WINDOW)
        .max_send_buf_size(SEND_BUFFER)
        .max_header_list_size(u32::try_from(MOST_HEAD).unwrap_or(u32::MAX))
        .keep_alive_interval(PING_AFTER)
        .keep_alive_timeout(PONG_WITHIN)
        .enable_connect_protocol()
        .serve_connection(TokioIo::new(io), service)
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "a client's connection ended");
    }
}
