//! Audit record of one request, filled in from its first byte to the end of its response.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use policy::audit::{AuditEvent, Kind};
use policy::id::RequestId;
use policy::verdict::{Denial, Question, RuleName, VerdictKind};
use tokio::sync::OwnedSemaphorePermit;

use crate::metrics::AnswerEnd;
use crate::sandbox_state::SandboxState;
use crate::services::Services;
use crate::stage::Stage;

/// Byte counters of a request and its response, and what the response body reported.
#[derive(Debug, Default)]
pub struct Tally {
    /// Bytes from the sandbox.
    pub sent: AtomicU64,
    /// Bytes to the sandbox.
    pub received: AtomicU64,
    /// Whether the upstream reported that it rejected a ref of a push.
    pub refs_rejected: AtomicBool,
}

/// The audit record of one request. Dropping it writes the record: after the response's last
/// byte, or when the client disconnects.
pub struct RequestLog {
    /// The event that will be written.
    pub event: Box<AuditEvent>,
    /// The request's id.
    pub id: RequestId,
    /// Counters, shared with the bodies.
    pub tally: Arc<Tally>,
    services: Arc<Services>,
    sandbox: Option<Arc<SandboxState>>,
    /// The time at which the request began.
    start: Instant,
    /// The time at which the last stage ended.
    last_stage_end: Instant,
    /// The audit slot, which is released when the record is written.
    slot: Option<OwnedSemaphorePermit>,
    /// Whether the record is not written.
    discarded: bool,
    /// Whether the response body was interrupted.
    interrupted: bool,
}

impl RequestLog {
    /// Begins a record. `slot` is released when the record is written.
    pub fn begin(
        services: &Arc<Services>,
        sandbox: Option<&Arc<SandboxState>>,
        kind: Kind,
        slot: Option<OwnedSemaphorePermit>,
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
            start: now,
            last_stage_end: now,
            slot,
            discarded: false,
            interrupted: false,
        }
    }

    /// Records the duration of a stage that has ended.
    pub fn end_stage(&mut self, stage: Stage) {
        let now = Instant::now();
        let duration = now - self.last_stage_end;
        self.last_stage_end = now;
        self.services.metrics().observe_stage(stage, duration);
        let ms = (duration.as_secs_f64() * 1e6).round() / 1e3;
        self.event.ms.insert(stage.as_str(), ms);
    }

    /// Records the rule that allows the request.
    pub fn record_allow(&mut self, rule: &RuleName) {
        self.event.verdict = Some(VerdictKind::Allow);
        self.event.rule = Some(rule.clone());
    }

    /// Records that the request waits for an approval, in case no decision follows.
    pub fn record_question(&mut self, question: &Question) {
        self.event.verdict = Some(VerdictKind::Ask);
        self.event.rule = question.rules.first().cloned();
    }

    /// Restarts the stage timer after an approval or a change of the rules: waiting is no stage.
    pub fn restart_stage_timer(&mut self) {
        self.last_stage_end = Instant::now();
    }

    /// Records why the request ended. A disconnected client and a failed upstream are no
    /// refusals: their record has the reason, and the verdict of the rules so far.
    pub fn record_refusal(&mut self, stage: Stage, denial: &Denial) {
        let failed = denial.reason.is_failure();
        if !failed {
            self.event.verdict = Some(VerdictKind::Deny);
        }
        if !failed || self.event.verdict.is_none() {
            self.event.rule = Some(denial.rule.clone());
        }
        self.event.reason = Some(denial.reason);
        self.event.stage = Some(stage.as_str().to_owned());
        if let Some(sandbox) = &self.sandbox {
            sandbox.record_refusal(self.id, stage, denial, &self.event);
        }
    }

    /// Writes an alert about the request, beside its record.
    pub fn raise_alert(&self, denial: &Denial) {
        let reason = denial.reason.code();
        let host = self.event.host.as_deref().unwrap_or_default();
        let sandbox = self.sandbox.as_ref().map(|sandbox| sandbox.id().as_str());
        tracing::warn!(sandbox, host, reason, request = %self.id, "request raised an alert");
        self.services.metrics().count_alert(denial.reason);
        let event = AuditEvent {
            event: Some(reason.to_owned()),
            kind: Kind::Alert,
            ms: policy::audit::Times::default(),
            reason: Some(denial.reason),
            rule: Some(denial.rule.clone()),
            verdict: Some(VerdictKind::Deny),
            ..(*self.event).clone()
        };
        self.services.write(Box::new(event), None);
    }

    /// Discards the record of an opened tunnel: the requests inside the tunnel have their own
    /// records.
    pub fn discard(mut self) {
        self.discarded = true;
    }

    /// Records that the response body was interrupted.
    pub fn record_interruption(&mut self) {
        self.interrupted = true;
    }

    fn answer_end(&self) -> AnswerEnd {
        if self.interrupted {
            AnswerEnd::Interrupted
        } else if self.tally.refs_rejected.load(Ordering::Relaxed) {
            AnswerEnd::RefsRejected
        } else {
            AnswerEnd::Complete
        }
    }

    /// Records the status that the client received.
    pub fn record_status(&mut self, status: http::StatusCode) {
        self.event.status = Some(status.as_u16());
    }
}

impl Drop for RequestLog {
    fn drop(&mut self) {
        if self.discarded {
            return;
        }
        let mut event =
            std::mem::replace(&mut self.event, Box::new(AuditEvent::new(Kind::Lifecycle)));
        event.bytes_in = self.tally.sent.load(Ordering::Relaxed);
        event.bytes_out = self.tally.received.load(Ordering::Relaxed);
        let duration = self.start.elapsed();
        let total = (duration.as_secs_f64() * 1e6).round() / 1e3;
        event.ms.insert("total", total);
        let metrics = self.services.metrics();
        metrics.count_request(&event, duration);
        metrics.count_git_operation(&event, self.answer_end());
        let slot = self.slot.take();
        self.services.write(event, slot);
    }
}
