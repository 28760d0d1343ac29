//! Decides about one message, which may have to wait for an operator's answer.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use decide::bundles::BundleRun;
use decide::decision::decide;
use decide::hold::{Attempt, HeldSubject};
use decide::subject::{McpFacts, Mode, Subject};
use futures_util::future::{pending, select_all};
use policy::answer::{ApprovalAnswer, ApprovalAnswers};
use policy::id::SandboxId;
use policy::reason::Reason;
use policy::verdict::{Denial, Digest, Edits, Question, Verdict};
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::message::PolicyMessage;
use super::{Governance, GovernedMessage, Moment, Ruling, cx, input, new_record, sanitise};
use crate::caller::McpCaller;
use crate::hold_terms::{CallApprovals, HoldEnd, HoldTerms};

/// The most messages of one caller that wait at a time.
const MAX_HELD_BY_CALLER: usize = 64;

/// The most messages that wait at a time.
const MAX_HELD: usize = 1024;

/// The answer for a question that an earlier approval covers.
const ALLOW_ONCE: ApprovalAnswer = ApprovalAnswer::Allow { until: None };

/// A message and the state of its decision, over several attempts.
pub(super) struct HeldMessage<'a> {
    governance: &'a Governance,
    message: &'a GovernedMessage<'a>,
    terms: &'a HoldTerms<'a>,
    /// The name of the tool or prompt, once the message was parsed.
    pub(super) operation: Option<String>,
    /// The decisions of the bundles in the last attempt.
    pub(super) run: BundleRun,
    /// The operator's approvals of this message, with those of earlier messages that apply.
    pub(super) approvals: CallApprovals,
    /// Questions that earlier approvals have answered.
    inherited: Vec<Digest>,
    /// The current question to the operator, or the last one.
    question: Option<Box<Question>>,
    /// The slot among the waiting messages; held until the message is decided.
    slot: Option<HeldSlot<'a>>,
    waiting_since: Option<Instant>,
    waited: Duration,
    deadline: Option<Instant>,
}

impl<'a> HeldMessage<'a> {
    pub(super) fn new(
        governance: &'a Governance,
        message: &'a GovernedMessage<'a>,
        terms: &'a HoldTerms<'a>,
    ) -> Self {
        Self {
            governance,
            message,
            terms,
            operation: None,
            run: BundleRun::default(),
            approvals: CallApprovals::default(),
            inherited: Vec::new(),
            question: None,
            slot: None,
            waiting_since: None,
            waited: Duration::ZERO,
            deadline: None,
        }
    }

    /// Ends the wait and releases the slot. Returns how long the message has waited, if it did.
    pub(super) fn finish(&mut self) -> Option<Duration> {
        self.stop_waiting();
        self.slot.take().map(|_| self.waited)
    }

    fn stop_waiting(&mut self) {
        let since = self.waiting_since.take();
        self.waited += since.map_or(Duration::ZERO, |since| since.elapsed());
    }

    /// Adds the bundles' evaluations of one attempt to the metrics.
    fn count_evaluations(&self) {
        let metrics = self.governance.metrics();
        for evaluation in &self.run.evaluations {
            metrics.record_decision(&evaluation.bundle, evaluation.action, evaluation.duration);
            if let Some(kind) = evaluation.failure {
                metrics.record_policy_failure(&evaluation.bundle, kind);
            }
        }
    }
}

