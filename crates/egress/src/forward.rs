//! The last stage: a cleared request leaves, and its answer comes back.
//!
//! What was checked is what is sent: the request is built anew from the permit's target.

use std::pin::Pin;
use std::time::Duration;

use decide::subject::Recorded;
use http::uri::PathAndQuery;
use http::{Request, Response, Uri, Version};
use hyper::body::Body;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use policy::allowlist::Target;
use policy::answer::Answers;
use policy::breaker::Outcome;
use policy::id::SandboxId;
use policy::proof::Cleared;
use policy::reason::Reason;
use policy::verdict::Denial;

use crate::admission::Admission;
use crate::body::{self, Content};
use crate::body_stream;
use crate::dialer::{Arriving, DialError};
use crate::headers;
use crate::in_flight::{Authorized, AuthorizedRequest, InFlight};
use crate::message::{Handover, Message};
use crate::outgoing::{Outgoing, RequestParts};
use crate::refusal::Refusal;
use crate::request;
use crate::request_cx::{Entering, RequestCx};
use crate::request_log::RequestLog;
use crate::services::Services;
use crate::splice;
use crate::stage::Stage;
use crate::websocket;

/// What the client is answered with.
pub enum Reply {
    /// The gate's own words.
    Ours(Response<Content>),
    /// The upstream's.
    Theirs(Response<Arriving>, InFlight),
    /// The upstream's, looked at or changed as it passes.
    Changed(Response<Content>, InFlight),
    /// The upstream's, and from then on another protocol.
    Upgraded(Box<Upgrade>),
}

/// Two ends that agreed to speak another protocol.
pub struct Upgrade {
    response: Response<Content>,
    client: Client,
    upstream: TokioIo<Upgraded>,
    live: InFlight,
}

impl Upgrade {
    /// Passes the answer on, and then everything that follows it. The record is written at
    /// the end.
    pub fn begin(
        self: Box<Self>,
        services: &Services,
        trail: RequestLog,
        patience: Duration,
    ) -> Response<Content> {
        let Upgrade {
            response,
            client,
            upstream,
            live,
        } = *self;
        services.spawn(async move {
            let (client, handover) = client;
            let joined = match client.await {
                Ok(client) => {
                    if let Some(handover) = handover {
                        handover.done();
                    }
                    let client = TokioIo::new(client);
                    splice::join(client, upstream, &trail.tally, &live, patience).await
                }
                Err(error) => Err(std::io::Error::other(error)),
            };
            if let Err(error) = joined {
                tracing::debug!(%error, "a conversation was cut");
            }
        });
        response
    }
}

/// What the upstream said to a request.
enum Answered {
    Theirs(Response<Arriving>),
    Switched(Box<(Response<Content>, Client, TokioIo<Upgraded>)>),
}

/// The client's end of a connection that may change its protocol.
type Client = (OnUpgrade, Option<Handover>);

/// A cleared request as it leaves, built anew from what was permitted, and in flight.
pub struct PreparedRequest {
    cx: RequestCx,
    outgoing: Outgoing,
    /// The client's end, where it asks for WebSocket.
    upgrade: Option<Client>,
    in_flight: InFlight,
    admission: Admission,
}

/// A request that is ready to leave, or one that waits because the rules changed at that moment.
#[expect(
    clippy::large_enum_variant,
    reason = "most requests leave at once, and a box would be an allocation for each of them"
)]
pub enum Preparing {
    /// It is ready.
    Now(PreparedRequest),
    /// It is made ready by this future.
    Later(Pin<Box<dyn Future<Output = Result<PreparedRequest, Refusal>> + Send>>),
}

/// Makes a cleared request ready to leave.
pub fn prepare(
    cx: RequestCx,
    request: Cleared<Message, Admission>,
    answers: &Answers,
) -> Result<Preparing, Refusal> {
    let (outgoing, target, admission, (upgrade, recorded)) = Outgoing::cleared(request, depart)?;
    let authorized = Authorized::Request(Box::new(AuthorizedRequest {
        tls: outgoing.route().tls,
        target,
        recorded,
        answers: answers.clone(),
    }));
    let leaving = move |cx, entered: Result<InFlight, Denial>| {
        let in_flight = entered.map_err(|denial| Refusal::new(Stage::Policy, denial))?;
        Ok(PreparedRequest::new(
            cx, outgoing, upgrade, in_flight, admission,
        ))
    };
    Ok(match cx.enter(authorized) {
        Entering::Now(entered) => Preparing::Now(leaving(cx, entered)?),
        Entering::Later(entering) => {
            Preparing::Later(Box::pin(async move { leaving(cx, entering.await) }))
        }
    })
}

