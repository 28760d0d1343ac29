//! Serves mirrors over the git protocol, at `git://palisade.internal/<name>`.
//!
//! ```text
//!   request line ──▶ identity ──▶ rate limit ──▶ mirror ──┬─ upload-pack: git on the mirror
//!                                                         └─ receive-pack: refs, push, report
//! ```
//! One connection is one fetch or one push. The requests are handled by the same functions as over
//! HTTP. A refusal is a git push report or an `ERR` line, which git prints.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame};
use policy::audit::Kind;
use policy::host::{GATE_HOST, Host};
use policy::reason::Reason;
use policy::repository::RepositoryOperation;
use policy::verdict::Denial;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::smart_http::{MirrorRequest, version};
use super::upstream_push::BANNER;
use super::{held_push, upstream_push};
use crate::admission::take_token;
use crate::body::{BodyError, MessageBody};
use crate::body_stream;
use crate::git_protocol::pkt_line::{self, PktLine};
use crate::git_protocol::push_spooler::PushEncoding;
use crate::in_flight::InFlight;
use crate::mirror::Mirror;
use crate::mirror::output::ChildOutput;
use crate::refusal::RequestRefusal;
use crate::request::ConnectionInfo;
use crate::request_cx::RequestCx;
use crate::request_log::{RequestLog, Tally};
use crate::sandbox_state::SandboxState;
use crate::services::Services;
use crate::source::{ConnectionSource, reserve_record};
use crate::stage::Stage;

/// Port of the git protocol.
pub const PORT: u16 = 9418;

/// Maximum size of the request line, with the path and the client's parameters.
const MAX_REQUEST_LINE_BYTES: usize = 4096;

/// Size of the read buffer.
const READ_BYTES: usize = 64 * 1024;

/// Maximum number of bytes that a client may send in one fetch: enough for a million commits.
const MAX_FETCH_INPUT_BYTES: u64 = 64 * 1024 * 1024;

/// How long the gate reads from a client after it has responded.
const LINGER_TIMEOUT: Duration = Duration::from_secs(10);

/// The request line of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RequestLine {
    operation: RepositoryOperation,
    /// Path of the repository as sent.
    path: String,
    /// Name of the mirror, if the path is a mirror's.
    name: Option<String>,
    protocol: Option<&'static str>,
}

/// Serves a connection to its end and writes one audit record.
pub async fn serve(
    services: &Arc<Services>,
    sandbox: &Arc<SandboxState>,
    connection_info: &ConnectionInfo,
    stream: TcpStream,
) {
    let slot = reserve_record(Some(sandbox)).await;
    let mut log = RequestLog::begin(services, Some(sandbox), Kind::Git, slot);
    connection_info.write_destination(&mut log);
    let cx = RequestCx::new(services, sandbox);
    let timeouts = &cx.snapshot.settings.egress.timeouts;
    let (mut reader, writer) = stream.into_split();
    let (sender, receiver) = mpsc::channel(1);
    let reading = timeout(timeouts.header, read_request_line(&mut reader)).await;
    let (line, rest) = match reading.unwrap_or_else(|_| Err(request_line_timeout_denial())) {
        Ok(read) => read,
        Err(denial) => {
            drop(receiver);
            refuse(writer, log, &RequestRefusal::new(Stage::Request, denial)).await;
            let _ = timeout(LINGER_TIMEOUT, read_to_end(reader, sender)).await;
            return;
        }
    };
    let connection = GitConnection {
        cx: &cx,
        input: ClientInput {
            receiver,
            buffered: (!rest.is_empty()).then_some(rest),
        },
        writer,
    };
    let mut reading = std::pin::pin!(read_to_end(reader, sender));
    let mut responding = std::pin::pin!(connection.respond(line, log));
    tokio::select! {
        () = &mut responding => {
            // Closing a socket with unread input resets it, and the client may lose the response.
            let _ = timeout(LINGER_TIMEOUT, reading).await;
        }
        () = &mut reading => responding.await,
    }
}

/// A connection whose request line was read.
struct GitConnection<'a> {
    cx: &'a RequestCx,
    input: ClientInput,
    writer: OwnedWriteHalf,
}

