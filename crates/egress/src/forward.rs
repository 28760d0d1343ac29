//! Forward stage: sends a cleared request upstream and returns the response.
//!
//! The request is built anew from the permit's target, so that what was checked is what is sent.

use std::pin::Pin;
use std::time::Duration;

use decide::subject::RecheckData;
use http::uri::PathAndQuery;
use http::{Request, Response, StatusCode, Uri, Version};
use http_body_util::{BodyExt, Limited};
use hyper::body::Body;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use policy::allowlist::Target;
use policy::answer::ApprovalAnswers;
use policy::breaker::UpstreamOutcome;
use policy::id::SandboxId;
use policy::proof::Cleared;
use policy::reason::Reason;
use policy::verdict::Denial;

use crate::admission::{self, Admission};
use crate::body::{self, MessageBody};
use crate::body_stream;
use crate::credential_stage::{self, CredentialPlan};
use crate::dialer::{DialError, UpstreamBody};
use crate::headers;
use crate::in_flight::{Authorized, AuthorizedRequest, InFlight};
use crate::message::{Handover, PipelineRequest};
use crate::outgoing::{Outgoing, RequestParts};
use crate::refusal::RequestRefusal;
use crate::request;
use crate::request_cx::{PendingEntry, RequestCx};
use crate::request_log::RequestLog;
use crate::response_filters::ResponseFilter;
use crate::services::Services;
use crate::splice;
use crate::stage::Stage;
use crate::websocket;

/// How much of a refused response is read before the request is sent again.
const MAX_DISCARDED: usize = 64 * 1024;

/// The response to a client.
pub enum ClientResponse {
    /// A response of the gate itself.
    Gate(Response<MessageBody>),
    /// The upstream's response.
    Upstream(Response<UpstreamBody>, InFlight),
    /// The upstream's response, read or changed by a filter.
    Changed(Response<MessageBody>, InFlight),
    /// The upstream's 101, after which both sides speak another protocol.
    Upgraded(Box<Upgrade>),
}

/// Two connections that switched to another protocol.
pub struct Upgrade {
    response: Response<MessageBody>,
    client: ClientUpgrade,
    upstream: TokioIo<Upgraded>,
    in_flight: InFlight,
}

impl Upgrade {
    /// Returns the 101 and relays the bytes that follow. The record is written when the relay
    /// ends.
    pub fn begin(
        self: Box<Self>,
        services: &Services,
        log: RequestLog,
        idle_timeout: Duration,
    ) -> Response<MessageBody> {
        let Upgrade {
            response,
            client,
            upstream,
            in_flight,
        } = *self;
        services.spawn(async move {
            let (client, handover) = client;
            let joined = match client.await {
                Ok(client) => {
                    if let Some(handover) = handover {
                        handover.notify_upgraded();
                    }
                    let client = TokioIo::new(client);
                    splice::join(client, upstream, &log.tally, &in_flight, idle_timeout).await
                }
                Err(error) => Err(std::io::Error::other(error)),
            };
            if let Err(error) = joined {
                tracing::debug!(%error, "upgraded connection failed");
            }
        });
        response
    }
}

/// The upstream's response to a forwarded request.
enum UpstreamReply {
    Http(Response<UpstreamBody>),
    Switched(Box<(Response<MessageBody>, ClientUpgrade, TokioIo<Upgraded>)>),
}

/// The client's side of a connection that may upgrade.
type ClientUpgrade = (OnUpgrade, Option<Handover>);

/// A cleared request that is built, in flight and ready to send.
pub struct PreparedRequest {
    cx: RequestCx,
    outgoing: Outgoing,
    /// The client's side, if it requested WebSocket.
    upgrade: Option<ClientUpgrade>,
    in_flight: InFlight,
    admission: Admission,
    /// What the credentials stage has to do; boxed, because most requests need nothing.
    credential: Option<Box<CredentialPlan>>,
}

/// A prepared request, or one that is decided again because the rules just changed.
#[expect(
    clippy::large_enum_variant,
    reason = "most requests are ready at once, and a box would cost each of them an allocation"
)]
pub enum Preparation {
    /// The request is ready.
    Now(PreparedRequest),
    /// The future prepares the request.
    Later(Pin<Box<dyn Future<Output = Result<PreparedRequest, RequestRefusal>> + Send>>),
}

