//! A fake operator: questions arrive in a queue, and the test answers them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use decide::hold::{Answerer, Questions};
use policy::answer::ApprovalAnswer;
use policy::verdict::Question;
use testkit::wait::LIMIT;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

/// Allows only the subject of the question.
pub(super) const ALLOW: ApprovalAnswer = ApprovalAnswer::Allow { until: None };

/// A question that waits for an answer.
pub(super) struct OpenQuestion {
    pub(super) question: Question,
    answer: oneshot::Sender<ApprovalAnswer>,
}

impl OpenQuestion {
    /// Answers the question, which must not be withdrawn.
    pub(super) fn answer(self, answer: ApprovalAnswer) {
        self.answer
            .send(answer)
            .expect("a question that was not withdrawn");
    }

    /// Whether the gate no longer waits for the answer.
    pub(super) fn is_withdrawn(&self) -> bool {
        self.answer.is_closed()
    }

    /// Waits until the gate no longer waits for the answer.
    pub(super) async fn wait_until_withdrawn(mut self) {
        let dropped = timeout(LIMIT, self.answer.closed()).await;
        dropped.expect("the answerer's future is dropped");
    }
}

/// A fake operator whose answers the test chooses.
pub(super) struct TestOperator {
    sender: mpsc::UnboundedSender<OpenQuestion>,
    open: tokio::sync::Mutex<mpsc::UnboundedReceiver<OpenQuestion>>,
    waiting: Arc<AtomicUsize>,
    raised: Mutex<Vec<Question>>,
}

impl TestOperator {
    pub(super) fn new() -> Arc<Self> {
        let (sender, open) = mpsc::unbounded_channel();
        Arc::new(Self {
            sender,
            open: open.into(),
            waiting: Arc::default(),
            raised: Mutex::default(),
        })
    }

    /// A [`Questions`] whose answerer is this operator.
    pub(super) fn questions(self: &Arc<Self>) -> Questions {
        Questions::attended(Arc::clone(self) as _)
    }

    /// The next question that waits for an answer.
    pub(super) async fn next_question(&self) -> OpenQuestion {
        let next = timeout(LIMIT, async { self.open.lock().await.recv().await }).await;
        next.expect("a question in time").expect("an open channel")
    }

    /// Whether no question is queued.
    pub(super) fn is_idle(&self) -> bool {
        self.open.try_lock().expect("one reader").is_empty()
    }

    /// How many futures of [`Answerer::answer`] are alive.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    /// Questions that were raised without waiting.
    pub(super) fn raised(&self) -> Vec<Question> {
        self.raised.lock().unwrap().clone()
    }
}

/// Counts a future of [`Answerer::answer`] while it is alive.
struct WaitingCount(Arc<AtomicUsize>);

impl WaitingCount {
    fn begin(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(count))
    }
}

impl Drop for WaitingCount {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[async_trait::async_trait]
impl Answerer for TestOperator {
    async fn answer(&self, question: &Question) -> ApprovalAnswer {
        let _waiting = WaitingCount::begin(&self.waiting);
        let (answer, answered) = oneshot::channel();
        let question = question.clone();
        let sent = self.sender.send(OpenQuestion { question, answer });
        assert!(sent.is_ok(), "the queue of the operator is open");
        // A question that the test drops stays unanswered.
        match answered.await {
            Ok(answer) => answer,
            Err(_) => std::future::pending().await,
        }
    }

    fn raise(&self, question: &Question) {
        self.raised.lock().unwrap().push(question.clone());
    }
}
