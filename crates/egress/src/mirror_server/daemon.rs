//! Mirrors over git's own protocol, at `git://palisade.internal/<name>`.
//!
//! ```text
//!   request line ──▶ who asks ──▶ mirror ──▶ pace ──┬─ upload-pack: git, on the mirror
//!                                                   └─ receive-pack: list, push, answer
//! ```
//! One connection is one fetch or one push. What is asked for is answered by the functions that
//! answer over HTTP; a refusal is git's own report, or an `ERR` line, which git prints.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame};
use policy::audit::Kind;
use policy::host::{GATE, Host};
use policy::reason::Reason;
use policy::repository::RepositoryOperation;
use policy::verdict::Denial;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::push::BANNER;
use super::serve::{Visitor, version};
use super::{held_push, push};
use crate::admission::take_token;
use crate::body::{Broken, Content};
use crate::body_stream;
use crate::git_protocol::intake::Coding;
use crate::git_protocol::line::{self, Line};
use crate::in_flight::InFlight;
use crate::mirror::Mirror;
use crate::mirror::output::Output;
use crate::refusal::Refusal;
use crate::request::ConnectionInfo;
use crate::request_cx::RequestCx;
use crate::request_log::{RequestLog, Tally};
use crate::sandbox_state::SandboxState;
use crate::services::Services;
use crate::source::{Source, reserve_record};
use crate::stage::Stage;

/// The port on which this is spoken.
pub const PORT: u16 = 9418;

/// The longest request line: a name, and what else a client says of itself.
const MOST_ASKED: usize = 4096;

/// What is read of a client at once.
const PIECE: usize = 64 * 1024;

/// What a client may say on one fetch: more than a million commits that it has.
const MOST_SAID: u64 = 64 * 1024 * 1024;

/// How long a client that was answered may go on speaking.
const PARTING: Duration = Duration::from_secs(10);

/// What a client asks for, in its first line.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Wanted {
    operation: RepositoryOperation,
    /// The repository, as it was written.
    path: String,
    /// The mirror.
    name: Option<String>,
    protocol: Option<&'static str>,
}

/// Serves a connection to its end. Whatever happens is written down, once.
pub async fn serve(
    services: &Arc<Services>,
    sandbox: &Arc<SandboxState>,
    connection_info: &ConnectionInfo,
    stream: TcpStream,
) {
    let slot = reserve_record(Some(sandbox)).await;
    let mut trail = RequestLog::begin(services, Some(sandbox), Kind::Git, slot);
    connection_info.note(&mut trail);
    let cx = RequestCx::new(services, sandbox);
    let timeouts = &cx.snapshot.settings.egress.timeouts;
    let (mut from, to) = stream.into_split();
    let (send, heard) = mpsc::channel(1);
    let asked = timeout(timeouts.header, hear(&mut from)).await;
    let (wanted, rest) = match asked.unwrap_or_else(|_| Err(late())) {
        Ok(heard) => heard,
        Err(denial) => {
            drop(heard);
            refuse(to, trail, &Refusal::new(Stage::Request, denial)).await;
            let _ = timeout(PARTING, read_on(from, send)).await;
            return;
        }
    };
    let visit = ClientConnection {
        cx: &cx,
        wire: Wire {
            heard,
            first: (!rest.is_empty()).then_some(rest),
        },
        to,
    };
    let mut reading = std::pin::pin!(read_on(from, send));
    let mut answering = std::pin::pin!(visit.answer(wanted, trail));
    tokio::select! {
        () = &mut answering => {
            // A client that is still speaking would not hear the answer from a closed socket.
            let _ = timeout(PARTING, reading).await;
        }
        () = &mut reading => answering.await,
    }
}

/// A client on its way to its answer.
struct ClientConnection<'a> {
    cx: &'a RequestCx,
    wire: Wire,
    to: OwnedWriteHalf,
}

impl ClientConnection<'_> {
    async fn answer(self, wanted: Wanted, mut trail: RequestLog) {
        let Self { cx, wire, mut to } = self;
        let patience = cx.snapshot.settings.egress.timeouts.idle;
        let answered = answer(cx, &wanted, wire, &mut to, &mut trail);
        match Box::pin(answered).await {
            Ok(Answer::Pushed(answer, live)) => {
                trail.passed(Stage::Git);
                let answer = body_stream::receiving(answer, trail, live, patience);
                send(answer, &mut to).await;
            }
            Ok(Answer::Fetch(fetch)) => {
                trail.passed(Stage::Git);
                let Fetch {
                    output,
                    stdin,
                    wire,
                    live,
                } = *fetch;
                let tally = Arc::clone(&trail.tally);
                let output = body_stream::receiving(output, trail, live, patience);
                let mut answering = std::pin::pin!(send(output, &mut to));
                tokio::select! {
                    () = &mut answering => {}
                    () = pass_on(wire, stdin, &tally) => answering.await,
                }
            }
            Ok(Answer::Nothing) => trail.passed(Stage::Git),
            Err(refusal) => return refuse(to, trail, &refusal).await,
        }
        let _ = to.shutdown().await;
    }
}