impl GitConnection<'_> {
    async fn respond(self, line: RequestLine, mut log: RequestLog) {
        let Self {
            cx,
            input,
            mut writer,
        } = self;
        let idle_timeout = cx.snapshot.settings.egress.timeouts.idle;
        let handling = handle(cx, &line, input, &mut writer, &mut log);
        match Box::pin(handling).await {
            Ok(Outcome::Pushed(report, in_flight)) => {
                log.end_stage(Stage::Git);
                let report = body_stream::response_body(report, log, in_flight, idle_timeout);
                send(report, &mut writer).await;
            }
            Ok(Outcome::Fetch(fetch)) => {
                log.end_stage(Stage::Git);
                let Fetch {
                    output,
                    stdin,
                    input,
                    in_flight,
                } = *fetch;
                let tally = Arc::clone(&log.tally);
                let output = body_stream::response_body(output, log, in_flight, idle_timeout);
                let mut sending = std::pin::pin!(send(output, &mut writer));
                tokio::select! {
                    () = &mut sending => {}
                    () = copy_input(input, stdin, &tally) => sending.await,
                }
            }
            Ok(Outcome::Nothing) => log.end_stage(Stage::Git),
            Err(refusal) => return refuse(writer, log, &refusal).await,
        }
        let _ = writer.shutdown().await;
    }
}

/// Outcome of an allowed request.
enum Outcome {
    /// Upstream's response to a push.
    Pushed(MessageBody, InFlight),
    /// A fetch that git serves.
    Fetch(Box<Fetch>),
    /// The client disconnected after the ref advertisement, or sent only a flush.
    Nothing,
}

/// A fetch between a client and git.
struct Fetch {
    output: ChildOutput,
    stdin: Option<tokio::process::ChildStdin>,
    input: ClientInput,
    in_flight: InFlight,
}

/// Handles a request: identity, rate limit, mirror, then fetch or push.
async fn handle(
    cx: &RequestCx,
    line: &RequestLine,
    input: ClientInput,
    writer: &mut OwnedWriteHalf,
    log: &mut RequestLog,
) -> Result<Outcome, RequestRefusal> {
    log.event.operation = Some(line.operation.as_str().to_owned());
    log.event.host = Some(GATE_HOST.to_owned());
    log.event.path = Some(line.path.clone());
    let source = ConnectionSource::Listener(Arc::clone(&cx.sandbox));
    let identity = source.identify(&cx.services, None)?;
    log.end_stage(Stage::Identity);
    let host = Host::parse(GATE_HOST).map_err(|error| {
        let denial = Denial::new(Reason::Internal, "names").with_evidence(error.to_string());
        RequestRefusal::new(Stage::Request, denial)
    })?;
    let request = MirrorRequest {
        cx,
        registration: identity.registration(),
        host: &host,
    };
    let _pass = take_token(cx, &host, log)?;
    let Some(name) = &line.name else {
        return Err(RequestRefusal::new(Stage::Git, not_a_mirror_denial()));
    };
    log.event.repo = Some(name.clone());
    let mirror = request.find(name, log)?;
    match line.operation {
        RepositoryOperation::Fetch => fetch(&request, &mirror, line.protocol, input).await,
        RepositoryOperation::Push => receive_push(&request, &mirror, input, writer, log).await,
        RepositoryOperation::AdvertiseFetch
        | RepositoryOperation::AdvertisePush
        | RepositoryOperation::Lfs
        | RepositoryOperation::Download => {
            Err(RequestRefusal::new(Stage::Git, not_a_mirror_denial()))
        }
    }
}

/// Starts git on the mirror for a fetch.
async fn fetch(
    request: &MirrorRequest<'_>,
    mirror: &Mirror,
    protocol: Option<&'static str>,
    input: ClientInput,
) -> Result<Outcome, RequestRefusal> {
    // The semaphore is never closed.
    let permit = Arc::clone(&request.cx.sandbox.fetches)
        .acquire_owned()
        .await;
    let refreshed = Box::pin(mirror.refresh(&request.upstream_access())).await;
    refreshed.map_err(|error| error.refusal(mirror))?;
    let started = mirror.upload_pack(&[], protocol).await;
    let (mut child, usage) = started.map_err(|error| error.refusal(mirror))?;
    let stdin = child.stdin.take();
    let in_flight = request.enter(mirror).await?;
    Ok(Outcome::Fetch(Box::new(Fetch {
        output: ChildOutput::new(child, b"")
            .with_permit(permit.ok())
            .with_usage_guard(usage),
        stdin,
        input,
        in_flight,
    })))
}

