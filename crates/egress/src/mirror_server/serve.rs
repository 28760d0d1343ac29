//! Mirrors over smart HTTP, at `http://palisade.internal/git/<name>`.

use std::io::Read;
use std::sync::Arc;

use bytes::Bytes;
use decide::subject::{MirrorFacts, Subject};
use flate2::read::GzDecoder;
use http::Response;
use http::header::{CACHE_CONTROL, CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderValue};
use http_body_util::BodyExt;
use policy::allowlist::Target;
use policy::answer::Answers;
use policy::audit::Kind;
use policy::git_address::recognise;
use policy::host::Host;
use policy::reason::Reason;
use policy::registration::Registration;
use policy::repository::RepositoryOperation;
use policy::verdict::Denial;
use tokio::task::spawn_blocking;

use super::{held_push, push};
use crate::admission::take_token;
use crate::body::{self, Content};
use crate::forward::Reply;
use crate::git::receive;
use crate::git_protocol::{advertisement, ask, report};
use crate::headers::GIT_PROTOCOL;
use crate::in_flight::{Authorized, InFlight};
use crate::mirror::Mirror;
use crate::mirror::output::Output;
use crate::mirror::stale::Stale;
use crate::mirror::upstream::Asking;
use crate::refusal::Refusal;
use crate::request_cx::RequestCx;
use crate::request_log::RequestLog;
use crate::stage::Stage;

/// Where mirrors are, below the gate's own name.
const BELOW: &str = "git/";

/// What a client may ask for at once, with everything it says it has: before and after
/// compression.
const MOST_ASKED: usize = 8 * 1024 * 1024;
const MOST_READ: u64 = 64 * 1024 * 1024;

/// A request for a mirror.
#[derive(Clone, Copy)]
pub struct Visitor<'a> {
    /// By what it is decided.
    pub cx: &'a RequestCx,
    /// The registration of the sandbox.
    pub registration: &'a Registration,
    /// The gate's own name, under which mirrors are.
    pub host: &'a Host,
}

impl Visitor<'_> {
    /// How upstream is asked for it.
    pub fn asking(&self) -> Asking<'_> {
        let RequestCx {
            services,
            sandbox,
            snapshot,
        } = self.cx;
        Asking {
            dialer: services.dialer(),
            settings: &snapshot.settings,
            sandbox: sandbox.id(),
            directory: services.mirrors().directory(),
        }
    }

    /// The mirror of that name.
    pub fn find(&self, name: &str, trail: &mut RequestLog) -> Result<Arc<Mirror>, Refusal> {
        let answers = Answers::default();
        let subject = Subject::Mirror(MirrorFacts::Named(name));
        let decided = self.cx.decide(subject, &answers).now();
        let stage = Stage::of(decided.check);
        let decided = decided.refusal();
        let rule = decided.map_err(|denial| Refusal::new(stage, denial))?;
        let mirror = self
            .cx
            .snapshot
            .mirror(name)
            .ok_or_else(|| Refusal::new(stage, Denial::new(Reason::GitRepo, "git.mirrors")))?;
        trail.allowed(&rule);
        Ok(self.cx.services.mirrors().find(mirror))
    }

    /// Notes that what it asked of a mirror is in flight.
    pub async fn enter(&self, mirror: &Mirror) -> Result<InFlight, Refusal> {
        let authorized = Authorized::Mirror(Box::new(mirror.settings().clone()));
        let entered = self.cx.enter(authorized).wait().await;
        entered.map_err(|denial| Refusal::new(Stage::Git, denial))
    }
}

/// Whether a request to the gate itself is for a mirror.
pub fn is_for_mirror(target: &Target) -> bool {
    target.path.segments().next() == Some("git")
}

/// Answers a request for a mirror.
pub async fn answer(
    visitor: &Visitor<'_>,
    target: &Target,
    headers: &HeaderMap,
    body: Content,
    trail: &mut RequestLog,
) -> Result<Reply, Refusal> {
    trail.event.kind = Kind::Git;
    let Some(address) = recognise(target) else {
        let _pass = take_token(visitor.cx, visitor.host, trail)?;
        return Err(Refusal::new(Stage::Git, closed()));
    };
    trail.event.operation = Some(address.operation.as_str().to_owned());
    let shown = address.shown.strip_prefix(BELOW).unwrap_or_default();
    trail.event.repo = Some(shown.to_owned());
    let answered = answer_errand(visitor, address.operation, shown, headers, body, trail);
    let reply = answered.await.map_err(|refusal| match address.operation {
        // Git shows a person no other.
        RepositoryOperation::AdvertiseFetch | RepositoryOperation::AdvertisePush => {
            refusal.in_text()
        }
        RepositoryOperation::Fetch
        | RepositoryOperation::Push
        | RepositoryOperation::Lfs
        | RepositoryOperation::Download => refusal,
    })?;
    trail.passed(Stage::Git);
    Ok(reply)
}

