//! The operator's policy bundles for one entrypoint, and their evaluation.
//!
//! A quick evaluation runs on the async thread, a longer one on a blocking thread. Bundles are
//! evaluated in the order of the settings, each with the content as changed by earlier bundles.
//! A refusal ends the evaluation; a question does not, because a later bundle may refuse. Decisions
//! of a bundle in mode `log` are only logged.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use config::Settings;
use config::bundle::{self, BundleReadError, LoadedBundles};
use policy::reason::Reason;
use policy::rego::policy_bundle::{BundleOutcome, PolicyBundle};
use policy::rego::{Decision, DecisionDetails, EvaluationError};
use policy::verdict::{Denial, Digest, Edits, Modification, RuleName, Verdict, VerdictKind};
use serde_json::{Map, Value};
use tokio::sync::Semaphore;

use crate::question::{RaisedQuestions, digest};

/// Maximum number of concurrent evaluations on blocking threads.
const MAX_BLOCKING_EVALUATIONS: usize = 4;

/// The bundles for one entrypoint.
#[derive(Debug)]
pub struct Bundles {
    bundles: Vec<Arc<PolicyBundle>>,
    missing: Vec<String>,
    blocking_permits: Semaphore,
}

impl Default for Bundles {
    fn default() -> Self {
        Self {
            bundles: Vec::new(),
            missing: Vec::new(),
            blocking_permits: Semaphore::new(MAX_BLOCKING_EVALUATIONS),
        }
    }
}

/// The merged `metadata` of the policies' decisions.
pub type Notes = Map<String, Value>;

/// A subject that bundles decide about, and that they may change if it is a message of a tool.
#[async_trait]
pub trait BundleSubject: Send + Sync {
    /// The `input` document of the policies.
    fn input(&self) -> &Arc<Value>;

    /// The digest of the values that identify a question about the subject.
    fn digest(&self) -> Digest;

    /// Whether an evaluation takes too long for an async thread.
    fn is_large(&self) -> bool {
        false
    }

    /// Applies a policy's change to a copy of the content and returns the copy; none if the content
    /// stays the same.
    async fn propose(
        &self,
        rule: RuleName,
        outputs: Value,
        details: DecisionDetails,
    ) -> Result<Option<String>, Denial>;

    /// Replaces the content by content that `propose` returned, for the next bundles.
    async fn accept(&mut self, content: String) -> Result<(), Denial>;

    /// The content, if it was changed.
    fn changed(&self) -> Result<Option<String>, Denial>;
}

/// The input of a subject that no policy can change: a request, a connection or a push.
#[derive(Debug)]
pub struct FixedInput {
    /// The `input` document of the policies.
    pub input: Arc<Value>,
    /// The fields that identify a question; empty if all fields do.
    identifying_fields: &'static [&'static str],
}

impl FixedInput {
    /// The input for a request. A question is identified by target and method, not by headers.
    pub(crate) fn for_request(input: Value) -> Self {
        Self::for_recheck(Arc::new(input))
    }

    /// The recorded input of a request that was allowed before.
    pub(crate) fn for_recheck(input: Arc<Value>) -> Self {
        let identifying_fields = &[
            "kind", "sandbox", "method", "scheme", "host", "port", "raw_path",
        ];
        Self {
            input,
            identifying_fields,
        }
    }

    /// The input for a push. A question is identified by all fields.
    pub(crate) fn for_push(input: Value) -> Self {
        Self {
            input: Arc::new(input),
            identifying_fields: &[],
        }
    }
}

#[async_trait]
impl BundleSubject for FixedInput {
    fn input(&self) -> &Arc<Value> {
        &self.input
    }

    fn digest(&self) -> Digest {
        if self.identifying_fields.is_empty() {
            return digest([self.input.to_string().as_bytes()]);
        }
        let field = |field: &&str| self.input.get(*field).map(Value::to_string);
        let fields = self
            .identifying_fields
            .iter()
            .map(field)
            .map(Option::unwrap_or_default);
        let fields: Vec<String> = fields.collect();
        digest(fields.iter().map(String::as_bytes))
    }

    async fn propose(
        &self,
        rule: RuleName,
        _: Value,
        details: DecisionDetails,
    ) -> Result<Option<String>, Denial> {
        Err(refuse_change(rule, details))
    }