/// Sends the client upstream's ref advertisement and forwards its push.
async fn receive_push(
    request: &MirrorRequest<'_>,
    mirror: &Mirror,
    mut input: ClientInput,
    writer: &mut OwnedWriteHalf,
    log: &mut RequestLog,
) -> Result<Outcome, RequestRefusal> {
    let (advertised, in_flight) = Box::pin(upstream_push::advertise(request, mirror)).await?;
    let advertised = advertised.strip_prefix(BANNER).unwrap_or(&advertised);
    let length = u64::try_from(advertised.len()).unwrap_or(u64::MAX);
    log.tally.received.fetch_add(length, Ordering::Relaxed);
    let advertise_operation = RepositoryOperation::AdvertisePush.as_str();
    let idle_timeout = request.cx.snapshot.settings.egress.timeouts.idle;
    let written = timeout(idle_timeout, writer.write_all(advertised)).await;
    drop(in_flight);
    if !matches!(written, Ok(Ok(()))) || !input.wait_for_data(idle_timeout).await {
        // A client with nothing to push may close the connection.
        log.event.operation = Some(advertise_operation.to_owned());
        return Ok(Outcome::Nothing);
    }
    let body = body_stream::request_body(input, &log.tally, idle_timeout);
    let pushing = Box::pin(held_push::forward(
        request,
        mirror,
        PushEncoding::UntilPackEnd,
        body,
        log,
    ));
    match pushing.await? {
        (Some(report), in_flight) => Ok(Outcome::Pushed(report, in_flight)),
        (None, _) => {
            // A flush alone: git has nothing to push.
            log.event.operation = Some(advertise_operation.to_owned());
            log.event.event = None;
            Ok(Outcome::Nothing)
        }
    }
}

/// Bytes received from a client. They end only when the client closes its sending side.
struct ClientInput {
    receiver: mpsc::Receiver<Bytes>,
    /// Received bytes that come before those of the channel.
    buffered: Option<Bytes>,
}

impl ClientInput {
    /// Waits for bytes from the client. Returns whether any arrived in time.
    async fn wait_for_data(&mut self, limit: Duration) -> bool {
        if self.buffered.is_none() {
            self.buffered = timeout(limit, self.receiver.recv()).await.ok().flatten();
        }
        self.buffered.is_some()
    }

    async fn next(&mut self) -> Option<Bytes> {
        match self.buffered.take() {
            Some(bytes) => Some(bytes),
            None => self.receiver.recv().await,
        }
    }
}

impl Body for ClientInput {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let next = match self.buffered.take() {
            Some(bytes) => Some(bytes),
            None => ready!(self.receiver.poll_recv(cx)),
        };
        Poll::Ready(next.map(|data| Ok(Frame::data(data))))
    }
}

/// Reads from a client to the end, and discards the bytes once the receiver is closed.
async fn read_to_end(mut reader: OwnedReadHalf, writer: mpsc::Sender<Bytes>) {
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(READ_BYTES);
        match reader.read_buf(&mut buffer).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {
                // A closed receiver needs no more bytes.
                let _ = writer.send(buffer.split().freeze()).await;
            }
        }
    }
}

/// Copies the client's bytes to git until either side ends or the limit is reached.
async fn copy_input(
    mut input: ClientInput,
    stdin: Option<tokio::process::ChildStdin>,
    tally: &Tally,
) {
    let Some(mut stdin) = stdin else { return };
    let mut copied = 0_u64;
    while let Some(data) = input.next().await {
        let length = u64::try_from(data.len()).unwrap_or(u64::MAX);
        copied = copied.saturating_add(length);
        tally.sent.fetch_add(length, Ordering::Relaxed);
        if copied > MAX_FETCH_INPUT_BYTES || stdin.write_all(&data).await.is_err() {
            return;
        }
    }
}

/// Sends a body to the client. An error in the body ends the response early.
async fn send(mut body: MessageBody, writer: &mut OwnedWriteHalf) {
    while let Some(Ok(frame)) = body.frame().await {
        let data = frame.into_data().unwrap_or_default();
        if writer.write_all(&data).await.is_err() {
            return;
        }
    }
}

async fn refuse(mut writer: OwnedWriteHalf, mut log: RequestLog, refusal: &RequestRefusal) {
    log.record_refusal(refusal.stage, &refusal.denial);
    let message = refusal.to_git_protocol(log.id);
    let length = u64::try_from(message.len()).unwrap_or(u64::MAX);
    log.tally.received.fetch_add(length, Ordering::Relaxed);
    drop(log);
    if writer.write_all(&message).await.is_ok() {
        let _ = writer.shutdown().await;
    }
}