/// Prepares a cleared request for sending.
pub fn prepare(
    cx: RequestCx,
    request: Cleared<PipelineRequest, Admission>,
    answers: &ApprovalAnswers,
) -> Result<Preparation, RequestRefusal> {
    let credential = credential_stage::plan(&cx, &request)?;
    let (outgoing, target, admission, (upgrade, recorded)) =
        Outgoing::cleared(request, build_outgoing)?;
    let authorized = Authorized::Request(Box::new(AuthorizedRequest {
        tls: outgoing.route().tls,
        target,
        recorded,
        answers: answers.clone(),
    }));
    let prepared = move |cx, entered: Result<InFlight, Denial>| {
        let in_flight = entered.map_err(|denial| RequestRefusal::new(Stage::Policy, denial))?;
        Ok(PreparedRequest::new(
            cx, outgoing, upgrade, in_flight, admission, credential,
        ))
    };
    Ok(match cx.enter(authorized) {
        PendingEntry::Now(entered) => Preparation::Now(prepared(cx, entered)?),
        PendingEntry::Later(entering) => {
            Preparation::Later(Box::pin(async move { prepared(cx, entering.await) }))
        }
    })
}

/// Builds the outgoing request from the permitted target.
fn build_outgoing(
    message: PipelineRequest,
    target: &Target,
) -> Result<RequestParts<(Option<ClientUpgrade>, RecheckData)>, RequestRefusal> {
    let PipelineRequest {
        head,
        body,
        destination,
        upgrade,
        recorded,
        credentials,
    } = message;
    let path = PathAndQuery::try_from(target.path.target()).map_err(|error| {
        let denial = Denial::new(Reason::BadName, "names").with_evidence(error.to_string());
        RequestRefusal::new(Stage::Forward, denial)
    })?;
    let upgrade = upgrade.filter(|_| websocket::is_requested(&head));
    if upgrade.is_some() && !body.is_empty() {
        // The upgrade request is sent without a body: refuse instead of dropping one.
        let denial = request::framing_denial("a WebSocket request must not have a body");
        return Err(RequestRefusal::new(Stage::Forward, denial));
    }
    let head = *head;
    let mut request = Request::new(body.into_content());
    *request.method_mut() = head.method;
    *request.uri_mut() = Uri::from(path);
    *request.headers_mut() = head.headers;
    Ok(RequestParts {
        request,
        tls: destination.tls,
        credentials,
        rest: (upgrade, recorded),
    })
}

impl PreparedRequest {
    fn new(
        cx: RequestCx,
        outgoing: Outgoing,
        upgrade: Option<ClientUpgrade>,
        in_flight: InFlight,
        admission: Admission,
        credential: Option<Box<CredentialPlan>>,
    ) -> Self {
        let outgoing = if outgoing.request().body().is_end_stream() {
            outgoing
        } else {
            let upload = in_flight.for_upload();
            outgoing.map(|request| request.map(|body| body_stream::revocable(body, upload)))
        };
        Self {
            cx,
            outgoing,
            upgrade,
            in_flight,
            admission,
            credential,
        }
    }

    /// Adds the credential, if there is one, sends the request and waits for the response head.
    /// Returns the response with the filter that removes an echo of the credential.
    pub async fn send(
        self,
        log: &mut RequestLog,
    ) -> Result<(ClientResponse, Option<ResponseFilter>), RequestRefusal> {
        let PreparedRequest {
            cx,
            outgoing,
            upgrade,
            in_flight,
            admission,
            credential,
        } = self;
        if let Some(plan) = credential {
            let request = PreparedRequest {
                cx,
                outgoing,
                upgrade,
                in_flight,
                admission,
                credential: None,
            };
            return send_with_credential(request, plan, log).await;
        }
        let (services, sandbox) = (&cx.services, cx.sandbox.id());
        // The rules may change while the upstream has not responded yet.
        let answered = async {
            match upgrade {
                // Boxed because it is rare: it would enlarge the future of every request.
                Some(client) => Box::pin(send_upgrade(services, sandbox, outgoing, client)).await,
                None => {
                    let sent = services.dialer().send(sandbox, outgoing).await;
                    sent.map(|sent| UpstreamReply::Http(sent.response))
                }
            }
        };
        let answered = tokio::select! {
            answered = answered => Some(answered),
            () = in_flight.revoked() => None,
        };
        // A revocation may end the upload before it is seen here.
        let answered = answered.filter(|answered| answered.is_ok() || !in_flight.is_revoked());
        let Some(answered) = answered else {
            drop(admission);
            let revoked = services.revocation_reason(&cx.sandbox, in_flight);
            return Err(RequestRefusal::new(Stage::Policy, Box::pin(revoked).await));
        };
        match answered {
            Ok(UpstreamReply::Http(mut response)) => {
                admission.settle(if response.status().is_server_error() {
                    UpstreamOutcome::Failure
                } else {
                    UpstreamOutcome::Success
                });
                headers::strip_hop_by_hop(response.headers_mut());
                // hyper writes the version of the client's connection.
                *response.version_mut() = Version::default();
                Ok((ClientResponse::Upstream(response, in_flight), None))
            }
            Ok(UpstreamReply::Switched(switched)) => {
                let (response, client, upstream) = *switched;
                admission.settle(UpstreamOutcome::Success);
                let upgrade = Upgrade {
                    response,
                    client,
                    upstream,
                    in_flight,
                };
                Ok((ClientResponse::Upgraded(Box::new(upgrade)), None))
            }
            Err(error) => {
                admission.settle(if error.counts_as_failure() {
                    UpstreamOutcome::Failure
                } else {
                    UpstreamOutcome::Abandoned
                });
                Err(refusal(&error))
            }
        }
    }
}

