//! The operator's policy bundles for one entrypoint, and their evaluation.
//!
//! A bundle is evaluated on the spot where that takes next to no time, and on a blocking thread
//! otherwise. Bundles are asked in the order of the settings, each about what the ones before it
//! left. A refusal ends it; a question does not, because a later bundle may refuse. A bundle in
//! mode `log` decides nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use config::Settings;
use config::bundle::{self, BundleReadError, LoadedBundles};
use policy::reason::Reason;
use policy::rego::policy_bundle::{Outcome, PolicyBundle};
use policy::rego::{Decision, Failure, Said};
use policy::verdict::{Denial, Digest, Edits, Modification, RuleName, Verdict, Word};
use serde_json::{Map, Value};
use tokio::sync::Semaphore;

use crate::question::{Asked, digest};

/// Slow evaluations at the same time.
const MAX_SLOW: usize = 4;

/// The bundles for one entrypoint.
#[derive(Debug)]
pub struct Bundles {
    judges: Vec<Arc<PolicyBundle>>,
    missing: Vec<String>,
    slow: Semaphore,
}

impl Default for Bundles {
    fn default() -> Self {
        Self {
            judges: Vec::new(),
            missing: Vec::new(),
            slow: Semaphore::new(MAX_SLOW),
        }
    }
}

/// What policies report to the caller beside their decisions.
pub type Notes = Map<String, Value>;

/// A message that bundles decide about, and may change where its kind allows that.
#[async_trait]
pub trait BundleSubject: Send + Sync {
    /// What the policies read under `input`.
    fn input(&self) -> &Arc<Value>;

    /// What a question about it is about.
    fn digest(&self) -> Digest;

    /// Whether an evaluation takes too long for an async thread.
    fn is_large(&self) -> bool {
        false
    }

    /// The content as a policy wants it; none where that changes nothing.
    async fn propose(
        &self,
        rule: RuleName,
        outputs: Value,
        said: Said,
    ) -> Result<Option<String>, Denial>;

    /// Takes proposed content over, for the bundles that follow.
    async fn accept(&mut self, content: String) -> Result<(), Denial>;

    /// The content, where it is another than it was at first.
    fn changed(&self) -> Result<Option<String>, Denial>;
}

/// Facts that no policy can change.
#[derive(Debug)]
pub struct FixedInput {
    /// What the policies read.
    pub input: Arc<Value>,
    /// The fields that a question is about; empty for all.
    about: &'static [&'static str],
}

impl FixedInput {
    /// A request: a question is about where it goes and what it does there, and not about its
    /// headers.
    pub(crate) fn request(input: Value) -> Self {
        Self::request_again(Arc::new(input))
    }

    /// A request that was decided about before.
    pub(crate) fn request_again(input: Arc<Value>) -> Self {
        let about = &[
            "kind", "sandbox", "method", "scheme", "host", "port", "raw_path",
        ];
        Self { input, about }
    }

    /// Facts that count as a whole.
    pub(crate) fn whole(input: Value) -> Self {
        let (input, about) = (Arc::new(input), &[][..]);
        Self { input, about }
    }
}

#[async_trait]
impl BundleSubject for FixedInput {
    fn input(&self) -> &Arc<Value> {
        &self.input
    }

    fn digest(&self) -> Digest {
        if self.about.is_empty() {
            return digest([self.input.to_string().as_bytes()]);
        }
        let field = |field: &&str| self.input.get(*field).map(Value::to_string);
        let fields = self.about.iter().map(field).map(Option::unwrap_or_default);
        let fields: Vec<String> = fields.collect();
        digest(fields.iter().map(String::as_bytes))
    }

    async fn propose(
        &self,
        rule: RuleName,
        _: Value,
        said: Said,
    ) -> Result<Option<String>, Denial> {
        Err(cannot_change(rule, said))
    }

    async fn accept(&mut self, _: String) -> Result<(), Denial> {
        Ok(())
    }

    fn changed(&self) -> Result<Option<String>, Denial> {
        Ok(None)
    }
}

