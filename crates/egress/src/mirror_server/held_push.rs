//! A push to a mirror: spooled and decided like any other push, held while the operator is asked,
//! then sent to upstream unchanged.

use std::sync::Arc;

use decide::hold::{self, Attempt, HeldSubject, Holding};
use policy::answer::{ApprovalAnswer, ApprovalAnswers};
use policy::refs::RefUpdate;
use policy::registration::MAX_RECEIVE_PACK_BYTES;
use policy::verdict::{Denial, Digest};

use super::smart_http::MirrorRequest;
use super::upstream_push;
use crate::body::MessageBody;
use crate::body_stream;
use crate::git::receive::{self, IncomingPush, PushVerdict};
use crate::git::upstream_trees::UpstreamRepository;
use crate::git_protocol::push::PushCapabilities;
use crate::git_protocol::push_spooler::PushEncoding;
use crate::in_flight::{Authorized, InFlight};
use crate::message::BodyState;
use crate::mirror::Mirror;
use crate::refusal::RequestRefusal;
use crate::request_cx::{self, RequestCx};
use crate::request_log::RequestLog;
use crate::response_filters::git_report::ForwardedPush;
use crate::source::ConnectionSource;
use crate::stage::Stage;

/// Spools a push, decides it and sends it to upstream. Returns upstream's response, or none for a
/// probe.
pub(super) async fn forward(
    request: &MirrorRequest<'_>,
    mirror: &Mirror,
    encoding: PushEncoding,
    body: MessageBody,
    log: &mut RequestLog,
) -> Result<(Option<MessageBody>, InFlight), RequestRefusal> {
    let mut held = HeldPush {
        request,
        name: mirror.name(),
        encoding,
        body: BodyState::Stream(body),
        token_taken: false,
        report_data: None,
        waiting: None,
        log,
    };
    let services = &request.cx.services;
    let holding = Holding {
        questions: services.questions(),
        policy: services.policy(),
        limit: None,
    };
    let (cx, mirror, forwarded) = hold::settle(&mut held, holding).await?;
    let push = held.body.into_content();
    let request = MirrorRequest {
        cx: &cx,
        ..*request
    };
    let in_flight = request.enter(&mirror).await?;
    let Some(forwarded) = forwarded else {
        return Ok((None, in_flight));
    };
    let push = body_stream::revocable(push, in_flight.for_upload());
    let access = request.upstream_access();
    let sending = upstream_push::send_push(services, &mirror, &access, push).await;
    let response = sending.map_err(|error| {
        let denial = error.denial(mirror.name());
        receive::push_refusal(denial, forwarded.capabilities, &forwarded.updates)
    })?;
    Ok((Some(forwarded.watch(response)), in_flight))
}

/// A push to a mirror while it is decided, which may include waiting for the operator.
struct HeldPush<'a> {
    request: &'a MirrorRequest<'a>,
    /// Name of the mirror. Every attempt looks up its upstream in the current settings.
    name: &'a str,
    encoding: PushEncoding,
    body: BodyState,
    /// Whether the push has taken its rate limit token.
    token_taken: bool,
    /// Capabilities and updates for the report of a refusal, once a question was asked.
    report_data: Option<(PushCapabilities, Vec<RefUpdate>)>,
    /// Entry in the in-flight set while the push waits.
    waiting: Option<InFlight>,
    log: &'a mut RequestLog,
}

impl HeldSubject for HeldPush<'_> {
    type Allowed = (RequestCx, Arc<Mirror>, Option<Box<ForwardedPush>>);
    type Refused = RequestRefusal;

    async fn attempt(
        &mut self,
        answers: &ApprovalAnswers,
    ) -> Result<Attempt<Self::Allowed>, RequestRefusal> {
        if self.waiting.take().is_some() {
            self.log.restart_stage_timer();
        }
        let cx = self.request.cx.renewed();
        let source = ConnectionSource::Listener(Arc::clone(&cx.sandbox));
        let identity = source.identify(&cx.services, None)?;
        let request = MirrorRequest {
            cx: &cx,
            ..*self.request
        };
        let mirror = request.find(self.name, self.log)?;
        let limits = &cx.snapshot.settings.policy.git.push_limits;
        let upstream = UpstreamRepository::for_mirror(&cx, &mirror);
        let incoming = IncomingPush {
            registration: identity.registration(),
            host: self.request.host,
            repo: self.name,
            limit: limits.hard_limit_bytes.min(MAX_RECEIVE_PACK_BYTES),
            upstream: Some(&upstream),
        };
        // The semaphore is never closed.
        let permit = cx.sandbox.pushes.acquire().await;
        let body = std::mem::replace(&mut self.body, BodyState::empty());
        let spooled = receive::spool_push(&cx, body, self.encoding, incoming.limit).await?;
        let deciding = receive::decide_push(
            &cx,
            &incoming,
            &spooled,
            answers,
            &mut self.token_taken,
            self.log,
        );
        let verdict = Box::pin(deciding).await;
        self.body = BodyState::Pushed(Box::new(spooled));
        drop(permit);
        Ok(match verdict? {
            PushVerdict::Allow(_) if !cx.is_current() => Attempt::Stale,
            PushVerdict::Allow(forwarded) => Attempt::Done((cx.clone(), mirror, forwarded)),
            PushVerdict::Ask(question, capabilities, updates) => {
                self.log.record_question(&question);
                self.report_data = Some((capabilities, updates));
                Attempt::Ask(question)
            }
        })
    }

    fn refuse(&self, denial: Denial) -> RequestRefusal {
        match &self.report_data {
            Some((capabilities, updates)) => receive::push_refusal(denial, *capabilities, updates),
            None => RequestRefusal::new(Stage::Git, denial),
        }
    }

    fn snapshot(&self) -> u64 {
        self.request.cx.renewed().snapshot.number
    }

    async fn secure(&mut self) -> Result<(), RequestRefusal> {
        let in_flight = &self.request.cx.sandbox.in_flight;
        self.waiting = Some(in_flight.enter(Authorized::Held));
        Ok(())
    }

    async fn ended(&mut self) -> Denial {
        match &self.waiting {
            Some(waiting) => waiting.revoked().await,
            None => std::future::pending().await,
        }
        request_cx::ended_denial(&self.request.cx.sandbox)
    }

    fn grant(&mut self, digest: Digest, answer: &ApprovalAnswer) {
        self.request.cx.grant(digest, answer);
    }
}
