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
pub struct Judge {
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

/// What a policy wants changed.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// How, as the policy puts it.
    pub outputs: serde_json::Value,
    /// Why.
    pub said: Said,
}

impl Judge {
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

    /// What follows: it passes, it passes with changes, or it does not.
    pub fn understand(&self, decision: Decision) -> Result<Option<Change>, Denial> {
        let deny = |reason: Reason| Denial::new(reason, self.rule_name());
        match decision {
            Decision::Allow(_) => Ok(None),
            Decision::Modify { outputs, said } => Ok(Some(Change { outputs, said })),
            Decision::Deny(said) => Err(said.told(deny(Reason::RegoDenied))),
            Decision::Undefined => {
                let because = format!("{} is undefined here", self.bundle.rule());
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
            Decision::Failed(failure) => Err(deny(Reason::RegoError).because(failure.to_string())),
        }
    }

    /// Whether what it says decides: it is not there to log, nor did it fail where the
    /// operator lets failures pass.
    pub fn decides<T>(&self, outcome: &Result<T, Denial>) -> bool {
        let failed = matches!(outcome, Err(denial) if denial.reason == Reason::RegoError);
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
