use std::collections::VecDeque;
use std::sync::Mutex;

use config::Settings;
use policy::verdict::Grant;
use tokio::sync::Notify;

use super::*;
use crate::snapshot::PolicySnapshot;

/// An answerer with a list of answers. After the last answer it waits for `may_deny` and denies.
#[derive(Default)]
struct ScriptedAnswerer {
    answers: Mutex<VecDeque<ApprovalAnswer>>,
    asked_digests: Mutex<Vec<Digest>>,
    may_deny: Notify,
}

impl ScriptedAnswerer {
    fn with_answers(answers: &[ApprovalAnswer]) -> Arc<Self> {
        let answerer = Self::default();
        answerer
            .answers
            .lock()
            .unwrap()
            .extend(answers.iter().cloned());
        Arc::new(answerer)
    }

    fn asked_digests(&self) -> Vec<Digest> {
        self.asked_digests.lock().unwrap().clone()
    }
}

#[async_trait]
impl Answerer for ScriptedAnswerer {
    async fn answer(&self, question: &Question) -> ApprovalAnswer {
        self.asked_digests.lock().unwrap().push(question.digest);
        let next = self.answers.lock().unwrap().pop_front();
        match next {
            Some(answer) => answer,
            None => {
                self.may_deny.notified().await;
                ApprovalAnswer::Deny
            }
        }
    }

    fn raise(&self, question: &Question) {
        self.asked_digests.lock().unwrap().push(question.digest);
    }
}

/// A subject that raises `questions` one after the other, except those already answered.
struct Subject {
    policy: Arc<CurrentPolicy>,
    questions: Vec<u8>,
    attempts: usize,
    secured: usize,
    end: Arc<Notify>,
}

impl HeldSubject for Subject {
    type Allowed = usize;
    type Refused = Denial;

    async fn attempt(&mut self, answers: &ApprovalAnswers) -> Result<Attempt<usize>, Denial> {
        self.attempts += 1;
        for digest in &self.questions {
            let question = Question {
                digest: [*digest; 32],
                rules: vec!["rule".into()],
                sentences: vec!["Shall it?".to_owned()],
                evidence: None,
                grants: Grant::Request,
                snapshot: self.policy.load().number,
            };
            match answers.find(&question) {
                None => return Ok(Attempt::Ask(Box::new(question))),
                Some(ApprovalAnswer::Allow { .. }) => {}
                Some(ApprovalAnswer::Deny) => return Err(question.denial(Reason::AskDenied)),
                Some(ApprovalAnswer::TimedOut) => return Err(question.denial(Reason::AskTimeout)),
            }
        }
        Ok(Attempt::Done(self.attempts))
    }

    fn refuse(&self, denial: Denial) -> Denial {
        denial
    }

    fn snapshot(&self) -> u64 {
        self.policy.load().number
    }

    async fn secure(&mut self) -> Result<(), Denial> {
        self.secured += 1;
        Ok(())
    }

    async fn ended(&mut self) -> Denial {
        self.end.notified().await;
        Denial::new(Reason::IdentityUnknown, "identity")
    }

    fn grant(&mut self, _: Digest, _: &ApprovalAnswer) {}
}

fn snapshot() -> PolicySnapshot {
    PolicySnapshot::without_bundles(Arc::new(Settings::default()))
}

fn subject(questions: &[u8]) -> Subject {
    Subject {
        policy: Arc::new(CurrentPolicy::new(snapshot())),
        questions: questions.to_vec(),
        attempts: 0,
        secured: 0,
        end: Arc::default(),
    }
}

async fn settle_with_limit(
    subject: &mut Subject,
    questions: &Questions,
    limit: Option<Duration>,
) -> Result<usize, Denial> {
    let policy = Arc::clone(&subject.policy);
    let holding = Holding {
        questions,
        policy: &policy,
        limit,
    };
    settle(subject, holding).await
}

const ALLOW: ApprovalAnswer = ApprovalAnswer::Allow { until: None };

#[tokio::test]
async fn question_without_an_answerer_is_refused_as_unattended() {
    let mut subject = subject(&[1]);
    let refused = settle_with_limit(&mut subject, &Questions::default(), None).await;
    assert_eq!(refused.unwrap_err().reason, Reason::AskUnattended);
    assert_eq!((subject.attempts, subject.secured), (1, 0));
}

