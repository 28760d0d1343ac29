//! What is remembered of one request, from its first byte to its audit record.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use policy::audit::{AuditEvent, Kind};
use policy::id::RequestId;
use policy::verdict::{Denial, Question, RuleName, Word};
use tokio::sync::OwnedSemaphorePermit;

use crate::metrics::AnswerEnd;
use crate::sandbox_state::SandboxState;
use crate::services::Services;
use crate::stage::Stage;

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
pub struct RequestLog {
    /// What will be written.
    pub event: Box<AuditEvent>,
    /// The request's own name.
    pub id: RequestId,
    /// Bytes that passed.
    pub tally: Arc<Tally>,
    services: Arc<Services>,
    sandbox: Option<Arc<SandboxState>>,
    begun: Instant,
    last: Instant,
    place: Option<OwnedSemaphorePermit>,
    silent: bool,
    interrupted: bool,
}

impl RequestLog {
    /// Begins one. `place` is given back when the record is written.
    pub fn begin(
        services: &Arc<Services>,
        sandbox: Option<&Arc<SandboxState>>,
        kind: Kind,
        place: Option<OwnedSemaphorePermit>,
    ) -> Self {
        let id = services.new_id();
        let now = Instant::now();
        let event = AuditEvent {
            request_id: Some(id),
            sandbox: sandbox.map(|sandbox| sandbox.id().clone()),
            ..AuditEvent::new(kind)
        };
        Self {
            event: Box::new(event),
            id,
            tally: Arc::default(),
            services: Arc::clone(services),
            sandbox: sandbox.cloned(),
            begun: now,
            last: now,
            place,
            silent: false,
            interrupted: false,
        }
    }

    /// Notes that a stage is over.
    pub fn passed(&mut self, stage: Stage) {
        let now = Instant::now();
        let took = now - self.last;
        self.last = now;
        self.services.metrics().stage(stage, took);
        let ms = (took.as_secs_f64() * 1e6).round() / 1e3;
        self.event.ms.insert(stage.as_str(), ms);
    }

    /// Notes what was decided to go on.
    pub fn allowed(&mut self, rule: &RuleName) {
        self.event.verdict = Some(Word::Allow);
        self.event.rule = Some(rule.clone());
    }

    /// Notes that the operator is asked. The record says that much if nothing follows.
    pub fn asked(&mut self, question: &Question) {
        self.event.verdict = Some(Word::Ask);
        self.event.rule = question.rules.first().cloned();
    }

    /// Notes that an answer came, or the rules changed. What was waited for is no part of a stage.
    pub fn resumed(&mut self) {
        self.last = Instant::now();
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
        if let Some(sandbox) = &self.sandbox {
            sandbox.remember(self.id, stage, denial, &self.event);
        }
    }

    /// Nothing was decided: what comes of it has records of its own.
    pub fn discard(mut self) {
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

impl Drop for RequestLog {
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
        let numbers = self.services.metrics();
        numbers.request(&event, took);
        numbers.git(&event, self.answer_end());
        let place = self.place.take();
        self.services.write(event, place);
    }
}