    async fn accept(&mut self, _: String) -> Result<(), Denial> {
        Ok(())
    }

    fn changed(&self) -> Result<Option<String>, Denial> {
        Ok(None)
    }
}

fn refuse_change(rule: RuleName, details: DecisionDetails) -> Denial {
    let evidence = "the policy's action is redact, but requests cannot be changed";
    details
        .apply_to(Denial::new(Reason::RegoDenied, rule))
        .with_evidence(evidence)
}

/// The record of an evaluation of all bundles.
#[derive(Clone, Debug, Default)]
pub struct BundleRun {
    /// The last bundle whose decision was enforced, and its rule.
    pub decided_by: Option<(String, RuleName)>,
    /// Every evaluation, in order.
    pub evaluations: Vec<BundleEvaluation>,
    /// Decisions that were only logged.
    pub logged: Vec<LoggedDecision>,
    /// The `metadata` of the enforced decisions.
    pub notes: Notes,
    /// The reason of the last enforced decision that has one.
    pub reason: Option<String>,
}

/// One evaluation of one bundle.
#[derive(Clone, Debug)]
pub struct BundleEvaluation {
    /// The bundle.
    pub bundle: String,
    /// The name of the action in metrics.
    pub action: &'static str,
    /// The name of the kind of failure in metrics.
    pub failure: Option<&'static str>,
    /// The duration of the evaluation.
    pub duration: Duration,
}

/// A decision that was logged and not enforced: of a bundle in mode `log`, or a failed evaluation
/// of a bundle with `fail_open`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoggedDecision {
    /// The bundle.
    pub bundle: String,
    /// The name of the bundle's rule.
    pub rule: RuleName,
    /// The verdict if the decision had been enforced.
    pub verdict: VerdictKind,
    /// The reason.
    pub reason: Option<Reason>,
}

impl Bundles {
    /// Reads the bundles of `settings` for `entrypoint`. Blocks. A missing bundle is skipped with a
    /// warning, unless it is required; an invalid bundle is an error.
    pub fn load(settings: &Settings, entrypoint: &str) -> Result<Self, BundleReadError> {
        let LoadedBundles { bundles, missing } =
            bundle::load_for_entrypoint(&settings.policies, entrypoint)?;
        for problem in &missing {
            tracing::warn!(%problem, "policy bundle is missing and was skipped");
        }
        Ok(Self {
            bundles,
            missing: missing.iter().map(ToString::to_string).collect(),
            ..Self::default()
        })
    }

    /// Whether there is no bundle.
    pub fn is_empty(&self) -> bool {
        self.bundles.is_empty()
    }

    /// Whether the decisions of some bundle are enforced, and not only logged.
    pub fn is_enforced(&self) -> bool {
        self.bundles.iter().any(|bundle| bundle.is_enforced())
    }

    /// Configured bundles that were skipped, and why.
    pub fn missing(&self) -> &[String] {
        &self.missing
    }