fn cannot_change(rule: RuleName, said: Said) -> Denial {
    let because = "the policy wants the request changed, which the gate cannot do";
    said.told(Denial::new(Reason::RegoDenied, rule))
        .because(because)
}

/// What is recorded of an evaluation of all bundles.
#[derive(Clone, Debug, Default)]
pub struct BundleRun {
    /// The last bundle whose decision counted, and its rule.
    pub decided_by: Option<(String, RuleName)>,
    /// Every evaluation, in order.
    pub evaluations: Vec<Evaluation>,
    /// Decisions that were only logged.
    pub logged: Vec<LoggedDecision>,
    /// `metadata` of the decisions that counted.
    pub notes: Notes,
    /// The sentence of the last decision that counted and has one.
    pub reason: Option<String>,
}

/// One evaluation of one bundle.
#[derive(Clone, Debug)]
pub struct Evaluation {
    /// The bundle.
    pub bundle: String,
    /// The action, as metrics name it.
    pub action: &'static str,
    /// The kind of failure, as metrics name it.
    pub failure: Option<&'static str>,
    /// How long it took.
    pub took: Duration,
}

/// A decision that was only logged: of a bundle in mode `log`, or a failure that passes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoggedDecision {
    /// The bundle.
    pub bundle: String,
    /// Its rule.
    pub rule: RuleName,
    /// What it would have decided.
    pub verdict: Word,
    /// Why.
    pub reason: Option<Reason>,
}

impl Bundles {
    /// Reads the bundles of `settings` for `entrypoint`. Blocks. A bundle that is missing is left
    /// out with a warning, unless it is required; one that cannot be used is an error.
    pub fn load(settings: &Settings, entrypoint: &str) -> Result<Self, BundleReadError> {
        let LoadedBundles { judges, missing } = bundle::judges(&settings.policies, entrypoint)?;
        for problem in &missing {
            tracing::warn!(%problem, "a policy bundle is missing and judges nothing");
        }
        Ok(Self {
            judges,
            missing: missing.iter().map(ToString::to_string).collect(),
            ..Self::default()
        })
    }

    /// Whether there is no bundle.
    pub fn is_empty(&self) -> bool {
        self.judges.is_empty()
    }

    /// Whether some bundle decides, and does not only log.
    pub fn is_enforced(&self) -> bool {
        self.judges.iter().any(|judge| judge.counts())
    }

    /// Bundles that are configured and were left out, and why.
    pub fn missing(&self) -> &[String] {
        &self.missing
    }

    /// Evaluates every bundle up to the first that refuses. `rule` is that of the check before;
    /// questions are added to `asked`.
    pub(crate) async fn run(
        &self,
        subject: &mut dyn BundleSubject,
        rule: RuleName,
        asked: &mut Asked,
    ) -> (Verdict, BundleRun) {
        let mut run = BundleRun::default();
        for judge in &self.judges {
            let begun = Instant::now();
            let decision = self.evaluate(judge, &*subject).await;
            run.evaluations.push(evaluation(judge, &decision, begun));
            let (noted, reason) = (decision.metadata().cloned(), decision.message());
            let reason = reason.map(str::to_owned);
            let rule = judge.rule_name();
            let step = match understand(judge, decision) {
                Outcome::Pass => Step::Pass,
                Outcome::Change { outputs, said } => {
                    match subject.propose(rule.clone(), outputs, said).await {
                        Ok(None) => Step::Pass,
                        Ok(Some(content)) => Step::Change(content),
                        Err(denial) => Step::Deny(denial),
                    }
                }
                Outcome::Ask(said) => Step::Ask(said),
                Outcome::Deny(denial) => Step::Deny(denial),
            };
            if !judge.decides(step.refusal()) {
                run.logged.extend(step.logged(judge));
                continue;
            }
            run.notes.extend(noted.into_iter().flatten());
            run.reason = reason.or(run.reason.take());
            run.decided_by = Some((judge.id().to_owned(), rule.clone()));
            match step {
                Step::Pass => {}
                Step::Change(content) => {
                    if let Err(denial) = subject.accept(content).await {
                        return (denial.into(), run);
                    }
                }
                Step::Ask(said) => asked.raise_policy(rule, said, subject.digest()),
                Step::Deny(denial) => return (denial.into(), run),
            }
        }
        let verdict = match subject.changed() {
            Ok(None) => Verdict::Allow { rule },
            Ok(Some(content)) => {
                let rule = run
                    .decided_by
                    .as_ref()
                    .map_or(rule, |(_, rule)| rule.clone());
                let edits = Edits::Json(content);
                Verdict::Modify(Box::new(Modification { rule, edits }))
            }
            Err(denial) => denial.into(),
        };
        (verdict, run)
    }

