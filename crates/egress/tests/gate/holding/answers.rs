//! Operator answers and the held requests that wait for them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use decide::hold::{Answerer, Questions};
use egress::services::ServiceDependencies;
use policy::answer::ApprovalAnswer;
use policy::reason::Reason;
use policy::verdict::{Question, VerdictKind};

use super::fixture::{ClientResponse, Gate, Rules, hello_origin};
use super::operator::ALLOW;

#[tokio::test]
async fn held_request_follows_the_operators_answer() {
    for (rules, host, rule) in [
        (Rules::default(), "asked.example", "egress.unknown"),
        (
            Rules::with_asking_bundle("mine"),
            "known.example",
            "rego:mine",
        ),
    ] {
        for (answer, refused) in [
            (ALLOW, None),
            (ApprovalAnswer::Deny, Some(Reason::AskDenied)),
            (ApprovalAnswer::TimedOut, Some(Reason::AskTimeout)),
        ] {
            let gate = Gate::new(&rules);
            let request_task = gate.spawn_get(host, "/").await;
            let open = gate.operator.next_question().await;
            assert_eq!(open.question.rules, [rule.into()]);
            assert_eq!(gate.sandbox.in_flight.held(), 1);
            assert_eq!(
                gate.origin.requests().len(),
                0,
                "the gate forwarded nothing yet"
            );
            open.answer(answer);
            let response = request_task.await.unwrap();
            let (verdict, reason, deciding_rule) = gate.only_record().await;
            assert_eq!(reason, refused);
            match refused {
                None => {
                    assert_eq!((response.status, response.body.as_str()), (200, "hello"));
                    assert_eq!(verdict, Some(VerdictKind::Allow));
                }
                Some(reason) => {
                    assert_eq!(
                        (response.status, response.reason()),
                        (403, reason.code().into())
                    );
                    assert_eq!(
                        (verdict, deciding_rule.as_deref()),
                        (Some(VerdictKind::Deny), Some(rule))
                    );
                }
            }
            assert_eq!(gate.origin.requests().len(), usize::from(refused.is_none()));
            assert!(gate.operator.is_idle());
            gate.assert_nothing_held().await;
        }
    }
}

#[tokio::test]
async fn answer_satisfies_only_its_own_question() {
    let gate = Gate::new(&Rules::default());
    let first = gate.spawn_get("asked.example", "/").await;
    let refused = gate.operator.next_question().await;
    let second = gate.spawn_get("other.example", "/").await;
    let allowed = gate.operator.next_question().await;
    assert_ne!(refused.question.digest, allowed.question.digest);
    allowed.answer(ALLOW);
    assert_eq!(second.await.unwrap().status, 200);
    assert_eq!(
        gate.sandbox.in_flight.held(),
        1,
        "the other request still waits"
    );
    refused.answer(ApprovalAnswer::Deny);
    assert_eq!(first.await.unwrap().reason(), "ask_denied");
    // An answer without `until` applies to one request only.
    let again = gate.spawn_get("other.example", "/").await;
    gate.operator
        .next_question()
        .await
        .answer(ApprovalAnswer::Deny);
    assert_eq!(again.await.unwrap().reason(), "ask_denied");
}

/// An operator who allows every question, and replaces the policy bundle before each answer.
#[derive(Default)]
struct ReloadingOperator {
    gate: OnceLock<Arc<Gate>>,
    questions: Mutex<Vec<Question>>,
    reloads: AtomicUsize,
}

/// Ids of the bundles, in the order in which they replace each other.
const BUNDLE_IDS: [&str; 5] = ["one", "two", "three", "four", "five"];

#[async_trait::async_trait]
impl Answerer for ReloadingOperator {
    async fn answer(&self, question: &Question) -> ApprovalAnswer {
        self.questions.lock().unwrap().push(question.clone());
        let next = self.reloads.fetch_add(1, Ordering::SeqCst) + 1;
        let gate = self.gate.get().unwrap();
        gate.reload(&Rules::with_asking_bundle(BUNDLE_IDS[next]));
        ALLOW
    }

    fn raise(&self, _: &Question) {}
}

#[tokio::test]
async fn request_with_a_fourth_question_is_refused() {
    let operator = Arc::new(ReloadingOperator::default());
    let questions = Questions::attended(Arc::clone(&operator) as _);
    let rules = Rules::with_asking_bundle(BUNDLE_IDS[0]);
    let gate =
        Gate::with_dependencies(&rules, hello_origin(), |dependencies| ServiceDependencies {
            questions,
            ..dependencies
        });
    let gate = Arc::new(gate);
    assert!(operator.gate.set(Arc::clone(&gate)).is_ok());
    let response: ClientResponse = gate.get("known.example", "/").await;
    assert_eq!(
        (response.status, response.reason()),
        (403, "ask_denied".into())
    );
    assert!(
        response.body.contains("more approvals"),
        "{}",
        response.body
    );
    let (verdict, reason, rule) = gate.only_record().await;
    assert_eq!(
        (verdict, reason),
        (Some(VerdictKind::Deny), Some(Reason::AskDenied))
    );
    assert_eq!(rule.as_deref(), Some("rego:four"));
    let questions_asked = operator.questions.lock().unwrap();
    let rules: Vec<String> = questions_asked
        .iter()
        .map(|question| question.rules[0].to_string())
        .collect();
    assert_eq!(rules, ["rego:one", "rego:two", "rego:three"]);
    assert_eq!(gate.origin.requests().len(), 0);
}