    /// Evaluates every bundle up to the first that refuses. `rule` is the rule that allowed the
    /// subject before the bundles; questions are added to `raised`.
    pub(crate) async fn run(
        &self,
        subject: &mut dyn BundleSubject,
        rule: RuleName,
        raised: &mut RaisedQuestions,
    ) -> (Verdict, BundleRun) {
        let mut run = BundleRun::default();
        for bundle in &self.bundles {
            let start = Instant::now();
            let decision = self.evaluate(bundle, &*subject).await;
            run.evaluations
                .push(evaluation_record(bundle, &decision, start));
            let (metadata, reason) = (decision.metadata().cloned(), decision.message());
            let reason = reason.map(str::to_owned);
            let rule = bundle.rule_name();
            let step = match outcome_of(bundle, decision) {
                BundleOutcome::Pass => Step::Pass,
                BundleOutcome::Change { outputs, details } => {
                    match subject.propose(rule.clone(), outputs, details).await {
                        Ok(None) => Step::Pass,
                        Ok(Some(content)) => Step::Change(content),
                        Err(denial) => Step::Deny(denial),
                    }
                }
                BundleOutcome::Ask(details) => Step::Ask(details),
                BundleOutcome::Deny(denial) => Step::Deny(denial),
            };
            if !bundle.is_outcome_enforced(step.refusal()) {
                run.logged.extend(step.into_logged(bundle));
                continue;
            }
            run.notes.extend(metadata.into_iter().flatten());
            run.reason = reason.or(run.reason.take());
            run.decided_by = Some((bundle.id().to_owned(), rule.clone()));
            match step {
                Step::Pass => {}
                Step::Change(content) => {
                    if let Err(denial) = subject.accept(content).await {
                        return (denial.into(), run);
                    }
                }
                Step::Ask(details) => raised.raise_policy(rule, details, subject.digest()),
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

    /// Evaluates every enforced bundle on this thread, with the input of the first decision. Blocks
    /// for up to the time limits of the bundles.
    pub(crate) fn run_blocking(
        &self,
        subject: &FixedInput,
        raised: &mut RaisedQuestions,
    ) -> Result<(), Denial> {
        for bundle in self.bundles.iter().filter(|bundle| bundle.is_enforced()) {
            let rule = bundle.rule_name();
            let denial = match outcome_of(bundle, bundle.decide_blocking(&subject.input)) {
                BundleOutcome::Pass => continue,
                BundleOutcome::Ask(details) => {
                    raised.raise_policy(rule, details, subject.digest());
                    continue;
                }
                BundleOutcome::Change { details, .. } => refuse_change(rule, details),
                BundleOutcome::Deny(denial) => denial,
            };
            if bundle.is_outcome_enforced(Some(&denial)) {
                return Err(denial);
            }
        }
        Ok(())
    }

    async fn evaluate(&self, bundle: &Arc<PolicyBundle>, subject: &dyn BundleSubject) -> Decision {
        let input = subject.input();
        if !subject.is_large()
            && let Some(decision) = bundle.decide_quickly(input)
        {
            return decision;
        }
        // `acquire` fails only for a closed semaphore, and this one is never closed.
        let permit = self.blocking_permits.acquire().await;
        let (bundle, input) = (Arc::clone(bundle), Arc::clone(input));
        let evaluated = tokio::task::spawn_blocking(move || bundle.decide_blocking(&input)).await;
        drop(permit);
        evaluated
            .unwrap_or_else(|error| Decision::Failed(EvaluationError::Error(error.to_string())))
    }
}

/// The outcome of one bundle for the subject.
enum Step {
    Pass,
    Change(String),
    Ask(DecisionDetails),
    Deny(Denial),
}

impl Step {
    fn refusal(&self) -> Option<&Denial> {
        match self {
            Step::Deny(denial) => Some(denial),
            Step::Pass | Step::Change(_) | Step::Ask(_) => None,
        }
    }

    fn into_logged(self, bundle: &PolicyBundle) -> Option<LoggedDecision> {
        let (verdict, reason) = match self {
            Step::Pass => return None,
            Step::Change(_) => (VerdictKind::Modify, None),
            Step::Ask(_) => (VerdictKind::Deny, Some(Reason::AskUnattended)),
            Step::Deny(denial) => (VerdictKind::Deny, Some(denial.reason)),
        };
        Some(LoggedDecision {
            bundle: bundle.id().to_owned(),
            rule: bundle.rule_name(),
            verdict,
            reason,
        })
    }
}

fn outcome_of(bundle: &PolicyBundle, decision: Decision) -> BundleOutcome {
    if let Decision::Failed(failure) = &decision
        && let Some(failures) = bundle.count_failure()
    {
        let bundle = bundle.id();
        tracing::error!(bundle, %failure, failures, "policy bundle evaluation failed");
    }
    bundle.outcome(decision)
}

fn evaluation_record(
    bundle: &PolicyBundle,
    decision: &Decision,
    start: Instant,
) -> BundleEvaluation {
    let action = match decision {
        Decision::Allow(_) => "allow",
        Decision::Deny(_) | Decision::Undefined => "block",
        Decision::Ask(_) => "ask",
        Decision::Modify { .. } => "redact",
        Decision::Failed(_) => "error",
    };
    let failure = match decision {
        Decision::Failed(EvaluationError::OutOfTime | EvaluationError::OutOfSteps) => {
            Some("timeout")
        }
        Decision::Failed(EvaluationError::Error(_)) => Some("error"),
        Decision::Failed(EvaluationError::Shape(_)) => Some("shape"),
        _ => None,
    };
    BundleEvaluation {
        bundle: bundle.id().to_owned(),
        action,
        failure,
        duration: start.elapsed(),
    }
}
