//! A policy bundle with its settings: evaluation, and the outcome of its decisions.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::decision::{Decision, DecisionDetails, EvaluationError};
use super::{Budget, Bundle};
use crate::reason::Reason;
use crate::verdict::{Denial, RuleName};

/// The budget of evaluations on an async thread. A policy of ordinary size needs a tenth of it.
const QUICK_BUDGET: Budget = Budget {
    time: Duration::from_millis(1),
    steps: 10_000,
};

/// A compiled bundle with its settings.
#[derive(Debug)]
pub struct PolicyBundle {
    bundle: Bundle,
    settings: EvaluationSettings,
    failures: AtomicU64,
}

/// The settings of a bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvaluationSettings {
    /// The limits of one evaluation.
    pub budget: Budget,
    /// Whether the bundle's decisions are enforced; otherwise they are only logged.
    pub is_enforced: bool,
    /// Whether a failed evaluation allows the request.
    pub fail_open: bool,
}

/// The outcome of a bundle's decision.
#[derive(Clone, Debug, PartialEq)]
pub enum BundleOutcome {
    /// The subject passes.
    Pass,
    /// The subject passes with changed content.
    Change {
        /// The policy's `outputs`, which describe the changes.
        outputs: serde_json::Value,
        /// The details of the decision.
        details: DecisionDetails,
    },
    /// The operator decides.
    Ask(DecisionDetails),
    /// The subject is refused.
    Deny(Denial),
}

impl PolicyBundle {
    /// A bundle with its settings.
    pub fn new(bundle: Bundle, settings: EvaluationSettings) -> Self {
        Self {
            bundle,
            settings,
            failures: AtomicU64::new(0),
        }
    }

    /// The bundle's id.
    pub fn id(&self) -> &str {
        self.bundle.id()
    }

    /// The rule name in refusals and records.
    pub fn rule_name(&self) -> RuleName {
        self.bundle.rule_name()
    }

    /// Whether the bundle's decisions are enforced, except for failures with `fail_open`.
    pub fn is_enforced(&self) -> bool {
        self.settings.is_enforced
    }

    /// Evaluates with a small budget, for async threads. None if that is not enough; the caller
    /// then evaluates again on a blocking thread, which is safe because evaluations have no side
    /// effects.
    pub fn decide_quickly(&self, input: &serde_json::Value) -> Option<Decision> {
        let decision = self.bundle.decide(input, QUICK_BUDGET);
        let is_slow = matches!(
            decision,
            Decision::Failed(EvaluationError::OutOfTime | EvaluationError::OutOfSteps)
        );
        (!is_slow).then_some(decision)
    }

    /// Evaluates with the configured budget, and blocks for that time.
    pub fn decide_blocking(&self, input: &serde_json::Value) -> Decision {
        self.bundle.decide(input, self.settings.budget)
    }

    /// The outcome of a decision.
    pub fn outcome(&self, decision: Decision) -> BundleOutcome {
        let deny = |reason: Reason| Denial::new(reason, self.rule_name());
        match decision {
            Decision::Allow(_) => BundleOutcome::Pass,
            Decision::Modify { outputs, details } => BundleOutcome::Change { outputs, details },
            Decision::Ask(details) => BundleOutcome::Ask(details),
            Decision::Deny(details) => {
                BundleOutcome::Deny(details.apply_to(deny(Reason::RegoDenied)))
            }
            Decision::Undefined => {
                let evidence = format!("{} is undefined for this input", self.bundle.rule());
                BundleOutcome::Deny(deny(Reason::RegoDenied).with_evidence(evidence))
            }
            Decision::Failed(failure) => {
                BundleOutcome::Deny(deny(Reason::RegoError).with_evidence(failure.to_string()))
            }
        }
    }

    /// Whether an outcome of this bundle is enforced; `refusal` is none if the outcome is not a
    /// refusal. False for a bundle that only logs, and for a failure with `fail_open`.
    pub fn is_outcome_enforced(&self, refusal: Option<&Denial>) -> bool {
        let failed = refusal.is_some_and(|denial| denial.reason == Reason::RegoError);
        self.settings.is_enforced && !(failed && self.settings.fail_open)
    }

    /// Counts a failure. Returns the count if it should be logged (powers of two), because an
    /// agent can make a policy fail any number of times.
    pub fn count_failure(&self) -> Option<u64> {
        let failures = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
        failures.is_power_of_two().then_some(failures)
    }
}

#[cfg(test)]
mod tests;
