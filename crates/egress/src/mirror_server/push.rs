//! A push to a mirror: judged like any other, then told to upstream's own receive-pack in the
//! client's own words.

use std::time::Duration;

use bytes::Bytes;
use config::section::git::MirrorTransport;
use http::header::{ACCEPT, ACCEPT_ENCODING, CONTENT_TYPE, HeaderValue, USER_AGENT};
use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStdin};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::serve::Visitor;
use crate::body::{self, Content};
use crate::dialer::Arriving;
use crate::git_protocol::advertisement::{self, Rewriter};
use crate::git_protocol::line::{self, Line};
use crate::git_protocol::report;
use crate::in_flight::InFlight;
use crate::mirror::Mirror;
use crate::mirror::output::Output;
use crate::mirror::program::{GitCommandError, LIST_WITHIN, last_line, tail};
use crate::mirror::stale::Stale;
use crate::mirror::upstream::{Asking, Upstream};
use crate::outgoing::Outgoing;
use crate::refusal::Refusal;
use crate::services::Services;

/// The longest list of refs.
const MOST_ADVERTISED: usize = 16 * 1024 * 1024;

/// What is read of it at once.
const PIECE: usize = 16 * 1024;

/// What upstream is asked for.
const WHAT: &str = "asking the upstream to take a push";

/// What comes before the list over HTTP.
pub(super) const BANNER: &[u8] = b"001f# service=git-receive-pack\n0000";

/// How long upstream may take to say why it hung up.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// What upstream tells whoever wants to push, as the client is told it over HTTP.
pub(super) async fn advertise(
    visitor: &Visitor<'_>,
    mirror: &Mirror,
) -> Result<(Vec<u8>, InFlight), Refusal> {
    let told = ask(mirror, &visitor.asking()).await;
    let told = told.map_err(|why| why.refusal(mirror))?;
    let mut rewriter = Rewriter::default();
    let mut rewritten = rewriter.feed(&told);
    rewritten.extend(rewriter.finish());
    let live = visitor.enter(mirror).await?;
    Ok((rewritten, live))
}

/// What upstream tells whoever wants to push, as HTTP has it.
async fn ask(mirror: &Mirror, asking: &Asking<'_>) -> Result<Vec<u8>, Stale> {
    let upstream = Upstream::reach(mirror.settings(), asking).await?;
    match upstream.transport() {
        MirrorTransport::Ssh => {
            let talk = ReceivePackSession::begin(&upstream).await?;
            let told = talk.told.clone();
            talk.hang_up().await;
            Ok([BANNER, told.as_slice()].concat())
        }
        MirrorTransport::Https | MirrorTransport::Http => {
            let path = format!("{}/info/refs?service=git-receive-pack", upstream.path());
            let request = request(Method::GET, &path, body::empty())?;
            let answer = send(mirror, asking, request, advertisement::CONTENT_TYPE).await?;
            let told = answer.into_body().map_err(Into::into).boxed_unsync();
            let read = timeout(LIST_WITHIN, body::whole(told, MOST_ADVERTISED)).await;
            let read = read.map_err(|_| late())?;
            let read = read.map_err(|error| Stale::unreachable(&error.to_string()))?;
            Ok(read.to_vec())
        }
        MirrorTransport::Git => Err(Stale::unpushable()),
    }
}

/// Tells a judged push to upstream. What comes back is upstream's own answer.
pub(super) async fn tell(
    services: &Services,
    mirror: &Mirror,
    asking: &Asking<'_>,
    push: Content,
) -> Result<Content, Stale> {
    let upstream = Upstream::reach(mirror.settings(), asking).await?;
    match upstream.transport() {
        MirrorTransport::Ssh => {
            let talk = ReceivePackSession::begin(&upstream).await?;
            Ok(talk.tell(services, push))
        }
        MirrorTransport::Https | MirrorTransport::Http => {
            let path = format!("{}/git-receive-pack", upstream.path());
            let mut request = request(Method::POST, &path, push)?;
            let kind = HeaderValue::from_static("application/x-git-receive-pack-request");
            request.headers_mut().insert(CONTENT_TYPE, kind);
            let answer = send(mirror, asking, request, report::CONTENT_TYPE).await?;
            let body = answer.into_body();
            Ok(body.map_err(Into::into).boxed_unsync())
        }
        MirrorTransport::Git => Err(Stale::unpushable()),
    }
}

fn late() -> Stale {
    Stale::from(GitCommandError::TimedOut {
        what: WHAT,
        after: LIST_WITHIN,
    })
}

fn request(method: Method, path: &str, body: Content) -> Result<Request<Content>, Stale> {
    let mut request = Request::new(body);
    *request.method_mut() = method;
    *request.uri_mut() = path
        .parse()
        .map_err(|_| Stale::unreachable("its path cannot be asked for"))?;
    for (name, value) in [
        (USER_AGENT, "git/palisade"),
        (ACCEPT, "*/*"),
        (ACCEPT_ENCODING, "identity"),
    ] {
        let value = HeaderValue::from_static(value);
        request.headers_mut().insert(name, value);
    }
    Ok(request)
}

