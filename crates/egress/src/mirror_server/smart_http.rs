//! Serves mirrors over smart HTTP, at `http://palisade.internal/git/<name>`.

use std::io::Read;
use std::sync::Arc;

use bytes::Bytes;
use decide::subject::{MirrorFacts, Subject};
use flate2::read::GzDecoder;
use http::Response;
use http::header::{CACHE_CONTROL, CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderValue};
use http_body_util::BodyExt;
use policy::allowlist::Target;
use policy::answer::ApprovalAnswers;
use policy::audit::Kind;
use policy::git_address::recognise;
use policy::host::Host;
use policy::reason::Reason;
use policy::registration::Registration;
use policy::repository::RepositoryOperation;
use policy::verdict::Denial;
use tokio::task::spawn_blocking;

use super::{held_push, upstream_push};
use crate::admission::take_token;
use crate::body::{self, MessageBody};
use crate::forward::ClientResponse;
use crate::git::receive;
use crate::git_protocol::{advertisement, protocol_v2, report};
use crate::headers::GIT_PROTOCOL;
use crate::in_flight::{Authorized, InFlight};
use crate::mirror::Mirror;
use crate::mirror::error::MirrorError;
use crate::mirror::output::ChildOutput;
use crate::mirror::upstream::UpstreamAccess;
use crate::refusal::RequestRefusal;
use crate::request_cx::RequestCx;
use crate::request_log::RequestLog;
use crate::stage::Stage;

/// Path prefix of mirrors on the gate's own host.
const PATH_PREFIX: &str = "git/";

/// Maximum size of an upload-pack request, which lists the client's commits: as sent, and after
/// decompression.
const MAX_REQUEST_BYTES: usize = 8 * 1024 * 1024;
const MAX_DECODED_BYTES: u64 = 64 * 1024 * 1024;

/// A request for a mirror.
#[derive(Clone, Copy)]
pub struct MirrorRequest<'a> {
    /// Policy, services and sandbox of the request.
    pub cx: &'a RequestCx,
    /// The registration of the sandbox.
    pub registration: &'a Registration,
    /// The gate's own host name, which serves the mirrors.
    pub host: &'a Host,
}

impl MirrorRequest<'_> {
    /// Access to the mirror's upstream for this request.
    pub fn upstream_access(&self) -> UpstreamAccess<'_> {
        let RequestCx {
            services,
            sandbox,
            snapshot,
        } = self.cx;
        UpstreamAccess {
            dialer: services.dialer(),
            settings: &snapshot.settings,
            sandbox: sandbox.id(),
            directory: services.mirrors().directory(),
        }
    }

    /// Finds the mirror of this name, if the policy allows it.
    pub fn find(&self, name: &str, log: &mut RequestLog) -> Result<Arc<Mirror>, RequestRefusal> {
        let answers = ApprovalAnswers::default();
        let subject = Subject::Mirror(MirrorFacts::Named(name));
        let decision = self.cx.decide(subject, &answers).into_outcome();
        let stage = Stage::of(decision.check);
        let allowed = decision.refusal();
        let rule = allowed.map_err(|denial| RequestRefusal::new(stage, denial))?;
        let mirror = self.cx.snapshot.mirror(name).ok_or_else(|| {
            RequestRefusal::new(stage, Denial::new(Reason::GitRepo, "git.mirrors"))
        })?;
        log.record_allow(&rule);
        Ok(self.cx.services.mirrors().find(mirror))
    }

    /// Registers the request as in flight.
    pub async fn enter(&self, mirror: &Mirror) -> Result<InFlight, RequestRefusal> {
        let authorized = Authorized::Mirror(Box::new(mirror.settings().clone()));
        let entered = self.cx.enter(authorized).wait().await;
        entered.map_err(|denial| RequestRefusal::new(Stage::Git, denial))
    }
}

/// Whether a request to the gate itself is for a mirror.
pub fn is_for_mirror(target: &Target) -> bool {
    target.path.segments().next() == Some("git")
}

/// Answers a request for a mirror.
pub async fn answer(
    request: &MirrorRequest<'_>,
    target: &Target,
    headers: &HeaderMap,
    body: MessageBody,
    log: &mut RequestLog,
) -> Result<ClientResponse, RequestRefusal> {
    log.event.kind = Kind::Git;
    let Some(address) = recognise(target) else {
        let _pass = take_token(request.cx, request.host, log)?;
        return Err(RequestRefusal::new(Stage::Git, unsupported_path_denial()));
    };
    log.event.operation = Some(address.operation.as_str().to_owned());
    let name = address
        .display_name
        .strip_prefix(PATH_PREFIX)
        .unwrap_or_default();
    log.event.repo = Some(name.to_owned());
    let answered = answer_operation(request, address.operation, name, headers, body, log);
    let reply = answered.await.map_err(|refusal| match address.operation {
        // Git shows the user only text bodies of these requests.
        RepositoryOperation::AdvertiseFetch | RepositoryOperation::AdvertisePush => {
            refusal.as_plain_text()
        }
        RepositoryOperation::Fetch
        | RepositoryOperation::Push
        | RepositoryOperation::Lfs
        | RepositoryOperation::Download => refusal,
    })?;
    log.end_stage(Stage::Git);
    Ok(reply)
}

