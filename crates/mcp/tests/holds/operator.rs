//! Fake operator that answers when a test requests it.

use std::sync::Arc;

use async_trait::async_trait;
use decide::hold::Answerer;
use policy::answer::ApprovalAnswer;
use policy::verdict::Question;
use tokio::sync::{oneshot, watch};

use crate::fixture::within_timeout;

/// The answer that approves one request.
pub(crate) const APPROVE: ApprovalAnswer = ApprovalAnswer::Allow { until: None };

/// The questions that the operator has received.
#[derive(Debug, Default)]
pub(crate) struct OperatorQuestions {
    /// Number of all questions.
    pub(crate) count: usize,
    /// Open questions, by number.
    pub(crate) open: Vec<(usize, oneshot::Sender<ApprovalAnswer>)>,
}

#[derive(Debug)]
pub(crate) struct Operator(watch::Sender<OperatorQuestions>);

impl Operator {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self(watch::Sender::new(OperatorQuestions::default())))
    }

    /// Waits until `condition` holds.
    pub(crate) async fn wait(&self, condition: impl FnMut(&OperatorQuestions) -> bool) {
        let mut changes = self.0.subscribe();
        within_timeout(changes.wait_for(condition)).await.unwrap();
    }

    /// Waits until exactly `count` questions are open.
    pub(crate) async fn wait_open(&self, count: usize) {
        self.wait(|questions| questions.open.len() == count).await;
    }

    /// Number of all questions.
    pub(crate) fn count(&self) -> usize {
        self.0.borrow().count
    }

    /// Waits until one question is open, and answers it.
    pub(crate) async fn answer(&self, answer: ApprovalAnswer) {
        self.wait_open(1).await;
        let mut open = Vec::new();
        self.0
            .send_modify(|questions| open.append(&mut questions.open));
        for (_, sender) in open {
            sender.send(answer.clone()).unwrap();
        }
    }
}

/// Removes a question when its sender stops waiting.
struct Withdrawal<'a>(&'a Operator, usize);

impl Drop for Withdrawal<'_> {
    fn drop(&mut self) {
        let Withdrawal(operator, number) = self;
        operator.0.send_modify(|questions| {
            questions.open.retain(|(open, _)| open != number);
        });
    }
}

#[async_trait]
impl Answerer for Operator {
    async fn answer(&self, _: &Question) -> ApprovalAnswer {
        let (sender, answer) = oneshot::channel();
        let mut number = 0;
        self.0.send_modify(|questions| {
            questions.count += 1;
            number = questions.count;
            questions.open.push((number, sender));
        });
        let _withdrawal = Withdrawal(self, number);
        answer.await.unwrap()
    }

    fn raise(&self, _: &Question) {
        self.0.send_modify(|questions| questions.count += 1);
    }
}
