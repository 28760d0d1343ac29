//! Client of receive-pack at a mirror's upstream: fetches its ref advertisement and sends allowed
//! pushes.

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

use super::smart_http::MirrorRequest;
use crate::body::{self, MessageBody};
use crate::dialer::UpstreamBody;
use crate::git_protocol::advertisement::{self, AdvertisementRewriter};
use crate::git_protocol::pkt_line::{self, PktLine};
use crate::git_protocol::report;
use crate::in_flight::InFlight;
use crate::mirror::Mirror;
use crate::mirror::error::MirrorError;
use crate::mirror::git_command::{GitCommandError, LIST_TIMEOUT, last_line, read_tail};
use crate::mirror::output::ChildOutput;
use crate::mirror::upstream::{MirrorUpstream, UpstreamAccess};
use crate::outgoing::Outgoing;
use crate::refusal::RequestRefusal;
use crate::services::Services;

/// Maximum size of a ref advertisement.
const MAX_ADVERTISEMENT_BYTES: usize = 16 * 1024 * 1024;

/// Size of the read buffer.
const READ_BYTES: usize = 16 * 1024;

/// The purpose of the ssh command, in its errors.
const ACTION: &str = "starting a push to the upstream";

/// The lines before a receive-pack advertisement over HTTP.
pub(super) const BANNER: &[u8] = b"001f# service=git-receive-pack\n0000";

/// How long to wait for ssh's error message after the connection ended.
const STDERR_TIMEOUT: Duration = Duration::from_secs(5);

/// Fetches upstream's receive-pack advertisement in its HTTP form and adds `no-thin`.
pub(super) async fn advertise(
    request: &MirrorRequest<'_>,
    mirror: &Mirror,
) -> Result<(Vec<u8>, InFlight), RequestRefusal> {
    let advertised = fetch_advertisement(mirror, &request.upstream_access()).await;
    let advertised = advertised.map_err(|error| error.refusal(mirror))?;
    let mut rewriter = AdvertisementRewriter::default();
    let mut rewritten = rewriter.feed(&advertised);
    rewritten.extend(rewriter.finish());
    let in_flight = request.enter(mirror).await?;
    Ok((rewritten, in_flight))
}

/// Fetches upstream's receive-pack advertisement in its HTTP form.
async fn fetch_advertisement(
    mirror: &Mirror,
    access: &UpstreamAccess<'_>,
) -> Result<Vec<u8>, MirrorError> {
    let upstream = MirrorUpstream::resolve(mirror.settings(), access).await?;
    match upstream.transport() {
        MirrorTransport::Ssh => {
            let session = ReceivePackSession::begin(&upstream).await?;
            let advertised = session.advertised.clone();
            session.end().await;
            Ok([BANNER, advertised.as_slice()].concat())
        }
        MirrorTransport::Https | MirrorTransport::Http => {
            let path = format!("{}/info/refs?service=git-receive-pack", upstream.path());
            let request = build_request(Method::GET, &path, body::empty())?;
            let response = send(mirror, access, request, advertisement::CONTENT_TYPE).await?;
            let body = response.into_body().map_err(Into::into).boxed_unsync();
            let read = timeout(
                LIST_TIMEOUT,
                body::read_whole(body, MAX_ADVERTISEMENT_BYTES),
            )
            .await;
            let read = read.map_err(|_| list_timeout_error())?;
            let read = read.map_err(|error| MirrorError::unreachable(&error.to_string()))?;
            Ok(read.to_vec())
        }
        MirrorTransport::Git => Err(MirrorError::push_unsupported()),
    }
}

/// Sends an allowed push to upstream and returns upstream's response.
pub(super) async fn send_push(
    services: &Services,
    mirror: &Mirror,
    access: &UpstreamAccess<'_>,
    push: MessageBody,
) -> Result<MessageBody, MirrorError> {
    let upstream = MirrorUpstream::resolve(mirror.settings(), access).await?;
    match upstream.transport() {
        MirrorTransport::Ssh => {
            let session = ReceivePackSession::begin(&upstream).await?;
            Ok(session.send_push(services, push))
        }
        MirrorTransport::Https | MirrorTransport::Http => {
            let path = format!("{}/git-receive-pack", upstream.path());
            let mut request = build_request(Method::POST, &path, push)?;
            let kind = HeaderValue::from_static("application/x-git-receive-pack-request");
            request.headers_mut().insert(CONTENT_TYPE, kind);
            let response = send(mirror, access, request, report::CONTENT_TYPE).await?;
            let body = response.into_body();
            Ok(body.map_err(Into::into).boxed_unsync())
        }
        MirrorTransport::Git => Err(MirrorError::push_unsupported()),
    }
}

fn list_timeout_error() -> MirrorError {
    MirrorError::from(GitCommandError::TimedOut {
        action: ACTION,
        after: LIST_TIMEOUT,
    })
}