async fn answer_operation(
    request: &MirrorRequest<'_>,
    operation: RepositoryOperation,
    name: &str,
    headers: &HeaderMap,
    body: MessageBody,
    log: &mut RequestLog,
) -> Result<ClientResponse, RequestRefusal> {
    let _pass = take_token(request.cx, request.host, log)?;
    let mirror = request.find(name, log)?;
    match operation {
        RepositoryOperation::AdvertiseFetch | RepositoryOperation::Fetch => {
            Box::pin(fetch(request, &mirror, operation, headers, body)).await
        }
        RepositoryOperation::AdvertisePush => {
            let (advertised, in_flight) =
                Box::pin(upstream_push::advertise(request, &mirror)).await?;
            let response = respond(advertisement::CONTENT_TYPE, body::full(advertised));
            Ok(ClientResponse::Changed(response, in_flight))
        }
        RepositoryOperation::Push => {
            let encoding = receive::push_encoding(headers)?;
            let pushing = Box::pin(held_push::forward(request, &mirror, encoding, body, log));
            let (report, in_flight) = pushing.await?;
            // The response to a probe is empty.
            let response = respond(report::CONTENT_TYPE, report.unwrap_or_else(body::empty));
            Ok(ClientResponse::Changed(response, in_flight))
        }
        RepositoryOperation::Lfs | RepositoryOperation::Download => {
            Err(RequestRefusal::new(Stage::Git, unsupported_path_denial()))
        }
    }
}

/// Serves a fetch from the mirror.
async fn fetch(
    request: &MirrorRequest<'_>,
    mirror: &Mirror,
    operation: RepositoryOperation,
    headers: &HeaderMap,
    body: MessageBody,
) -> Result<ClientResponse, RequestRefusal> {
    let refusal = |error: MirrorError| error.refusal(mirror);
    // The semaphore is never closed.
    let permit = Arc::clone(&request.cx.sandbox.fetches)
        .acquire_owned()
        .await;
    let access = request.upstream_access();
    let protocol = requested_protocol(headers);
    let (kind, output) = if operation == RepositoryOperation::AdvertiseFetch {
        mirror.refresh(&access).await.map_err(refusal)?;
        let arguments = ["--stateless-rpc", "--http-backend-info-refs"];
        let started = mirror.upload_pack(&arguments, protocol).await;
        let (child, usage) = started.map_err(refusal)?;
        // Protocol version 2 has no such line (gitprotocol-http, 'Smart Server Response').
        let banner: &[u8] = match protocol {
            Some("version=2") => b"",
            _ => b"001e# service=git-upload-pack\n0000",
        };
        let kind = "application/x-git-upload-pack-advertisement";
        (
            kind,
            ChildOutput::new(child, banner).with_usage_guard(usage),
        )
    } else {
        let rpc_request = read_request(headers, body).await?;
        mirror.refresh_if_old(&access).await.map_err(refusal)?;
        let output = mirror
            .upload_pack_rpc(rpc_request, protocol)
            .await
            .map_err(refusal)?;
        (protocol_v2::RESULT_TYPE, output)
    };
    let in_flight = request.enter(mirror).await?;
    let body = output.with_permit(permit.ok()).boxed_unsync();
    Ok(ClientResponse::Changed(respond(kind, body), in_flight))
}

fn unsupported_path_denial() -> Denial {
    Denial::new(Reason::PathDenied, "git.mirrors").with_message(
        "Mirrors are for git: clone, fetch from and push to http://palisade.internal/git/<name>.",
    )
}

/// The protocol version that a client requests, if it is a known one.
fn requested_protocol(headers: &HeaderMap) -> Option<&'static str> {
    let requested = headers.get(GIT_PROTOCOL)?.to_str().ok()?;
    requested.split(':').find_map(version)
}

/// The protocol version that a parameter names.
pub(super) fn version(parameter: &str) -> Option<&'static str> {
    match parameter {
        "version=2" => Some("version=2"),
        "version=1" => Some("version=1"),
        _ => None,
    }
}

/// Reads a whole upload-pack request and decompresses it.
async fn read_request(headers: &HeaderMap, body: MessageBody) -> Result<Bytes, RequestRefusal> {
    let malformed = |message: &str| {
        let denial = Denial::new(Reason::GitMalformed, "git:form").with_message(message);
        RequestRefusal::new(Stage::Git, denial)
    };
    let sent = body::read_whole(body, MAX_REQUEST_BYTES).await;
    let sent =
        sent.map_err(|_| malformed("The request is too large. Fetch fewer refs at once."))?;
    match headers.get(CONTENT_ENCODING).map(HeaderValue::as_bytes) {
        None | Some(b"identity") => Ok(sent),
        Some(b"gzip" | b"x-gzip") => {
            let read = spawn_blocking(move || {
                let mut decoded = Vec::new();
                let mut decoder = GzDecoder::new(&*sent).take(MAX_DECODED_BYTES + 1);
                decoder.read_to_end(&mut decoded).map(|_| decoded)
            });
            match read.await {
                Ok(Ok(decoded)) if decoded.len() as u64 <= MAX_DECODED_BYTES => Ok(decoded.into()),
                _ => Err(malformed("The request is not valid gzip, or too large.")),
            }
        }
        Some(_) => Err(malformed(
            "The request has an unsupported Content-Encoding. Use gzip or no compression.",
        )),
    }
}

/// A response of the git server.
fn respond(kind: &'static str, body: MessageBody) -> Response<MessageBody> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}