    /// Evaluates every bundle that counts, on this thread, about facts that were recorded when
    /// they were decided first. Blocks for as long as the bundles may take.
    pub(crate) fn run_blocking(
        &self,
        subject: &FixedInput,
        asked: &mut Asked,
    ) -> Result<(), Denial> {
        for judge in self.judges.iter().filter(|judge| judge.counts()) {
            let rule = judge.rule_name();
            let denial = match understand(judge, judge.at_length(&subject.input)) {
                Outcome::Pass => continue,
                Outcome::Ask(said) => {
                    asked.raise_policy(rule, said, subject.digest());
                    continue;
                }
                Outcome::Change { said, .. } => cannot_change(rule, said),
                Outcome::Deny(denial) => denial,
            };
            if judge.decides(Some(&denial)) {
                return Err(denial);
            }
        }
        Ok(())
    }

    async fn evaluate(&self, judge: &Arc<PolicyBundle>, subject: &dyn BundleSubject) -> Decision {
        let input = subject.input();
        if !subject.is_large()
            && let Some(decision) = judge.at_once(input)
        {
            return decision;
        }
        // The semaphore is never closed.
        let permit = self.slow.acquire().await;
        let (judge, input) = (Arc::clone(judge), Arc::clone(input));
        let decided = tokio::task::spawn_blocking(move || judge.at_length(&input)).await;
        drop(permit);
        decided.unwrap_or_else(|error| Decision::Failed(Failure::Error(error.to_string())))
    }
}

/// What one bundle makes of the subject.
enum Step {
    Pass,
    Change(String),
    Ask(Said),
    Deny(Denial),
}

impl Step {
    fn refusal(&self) -> Option<&Denial> {
        match self {
            Step::Deny(denial) => Some(denial),
            Step::Pass | Step::Change(_) | Step::Ask(_) => None,
        }
    }

    fn logged(self, judge: &PolicyBundle) -> Option<LoggedDecision> {
        let (verdict, reason) = match self {
            Step::Pass => return None,
            Step::Change(_) => (Word::Modify, None),
            Step::Ask(_) => (Word::Deny, Some(Reason::AskUnattended)),
            Step::Deny(denial) => (Word::Deny, Some(denial.reason)),
        };
        Some(LoggedDecision {
            bundle: judge.id().to_owned(),
            rule: judge.rule_name(),
            verdict,
            reason,
        })
    }
}

fn understand(judge: &PolicyBundle, decision: Decision) -> Outcome {
    if let Decision::Failed(failure) = &decision
        && let Some(failures) = judge.count_failure()
    {
        let bundle = judge.id();
        tracing::error!(bundle, %failure, failures, "a policy bundle could not decide");
    }
    judge.understand(decision)
}

fn evaluation(judge: &PolicyBundle, decision: &Decision, begun: Instant) -> Evaluation {
    let action = match decision {
        Decision::Allow(_) => "allow",
        Decision::Deny(_) | Decision::Undefined => "block",
        Decision::Ask(_) => "ask",
        Decision::Modify { .. } => "redact",
        Decision::Failed(_) => "error",
    };
    let failure = match decision {
        Decision::Failed(Failure::OutOfTime | Failure::OutOfSteps) => Some("timeout"),
        Decision::Failed(Failure::Error(_)) => Some("error"),
        Decision::Failed(Failure::Shape(_)) => Some("shape"),
        _ => None,
    };
    Evaluation {
        bundle: judge.id().to_owned(),
        action,
        failure,
        took: begun.elapsed(),
    }
}
