//! Traffic metrics. Label values come from closed lists: a non-standard method is `other`, and a
//! host appears only as the rule that allows it.

mod timer;
pub mod upstream_failures;

use std::time::Duration;

use policy::audit::AuditEvent;
use policy::reason::Reason;
use policy::repository::RepositoryOperation;
use policy::verdict::VerdictKind;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use self::timer::Timer;
use self::upstream_failures::UpstreamFailures;
use crate::stage::Stage;

/// Methods that are label values.
const METHODS: [&str; 9] = [
    "GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE",
];

/// Counters and timers of the traffic. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct TrafficMetrics {
    requests: Family<RequestLabels, Counter>,
    durations: Family<VerdictLabels, Timer>,
    /// The timer of allowed requests in `durations`, cached because most requests are allowed.
    allowed: Timer,
    stages: Family<StageLabels, Timer>,
    /// The timers in `stages`, cached by stage.
    by_stage: [(Stage, Timer); Stage::ALL.len()],
    failures: UpstreamFailures,
    undecided: Counter,
    operations: Family<OperationLabels, Counter>,
    blocked: Family<BlockedLabels, Counter>,
    alerts: Family<BlockedLabels, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    method: &'static str,
    status: u16,
    upstream: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VerdictLabels {
    verdict: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabels {
    operation: &'static str,
    verdict: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BlockedLabels {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StageLabels {
    stage: &'static str,
}

/// How an operation on a repository ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GitOutcome {
    /// The upstream carried out the operation.
    Ok,
    /// The gate refused the operation.
    Refused,
    /// The upstream refused the operation.
    Rejected,
    /// The upstream could not be reached, failed, or interrupted its response.
    Failed,
    /// The client disconnected first.
    Abandoned,
}

impl GitOutcome {
    /// The label value.
    pub const fn as_str(self) -> &'static str {
        match self {
            GitOutcome::Ok => "ok",
            GitOutcome::Refused => "refused",
            GitOutcome::Rejected => "rejected",
            GitOutcome::Failed => "failed",
            GitOutcome::Abandoned => "abandoned",
        }
    }

    /// The outcome, from a finished record and the response body.
    pub fn of(event: &AuditEvent, answer: AnswerEnd) -> Self {
        let status = event.status.unwrap_or_default();
        match event.reason {
            _ if event.verdict == Some(VerdictKind::Deny) => GitOutcome::Refused,
            _ if event.verdict == Some(VerdictKind::Ask) => GitOutcome::Abandoned,
            Some(Reason::ClientLeft) => GitOutcome::Abandoned,
            Some(reason) if reason.is_failure() => GitOutcome::Failed,
            _ if answer == AnswerEnd::Interrupted || status >= 500 => GitOutcome::Failed,
            _ if answer == AnswerEnd::RefsRejected || status >= 400 => GitOutcome::Rejected,
            _ => GitOutcome::Ok,
        }
    }
}

/// How a response body ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerEnd {
    /// Normally.
    Complete,
    /// Interrupted before its end.
    Interrupted,
    /// With a report that the upstream rejected a ref.
    RefsRejected,
}

impl Default for TrafficMetrics {
    fn default() -> Self {
        // The buckets range from one microsecond to some seconds.
        let stages: Family<StageLabels, Timer> =
            Family::new_with_constructor(|| Timer::new(Duration::from_micros(1), 4, 12));
        let by_stage = Stage::ALL.map(|stage| {
            let labels = StageLabels {
                stage: stage.as_str(),
            };
            (stage, Timer::clone(&stages.get_or_create(&labels)))
        });
        // The buckets range from a tenth of a millisecond to some minutes.
        let durations: Family<VerdictLabels, Timer> =
            Family::new_with_constructor(|| Timer::new(Duration::from_micros(100), 3, 14));
        let verdict = VerdictKind::Allow.as_str();
        let allowed = Timer::clone(&durations.get_or_create(&VerdictLabels { verdict }));
        Self {
            requests: Family::default(),
            durations,
            allowed,
            stages,
            by_stage,
            failures: UpstreamFailures::default(),
            undecided: Counter::default(),
            operations: Family::default(),
            blocked: Family::default(),
            alerts: Family::default(),
        }
    }
}

impl TrafficMetrics {
    /// Failures of upstreams.
    pub fn failures(&self) -> &UpstreamFailures {
        &self.failures
    }

