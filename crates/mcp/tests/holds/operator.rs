//! An operator who answers when a test says so.

use std::sync::Arc;

use async_trait::async_trait;
use decide::hold::Answerer;
use policy::answer::Answer;
use policy::verdict::Question;
use tokio::sync::{oneshot, watch};

use crate::fixture::soon;

pub(crate) const YES: Answer = Answer::Allow { until: None };

/// The questions so far.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    /// How many there were.
    pub(crate) count: usize,
    /// Those that wait for an answer, by number.
    pub(crate) open: Vec<(usize, oneshot::Sender<Answer>)>,
}

#[derive(Debug)]
pub(crate) struct Operator(watch::Sender<Asked>);

impl Operator {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self(watch::Sender::new(Asked::default())))
    }

    /// Waits until `condition` holds.
    pub(crate) async fn wait(&self, condition: impl FnMut(&Asked) -> bool) {
        let mut changes = self.0.subscribe();
        soon(changes.wait_for(condition)).await.unwrap();
    }

    /// Waits until exactly `count` questions wait for an answer.
    pub(crate) async fn wait_open(&self, count: usize) {
        self.wait(|asked| asked.open.len() == count).await;
    }

    /// How many questions there were.
    pub(crate) fn count(&self) -> usize {
        self.0.borrow().count
    }

    /// Waits until one question is open, and answers it.
    pub(crate) async fn answer(&self, answer: Answer) {
        self.wait_open(1).await;
        let mut open = Vec::new();
        self.0.send_modify(|asked| open.append(&mut asked.open));
        for (_, sender) in open {
            sender.send(answer.clone()).unwrap();
        }
    }
}

/// Removes a question when its asker does not wait any more.
struct Withdrawal<'a>(&'a Operator, usize);

impl Drop for Withdrawal<'_> {
    fn drop(&mut self) {
        let Withdrawal(operator, number) = self;
        operator.0.send_modify(|asked| {
            asked.open.retain(|(open, _)| open != number);
        });
    }
}

#[async_trait]
impl Answerer for Operator {
    async fn answer(&self, _: &Question) -> Answer {
        let (sender, answer) = oneshot::channel();
        let mut number = 0;
        self.0.send_modify(|asked| {
            asked.count += 1;
            number = asked.count;
            asked.open.push((number, sender));
        });
        let _withdrawal = Withdrawal(self, number);
        answer.await.unwrap()
    }

    fn raise(&self, _: &Question) {
        self.0.send_modify(|asked| asked.count += 1);
    }
}