/// Sends a request of our own to an upstream that speaks HTTP.
async fn send(
    mirror: &Mirror,
    asking: &Asking<'_>,
    request: Request<Content>,
    kind: &str,
) -> Result<Response<Arriving>, Stale> {
    let outgoing = Outgoing::for_mirror(mirror.settings(), request);
    let outgoing = outgoing.ok_or_else(|| Stale::unreachable("its address cannot be read"))?;
    let sent = asking.dialer.send(asking.sandbox, outgoing);
    let answer = Box::pin(sent).await?.response;
    let said = answer.headers().get(CONTENT_TYPE);
    if answer.status() != StatusCode::OK
        || said.is_none_or(|said| !said.as_bytes().eq_ignore_ascii_case(kind.as_bytes()))
    {
        return Err(Stale::unreachable(&format!(
            "it answers {}",
            answer.status()
        )));
    }
    Ok(answer)
}

/// A conversation with upstream's receive-pack.
struct ReceivePackSession {
    child: Child,
    stdin: ChildStdin,
    /// What it said first.
    told: Vec<u8>,
    /// What ssh complains about.
    complaints: JoinHandle<Vec<u8>>,
}

impl ReceivePackSession {
    /// Begins one, and hears what upstream has.
    async fn begin(upstream: &Upstream) -> Result<Self, Stale> {
        let mut child = upstream.speak("git-receive-pack")?;
        let complaints = tokio::spawn(tail(child.stderr.take()));
        let (Some(stdin), Some(mut stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Stale::unreachable("ssh has no pipes"));
        };
        let mut told = Vec::new();
        let heard = timeout(LIST_WITHIN, hear(&mut stdout, &mut told)).await;
        match heard.map_err(|_| late())? {
            Heard::All => {}
            Heard::Nonsense => return Err(Stale::refs()),
            Heard::End => {
                let said = timeout(LAST_WORDS, complaints).await;
                let said = said.ok().and_then(Result::ok).unwrap_or_default();
                return Err(Stale::from(GitCommandError::Failed {
                    what: WHAT,
                    said: last_line(&said),
                }));
            }
        }
        child.stdout = Some(stdout);
        Ok(Self {
            child,
            stdin,
            told,
            complaints,
        })
    }

    /// Wants nothing.
    async fn hang_up(mut self) {
        let _ = self.stdin.write_all(b"0000").await;
    }

    /// Says all of a push, while the answer is read.
    fn tell(self, services: &Services, mut push: Content) -> Content {
        let Self {
            child,
            mut stdin,
            complaints,
            ..
        } = self;
        services.spawn(async move {
            while let Some(Ok(frame)) = push.frame().await {
                let data: Bytes = frame.into_data().unwrap_or_default();
                if stdin.write_all(&data).await.is_err() {
                    break;
                }
            }
            drop(stdin);
            if let Ok(said) = complaints.await
                && !said.is_empty()
            {
                let said = last_line(&said);
                tracing::debug!(said, "ssh has something to say about a push");
            }
        });
        Output::new(child, b"").boxed_unsync()
    }
}

/// What came of listening.
enum Heard {
    /// Everything up to the flush.
    All,
    /// The end came first.
    End,
    /// No such list.
    Nonsense,
}

async fn hear(from: &mut (impl AsyncReadExt + Unpin), told: &mut Vec<u8>) -> Heard {
    let mut at = 0;
    loop {
        loop {
            match line::first(told.get(at..).unwrap_or_default()) {
                Ok(Some((Line::Data(_), length))) => at += length,
                // Upstream waits for us now, so nothing may follow.
                Ok(Some((Line::Flush, length))) if at + length == told.len() => return Heard::All,
                Ok(Some(_)) | Err(_) => return Heard::Nonsense,
                Ok(None) => break,
            }
        }
        if told.len() > MOST_ADVERTISED {
            return Heard::Nonsense;
        }
        told.reserve(PIECE);
        match from.read_buf(told).await {
            Ok(0) | Err(_) => return Heard::End,
            Ok(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn upstream_is_heard_out_up_to_its_flush_and_no_further() {
        let mut list = Vec::new();
        line::write(&mut list, b"11 refs/heads/main\0report-status\n");
        line::write(&mut list, b"22 refs/heads/two\n");
        line::flush(&mut list);
        let mut told = Vec::new();
        assert!(matches!(hear(&mut &*list, &mut told).await, Heard::All));
        assert_eq!(told, list);
        let cut = &list[..list.len() - 2];
        assert!(matches!(
            hear(&mut &*cut, &mut Vec::new()).await,
            Heard::End
        ));
        let more = [list.as_slice(), b"0000"].concat();
        for bad in [more.as_slice(), b"Welcome to this host", b"0001"] {
            let heard = hear(&mut &*bad, &mut Vec::new()).await;
            assert!(matches!(heard, Heard::Nonsense));
        }
    }
}