fn build_request(
    method: Method,
    path: &str,
    body: MessageBody,
) -> Result<Request<MessageBody>, MirrorError> {
    let mut request = Request::new(body);
    *request.method_mut() = method;
    *request.uri_mut() = path
        .parse()
        .map_err(|_| MirrorError::unreachable("its path is not valid in a URL"))?;
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

/// Sends a request of the gate to an HTTP upstream.
async fn send(
    mirror: &Mirror,
    access: &UpstreamAccess<'_>,
    request: Request<MessageBody>,
    content_type: &str,
) -> Result<Response<UpstreamBody>, MirrorError> {
    let outgoing = Outgoing::for_mirror(mirror.settings(), request);
    let outgoing = outgoing.ok_or_else(|| MirrorError::unreachable("its address is not valid"))?;
    let sent = access.dialer.send(access.sandbox, outgoing);
    let response = Box::pin(sent).await?.response;
    let received = response.headers().get(CONTENT_TYPE);
    let is_expected = |value: &HeaderValue| {
        value
            .as_bytes()
            .eq_ignore_ascii_case(content_type.as_bytes())
    };
    if response.status() != StatusCode::OK || !received.is_some_and(is_expected) {
        return Err(MirrorError::unreachable(&format!(
            "it responded with status {} or another content type",
            response.status()
        )));
    }
    Ok(response)
}

/// An ssh session with upstream's receive-pack.
struct ReceivePackSession {
    child: Child,
    stdin: ChildStdin,
    /// The ref advertisement.
    advertised: Vec<u8>,
    /// Reads the end of ssh's standard error.
    stderr: JoinHandle<Vec<u8>>,
}

impl ReceivePackSession {
    /// Starts a session and reads the ref advertisement.
    async fn begin(upstream: &MirrorUpstream) -> Result<Self, MirrorError> {
        let mut child = upstream.spawn_ssh("git-receive-pack")?;
        let stderr = tokio::spawn(read_tail(child.stderr.take()));
        let (Some(stdin), Some(mut stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(MirrorError::unreachable("ssh has no pipes"));
        };
        let mut advertised = Vec::new();
        let reading = read_advertisement(&mut stdout, &mut advertised);
        let outcome = timeout(LIST_TIMEOUT, reading).await;
        match outcome.map_err(|_| list_timeout_error())? {
            ReadOutcome::Complete => {}
            ReadOutcome::Malformed => return Err(MirrorError::unreadable_refs()),
            ReadOutcome::Closed => {
                let text = timeout(STDERR_TIMEOUT, stderr).await;
                let text = text.ok().and_then(Result::ok).unwrap_or_default();
                return Err(MirrorError::from(GitCommandError::Failed {
                    action: ACTION,
                    message: last_line(&text),
                }));
            }
        }
        child.stdout = Some(stdout);
        Ok(Self {
            child,
            stdin,
            advertised,
            stderr,
        })
    }

    /// Ends the session without a push.
    async fn end(mut self) {
        let _ = self.stdin.write_all(b"0000").await;
    }

    /// Sends a push in a task. Returns the response, which can be read at the same time.
    fn send_push(self, services: &Services, mut push: MessageBody) -> MessageBody {
        let Self {
            child,
            mut stdin,
            stderr,
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
            if let Ok(text) = stderr.await
                && !text.is_empty()
            {
                let error = last_line(&text);
                tracing::debug!(error, "ssh reported an error during a push to a git mirror");
            }
        });
        ChildOutput::new(child, b"").boxed_unsync()
    }
}

/// Outcome of reading a ref advertisement.
enum ReadOutcome {
    /// The advertisement was read up to its flush.
    Complete,
    /// The stream ended before the flush.
    Closed,
    /// The bytes are no advertisement, or too many.
    Malformed,
}

async fn read_advertisement(
    from: &mut (impl AsyncReadExt + Unpin),
    received: &mut Vec<u8>,
) -> ReadOutcome {
    let mut at = 0;
    loop {
        loop {
            match pkt_line::first(received.get(at..).unwrap_or_default()) {
                Ok(Some((PktLine::Data(_), length))) => at += length,
                // Upstream waits for the client now, so no byte may follow the flush.
                Ok(Some((PktLine::Flush, length))) if at + length == received.len() => {
                    return ReadOutcome::Complete;
                }
                Ok(Some(_)) | Err(_) => return ReadOutcome::Malformed,
                Ok(None) => break,
            }
        }
        if received.len() > MAX_ADVERTISEMENT_BYTES {
            return ReadOutcome::Malformed;
        }
        received.reserve(READ_BYTES);
        match from.read_buf(received).await {
            Ok(0) | Err(_) => return ReadOutcome::Closed,
            Ok(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn advertisement_is_read_up_to_its_flush() {
        let mut list = Vec::new();
        pkt_line::write(&mut list, b"11 refs/heads/main\0report-status\n");
        pkt_line::write(&mut list, b"22 refs/heads/two\n");
        pkt_line::flush(&mut list);
        let mut received = Vec::new();
        assert!(matches!(
            read_advertisement(&mut &*list, &mut received).await,
            ReadOutcome::Complete
        ));
        assert_eq!(received, list);
        let cut = &list[..list.len() - 2];
        assert!(matches!(
            read_advertisement(&mut &*cut, &mut Vec::new()).await,
            ReadOutcome::Closed
        ));
        let more = [list.as_slice(), b"0000"].concat();
        for bad in [more.as_slice(), b"Welcome to this host", b"0001"] {
            let outcome = read_advertisement(&mut &*bad, &mut Vec::new()).await;
            assert!(matches!(outcome, ReadOutcome::Malformed));
        }
    }
}