/// A response with the filter that removes an echo of the credential.
type FilteredReply = (ClientResponse, Option<ResponseFilter>);

/// Adds the credential and sends the request. If the upstream refuses the credential (401) and there
/// is a newer one, the request is sent once more. Boxed, because it would enlarge the future of
/// requests without a credential.
fn send_with_credential<'a>(
    mut request: PreparedRequest,
    plan: Box<CredentialPlan>,
    log: &'a mut RequestLog,
) -> Pin<Box<dyn Future<Output = Result<FilteredReply, RequestRefusal>> + Send + 'a>> {
    Box::pin(async move {
        let cx = request.cx.clone();
        let route = request.outgoing.route().clone();
        let is_upgrade = request.upgrade.is_some();
        let applying = plan.apply(&cx, request.outgoing, log);
        let applied = tokio::select! {
            applied = applying => Some(applied),
            () = request.in_flight.revoked() => None,
        };
        let Some(applied) = applied else {
            let revoked = cx
                .services
                .revocation_reason(&cx.sandbox, request.in_flight);
            return Err(RequestRefusal::new(Stage::Policy, revoked.await));
        };
        let (outgoing, applied) = applied?;
        request.outgoing = outgoing;
        log.end_stage(Stage::Credentials);
        let (mut response, _) = request.send(log).await?;
        let Some(mut applied) = applied else {
            return Ok((response, None));
        };
        if let ClientResponse::Upstream(refused, in_flight) = response {
            let renewed = match (refused.status(), is_upgrade) {
                (StatusCode::UNAUTHORIZED, false) => applied.renew(&cx).await?,
                _ => None,
            };
            response = match renewed {
                Some(newer) => {
                    discard(refused).await;
                    let again = PreparedRequest {
                        outgoing: Outgoing::with_credential(route, newer),
                        upgrade: None,
                        in_flight,
                        admission: admission::take_ticket(&cx, applied.host())?,
                        credential: None,
                        cx,
                    };
                    again.send(log).await?.0
                }
                None => ClientResponse::Upstream(refused, in_flight),
            };
        }
        let echo = applied.into_echoes().map(ResponseFilter::credential_echo);
        Ok((response, echo))
    })
}

/// Reads a response that is replaced by another, so that its connection can be used again.
async fn discard(response: Response<UpstreamBody>) {
    let mut body = Limited::new(response.into_body(), MAX_DISCARDED);
    while let Some(Ok(_)) = body.frame().await {}
}

/// Sends a WebSocket request on a single-use connection.
async fn send_upgrade(
    services: &Services,
    sandbox: &SandboxId,
    outgoing: Outgoing,
    client: ClientUpgrade,
) -> Result<UpstreamReply, DialError> {
    let outgoing = outgoing.map(|mut request| {
        websocket::request_upgrade(request.headers_mut());
        request.map(|_| body::empty())
    });
    let answer = services
        .dialer()
        .open(sandbox, outgoing.route())
        .await?
        .send(outgoing)
        .await?;
    let Some(upstream) = answer.io else {
        return Ok(UpstreamReply::Http(answer.response));
    };
    let mut response = answer.response.map(|_| body::empty());
    websocket::confirm_upgrade(response.headers_mut());
    *response.version_mut() = Version::default();
    Ok(UpstreamReply::Switched(Box::new((
        response, client, upstream,
    ))))
}

/// The refusal for a dialer error. Details of the operator's network are evidence for the
/// operator only.
pub fn refusal(error: &DialError) -> RequestRefusal {
    let denial = Denial::new(error.reason(), "dialer")
        .with_message(error.to_string())
        .with_evidence(error.evidence());
    RequestRefusal::new(Stage::Forward, denial)
}
