//! The bundles that judge tool calls, and what follows from what they say.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use config::Settings;
use config::bundle::{self, BadBundle};
use config::section::policies::BundleMode;
use policy::reason::Reason;
use policy::redaction::BadRedaction;
use policy::rego::{Budget, Bundle, Decision, Failure};
use policy::verdict::{Denial, RuleName};
use serde_json::Value;
use tokio::sync::Semaphore;

use super::Moment;
use super::input::Subject;

/// What bundles about calls and answers decide.
const CALLS: &str = "mcp/authz";

/// What bundles about questions of a server to the client decide.
const ELICITATIONS: &str = "mcp/elicitation";

/// What is tried at once. A policy of ordinary size needs a tenth of it; whatever needs more
/// is asked again where it keeps nobody else waiting. A decision has no effects, so asking
/// twice does no harm.
const QUICK: Budget = Budget {
    time: Duration::from_millis(1),
    steps: 10_000,
};

/// Slow decisions that are made at the same time.
const MOST_SLOW: usize = 4;

/// The bundles of one configuration.
#[derive(Debug)]
pub struct Rules {
    calls: Vec<Judge>,
    elicitations: Vec<Judge>,
    tools: Vec<String>,
    budget: Budget,
    fail_open: bool,
    slow: Semaphore,
}

/// One bundle.
#[derive(Debug)]
pub(super) struct Judge {
    bundle: Arc<Bundle>,
    counts: bool,
    failures: AtomicU64,
}

/// No bundle: everything passes.
impl Default for Rules {
    fn default() -> Self {
        Self {
            calls: Vec::new(),
            elicitations: Vec::new(),
            tools: Vec::new(),
            budget: QUICK,
            fail_open: false,
            slow: Semaphore::new(MOST_SLOW),
        }
    }
}

impl Rules {
    /// Reads the bundles of `settings` for tool calls. Blocks. One that is not there is left
    /// out, with a warning, unless it is required; one that cannot be used is an error.
    pub fn load(settings: &Settings) -> Result<Self, BadBundle> {
        let section = &settings.policies;
        let mut rules = Self {
            tools: settings
                .tools
                .iter()
                .map(|tool| tool.name.clone())
                .collect(),
            budget: Budget::of(section.timeout),
            fail_open: section.fail_open,
            ..Self::default()
        };
        for named in &section.bundles {
            let is_for = |entrypoint: &str| {
                let inner = named.entrypoint.strip_prefix(entrypoint);
                inner.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            };
            let judges = if is_for(CALLS) {
                &mut rules.calls
            } else if is_for(ELICITATIONS) {
                &mut rules.elicitations
            } else {
                continue;
            };
            match bundle::read(named) {
                Ok(bundle) => judges.push(Judge {
                    bundle: Arc::new(bundle),
                    counts: named.mode == BundleMode::Enforce,
                    failures: AtomicU64::new(0),
                }),
                Err(problem @ BadBundle::Missing { .. }) if !named.required => {
                    tracing::warn!(%problem, "a policy bundle is missing and judges nothing");
                }
                Err(problem) => return Err(problem),
            }
        }
        Ok(rules)
    }

    /// Whether there is nobody to ask.
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty() && self.elicitations.is_empty()
    }

    /// The tools that are configured.
    pub(super) fn tools(&self) -> &[String] {
        &self.tools
    }

    pub(super) fn judges(&self, moment: Moment) -> &[Judge] {
        match moment {
            Moment::Before | Moment::After => &self.calls,
            Moment::Elicitation => &self.elicitations,
        }
    }

    /// What a bundle says.
    pub(super) async fn ask(&self, judge: &Judge, subject: &Subject<'_>) -> Decision {
        if !subject.large {
            let decision = judge.bundle.decide(&subject.input, QUICK);
            if !matches!(
                decision,
                Decision::Failed(Failure::OutOfTime | Failure::OutOfSteps)
            ) {
                return decision;
            }
        }
        // The semaphore is never closed.
        let place = self.slow.acquire().await;
        let (bundle, input) = (Arc::clone(&judge.bundle), Arc::clone(&subject.input));
        let budget = self.budget;
        let decided = tokio::task::spawn_blocking(move || bundle.decide(&input, budget)).await;
        drop(place);
        decided.unwrap_or_else(|error| Decision::Failed(Failure::Error(error.to_string())))
    }

    /// What follows: it passes, it passes with changes, or it does not.
    pub(super) fn understand(
        &self,
        judge: &Judge,
        decision: Decision,
    ) -> Result<Option<Value>, Denial> {
        let deny = |reason: Reason| Denial::new(reason, judge.rule_name());
        match decision {
            Decision::Allow(_) => Ok(None),
            Decision::Modify { outputs, .. } => Ok(Some(outputs)),
            Decision::Deny(said) => Err(said.told(deny(Reason::RegoDenied))),
            Decision::Undefined => {
                let because = format!("{} is undefined here", judge.bundle.rule());
                Err(deny(Reason::RegoDenied).because(because))
            }
            Decision::Ask(said) => {
                let denial = said.told(deny(Reason::AskUnattended));
                let message = format!(
                    "{} The operator wants to be asked, and this version cannot ask yet.",
                    denial.message
                );
                Err(denial.saying(message))
            }
            Decision::Failed(failure) => {
                judge.note(&failure);
                Err(deny(Reason::RegoError).because(failure.to_string()))
            }
        }
    }
}

impl Judge {
    pub(super) fn id(&self) -> &str {
        self.bundle.id()
    }

    pub(super) fn rule_name(&self) -> RuleName {
        self.bundle.rule_name()
    }

    /// Whether what it says counts: it is not there to log, nor did it fail where the operator
    /// lets failures pass.
    pub(super) fn decides<T>(&self, outcome: &Result<T, Denial>, rules: &Rules) -> bool {
        let failed = matches!(outcome, Err(denial) if denial.reason == Reason::RegoError);
        self.counts && !(failed && rules.fail_open)
    }

    /// A policy that wants something redacted has not allowed it as it is, so that this is a
    /// refusal even where failures pass.
    pub(super) fn cannot_redact(&self, fault: &BadRedaction) -> Denial {
        Denial::new(Reason::RegoDenied, self.rule_name())
            .saying("A policy wants this redacted, and that cannot be done.")
            .because(fault.to_string())
    }

    /// An agent can make a policy fail as often as it likes, so that not every failure is a
    /// line of the log.
    fn note(&self, failure: &Failure) {
        let failures = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
        if failures.is_power_of_two() {
            let bundle = self.bundle.id();
            tracing::error!(bundle, %failure, failures, "a policy bundle could not decide");
        }
    }
}

/// The word in metrics.
pub(super) fn action(decision: &Decision) -> &'static str {
    match decision {
        Decision::Allow(_) => "allow",
        Decision::Deny(_) | Decision::Undefined => "block",
        Decision::Ask(_) => "ask",
        Decision::Modify { .. } => "redact",
        Decision::Failed(_) => "error",
    }
}

/// The word in metrics.
pub(super) fn kind_of(failure: &Failure) -> &'static str {
    match failure {
        Failure::OutOfTime | Failure::OutOfSteps => "timeout",
        Failure::Error(_) => "error",
        Failure::Shape(_) => "shape",
    }
}
