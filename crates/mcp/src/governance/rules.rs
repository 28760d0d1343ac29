//! The bundles that judge tool calls, and what follows from what they say.

use std::sync::Arc;

use config::Settings;
use config::bundle::{self, BadBundle, Found};
use config::section::policies::{ELICITATIONS, TOOL_CALLS};
use policy::reason::Reason;
use policy::redaction::BadRedaction;
use policy::rego::judge::Judge;
use policy::rego::{Decision, Failure};
use policy::verdict::Denial;
use serde_json::Value;
use tokio::sync::Semaphore;

use super::Moment;
use super::input::Subject;

/// Slow decisions that are made at the same time.
const MOST_SLOW: usize = 4;

/// The bundles of one configuration.
#[derive(Debug)]
pub struct Rules {
    calls: Vec<Arc<Judge>>,
    elicitations: Vec<Arc<Judge>>,
    tools: Vec<String>,
    /// Bundles that are configured and were left out, and why.
    missing: Vec<String>,
    slow: Semaphore,
}

/// No bundle: everything passes.
impl Default for Rules {
    fn default() -> Self {
        Self {
            calls: Vec::new(),
            elicitations: Vec::new(),
            tools: Vec::new(),
            missing: Vec::new(),
            slow: Semaphore::new(MOST_SLOW),
        }
    }
}

impl Rules {
    /// Reads the bundles of `settings` for tool calls. Blocks. One that is not there is left
    /// out, with a warning, unless it is required; one that cannot be used is an error.
    pub fn load(settings: &Settings) -> Result<Self, BadBundle> {
        let mut left_out = Vec::new();
        let mut judges = |entrypoint: &str| {
            let Found { judges, missing } = bundle::judges(&settings.policies, entrypoint)?;
            for problem in missing {
                tracing::warn!(%problem, "a policy bundle is missing and judges nothing");
                left_out.push(problem.to_string());
            }
            Ok(judges)
        };
        let (calls, elicitations) = (judges(TOOL_CALLS)?, judges(ELICITATIONS)?);
        let tools = settings.tools.iter();
        Ok(Self {
            calls,
            elicitations,
            tools: tools.map(|tool| tool.name.clone()).collect(),
            missing: left_out,
            ..Self::default()
        })
    }

    /// Whether there is nobody to ask.
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty() && self.elicitations.is_empty()
    }

    /// Bundles that are configured and were left out, and why.
    pub(super) fn missing(&self) -> &[String] {
        &self.missing
    }

    /// The tools that are configured.
    pub(super) fn tools(&self) -> &[String] {
        &self.tools
    }

    pub(super) fn judges(&self, moment: Moment) -> &[Arc<Judge>] {
        match moment {
            Moment::Before | Moment::After => &self.calls,
            Moment::Elicitation => &self.elicitations,
        }
    }

    /// What a bundle says.
    pub(super) async fn ask(&self, judge: &Arc<Judge>, subject: &Subject<'_>) -> Decision {
        if !subject.large
            && let Some(decision) = judge.at_once(&subject.input)
        {
            return decision;
        }
        // The semaphore is never closed.
        let place = self.slow.acquire().await;
        let (judge, input) = (Arc::clone(judge), Arc::clone(&subject.input));
        let decided = tokio::task::spawn_blocking(move || judge.at_length(&input)).await;
        drop(place);
        decided.unwrap_or_else(|error| Decision::Failed(Failure::Error(error.to_string())))
    }
}

/// What follows: it passes, it passes with changes, or it does not.
pub(super) fn understand(judge: &Judge, decision: Decision) -> Result<Option<Value>, Denial> {
    if let Decision::Failed(failure) = &decision
        && let Some(failures) = judge.count_failure()
    {
        let bundle = judge.id();
        tracing::error!(bundle, %failure, failures, "a policy bundle could not decide");
    }
    let change = judge.understand(decision)?;
    Ok(change.map(|change| change.outputs))
}

/// A policy that wants something redacted has not allowed it as it is, so that this is a
/// refusal even where failures pass.
pub(super) fn cannot_redact(judge: &Judge, fault: &BadRedaction) -> Denial {
    Denial::new(Reason::RegoDenied, judge.rule_name())
        .saying("A policy wants this redacted, and that cannot be done.")
        .because(fault.to_string())
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
