//! A bundle at its post: how it is asked, and what follows from what it says.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::decision::{Decision, Failure, Said};
use super::{Budget, Bundle};
use crate::reason::Reason;
use crate::verdict::{Denial, RuleName};

/// What is tried at once. A policy of ordinary size needs a tenth of it.
const QUICK: Budget = Budget {
    time: Duration::from_millis(1),
    steps: 10_000,
};

/// A bundle whose decisions have consequences.
#[derive(Debug)]
pub struct PolicyBundle {
    bundle: Bundle,
    terms: Terms,
    failures: AtomicU64,
}

/// On what terms a bundle judges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// How much one evaluation may take.
    pub budget: Budget,
    /// Whether what it says counts; otherwise it is written down and changes nothing.
    pub counts: bool,
    /// Whether what it cannot decide passes.
    pub fail_open: bool,
}

/// What follows from a bundle's decision.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// It passes.
    Pass,
    /// It passes with changed content.
    Change {
        /// The change, as the policy puts it.
        outputs: serde_json::Value,
        /// The policy's sentence and rule.
        said: Said,
    },
    /// An operator decides.
    Ask(Said),
    /// It is refused.
    Deny(Denial),
}

impl PolicyBundle {
    /// Puts a bundle at its post.
    pub fn new(bundle: Bundle, terms: Terms) -> Self {
        Self {
            bundle,
            terms,
            failures: AtomicU64::new(0),
        }
    }

    /// The bundle's name.
    pub fn id(&self) -> &str {
        self.bundle.id()
    }

    /// Its name among rules.
    pub fn rule_name(&self) -> RuleName {
        self.bundle.rule_name()
    }

    /// Whether what it says counts, as long as it can decide.
    pub fn counts(&self) -> bool {
        self.terms.counts
    }

    /// Decides, where that takes next to no time. Whatever takes more is asked again where it
    /// keeps nobody waiting: a decision has no effects, so asking twice does no harm.
    pub fn at_once(&self, input: &serde_json::Value) -> Option<Decision> {
        let decision = self.bundle.decide(input, QUICK);
        let is_slow = matches!(
            decision,
            Decision::Failed(Failure::OutOfTime | Failure::OutOfSteps)
        );
        (!is_slow).then_some(decision)
    }

    /// Decides in all the time there is for it. Blocks for as long.
    pub fn at_length(&self, input: &serde_json::Value) -> Decision {
        self.bundle.decide(input, self.terms.budget)
    }

    /// What follows from a decision.
    pub fn understand(&self, decision: Decision) -> Outcome {
        let deny = |reason: Reason| Denial::new(reason, self.rule_name());
        match decision {
            Decision::Allow(_) => Outcome::Pass,
            Decision::Modify { outputs, said } => Outcome::Change { outputs, said },
            Decision::Ask(said) => Outcome::Ask(said),
            Decision::Deny(said) => Outcome::Deny(said.told(deny(Reason::RegoDenied))),
            Decision::Undefined => {
                let because = format!("{} is undefined here", self.bundle.rule());
                Outcome::Deny(deny(Reason::RegoDenied).because(because))
            }
            Decision::Failed(failure) => {
                Outcome::Deny(deny(Reason::RegoError).because(failure.to_string()))
            }
        }
    }

    /// Whether a refusal by this bundle decides: it is not there to log, nor did it fail where
    /// the operator lets failures pass. None stands for any other outcome.
    pub fn decides(&self, refusal: Option<&Denial>) -> bool {
        let failed = refusal.is_some_and(|denial| denial.reason == Reason::RegoError);
        self.terms.counts && !(failed && self.terms.fail_open)
    }

    /// Counts a failure. How many there were, where that is worth a line of the log: an agent
    /// can make a policy fail as often as it likes.
    pub fn count_failure(&self) -> Option<u64> {
        let failures = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
        failures.is_power_of_two().then_some(failures)
    }
}

#[cfg(test)]
mod tests;
