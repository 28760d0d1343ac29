//! The traffic's numbers. Labels come from closed lists: a method that is no standard one
//! is `other`, and a host is only ever named by the rule that allows it.

mod timer;

use std::sync::Arc;
use std::time::Duration;

use policy::audit::AuditEvent;
use policy::breaker::State;
use policy::host::HostPattern;
use policy::repository::Errand;
use policy::verdict::Word;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use self::timer::Timer;
use crate::traffic::{Rules, Traffic};
use crate::trail::Stage;
use crate::upstream::Reading;

const METHODS: [&str; 9] = [
    "GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE",
];

/// Counters and timers of the traffic. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Numbers {
    requests: Family<RequestLabels, Counter>,
    durations: Family<VerdictLabels, Timer>,
    /// That of what was allowed, which is most: there is no need to look for it every time.
    allowed: Timer,
    stages: Family<StageLabels, Timer>,
    /// The same, by stage.
    by_stage: [(Stage, Timer); Stage::ALL.len()],
    rejected: Counter,
    failures: Counter,
    undecided: Counter,
    operations: Family<OperationLabels, Counter>,
    blocked: Family<BlockedLabels, Counter>,
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
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BlockedLabels {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StageLabels {
    stage: &'static str,
}

/// The buckets and breakers of every sandbox, read when somebody asks. Only hosts that a
/// rule names outright are shown: those below a wildcard have names of the agent's choice.
#[derive(Debug)]
pub struct States(pub Arc<Traffic>);

impl Collector for States {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let now = self.0.clock().tick();
        let exact = |rules: &Rules, reading: &Reading| {
            let named = rules.settings.allowlist().lookup(&reading.host);
            named.and_then(|rules| rules.first()).is_some_and(|rule| {
                matches!(rule.pattern, HostPattern::Exact(_) | HostPattern::Ip(_))
            })
        };
        let mut readings = Vec::new();
        for guest in self.0.known() {
            let rules = self.0.rules_for(Some(&guest));
            let all = guest.upstreams.readings(&rules.settings, now);
            let shown = all.into_iter().filter(|reading| exact(&rules, reading));
            readings.extend(shown.map(|reading| (guest.id().clone(), reading)));
        }
        let mut show = |name: &str, help: &str, value: fn(&Reading) -> i64| {
            let mut family = encoder.encode_descriptor(
                name,
                help,
                None,
                ConstGauge::new(0_i64).metric_type(),
            )?;
            for (sandbox, reading) in &readings {
                let labels = [
                    ("container_id", sandbox.as_str().to_owned()),
                    ("upstream", reading.host.to_string()),
                ];
                ConstGauge::new(value(reading)).encode(family.encode_family(&labels)?)?;
            }
            Ok::<(), std::fmt::Error>(())
        };
        show(
            "proxy_rate_limit_bucket_tokens",
            "Requests that may be sent at once",
            |reading| i64::from(reading.tokens),
        )?;
        show(
            "proxy_circuit_breaker_state",
            "0 closed, 1 open, 2 half-open",
            |reading| match reading.state {
                State::Closed => 0,
                State::Open => 1,
                State::HalfOpen => 2,
            },
        )
    }
}

impl Default for Numbers {
    fn default() -> Self {
        // From a microsecond to some seconds.
        let stages: Family<StageLabels, Timer> =
            Family::new_with_constructor(|| Timer::new(Duration::from_micros(1), 4, 12));
        let by_stage = Stage::ALL.map(|stage| {
            let labels = StageLabels {
                stage: stage.as_str(),
            };
            (stage, Timer::clone(&stages.get_or_create(&labels)))
        });
        // From a tenth of a millisecond to some minutes.
        let durations: Family<VerdictLabels, Timer> =
            Family::new_with_constructor(|| Timer::new(Duration::from_micros(100), 3, 14));
        let verdict = Word::Allow.as_str();
        let allowed = Timer::clone(&durations.get_or_create(&VerdictLabels { verdict }));
        Self {
            requests: Family::default(),
            durations,
            allowed,
            stages,
            by_stage,
            rejected: Counter::default(),
            failures: Counter::default(),
            undecided: Counter::default(),
            operations: Family::default(),
            blocked: Family::default(),
        }
    }
}

impl Numbers {
    /// Makes the numbers visible in `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "proxy_requests",
            "Requests by method, status and the rule that allowed them, 'refused' or 'none'",
            self.requests.clone(),
        );
        registry.register(
            "proxy_request_duration_seconds",
            "From a request's head to its answer's last byte",
            self.durations.clone(),
        );
        registry.register(
            "proxy_stage_duration_seconds",
            "Time spent in each stage of the pipeline",
            self.stages.clone(),
        );
        registry.register(
            "proxy_rate_limit_rejected",
            "Requests refused because they came too fast",
            self.rejected.clone(),
        );
        registry.register(
            "proxy_circuit_breaker_failures",
            "Requests that counted as failures of their upstream",
            self.failures.clone(),
        );
        registry.register(
            "proxy_policy_failures",
            "Requests about which a policy bundle could not decide",
            self.undecided.clone(),
        );
        registry.register(
            "proxy_git_operations",
            "What was asked of repositories, and whether it was allowed",
            self.operations.clone(),
        );
        registry.register(
            "proxy_git_push_blocked",
            "Pushes that were refused, by reason",
            self.blocked.clone(),
        );
    }

    /// A request ended.
    pub fn request(&self, event: &AuditEvent, took: Duration) {
        let known = |method: &str| METHODS.iter().find(|known| **known == method).copied();
        let allowed = event.verdict == Some(Word::Allow);
        let upstream = match (event.verdict, &event.rule) {
            (Some(Word::Allow), Some(rule)) => rule.as_str(),
            // The gate's own pages, and clients that left before anything was decided.
            (None, _) => "none",
            (Some(_), _) => "refused",
        };
        let labels = RequestLabels {
            method: event.method.as_deref().and_then(known).unwrap_or("other"),
            status: event.status.unwrap_or_default(),
            upstream: upstream.to_owned(),
        };
        self.requests.get_or_create(&labels).inc();
        let verdict = event.verdict.map_or("none", Word::as_str);
        if allowed {
            self.allowed.observe(took);
        } else {
            let durations = self.durations.get_or_create(&VerdictLabels { verdict });
            durations.observe(took);
        }
        self.git(event, verdict);
    }

    fn git(&self, event: &AuditEvent, verdict: &'static str) {
        let Some(operation) = event.operation.as_deref() else {
            return;
        };
        let mut errands = Errand::ALL.into_iter();
        let Some(errand) = errands.find(|errand| errand.as_str() == operation) else {
            return;
        };
        let operation = errand.as_str();
        let labels = OperationLabels { operation, verdict };
        self.operations.get_or_create(&labels).inc();
        if errand == Errand::Push
            && event.verdict == Some(Word::Deny)
            && let Some(reason) = event.reason
        {
            let reason = reason.code();
            self.blocked.get_or_create(&BlockedLabels { reason }).inc();
        }
    }

    /// A stage ended.
    pub fn stage(&self, stage: Stage, took: Duration) {
        let mut stages = self.by_stage.iter();
        if let Some((_, times)) = stages.find(|(known, _)| *known == stage) {
            times.observe(took);
        }
    }

    /// A request came too fast.
    pub fn rejected(&self) {
        self.rejected.inc();
    }

    /// A policy bundle could not decide.
    pub fn undecided(&self) {
        self.undecided.inc();
    }

    /// An upstream failed.
    pub fn failed(&self) {
        self.failures.inc();
    }
}
