//! A message that is decided, and may have to wait for an operator's answer in between.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use decide::bundles::BundleRun;
use decide::decision::decide;
use decide::hold::{Attempt, Held};
use decide::subject::{McpFacts, Mode, Subject};
use futures_util::future::{pending, select_all};
use policy::answer::{Answer, Answers};
use policy::id::SandboxId;
use policy::reason::Reason;
use policy::verdict::{Denial, Digest, Edits, Question, Verdict};
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::message::PolicyMessage;
use super::{Asked, Governance, Moment, Ruling, clean, cx, input, record};
use crate::caller::Caller;
use crate::hold_terms::{CallApprovals, HoldEnd, HoldTerms};

/// Messages of one caller that wait at a time.
const MAX_HELD_BY_CALLER: usize = 64;

/// Messages that wait at a time.
const MAX_HELD: usize = 1024;

/// The answer that a message inherits.
const ALLOW_ONCE: Answer = Answer::Allow { until: None };

/// One attempt after another to have a message decided.
pub(super) struct HeldMessage<'a> {
    governance: &'a Governance,
    asked: &'a Asked<'a>,
    terms: &'a HoldTerms<'a>,
    /// The name of the tool or prompt, once the message was read.
    pub(super) operation: Option<String>,
    /// What the bundles decided in the last attempt.
    pub(super) run: BundleRun,
    /// The operator's approvals of this message, also those that it inherited.
    pub(super) approvals: CallApprovals,
    /// Questions that earlier answers have answered.
    inherited: Vec<Digest>,
    /// The question it waits for, or waited for last.
    question: Option<Box<Question>>,
    /// Its place among the messages that wait; kept until it is decided.
    place: Option<HeldPlace<'a>>,
    waits_since: Option<Instant>,
    waited: Duration,
    deadline: Option<Instant>,
}

impl<'a> HeldMessage<'a> {
    pub(super) fn new(
        governance: &'a Governance,
        asked: &'a Asked<'a>,
        terms: &'a HoldTerms<'a>,
    ) -> Self {
        Self {
            governance,
            asked,
            terms,
            operation: None,
            run: BundleRun::default(),
            approvals: CallApprovals::default(),
            inherited: Vec::new(),
            question: None,
            place: None,
            waits_since: None,
            waited: Duration::ZERO,
            deadline: None,
        }
    }

    /// Notes that the message is decided. How long it has waited; none where it has not.
    pub(super) fn finish(&mut self) -> Option<Duration> {
        self.stop_waiting();
        self.place.take().map(|_| self.waited)
    }

    fn stop_waiting(&mut self) {
        let since = self.waits_since.take();
        self.waited += since.map_or(Duration::ZERO, |since| since.elapsed());
    }

    /// Counts what the bundles did in one attempt.
    fn count(&self) {
        let metrics = self.governance.metrics();
        for one in &self.run.evaluations {
            metrics.decided(&one.bundle, one.action, one.took);
            if let Some(kind) = one.failure {
                metrics.failed(&one.bundle, kind);
            }
        }
    }
}

impl Held for HeldMessage<'_> {
    type Allowed = Ruling;
    type Refused = Denial;

    async fn attempt(&mut self, answers: &Answers) -> Result<Attempt<Ruling>, Denial> {
        self.stop_waiting();
        self.run = BundleRun::default();
        if self.place.is_some()
            && let Some(check) = self.terms.head
        {
            check()?;
        }
        let (governance, asked) = (self.governance, self.asked);
        let snapshot = governance.0.policy.load();
        let bundles = match asked.moment {
            Moment::Before | Moment::After => &snapshot.calls,
            Moment::Elicitation => &snapshot.elicitations,
        };
        if bundles.is_empty() {
            return Ok(Attempt::Done(Ruling::Pass));
        }
        let mut message = PolicyMessage::read(asked, &governance.0.patterns).await?;
        self.operation = Some(clean(message.name())).filter(|name| !name.is_empty());
        let facts = McpFacts {
            stored: None,
            tool: Ok(()),
            message: Some(&mut message),
        };
        let subject = match asked.moment {
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
        self.count();
        match decided.verdict {
            Verdict::Allow { .. } => Ok(Attempt::Done(Ruling::Pass)),
            Verdict::Modify(change) => {
                let Edits::Json(text) = change.edits;
                let raw = RawValue::from_string(text);
                let raw = raw.map_err(|error| input::unreadable(&error.to_string()))?;
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

    /// The message is in memory already. From here on it has a record, whatever becomes of it.
    async fn secure(&mut self) -> Result<(), Denial> {
        if self.place.is_none() {
            self.place = Some(self.governance.0.held.enter(self.asked.caller)?);
        }
        let now = Instant::now();
        self.waits_since = Some(now);
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
                |question| question.refused(Reason::AskTimeout),
            )
        };
        tokio::select! {
            denial = cancelled => denial,
            denial = too_long => denial,
        }
    }

    /// A tool call has no state of a sandbox in which an answer could hold for longer.
    fn grant(&mut self, _: Digest, answer: &Answer) {
        if let Some(question) = &self.question {
            self.approvals.add(question, answer);
        }
    }
}

/// A message that waited and is dropped undecided has lost its sender: the record says so.
impl Drop for HeldMessage<'_> {
    fn drop(&mut self) {
        let Some(waited) = self.finish() else {
            return;
        };
        let denial = HoldEnd::Withdrawn.denial();
        let mut event = record(self.asked);
        event.operation = self.operation.take().or(event.operation);
        super::note_hold(&mut event, waited);
        super::note_denial(&mut event, &denial);
        self.governance.record_later(event, self.asked.moment);
    }
}

/// How many messages wait, by agent and sandbox.
#[derive(Debug, Default)]
pub(super) struct HeldCounts(Mutex<HashMap<CallerKey, usize>>);

type CallerKey = (String, Option<SandboxId>);

impl HeldCounts {
    /// A place for a message of `caller`, until it is dropped. Refused where too many wait.
    fn enter(&self, caller: &Caller) -> Result<HeldPlace<'_>, Denial> {
        let key = (caller.agent.clone(), caller.sandbox.clone());
        let mut counts = self.lock();
        let own = counts.get(&key).copied().unwrap_or_default();
        if own >= MAX_HELD_BY_CALLER || counts.values().sum::<usize>() >= MAX_HELD {
            let denial = Denial::new(Reason::RateLimited, "mcp:hold");
            return Err(denial.saying("Too many messages wait for an operator's answer."));
        }
        counts.insert(key.clone(), own + 1);
        Ok(HeldPlace { counts: self, key })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<CallerKey, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of one message among those that wait.
struct HeldPlace<'a> {
    counts: &'a HeldCounts,
    key: CallerKey,
}

impl Drop for HeldPlace<'_> {
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
