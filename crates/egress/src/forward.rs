//! The last stage: a cleared request leaves, and its answer comes back.
//!
//! What was checked is what is sent: the request is built anew from the permit's target.

use std::time::Duration;

use http::uri::PathAndQuery;
use http::{Request, Response, Uri, Version};
use hyper::body::Body;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use policy::breaker::Outcome;
use policy::id::SandboxId;
use policy::proof::{Cleared, Guard};
use policy::reason::Reason;
use policy::verdict::Denial;

use crate::body::{self, Content};
use crate::dialer::{Arriving, DialError, Route};
use crate::flow;
use crate::guest::Guest;
use crate::headers;
use crate::live::{Asked, Live};
use crate::pipeline::{Handover, Message, settle};
use crate::refusal::Refusal;
use crate::request::{self, Destination};
use crate::splice;
use crate::traffic::{Rules, Traffic};
use crate::trail::{Stage, Trail};
use crate::websocket;

/// What the client is answered with.
pub enum Reply {
    /// The gate's own words.
    Ours(Response<Content>),
    /// The upstream's.
    Theirs(Response<Arriving>, Live),
    /// The upstream's, looked at or changed as it passes.
    Changed(Response<Content>, Live),
    /// The upstream's, and from then on another protocol.
    Upgraded(Box<Upgrade>),
}

/// Two ends that agreed to speak another protocol.
pub struct Upgrade {
    response: Response<Content>,
    client: Client,
    upstream: TokioIo<Upgraded>,
    live: Live,
}

impl Upgrade {
    /// Passes the answer on, and then everything that follows it. The record is written at
    /// the end.
    pub fn begin(
        self: Box<Self>,
        traffic: &Traffic,
        trail: Trail,
        patience: Duration,
    ) -> Response<Content> {
        let Upgrade {
            response,
            client,
            upstream,
            live,
        } = *self;
        traffic.spawn(async move {
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

/// Gives the breaker its ticket back whatever happens, also when the client goes away.
struct Settled<'a> {
    traffic: &'a Traffic,
    guest: &'a Guest,
    rules: &'a Rules,
    destination: Destination,
    guard: Option<Guard>,
}

impl Settled<'_> {
    fn learn(&mut self, outcome: Outcome) {
        if let Some(guard) = self.guard.take() {
            settle(
                self.traffic,
                self.guest,
                self.rules,
                &self.destination,
                guard,
                outcome,
            );
        }
    }
}

impl Drop for Settled<'_> {
    fn drop(&mut self) {
        self.learn(Outcome::Abandoned);
    }
}

/// What the upstream said to a request.
enum Answered {
    Theirs(Response<Arriving>),
    Switched(Box<(Response<Content>, Client, TokioIo<Upgraded>)>),
}

/// The client's end of a connection that may change its protocol.
type Client = (OnUpgrade, Option<Handover>);

/// A cleared request as it leaves, built anew from what was permitted, and under way.
pub struct Leaving<'a> {
    outgoing: Request<Content>,
    route: Route,
    /// Whoever wants to speak WebSocket.
    upgrade: Option<Client>,
    live: Live,
    settled: Settled<'a>,
}

/// Makes a cleared request ready to leave.
pub fn prepare<'a>(
    traffic: &'a Traffic,
    guest: &'a Guest,
    rules: &'a Rules,
    request: Cleared<Message>,
) -> Result<Leaving<'a>, Refusal> {
    let parts = request.into_parts();
    let Message {
        head,
        body,
        destination,
        upgrade,
        judged,
        anonymous: _,
    } = parts.request;
    let target = parts.permit.into_target();
    let route = Route {
        host: target.host.clone(),
        port: target.port,
        tls: destination.tls,
    };
    let settled = Settled {
        traffic,
        guest,
        rules,
        destination,
        guard: Some(parts.guard),
    };
    let path = PathAndQuery::try_from(target.path.target()).map_err(|error| {
        let denial = Denial::new(Reason::BadName, "names").because(error.to_string());
        Refusal::new(Stage::Forward, denial)
    })?;
    let upgrade = upgrade.filter(|_| websocket::is_asked_for(&head));
    if upgrade.is_some() && !body.is_end_stream() {
        // The upstream is asked without a body: one must not get lost without a word.
        let denial = request::framing("a request for WebSocket has no body");
        return Err(Refusal::new(Stage::Forward, denial));
    }
    let head = *head;
    let mut outgoing = Request::new(body);
    *outgoing.method_mut() = head.method;
    *outgoing.uri_mut() = Uri::from(path);
    *outgoing.headers_mut() = head.headers;
    let live = traffic
        .enter(guest, rules, Asked::Request(Box::new(target), judged))
        .map_err(|denial| Refusal::new(Stage::Policy, denial))?;
    let outgoing = if outgoing.body().is_end_stream() {
        outgoing
    } else {
        outgoing.map(|body| flow::revocable(body, live.for_upload()))
    };
    Ok(Leaving {
        outgoing,
        route,
        upgrade,
        live,
        settled,
    })
}

impl Leaving<'_> {
    /// Sends it, and waits for the answer's head.
    pub async fn send(self) -> Result<Reply, Refusal> {
        let Leaving {
            outgoing,
            route,
            upgrade,
            live,
            mut settled,
        } = self;
        let (traffic, sandbox) = (settled.traffic, settled.guest.id());
        // The upstream may take its time, and the rules may change meanwhile.
        let answered = async {
            match upgrade {
                // Boxed, as is all that is seldom: a request's future is as large as its
                // largest part, and is moved about.
                Some(client) => {
                    Box::pin(send_upgrade(traffic, sandbox, &route, outgoing, client)).await
                }
                None => {
                    let sent = traffic.dialer().send(sandbox, &route, outgoing).await;
                    sent.map(|sent| Answered::Theirs(sent.response))
                }
            }
        };
        let answered = tokio::select! {
            answered = answered => answered,
            () = live.revoked() => {
                let denial = traffic.why_revoked(settled.guest, &live);
                return Err(Refusal::new(Stage::Policy, denial));
            }
        };
        match answered {
            Ok(Answered::Theirs(mut response)) => {
                settled.learn(if response.status().is_server_error() {
                    Outcome::Failure
                } else {
                    Outcome::Success
                });
                headers::strip_hop_by_hop(response.headers_mut());
                // Hyper writes the version that the client speaks.
                *response.version_mut() = Version::default();
                Ok(Reply::Theirs(response, live))
            }
            Ok(Answered::Switched(switched)) => {
                let (response, client, upstream) = *switched;
                settled.learn(Outcome::Success);
                Ok(Reply::Upgraded(Box::new(Upgrade {
                    response,
                    client,
                    upstream,
                    live,
                })))
            }
            // The upload may hear of it first.
            Err(_) if live.is_revoked() => {
                let denial = traffic.why_revoked(settled.guest, &live);
                Err(Refusal::new(Stage::Policy, denial))
            }
            Err(error) => {
                settled.learn(if error.counts_as_failure() {
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
    traffic: &Traffic,
    sandbox: &SandboxId,
    route: &Route,
    mut outgoing: Request<Content>,
    client: Client,
) -> Result<Answered, DialError> {
    websocket::ask(outgoing.headers_mut());
    *outgoing.body_mut() = body::empty();
    let answer = traffic
        .dialer()
        .open(sandbox, route)
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