/// What came of a request.
enum Answer {
    /// Upstream's answer to a push.
    Pushed(Content, InFlight),
    /// A conversation with git.
    Fetch(Box<Fetch>),
    /// Nothing more was wanted.
    Nothing,
}

/// A conversation between a client and git.
struct Fetch {
    output: Output,
    stdin: Option<tokio::process::ChildStdin>,
    wire: Wire,
    live: InFlight,
}

/// The way of a request, in its order.
async fn answer(
    cx: &RequestCx,
    wanted: &Wanted,
    wire: Wire,
    to: &mut OwnedWriteHalf,
    trail: &mut RequestLog,
) -> Result<Answer, Refusal> {
    trail.event.operation = Some(wanted.operation.as_str().to_owned());
    trail.event.host = Some(GATE.to_owned());
    trail.event.path = Some(wanted.path.clone());
    let source = Source::Listener(Arc::clone(&cx.sandbox));
    let identity = source.identify(&cx.services, None)?;
    trail.passed(Stage::Identity);
    let host = Host::parse(GATE).map_err(|error| {
        let denial = Denial::new(Reason::Internal, "names").because(error.to_string());
        Refusal::new(Stage::Request, denial)
    })?;
    let visitor = Visitor {
        cx,
        registration: identity.registration(),
        host: &host,
    };
    let _pass = take_token(cx, &host, trail)?;
    let Some(name) = &wanted.name else {
        return Err(Refusal::new(Stage::Git, elsewhere()));
    };
    trail.event.repo = Some(name.clone());
    let mirror = visitor.find(name, trail)?;
    match wanted.operation {
        RepositoryOperation::Fetch => fetch(&visitor, &mirror, wanted.protocol, wire).await,
        RepositoryOperation::Push => take_push(&visitor, &mirror, wire, to, trail).await,
        RepositoryOperation::AdvertiseFetch
        | RepositoryOperation::AdvertisePush
        | RepositoryOperation::Lfs
        | RepositoryOperation::Download => Err(Refusal::new(Stage::Git, elsewhere())),
    }
}

/// Begins a conversation with git on the mirror.
async fn fetch(
    visitor: &Visitor<'_>,
    mirror: &Mirror,
    protocol: Option<&'static str>,
    wire: Wire,
) -> Result<Answer, Refusal> {
    // The semaphore is never closed.
    let place = Arc::clone(&visitor.cx.sandbox.fetches)
        .acquire_owned()
        .await;
    let refreshed = Box::pin(mirror.refresh(&visitor.asking())).await;
    refreshed.map_err(|why| why.refusal(mirror))?;
    let begun = mirror.upload_pack(&[], protocol).await;
    let (mut child, usage) = begun.map_err(|why| why.refusal(mirror))?;
    let stdin = child.stdin.take();
    let live = visitor.enter(mirror).await?;
    Ok(Answer::Fetch(Box::new(Fetch {
        output: Output::new(child, b"").holding(place.ok()).using(usage),
        stdin,
        wire,
        live,
    })))
}

/// Tells a client what upstream has, and takes what it pushes.
async fn take_push(
    visitor: &Visitor<'_>,
    mirror: &Mirror,
    mut wire: Wire,
    to: &mut OwnedWriteHalf,
    trail: &mut RequestLog,
) -> Result<Answer, Refusal> {
    let (told, live) = Box::pin(push::advertise(visitor, mirror)).await?;
    let told = told.strip_prefix(BANNER).unwrap_or(&told);
    let length = u64::try_from(told.len()).unwrap_or(u64::MAX);
    trail.tally.received.fetch_add(length, Ordering::Relaxed);
    let advertised = RepositoryOperation::AdvertisePush.as_str();
    let patience = visitor.cx.snapshot.settings.egress.timeouts.idle;
    let written = timeout(patience, to.write_all(told)).await;
    drop(live);
    if !matches!(written, Ok(Ok(()))) || !wire.is_spoken(patience).await {
        // Whoever finds that there is nothing to push may just leave.
        trail.event.operation = Some(advertised.to_owned());
        return Ok(Answer::Nothing);
    }
    let body = body_stream::sending(wire, &trail.tally, patience);
    let taking = Box::pin(held_push::take(
        visitor,
        mirror,
        Coding::Endless,
        body,
        trail,
    ));
    match taking.await? {
        (Some(answer), live) => Ok(Answer::Pushed(answer, live)),
        (None, _) => {
            // A flush alone is what git says in that case.
            trail.event.operation = Some(advertised.to_owned());
            trail.event.event = None;
            Ok(Answer::Nothing)
        }
    }
}

/// What a client says, as it comes. There is an end only where it closes its side.
struct Wire {
    heard: mpsc::Receiver<Bytes>,
    /// What came before, and was not taken yet.
    first: Option<Bytes>,
}

impl Wire {
    /// Whether the client says something, in time.
    async fn is_spoken(&mut self, patience: Duration) -> bool {
        if self.first.is_none() {
            self.first = timeout(patience, self.heard.recv()).await.ok().flatten();
        }
        self.first.is_some()
    }

