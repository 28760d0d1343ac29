//! Rules that change while a request is held: the request is decided again.

use config::section::egress::UnknownHostAction;
use policy::reason::Reason;
use policy::verdict::VerdictKind;

use super::fixture::{Gate, Rules};
use super::operator::ALLOW;

/// Rules that allow the host of the held request.
fn allowing_rules() -> Rules {
    Rules {
        domains: "known.example, asked.example".to_owned(),
        ..Rules::default()
    }
}

#[tokio::test]
async fn reload_that_allows_a_held_request_lets_it_pass() {
    let gate = Gate::new(&Rules::default());
    let request_task = gate.spawn_get("asked.example", "/").await;
    let open = gate.operator.next_question().await;
    assert_eq!(
        gate.reload(&allowing_rules()),
        0,
        "a held request is not in flight"
    );
    assert_eq!(request_task.await.unwrap().status, 200);
    open.wait_until_withdrawn().await;
    let (verdict, reason, rule) = gate.only_record().await;
    assert_eq!((verdict, reason), (Some(VerdictKind::Allow), None));
    assert_eq!(rule.as_deref(), Some("allowlist:asked.example"));
    gate.assert_nothing_held().await;
}

#[tokio::test]
async fn reload_that_refuses_a_held_request_refuses_it() {
    let gate = Gate::new(&Rules::default());
    let request_task = gate.spawn_get("asked.example", "/").await;
    let open = gate.operator.next_question().await;
    gate.reload(&Rules {
        unknown: UnknownHostAction::Deny,
        ..Rules::default()
    });
    assert_eq!(request_task.await.unwrap().reason(), "host_denied");
    open.wait_until_withdrawn().await;
    let (verdict, reason, _) = gate.only_record().await;
    assert_eq!(
        (verdict, reason),
        (Some(VerdictKind::Deny), Some(Reason::HostDenied))
    );
    assert_eq!(gate.origin.connections(), 0);
    gate.assert_nothing_held().await;
}

#[tokio::test]
async fn reload_with_unchanged_rules_asks_again_with_the_new_snapshot() {
    let gate = Gate::new(&Rules::default());
    let request_task = gate.spawn_get("asked.example", "/").await;
    let first = gate.operator.next_question().await;
    let snapshot = gate.services.policy().load().number;
    assert_eq!(first.question.snapshot, snapshot);
    gate.reload(&Rules::default());
    let second = gate.operator.next_question().await;
    assert_eq!(second.question.digest, first.question.digest);
    let snapshot = gate.services.policy().load().number;
    assert_eq!(second.question.snapshot, snapshot);
    // The gate no longer waits for the first answer, and the request is still held.
    assert!(first.is_withdrawn());
    assert_eq!(gate.sandbox.in_flight.held(), 1);
    assert_eq!(gate.origin.requests().len(), 0);
    second.answer(ALLOW);
    assert_eq!(request_task.await.unwrap().status, 200);
    assert_eq!(gate.only_record().await.0, Some(VerdictKind::Allow));
}