/// Builds the request that leaves from what was permitted.
fn depart(
    message: Message,
    target: &Target,
) -> Result<RequestParts<(Option<Client>, Recorded)>, Refusal> {
    let Message {
        head,
        body,
        destination,
        upgrade,
        recorded,
        credentials,
    } = message;
    let path = PathAndQuery::try_from(target.path.target()).map_err(|error| {
        let denial = Denial::new(Reason::BadName, "names").because(error.to_string());
        Refusal::new(Stage::Forward, denial)
    })?;
    let upgrade = upgrade.filter(|_| websocket::is_asked_for(&head));
    if upgrade.is_some() && !body.is_empty() {
        // The upstream is asked without a body: one must not get lost without a word.
        let denial = request::framing("a request for WebSocket has no body");
        return Err(Refusal::new(Stage::Forward, denial));
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
        upgrade: Option<Client>,
        in_flight: InFlight,
        admission: Admission,
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
        }
    }

    /// Sends it, and waits for the answer's head.
    pub async fn send(self) -> Result<Reply, Refusal> {
        let PreparedRequest {
            cx,
            outgoing,
            upgrade,
            in_flight,
            admission,
        } = self;
        let (services, sandbox) = (&cx.services, cx.sandbox.id());
        // The upstream may take its time, and the rules may change meanwhile.
        let answered = async {
            match upgrade {
                // Boxed, as is all that is seldom: a request's future is as large as its
                // largest part, and is moved about.
                Some(client) => Box::pin(send_upgrade(services, sandbox, outgoing, client)).await,
                None => {
                    let sent = services.dialer().send(sandbox, outgoing).await;
                    sent.map(|sent| Answered::Theirs(sent.response))
                }
            }
        };
        let answered = tokio::select! {
            answered = answered => Some(answered),
            () = in_flight.revoked() => None,
        };
        // The upload may be cut first.
        let answered = answered.filter(|answered| answered.is_ok() || !in_flight.is_revoked());
        let Some(answered) = answered else {
            drop(admission);
            let revoked = services.why_revoked(&cx.sandbox, in_flight);
            return Err(Refusal::new(Stage::Policy, Box::pin(revoked).await));
        };
        match answered {
            Ok(Answered::Theirs(mut response)) => {
                admission.settle(if response.status().is_server_error() {
                    Outcome::Failure
                } else {
                    Outcome::Success
                });
                headers::strip_hop_by_hop(response.headers_mut());
                // Hyper writes the version that the client speaks.
                *response.version_mut() = Version::default();
                Ok(Reply::Theirs(response, in_flight))
            }
            Ok(Answered::Switched(switched)) => {
                let (response, client, upstream) = *switched;
                admission.settle(Outcome::Success);
                Ok(Reply::Upgraded(Box::new(Upgrade {
                    response,
                    client,
                    upstream,
                    live: in_flight,
                })))
            }
            Err(error) => {
                admission.settle(if error.counts_as_failure() {
                    Outcome::Failure
                } else {
                    Outcome::Abandoned
                });
                Err(refusal(&error))
            }
        }
    }
}

/// Sends a request that asks for WebSocket, on a connection of its own.
async fn send_upgrade(
    services: &Services,
    sandbox: &SandboxId,
    outgoing: Outgoing,
    client: Client,
) -> Result<Answered, DialError> {
    let outgoing = outgoing.map(|mut request| {
        websocket::ask(request.headers_mut());
        request.map(|_| body::empty())
    });
    let answer = services
        .dialer()
        .open(sandbox, outgoing.route())
        .await?
        .send(outgoing)
        .await?;
    let Some(upstream) = answer.io else {
        return Ok(Answered::Theirs(answer.response));
    };
    let mut response = answer.response.map(|_| body::empty());
    websocket::agree(response.headers_mut());
    *response.version_mut() = Version::default();
    Ok(Answered::Switched(Box::new((response, client, upstream))))
}

/// A failure of the other side, in words for the agent. What it says of the operator's
/// network goes to the operator alone.
pub fn refusal(error: &DialError) -> Refusal {
    let denial = Denial::new(error.reason(), "dialer")
        .saying(error.to_string())
        .because(error.evidence());
    Refusal::new(Stage::Forward, denial)
}
