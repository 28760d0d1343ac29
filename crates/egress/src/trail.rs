//! What is remembered of one request, from its first byte to its audit record.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use policy::audit::{AuditEvent, Kind};
use policy::id::RequestId;
use policy::verdict::{Denial, RuleName, Word};
use tokio::sync::OwnedSemaphorePermit;

use crate::guest::Guest;
use crate::numbers::AnswerEnd;
use crate::request::Opening;
use crate::traffic::Traffic;

/// The stages of the pipeline, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// The message itself: framing, names, agreement.
    Request,
    /// Who is asking.
    Identity,
    /// How fast.
    Rate,
    /// Whether the upstream is left alone.
    Breaker,
    /// Whether the rules allow it.
    Policy,
    /// Whether the rules for git allow it.
    Git,
    /// The way to the upstream and back.
    Forward,
}

impl Stage {
    /// Every stage.
    pub const ALL: [Stage; 7] = [
        Stage::Request,
        Stage::Identity,
        Stage::Rate,
        Stage::Breaker,
        Stage::Policy,
        Stage::Git,
        Stage::Forward,
    ];

    /// The word in records and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Stage::Request => "request",
            Stage::Identity => "identity",
            Stage::Rate => "rate",
            Stage::Breaker => "breaker",
            Stage::Policy => "policy",
            Stage::Git => "git",
            Stage::Forward => "forward",
        }
    }
}

/// What is learnt of a request and its answer where their bytes pass.
#[derive(Debug, Default)]
pub struct Tally {
    /// From the sandbox.
    pub sent: AtomicU64,
    /// To the sandbox.
    pub received: AtomicU64,
    /// Whether the upstream reported that it did not move a ref of a push.
    pub refs_rejected: AtomicBool,
}

/// The record of one request. It is written when the trail is dropped, wherever that is:
/// at the end of the answer's last byte, or where the client went away.
pub struct Trail {
    /// What will be written.
    pub event: Box<AuditEvent>,
    /// The request's own name.
    pub id: RequestId,
    /// Bytes that passed.
    pub tally: Arc<Tally>,
    traffic: Arc<Traffic>,
    guest: Option<Arc<Guest>>,
    begun: Instant,
    last: Instant,
    place: Option<OwnedSemaphorePermit>,
    silent: bool,
    interrupted: bool,
}

impl Trail {
    /// Begins one. `place` is given back when the record is written.
    pub fn begin(
        traffic: &Arc<Traffic>,
        guest: Option<&Arc<Guest>>,
        kind: Kind,
        place: Option<OwnedSemaphorePermit>,
    ) -> Self {
        let id = traffic.new_id();
        let now = Instant::now();
        let event = AuditEvent {
            request_id: Some(id),
            sandbox: guest.map(|guest| guest.id().clone()),
            ..AuditEvent::new(kind)
        };
        Self {
            event: Box::new(event),
            id,
            tally: Arc::default(),
            traffic: Arc::clone(traffic),
            guest: guest.cloned(),
            begun: now,
            last: now,
            place,
            silent: false,
            interrupted: false,
        }
    }

    /// Notes where the connection was to lead, as far as that is known before anything is
    /// asked on it.
    pub fn came_for(&mut self, opening: &Opening) {
        let Opening { tunnel, meant, .. } = opening;
        let (host, port) = match (tunnel, meant) {
            (Some((host, port)), _) => (host.to_string(), *port),
            (None, Some(meant)) => (meant.ip().to_string(), meant.port()),
            (None, None) => return,
        };
        self.event.host = Some(host);
        self.event.port = Some(port);
    }

    /// Notes that a stage is over.
    pub fn passed(&mut self, stage: Stage) {
        let now = Instant::now();
        let took = now - self.last;
        self.last = now;
        self.traffic.numbers().stage(stage, took);
        let ms = (took.as_secs_f64() * 1e6).round() / 1e3;
        self.event.ms.insert(stage.as_str(), ms);
    }

    /// Notes what was decided to go on.
    pub fn allowed(&mut self, rule: &RuleName) {
        self.event.verdict = Some(Word::Allow);
        self.event.rule = Some(rule.clone());
    }

    /// Notes what ended it. A client that left and an upstream that failed are no refusals:
    /// their record has the reason, and what the rules had decided by then.
    pub fn refused(&mut self, stage: Stage, denial: &Denial) {
        let failed = denial.reason.is_failure();
        if !failed {
            self.event.verdict = Some(Word::Deny);
        }
        if !failed || self.event.verdict.is_none() {
            self.event.rule = Some(denial.rule.clone());
        }
        self.event.reason = Some(denial.reason);
        self.event.stage = Some(stage.as_str().to_owned());
        if let Some(guest) = &self.guest {
            guest.remember(self.id, stage, denial, &self.event);
        }
    }

    /// Nothing was decided: what comes of it has records of its own.
    pub fn nothing_to_say(mut self) {
        self.silent = true;
    }

    /// Notes that the answer's body broke off.
    pub fn interrupted(&mut self) {
        self.interrupted = true;
    }

    fn answer_end(&self) -> AnswerEnd {
        if self.interrupted {
            AnswerEnd::Interrupted
        } else if self.tally.refs_rejected.load(Ordering::Relaxed) {
            AnswerEnd::RefsRejected
        } else {
            AnswerEnd::Plain
        }
    }

    /// Notes the status the client saw.
    pub fn answered(&mut self, status: http::StatusCode) {
        self.event.status = Some(status.as_u16());
    }
}

impl Drop for Trail {
    fn drop(&mut self) {
        if self.silent {
            return;
        }
        let mut event =
            std::mem::replace(&mut self.event, Box::new(AuditEvent::new(Kind::Lifecycle)));
        event.bytes_in = self.tally.sent.load(Ordering::Relaxed);
        event.bytes_out = self.tally.received.load(Ordering::Relaxed);
        let took = self.begun.elapsed();
        let total = (took.as_secs_f64() * 1e6).round() / 1e3;
        event.ms.insert("total", total);
        let numbers = self.traffic.numbers();
        numbers.request(&event, took);
        numbers.git(&event, self.answer_end());
        let place = self.place.take();
        self.traffic.write(event, place);
    }
}