#[tokio::test]
async fn question_is_asked_once_and_answer_decides() {
    for (answer, expected) in [
        (ALLOW, Ok(2)),
        (ApprovalAnswer::Deny, Err(Reason::AskDenied)),
        (ApprovalAnswer::TimedOut, Err(Reason::AskTimeout)),
    ] {
        let (mut subject, answerer) = (subject(&[1]), ScriptedAnswerer::with_answers(&[answer]));
        let questions = Questions::attended(Arc::clone(&answerer) as _);
        let settled = settle_with_limit(&mut subject, &questions, None).await;
        assert_eq!(settled.map_err(|denial| denial.reason), expected);
        assert_eq!(answerer.asked_digests(), [[1; 32]]);
    }
}

#[tokio::test]
async fn fourth_question_of_a_request_is_refused() {
    let mut subject = subject(&[1, 2, 3, 4]);
    let answerer = ScriptedAnswerer::with_answers(&[ALLOW, ALLOW, ALLOW, ALLOW]);
    let questions = Questions::attended(Arc::clone(&answerer) as _);
    let refused = settle_with_limit(&mut subject, &questions, None)
        .await
        .unwrap_err();
    assert_eq!(refused.reason, Reason::AskDenied);
    assert_eq!(answerer.asked_digests().len(), 3);
}

#[tokio::test]
async fn reload_during_hold_asks_the_question_again() {
    let (mut subject, answerer) = (subject(&[1]), ScriptedAnswerer::with_answers(&[]));
    let questions = Questions::attended(Arc::clone(&answerer) as _);
    let policy = Arc::clone(&subject.policy);
    let reload = async {
        while answerer.asked_digests().is_empty() {
            tokio::task::yield_now().await;
        }
        policy.replace(Arc::new(snapshot()));
        while answerer.asked_digests().len() < 2 {
            tokio::task::yield_now().await;
        }
        answerer.may_deny.notify_one();
    };
    let (settled, ()) = tokio::join!(settle_with_limit(&mut subject, &questions, None), reload);
    assert_eq!(settled.unwrap_err().reason, Reason::AskDenied);
    assert_eq!(answerer.asked_digests(), [[1; 32], [1; 32]]);
}

#[tokio::test]
async fn subject_that_ends_while_waiting_is_refused() {
    let (mut subject, answerer) = (subject(&[1]), ScriptedAnswerer::with_answers(&[]));
    let questions = Questions::attended(Arc::clone(&answerer) as _);
    subject.end.notify_one();
    let refused = settle_with_limit(&mut subject, &questions, None)
        .await
        .unwrap_err();
    assert_eq!(refused.reason, Reason::IdentityUnknown);
}

#[tokio::test(start_paused = true)]
async fn hold_with_limit_times_out() {
    let (mut subject, answerer) = (subject(&[1]), ScriptedAnswerer::with_answers(&[]));
    let questions = Questions::attended(Arc::clone(&answerer) as _);
    let limit = Some(Duration::from_secs(10));
    let refused = settle_with_limit(&mut subject, &questions, limit)
        .await
        .unwrap_err();
    assert_eq!(refused.reason, Reason::AskTimeout);
}

#[tokio::test(start_paused = true)]
async fn reload_does_not_restart_limit_of_hold() {
    let (mut subject, answerer) = (subject(&[1]), ScriptedAnswerer::with_answers(&[]));
    let questions = Questions::attended(Arc::clone(&answerer) as _);
    let policy = Arc::clone(&subject.policy);
    let start = Instant::now();
    let reload = async {
        tokio::time::sleep(Duration::from_secs(9)).await;
        policy.replace(Arc::new(snapshot()));
    };
    let limit = Some(Duration::from_secs(10));
    let (settled, ()) = tokio::join!(settle_with_limit(&mut subject, &questions, limit), reload);
    assert_eq!(settled.unwrap_err().reason, Reason::AskTimeout);
    assert_eq!(answerer.asked_digests().len(), 2);
    assert_eq!(start.elapsed().as_secs(), 10);
}

#[tokio::test]
async fn subject_that_ends_with_simultaneous_answer_is_refused() {
    // Without `biased`, the select would take the answer in half of the cases.
    for _ in 0..20 {
        let (mut subject, answerer) = (subject(&[1]), ScriptedAnswerer::with_answers(&[ALLOW]));
        let questions = Questions::attended(answerer as _);
        subject.end.notify_one();
        let refused = settle_with_limit(&mut subject, &questions, None)
            .await
            .unwrap_err();
        assert_eq!(refused.reason, Reason::IdentityUnknown);
    }
}