async fn answer_errand(
    visitor: &Visitor<'_>,
    operation: RepositoryOperation,
    name: &str,
    headers: &HeaderMap,
    body: Content,
    trail: &mut RequestLog,
) -> Result<Reply, Refusal> {
    let _pass = take_token(visitor.cx, visitor.host, trail)?;
    let mirror = visitor.find(name, trail)?;
    match operation {
        RepositoryOperation::AdvertiseFetch | RepositoryOperation::Fetch => {
            Box::pin(fetch(visitor, &mirror, operation, headers, body)).await
        }
        RepositoryOperation::AdvertisePush => {
            let (told, live) = Box::pin(push::advertise(visitor, &mirror)).await?;
            let answer = respond(advertisement::CONTENT_TYPE, body::full(told));
            Ok(Reply::Changed(answer, live))
        }
        RepositoryOperation::Push => {
            let coding = receive::coding_of(headers)?;
            let taking = Box::pin(held_push::take(visitor, &mirror, coding, body, trail));
            let (answer, live) = taking.await?;
            // A probe asks whether it may go on.
            let answer = respond(report::CONTENT_TYPE, answer.unwrap_or_else(body::empty));
            Ok(Reply::Changed(answer, live))
        }
        RepositoryOperation::Lfs | RepositoryOperation::Download => {
            Err(Refusal::new(Stage::Git, closed()))
        }
    }
}

/// Answers a fetch, from the mirror.
async fn fetch(
    visitor: &Visitor<'_>,
    mirror: &Mirror,
    operation: RepositoryOperation,
    headers: &HeaderMap,
    body: Content,
) -> Result<Reply, Refusal> {
    let stale = |why: Stale| why.refusal(mirror);
    // The semaphore is never closed.
    let place = Arc::clone(&visitor.cx.sandbox.fetches)
        .acquire_owned()
        .await;
    let asking = visitor.asking();
    let protocol = protocol(headers);
    let (kind, output) = if operation == RepositoryOperation::AdvertiseFetch {
        mirror.refresh(&asking).await.map_err(stale)?;
        let arguments = ["--stateless-rpc", "--http-backend-info-refs"];
        let begun = mirror.upload_pack(&arguments, protocol).await;
        let (child, usage) = begun.map_err(stale)?;
        // The second version begins without this line (gitprotocol-http, 'Smart Server
        // Response').
        let banner: &[u8] = match protocol {
            Some("version=2") => b"",
            _ => b"001e# service=git-upload-pack\n0000",
        };
        let kind = "application/x-git-upload-pack-advertisement";
        (kind, Output::new(child, banner).using(usage))
    } else {
        let asked = read_question(headers, body).await?;
        mirror.refresh_if_old(&asking).await.map_err(stale)?;
        let output = mirror.answer(asked, protocol).await.map_err(stale)?;
        (ask::RESULT_TYPE, output)
    };
    let live = visitor.enter(mirror).await?;
    let body = output.holding(place.ok()).boxed_unsync();
    Ok(Reply::Changed(respond(kind, body), live))
}

fn closed() -> Denial {
    Denial::new(Reason::PathDenied, "git.mirrors").saying(
        "Mirrors are for git: clone, fetch from and push to http://palisade.internal/git/<name>.",
    )
}

/// The version that a client would like to speak, where that is one.
fn protocol(headers: &HeaderMap) -> Option<&'static str> {
    let asked = headers.get(GIT_PROTOCOL)?.to_str().ok()?;
    asked.split(':').find_map(version)
}

/// The version of the protocol that a word names.
pub(super) fn version(word: &str) -> Option<&'static str> {
    match word {
        "version=2" => Some("version=2"),
        "version=1" => Some("version=1"),
        _ => None,
    }
}

/// All of a client's question, as it was before it was compressed.
async fn read_question(headers: &HeaderMap, body: Content) -> Result<Bytes, Refusal> {
    let malformed = |why: &str| {
        let denial = Denial::new(Reason::GitMalformed, "git:form").saying(why);
        Refusal::new(Stage::Git, denial)
    };
    let sent = body::whole(body, MOST_ASKED).await;
    let sent = sent.map_err(|_| malformed("That is too much to ask for at once."))?;
    match headers.get(CONTENT_ENCODING).map(HeaderValue::as_bytes) {
        None | Some(b"identity") => Ok(sent),
        Some(b"gzip" | b"x-gzip") => {
            let read = spawn_blocking(move || {
                let mut asked = Vec::new();
                let mut decoder = GzDecoder::new(&*sent).take(MOST_READ + 1);
                decoder.read_to_end(&mut asked).map(|_| asked)
            });
            match read.await {
                Ok(Ok(asked)) if asked.len() as u64 <= MOST_READ => Ok(asked.into()),
                _ => Err(malformed("That is not compressed as it says.")),
            }
        }
        Some(_) => Err(malformed("Compress it with gzip, or not at all.")),
    }
}

/// An answer of git's.
fn respond(kind: &'static str, body: Content) -> Response<Content> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}
