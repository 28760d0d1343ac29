//! Holds a subject that needs approvals: it is decided again until no question is open.
//!
//! ```text
//!   ┌──▶ attempt: newest snapshot, identity, admission, head, content
//!   │        │            │                 │
//!   │      done      rules changed      a question
//!   │                     │                 │  body stored, admission returned
//!   └─────────────────────┴─── answer ◀── wait ──▶ ended, refused
//! ```
//! A waiting subject holds no ticket of a circuit breaker and no permit of a semaphore; its body is
//! in memory or on disk. After an answer, and after each reload, the subject is decided again.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use policy::answer::{ApprovalAnswer, ApprovalAnswers};
use policy::reason::Reason;
use policy::verdict::{Denial, Digest, Question};
use tokio::time::Instant;

use crate::snapshot::CurrentPolicy;

/// Maximum number of different questions of one request.
const MAX_QUESTIONS: usize = 3;

/// Maximum number of attempts while the rules keep changing.
const MAX_ATTEMPTS: usize = 100;

/// Answers questions. Approvals are not implemented yet, so only tests have an answerer.
#[async_trait]
pub trait Answerer: Send + Sync + 'static {
    /// Waits for the answer to `question`. The future is dropped when the request stops waiting.
    async fn answer(&self, question: &Question) -> ApprovalAnswer;

    /// Raises a question whose subject does not wait.
    fn raise(&self, question: &Question);
}

/// Sends questions to an answerer, if there is one.
#[derive(Clone, Default)]
pub struct Questions(Option<Arc<dyn Answerer>>);

impl Questions {
    /// Questions that `answerer` answers.
    pub fn attended(answerer: Arc<dyn Answerer>) -> Self {
        Self(Some(answerer))
    }

    /// Whether there is an answerer.
    pub fn is_attended(&self) -> bool {
        self.0.is_some()
    }

    /// Raises a question whose subject does not wait. Returns whether there is an answerer.
    pub fn raise(&self, question: &Question) -> bool {
        if let Some(answerer) = &self.0 {
            answerer.raise(question);
        }
        self.is_attended()
    }
}

impl std::fmt::Debug for Questions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Questions").field(&self.0.is_some()).finish()
    }
}

/// The outcome of an attempt.
#[derive(Debug)]
pub enum Attempt<T> {
    /// The subject is allowed.
    Done(T),
    /// The rules changed during the attempt, so the subject has to be decided again.
    Stale,
    /// The operator has to decide.
    Ask(Box<Question>),
}

/// A subject that may have to wait for approvals.
pub trait HeldSubject: Send {
    /// The result when the subject is allowed.
    type Allowed;
    /// A refusal.
    type Refused;

    /// Decides by the newest rules: identity, admission, head, content. If the outcome is a
    /// question, the subject returns its admission.
    fn attempt(
        &mut self,
        answers: &ApprovalAnswers,
    ) -> impl Future<Output = Result<Attempt<Self::Allowed>, Self::Refused>> + Send;

    /// Converts the refusal of a question.
    fn refuse(&self, denial: Denial) -> Self::Refused;

    /// The number of the current snapshot for this subject.
    fn snapshot(&self) -> u64;

    /// Prepares for waiting: stores the body in memory or on disk.
    fn secure(&mut self) -> impl Future<Output = Result<(), Self::Refused>> + Send;

    /// Resolves when the subject must not wait any longer: its sandbox was removed, or the gate
    /// stops.
    fn ended(&mut self) -> impl Future<Output = Denial> + Send;

    /// Stores an answer that also applies to later requests of the sandbox.
    fn grant(&mut self, digest: Digest, answer: &ApprovalAnswer);
}

/// The parameters of holding.
#[derive(Clone, Copy)]
pub struct Holding<'a> {
    /// Where questions are sent.
    pub questions: &'a Questions,
    /// The rules in force.
    pub policy: &'a CurrentPolicy,
    /// Maximum total waiting time; none if the answerer limits the time.
    pub limit: Option<Duration>,
}

/// Decides about `held` until it is allowed or refused.
pub async fn settle<H: HeldSubject>(
    held: &mut H,
    mut holding: Holding<'_>,
) -> Result<H::Allowed, H::Refused> {
    let mut answers = ApprovalAnswers::default();
    for _ in 0..MAX_ATTEMPTS {
        match held.attempt(&answers).await? {
            Attempt::Done(allowed) => return Ok(allowed),
            Attempt::Stale => {}
            // Boxed to keep this future small: almost no request waits for an answer.
            Attempt::Ask(question) => {
                Box::pin(wait_for_answer(held, &question, &mut answers, &mut holding)).await?;
            }
        }
    }
    let denial = Denial::new(Reason::Internal, "decide");
    Err(held.refuse(denial.with_evidence("the rules changed too often")))
}

/// Waits for the answer to `question`, or until the rules change. The waiting time is subtracted
/// from the limit, so a reload does not restart it.
async fn wait_for_answer<H: HeldSubject>(
    held: &mut H,
    question: &Question,
    answers: &mut ApprovalAnswers,
    holding: &mut Holding<'_>,
) -> Result<(), H::Refused> {
    let Some(answerer) = &holding.questions.0 else {
        return Err(held.refuse(question.unattended_denial()));
    };
    if answers.len() >= MAX_QUESTIONS {
        let denial = question.denial(Reason::AskDenied);
        let message = "The request needs more approvals than one request may have.";
        return Err(held.refuse(denial.with_message(message)));
    }
    let start = Instant::now();
    let mut changes = holding.policy.changes();
    held.secure().await?;
    if held.snapshot() != question.snapshot {
        return Ok(());
    }
    let timeout = async {
        match holding.limit {
            Some(limit) => tokio::time::sleep_until(start + limit).await,
            None => std::future::pending().await,
        }
    };
    // The order matters: a subject that has ended is not allowed by a simultaneous answer, and an
    // answer to a question of replaced rules is ignored.
    let answer = tokio::select! {
        biased;
        denial = held.ended() => return Err(held.refuse(denial)),
        // The new rules may allow or refuse the subject, so the caller decides again.
        _ = changes.changed() => None,
        answer = answerer.answer(question) => Some(answer),
        () = timeout => Some(ApprovalAnswer::TimedOut),
    };
    if let Some(limit) = &mut holding.limit {
        *limit = limit.saturating_sub(start.elapsed());
    }
    if let Some(answer) = answer {
        held.grant(question.digest, &answer);
        answers.add(question.digest, answer);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