    /// Registers the metrics in `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "proxy_requests",
            "Requests by method, status and the rule that allowed them, 'refused' or 'none'",
            self.requests.clone(),
        );
        registry.register(
            "proxy_request_duration_seconds",
            "Time from a request's head to its response's last byte",
            self.durations.clone(),
        );
        registry.register(
            "proxy_stage_duration_seconds",
            "Time spent in each stage of the pipeline",
            self.stages.clone(),
        );
        registry.register(
            "proxy_policy_failures",
            "Requests about which a policy bundle could not decide",
            self.undecided.clone(),
        );
        registry.register(
            "proxy_git_operations",
            "Operations on repositories by verdict and outcome",
            self.operations.clone(),
        );
        registry.register(
            "proxy_git_push_blocked",
            "Pushes that were refused, by reason",
            self.blocked.clone(),
        );
        registry.register(
            "proxy_alerts",
            "Requests that raised an alert, by reason",
            self.alerts.clone(),
        );
    }

    /// Counts a request that ended.
    pub fn count_request(&self, event: &AuditEvent, duration: Duration) {
        let listed = |method: &str| METHODS.iter().find(|listed| **listed == method).copied();
        let allowed = event.verdict == Some(VerdictKind::Allow);
        let upstream = match (event.verdict, &event.rule) {
            (Some(VerdictKind::Allow), Some(rule)) => rule.as_str(),
            // The gate's own pages, and clients that disconnected before a decision or while
            // waiting for an approval.
            (None | Some(VerdictKind::Ask), _) => "none",
            (Some(_), _) => "refused",
        };
        let labels = RequestLabels {
            method: event.method.as_deref().and_then(listed).unwrap_or("other"),
            status: event.status.unwrap_or_default(),
            upstream: upstream.to_owned(),
        };
        self.requests.get_or_create(&labels).inc();
        let verdict = event.verdict.map_or("none", VerdictKind::as_str);
        if allowed {
            self.allowed.observe(duration);
        } else {
            let durations = self.durations.get_or_create(&VerdictLabels { verdict });
            durations.observe(duration);
        }
    }

    /// Counts a request that ended, if it was an operation on a repository.
    pub fn count_git_operation(&self, event: &AuditEvent, answer: AnswerEnd) {
        let Some(operation) = event.operation.as_deref() else {
            return;
        };
        let mut kinds = RepositoryOperation::ALL.into_iter();
        let Some(kind) = kinds.find(|kind| kind.as_str() == operation) else {
            return;
        };
        let operation = kind.as_str();
        let labels = OperationLabels {
            operation,
            verdict: event.verdict.map_or("none", VerdictKind::as_str),
            outcome: GitOutcome::of(event, answer).as_str(),
        };
        self.operations.get_or_create(&labels).inc();
        if kind == RepositoryOperation::Push
            && event.verdict == Some(VerdictKind::Deny)
            && let Some(reason) = event.reason
        {
            let reason = reason.code();
            self.blocked.get_or_create(&BlockedLabels { reason }).inc();
        }
    }

    /// Counts a request that raised an alert.
    pub fn count_alert(&self, reason: Reason) {
        let reason = reason.code();
        self.alerts.get_or_create(&BlockedLabels { reason }).inc();
    }

    /// Records the duration of a stage.
    pub fn observe_stage(&self, stage: Stage, duration: Duration) {
        let mut stages = self.by_stage.iter();
        if let Some((_, timer)) = stages.find(|(timed_stage, _)| *timed_stage == stage) {
            timer.observe(duration);
        }
    }

    /// Counts a request about which a policy bundle could not decide.
    pub fn count_undecided(&self) {
        self.undecided.inc();
    }

    /// Counts a failure of the upstream with this label.
    pub fn count_failure(&self, upstream: String) {
        self.failures.count(upstream);
    }
}

#[cfg(test)]
mod tests {
    use policy::audit::Kind;

    use super::*;

    #[test]
    fn git_outcome_follows_verdict_reason_status_and_body() {
        let event = |verdict, reason, status| AuditEvent {
            verdict,
            reason,
            status,
            ..AuditEvent::new(Kind::Git)
        };
        let allowed = |reason, status| event(Some(VerdictKind::Allow), reason, status);
        for (event, answer, expected) in [
            (allowed(None, Some(200)), AnswerEnd::Complete, "ok"),
            (allowed(None, None), AnswerEnd::Complete, "ok"),
            (allowed(None, Some(401)), AnswerEnd::Complete, "rejected"),
            (
                allowed(None, Some(200)),
                AnswerEnd::RefsRejected,
                "rejected",
            ),
            (allowed(None, Some(200)), AnswerEnd::Interrupted, "failed"),
            (allowed(None, Some(502)), AnswerEnd::Complete, "failed"),
            (
                allowed(Some(Reason::UpstreamTimeout), None),
                AnswerEnd::Complete,
                "failed",
            ),
            (
                allowed(Some(Reason::ClientLeft), None),
                AnswerEnd::Interrupted,
                "abandoned",
            ),
            (
                event(Some(VerdictKind::Ask), None, None),
                AnswerEnd::Complete,
                "abandoned",
            ),
            (
                event(Some(VerdictKind::Deny), Some(Reason::GitSize), Some(413)),
                AnswerEnd::Complete,
                "refused",
            ),
        ] {
            assert_eq!(
                GitOutcome::of(&event, answer).as_str(),
                expected,
                "{event:?}"
            );
        }
    }
}