impl HeldSubject for HeldMessage<'_> {
    type Allowed = Ruling;
    type Refused = Denial;

    async fn attempt(&mut self, answers: &ApprovalAnswers) -> Result<Attempt<Ruling>, Denial> {
        self.stop_waiting();
        self.run = BundleRun::default();
        if self.slot.is_some()
            && let Some(check) = self.terms.recheck
        {
            check()?;
        }
        let (governance, message) = (self.governance, self.message);
        let snapshot = governance.0.policy.load();
        let bundles = match message.moment {
            Moment::Before | Moment::After => &snapshot.calls,
            Moment::Elicitation => &snapshot.elicitations,
        };
        if bundles.is_empty() {
            return Ok(Attempt::Done(Ruling::Pass));
        }
        let mut parsed = PolicyMessage::read(message, &governance.0.patterns).await?;
        self.operation = Some(sanitise(parsed.name())).filter(|name| !name.is_empty());
        let facts = McpFacts {
            stored: None,
            tool: Ok(()),
            message: Some(&mut parsed),
        };
        let subject = match message.moment {
            Moment::Before => Subject::McpCall(facts),
            Moment::After => Subject::McpResult(facts),
            Moment::Elicitation => Subject::McpQuestion(facts),
        };
        let mut all;
        let answers = if self.inherited.is_empty() {
            answers
        } else {
            all = answers.clone();
            for digest in &self.inherited {
                all.add(*digest, ALLOW_ONCE);
            }
            &all
        };
        let deciding = decide(subject, Mode::Live, cx(&snapshot, answers));
        let decided = deciding.wait().await;
        self.run = decided.bundles.map(|run| *run).unwrap_or_default();
        self.count_evaluations();
        match decided.verdict {
            Verdict::Allow { .. } => Ok(Attempt::Done(Ruling::Pass)),
            Verdict::Modify(change) => {
                let Edits::Json(text) = change.edits;
                let raw = RawValue::from_string(text);
                let raw = raw.map_err(|error| input::malformed_denial(&error.to_string()))?;
                Ok(Attempt::Done(Ruling::Modify(raw)))
            }
            Verdict::Deny(denial) => Err(*denial),
            Verdict::Ask(question) if self.terms.has_answer(&question) => {
                self.approvals.add(&question, &ALLOW_ONCE);
                self.inherited.push(question.digest);
                Ok(Attempt::Stale)
            }
            Verdict::Ask(question) => {
                self.question = Some(question.clone());
                Ok(Attempt::Ask(question))
            }
        }
    }

    fn refuse(&self, denial: Denial) -> Denial {
        denial
    }

    fn snapshot(&self) -> u64 {
        self.governance.0.policy.load().number
    }

    /// The message is already in memory. From now on it is recorded even if it is dropped.
    async fn secure(&mut self) -> Result<(), Denial> {
        if self.slot.is_none() {
            self.slot = Some(self.governance.0.held_counts.reserve(self.message.caller)?);
        }
        let now = Instant::now();
        self.waiting_since = Some(now);
        if self.deadline.is_none() {
            self.deadline = self.terms.limit.map(|limit| now + limit);
        }
        if let Some(flag) = self.terms.flag {
            flag.set();
        }
        Ok(())
    }

    async fn ended(&mut self) -> Denial {
        let ends = self.terms.ends;
        let cancelled = async {
            match ends.is_empty() {
                true => pending().await,
                false => select_all(ends.iter().map(|(_, end)| Box::pin(end.cancelled()))).await,
            };
            let end = ends.iter().find(|(_, end)| end.is_cancelled());
            end.map_or(HoldEnd::Withdrawn, |(end, _)| *end).denial()
        };
        let too_long = async {
            match self.deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => pending().await,
            }
            let question = self.question.as_deref();
            question.map_or_else(
                || Denial::new(Reason::AskTimeout, "ask"),
                |question| question.denial(Reason::AskTimeout),
            )
        };
        tokio::select! {
            denial = cancelled => denial,
            denial = too_long => denial,
        }
    }

    /// An approval is valid for this call only: there is no sandbox state to store it in.
    fn grant(&mut self, _: Digest, answer: &ApprovalAnswer) {
        if let Some(question) = &self.question {
            self.approvals.add(question, answer);
        }
    }
}

/// A waiting message is dropped undecided when its sender disconnects; this is recorded.
impl Drop for HeldMessage<'_> {
    fn drop(&mut self) {
        let Some(waited) = self.finish() else {
            return;
        };
        let denial = HoldEnd::Withdrawn.denial();
        let mut event = new_record(self.message);
        event.operation = self.operation.take().or(event.operation);
        super::add_hold(&mut event, waited);
        super::add_denial(&mut event, &denial);
        self.governance.record_later(event, self.message.moment);
    }
}

/// The number of waiting messages by agent and sandbox.
#[derive(Debug, Default)]
pub(super) struct HeldCounts(Mutex<HashMap<CallerKey, usize>>);

type CallerKey = (String, Option<SandboxId>);

impl HeldCounts {
    /// Reserves a slot for a message of `caller`. Refused if too many messages wait.
    fn reserve(&self, caller: &McpCaller) -> Result<HeldSlot<'_>, Denial> {
        let key = (caller.agent.clone(), caller.sandbox.clone());
        let mut counts = self.lock();
        let own = counts.get(&key).copied().unwrap_or_default();
        if own >= MAX_HELD_BY_CALLER || counts.values().sum::<usize>() >= MAX_HELD {
            let denial = Denial::new(Reason::RateLimited, "mcp:hold");
            return Err(denial.with_message(
                "Too many messages are waiting for an operator's answer. Try again later.",
            ));
        }
        counts.insert(key.clone(), own + 1);
        Ok(HeldSlot { counts: self, key })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<CallerKey, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The slot of one waiting message.
struct HeldSlot<'a> {
    counts: &'a HeldCounts,
    key: CallerKey,
}

impl Drop for HeldSlot<'_> {
    fn drop(&mut self) {
        let mut counts = self.counts.lock();
        if let Some(count) = counts.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.key);
            }
        }
    }
}