/// Reads the request line of a client. Also returns bytes that were received after it.
async fn read_request_line(reader: &mut OwnedReadHalf) -> Result<(RequestLine, Bytes), Denial> {
    let mut received = BytesMut::with_capacity(MAX_REQUEST_LINE_BYTES);
    loop {
        match pkt_line::first(&received) {
            Ok(Some((PktLine::Data(data), length))) => {
                let line = parse_request_line(data).ok_or_else(malformed_request_denial)?;
                let rest = received.split_off(length).freeze();
                return Ok((line, rest));
            }
            Ok(Some((PktLine::Flush | PktLine::Other, _))) | Err(_) => {
                return Err(malformed_request_denial());
            }
            Ok(None) if received.len() >= MAX_REQUEST_LINE_BYTES => {
                return Err(malformed_request_denial());
            }
            Ok(None) => {}
        }
        match reader.read_buf(&mut received).await {
            Ok(0) | Err(_) => {
                let evidence = "the client closed the connection before its request line";
                return Err(Denial::new(Reason::ClientLeft, "git:form").with_evidence(evidence));
            }
            Ok(_) => {}
        }
    }
}

/// Parses `git-upload-pack /name NUL host=… NUL NUL version=… NUL` (gitprotocol-pack, 'Git
/// Transport'). The host parameter is ignored, because the gate serves every host here.
fn parse_request_line(line: &[u8]) -> Option<RequestLine> {
    let line = str::from_utf8(pkt_line::chomp(line)).ok()?;
    let mut parts = line.split('\0');
    let (service, path) = parts.next()?.split_once(' ')?;
    let operation = match service {
        "git-upload-pack" => RepositoryOperation::Fetch,
        "git-receive-pack" => RepositoryOperation::Push,
        _ => return None,
    };
    if path.chars().any(char::is_control) {
        return None;
    }
    Some(RequestLine {
        operation,
        path: path.to_owned(),
        name: mirror_name(path).map(str::to_owned),
        protocol: parts.find_map(version),
    })
}

/// The mirror name in a path: `/app`, `/app.git` or, as over HTTP, `/git/app`.
fn mirror_name(path: &str) -> Option<&str> {
    let path = path.strip_prefix('/')?;
    let name = path.strip_prefix("git/").unwrap_or(path);
    let name = name.strip_suffix(".git").unwrap_or(name);
    (!name.is_empty() && !name.contains('/')).then_some(name)
}

fn request_line_timeout_denial() -> Denial {
    Denial::new(Reason::ClientTimeout, "timeouts.header")
        .with_evidence("the request line did not arrive in time")
}

fn malformed_request_denial() -> Denial {
    Denial::new(Reason::GitMalformed, "git:form")
        .with_message("The git request could not be parsed. Mirrors support fetch and push.")
}

fn not_a_mirror_denial() -> Denial {
    Denial::new(Reason::GitRepo, "git.mirrors").with_message(
        "This path is not a mirror: clone, fetch from and push to git://palisade.internal/<name>.",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_line_of_git_is_parsed() {
        for (line, operation, name, protocol) in [
            (
                "git-upload-pack /app\0host=palisade.internal\0",
                RepositoryOperation::Fetch,
                Some("app"),
                None,
            ),
            (
                "git-upload-pack /app.git\0host=x.example:9418\0\0version=2\0",
                RepositoryOperation::Fetch,
                Some("app"),
                Some("version=2"),
            ),
            (
                "git-receive-pack /git/app\0\0other\0version=1\0",
                RepositoryOperation::Push,
                Some("app"),
                Some("version=1"),
            ),
            (
                "git-upload-pack /git\n",
                RepositoryOperation::Fetch,
                Some("git"),
                None,
            ),
            (
                "git-upload-pack /git/git.git\0\0version=3\0",
                RepositoryOperation::Fetch,
                Some("git"),
                None,
            ),
            (
                "git-upload-pack /acme/app",
                RepositoryOperation::Fetch,
                None,
                None,
            ),
            (
                "git-upload-pack app",
                RepositoryOperation::Fetch,
                None,
                None,
            ),
            ("git-upload-pack /", RepositoryOperation::Fetch, None, None),
            (
                "git-upload-pack /git/../app",
                RepositoryOperation::Fetch,
                None,
                None,
            ),
            (
                "git-upload-pack //app",
                RepositoryOperation::Fetch,
                None,
                None,
            ),
        ] {
            let request = parse_request_line(line.as_bytes()).unwrap();
            assert_eq!((request.operation, request.protocol), (operation, protocol));
            assert_eq!(request.name.as_deref(), name, "{line}");
        }
        for bad in [
            &b"git-upload-archive /app\0host=x\0"[..],
            b"git-upload-pack",
            b"git-upload-pack /a\x1b[2J",
            b"git-upload-pack /\xff",
            b"GIT-UPLOAD-PACK /app",
            b"GET / HTTP/1.1",
            b"",
        ] {
            assert_eq!(parse_request_line(bad), None, "{bad:?}");
        }
    }
}
