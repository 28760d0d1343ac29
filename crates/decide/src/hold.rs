//! Holding: something is decided again and again until no question about it is open.
//!
//! ```text
//!   ┌──▶ attempt: newest snapshot, identity, admission, head, content
//!   │        │            │                 │
//!   │      done      rules changed      a question
//!   │                     │                 │  body secured, admission given back
//!   └─────────────────────┴─── answer ◀── wait ──▶ ended, refused
//! ```
//! What waits holds no ticket of a breaker and no permit of a semaphore; what it was asked for is
//! in memory or on disk. After an answer, and after each reload, everything is decided anew.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use policy::answer::{Answer, Answers};
use policy::reason::Reason;
use policy::verdict::{Denial, Digest, Question};
use tokio::time::Instant;

use crate::snapshot::CurrentPolicy;

/// How many different questions one request may raise.
const MAX_QUESTIONS: usize = 3;

/// How often something is decided while the rules change under it.
const MAX_ATTEMPTS: usize = 100;

/// Answers questions. Until there are approvals, only tests have an answerer.
#[async_trait]
pub trait Answerer: Send + Sync + 'static {
    /// Waits for the answer to `question`. Dropped when the request does not wait any more.
    async fn answer(&self, question: &Question) -> Answer;

    /// Raises a question whose asker does not wait.
    fn raise(&self, question: &Question);
}

/// Where questions go: to an operator, or nowhere.
#[derive(Clone, Default)]
pub struct Questions(Option<Arc<dyn Answerer>>);

impl Questions {
    /// Questions are answered by `answerer`.
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

/// How far an attempt came.
#[derive(Debug)]
pub enum Attempt<T> {
    /// Everything was decided, and it is allowed.
    Done(T),
    /// The rules changed meanwhile: it has to be decided again.
    Stale,
    /// The operator has to decide.
    Ask(Box<Question>),
}

/// Something that is decided, and may have to wait in between.
pub trait Held: Send {
    /// What is there once it is allowed.
    type Allowed;
    /// A refusal.
    type Refused;

    /// Decides it by the newest rules: identity, admission, head, content. On a question it gives
    /// back what it took.
    fn attempt(
        &mut self,
        answers: &Answers,
    ) -> impl Future<Output = Result<Attempt<Self::Allowed>, Self::Refused>> + Send;

    /// The refusal of what raised a question.
    fn refuse(&self, denial: Denial) -> Self::Refused;

    /// The number of the snapshot by which it would be decided now.
    fn snapshot(&self) -> u64;

    /// Makes it ready to wait: what was sent is kept in memory or on disk.
    fn secure(&mut self) -> impl Future<Output = Result<(), Self::Refused>> + Send;

    /// Resolves when it must not wait any longer: its sandbox is gone, or the gate stops.
    fn ended(&mut self) -> impl Future<Output = Denial> + Send;

    /// An answer that holds for the sandbox as well.
    fn grant(&mut self, digest: Digest, answer: &Answer);
}

/// By whom questions are answered, and under which rules.
#[derive(Clone, Copy)]
pub struct Holding<'a> {
    /// Who answers.
    pub questions: &'a Questions,
    /// The rules in force.
    pub policy: &'a CurrentPolicy,
    /// How long it may wait for answers in all; none where the answerer says it.
    pub limit: Option<Duration>,
}

/// Decides about `held` until it is allowed or refused.
pub async fn settle<H: Held>(
    held: &mut H,
    mut holding: Holding<'_>,
) -> Result<H::Allowed, H::Refused> {
    let mut answers = Answers::default();
    for _ in 0..MAX_ATTEMPTS {
        match held.attempt(&answers).await? {
            Attempt::Done(allowed) => return Ok(allowed),
            Attempt::Stale => {}
            // Boxed: next to no request waits for an answer.
            Attempt::Ask(question) => {
                Box::pin(wait(held, &question, &mut answers, &mut holding)).await?;
            }
        }
    }
    let denial = Denial::new(Reason::Internal, "decide");
    Err(held.refuse(denial.because("the rules changed too often")))
}

/// Waits for the answer to `question`, or until the rules change. What it waited is taken off the
/// limit: a reload does not begin it anew.
async fn wait<H: Held>(
    held: &mut H,
    question: &Question,
    answers: &mut Answers,
    holding: &mut Holding<'_>,
) -> Result<(), H::Refused> {
    let Some(answerer) = &holding.questions.0 else {
        return Err(held.refuse(question.unattended()));
    };
    if answers.len() >= MAX_QUESTIONS {
        let denial = question.refused(Reason::AskDenied);
        let message = "It raised more questions than an operator is asked about one request.";
        return Err(held.refuse(denial.saying(message)));
    }
    let begun = Instant::now();
    let mut changes = holding.policy.changes();
    held.secure().await?;
    if held.snapshot() != question.snapshot {
        return Ok(());
    }
    let limit = async {
        match holding.limit {
            Some(limit) => tokio::time::sleep_until(begun + limit).await,
            None => std::future::pending().await,
        }
    };
    // In this order: what has ended is not allowed by an answer of the same moment, and an answer
    // to a question of rules that are gone is not needed.
    let answer = tokio::select! {
        biased;
        denial = held.ended() => return Err(held.refuse(denial)),
        // The rules may allow or refuse it now: it is decided anew.
        _ = changes.changed() => None,
        answer = answerer.answer(question) => Some(answer),
        () = limit => Some(Answer::TimedOut),
    };
    if let Some(limit) = &mut holding.limit {
        *limit = limit.saturating_sub(begun.elapsed());
    }
    if let Some(answer) = answer {
        held.grant(question.digest, &answer);
        answers.add(question.digest, answer);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
