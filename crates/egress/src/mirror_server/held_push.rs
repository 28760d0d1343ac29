//! A push to a mirror: taken in and decided about like any other, then sent to upstream in the
//! client's own words.

use std::sync::Arc;

use decide::hold::{self, Attempt, Held, Holding};
use policy::answer::{Answer, Answers};
use policy::refs::RefUpdate;
use policy::registration::MAX_RECEIVE_PACK_BYTES;
use policy::verdict::{Denial, Digest};

use super::push::tell;
use super::serve::Visitor;
use crate::body::Content;
use crate::body_stream;
use crate::git::receive::{self, Arrival, PushVerdict};
use crate::git::upstream::Upstream;
use crate::git_protocol::intake::Coding;
use crate::git_protocol::push::Capabilities;
use crate::in_flight::{Authorized, InFlight};
use crate::message::BodyState;
use crate::mirror::Mirror;
use crate::refusal::Refusal;
use crate::request_cx::{self, RequestCx};
use crate::request_log::RequestLog;
use crate::response_filters::git_report::Sent;
use crate::source::Source;
use crate::stage::Stage;

/// Takes a push in, has it decided, and sends it to upstream. What comes back is upstream's
/// answer; none where nothing was to be pushed.
pub(super) async fn take(
    visitor: &Visitor<'_>,
    mirror: &Mirror,
    coding: Coding,
    body: Content,
    trail: &mut RequestLog,
) -> Result<(Option<Content>, InFlight), Refusal> {
    let mut held = HeldPush {
        visitor,
        name: mirror.name(),
        coding,
        body: BodyState::Stream(body),
        paid: false,
        asked: None,
        waiting: None,
        trail,
    };
    let services = &visitor.cx.services;
    let holding = Holding {
        questions: services.questions(),
        policy: services.policy(),
        limit: None,
    };
    let (cx, mirror, sent) = hold::settle(&mut held, holding).await?;
    let push = held.body.into_content();
    let visitor = Visitor {
        cx: &cx,
        ..*visitor
    };
    let in_flight = visitor.enter(&mirror).await?;
    let Some(sent) = sent else {
        return Ok((None, in_flight));
    };
    let push = body_stream::revocable(push, in_flight.for_upload());
    let told = tell(services, &mirror, &visitor.asking(), push).await;
    let answer = told.map_err(|why| {
        let denial = why.denial(mirror.name());
        receive::refused(denial, sent.capabilities, &sent.updates)
    })?;
    Ok((Some(sent.watch(answer)), in_flight))
}

/// A push to a mirror that is decided, and may have to wait in between.
struct HeldPush<'a> {
    visitor: &'a Visitor<'a>,
    /// The name of the mirror. Which upstream that is, the rules of each attempt say.
    name: &'a str,
    coding: Coding,
    body: BodyState,
    /// Whether its token was taken.
    paid: bool,
    /// How the refusal of its question is answered.
    asked: Option<(Capabilities, Vec<RefUpdate>)>,
    /// Its entry in the in-flight set while it waits.
    waiting: Option<InFlight>,
    trail: &'a mut RequestLog,
}

impl Held for HeldPush<'_> {
    type Allowed = (RequestCx, Arc<Mirror>, Option<Box<Sent>>);
    type Refused = Refusal;

    async fn attempt(&mut self, answers: &Answers) -> Result<Attempt<Self::Allowed>, Refusal> {
        if self.waiting.take().is_some() {
            self.trail.resumed();
        }
        let cx = self.visitor.cx.renewed();
        let source = Source::Listener(Arc::clone(&cx.sandbox));
        let identity = source.identify(&cx.services, None)?;
        let visitor = Visitor {
            cx: &cx,
            ..*self.visitor
        };
        let mirror = visitor.find(self.name, self.trail)?;
        let limits = &cx.snapshot.settings.policy.git.push_limits;
        let upstream = Upstream::of_mirror(&cx, &mirror);
        let arrival = Arrival {
            registration: identity.registration(),
            host: self.visitor.host,
            repo: self.name,
            limit: limits.hard_limit_bytes.min(MAX_RECEIVE_PACK_BYTES),
            upstream: Some(&upstream),
        };
        // The semaphore is never closed.
        let turn = cx.sandbox.pushes.acquire().await;
        let body = std::mem::replace(&mut self.body, BodyState::empty());
        let taken = receive::take_in(&cx, body, self.coding, arrival.limit).await?;
        let judging = receive::judge(&cx, &arrival, &taken, answers, &mut self.paid, self.trail);
        let judged = Box::pin(judging).await;
        self.body = BodyState::Pushed(Box::new(taken));
        drop(turn);
        Ok(match judged? {
            PushVerdict::Allow(_) if !cx.is_current() => Attempt::Stale,
            PushVerdict::Allow(sent) => Attempt::Done((cx.clone(), mirror, sent)),
            PushVerdict::Ask(question, capabilities, updates) => {
                self.trail.asked(&question);
                self.asked = Some((capabilities, updates));
                Attempt::Ask(question)
            }
        })
    }

    fn refuse(&self, denial: Denial) -> Refusal {
        match &self.asked {
            Some((capabilities, updates)) => receive::refused(denial, *capabilities, updates),
            None => Refusal::new(Stage::Git, denial),
        }
    }

    fn snapshot(&self) -> u64 {
        self.visitor.cx.renewed().snapshot.number
    }

    async fn secure(&mut self) -> Result<(), Refusal> {
        let in_flight = &self.visitor.cx.sandbox.in_flight;
        self.waiting = Some(in_flight.enter(Authorized::Held));
        Ok(())
    }

    async fn ended(&mut self) -> Denial {
        match &self.waiting {
            Some(waiting) => waiting.revoked().await,
            None => std::future::pending().await,
        }
        request_cx::ended(&self.visitor.cx.sandbox)
    }

    fn grant(&mut self, digest: Digest, answer: &Answer) {
        self.visitor.cx.grant(digest, answer);
    }
}