    async fn next(&mut self) -> Option<Bytes> {
        match self.first.take() {
            Some(first) => Some(first),
            None => self.heard.recv().await,
        }
    }
}

impl Body for Wire {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let next = match self.first.take() {
            Some(first) => Some(first),
            None => ready!(self.heard.poll_recv(cx)),
        };
        Poll::Ready(next.map(|data| Ok(Frame::data(data))))
    }
}

/// Reads what a client says, for whoever wants it; into nowhere when nobody does any more.
async fn read_on(mut from: OwnedReadHalf, to: mpsc::Sender<Bytes>) {
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(PIECE);
        match from.read_buf(&mut buffer).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {
                // Nobody to take it: it is thrown away.
                let _ = to.send(buffer.split().freeze()).await;
            }
        }
    }
}

/// Passes on to git what a client says, until either has enough.
async fn pass_on(mut wire: Wire, stdin: Option<tokio::process::ChildStdin>, tally: &Tally) {
    let Some(mut stdin) = stdin else { return };
    let mut said = 0_u64;
    while let Some(data) = wire.next().await {
        let length = u64::try_from(data.len()).unwrap_or(u64::MAX);
        said = said.saturating_add(length);
        tally.sent.fetch_add(length, Ordering::Relaxed);
        if said > MOST_SAID || stdin.write_all(&data).await.is_err() {
            return;
        }
    }
}

/// Sends an answer. Where it breaks off, the connection does.
async fn send(mut answer: Content, to: &mut OwnedWriteHalf) {
    while let Some(Ok(frame)) = answer.frame().await {
        let data = frame.into_data().unwrap_or_default();
        if to.write_all(&data).await.is_err() {
            return;
        }
    }
}

async fn refuse(mut to: OwnedWriteHalf, mut trail: RequestLog, refusal: &Refusal) {
    trail.refused(refusal.stage, &refusal.denial);
    let said = refusal.spoken(trail.id);
    let length = u64::try_from(said.len()).unwrap_or(u64::MAX);
    trail.tally.received.fetch_add(length, Ordering::Relaxed);
    drop(trail);
    if to.write_all(&said).await.is_ok() {
        let _ = to.shutdown().await;
    }
}

/// Reads a client's first line, and what came with it.
async fn hear(from: &mut OwnedReadHalf) -> Result<(Wanted, Bytes), Denial> {
    let mut heard = BytesMut::with_capacity(MOST_ASKED);
    loop {
        match line::first(&heard) {
            Ok(Some((Line::Data(data), length))) => {
                let wanted = read(data).ok_or_else(unreadable)?;
                let rest = heard.split_off(length).freeze();
                return Ok((wanted, rest));
            }
            Ok(Some((Line::Flush | Line::Other, _))) | Err(_) => return Err(unreadable()),
            Ok(None) if heard.len() >= MOST_ASKED => return Err(unreadable()),
            Ok(None) => {}
        }
        match from.read_buf(&mut heard).await {
            Ok(0) | Err(_) => {
                let why = "it left before it said what it wanted";
                return Err(Denial::new(Reason::ClientLeft, "git:form").because(why));
            }
            Ok(_) => {}
        }
    }
}

/// Reads `git-upload-pack /name NUL host=… NUL NUL version=… NUL` (gitprotocol-pack, 'Git
/// Transport'). Which host a client meant does not matter: whatever it is, the gate answers.
fn read(line: &[u8]) -> Option<Wanted> {
    let line = str::from_utf8(line::chomp(line)).ok()?;
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
    Some(Wanted {
        operation,
        path: path.to_owned(),
        name: name(path).map(str::to_owned),
        protocol: parts.find_map(version),
    })
}

/// The mirror that a path means: `/app`, `/app.git` or, as over HTTP, `/git/app`.
fn name(path: &str) -> Option<&str> {
    let path = path.strip_prefix('/')?;
    let name = path.strip_prefix("git/").unwrap_or(path);
    let name = name.strip_suffix(".git").unwrap_or(name);
    (!name.is_empty() && !name.contains('/')).then_some(name)
}

fn late() -> Denial {
    Denial::new(Reason::ClientTimeout, "timeouts.header").because("the first line took too long")
}

fn unreadable() -> Denial {
    Denial::new(Reason::GitMalformed, "git:form")
        .saying("What is asked for cannot be read. Mirrors are fetched from and pushed to.")
}

fn elsewhere() -> Denial {
    Denial::new(Reason::GitRepo, "git.mirrors").saying(
        "Only mirrors are here: clone, fetch from and push to git://palisade.internal/<name>.",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_read_as_git_writes_it() {
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
            let wanted = read(line.as_bytes()).unwrap();
            assert_eq!((wanted.operation, wanted.protocol), (operation, protocol));
            assert_eq!(wanted.name.as_deref(), name, "{line}");
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
            assert_eq!(read(bad), None, "{bad:?}");
        }
    }
}
