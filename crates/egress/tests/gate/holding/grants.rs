//! Answers that hold for the sandbox for a while.

use std::time::Duration;

use policy::answer::ApprovalAnswer;
use testkit::origin::{Latch, OriginReply};
use tokio::io::{AsyncReadExt, DuplexStream};

use super::fixture::{Gate, Rules, get_request};

/// Allows the same until so much later.
fn allow_for(gate: &Gate, time: Duration) -> ApprovalAnswer {
    let until = Some(gate.services.clock().tick() + time);
    ApprovalAnswer::Allow { until }
}

#[tokio::test]
async fn granted_question_is_not_asked_again() {
    let gate = Gate::new(&Rules::default());
    let request_task = gate.spawn_get("asked.example", "/").await;
    let answer = allow_for(&gate, Duration::from_secs(3600));
    gate.operator.next_question().await.answer(answer);
    assert_eq!(request_task.await.unwrap().status, 200);
    // The question was about the host, whatever is asked of it.
    assert_eq!(gate.get("asked.example", "/").await.status, 200);
    assert_eq!(gate.get("asked.example", "/else").await.status, 200);
    assert!(gate.operator.is_idle());
    let elsewhere = gate.spawn_get("other.example", "/").await;
    gate.operator
        .next_question()
        .await
        .answer(ApprovalAnswer::Deny);
    assert_eq!(elsewhere.await.unwrap().reason(), "ask_denied");
    assert_eq!(gate.records().len(), 4);
}

/// Reads the status of an answer whose body has no end yet.
async fn read_status(client: &mut DuplexStream) {
    let mut status = [0; 12];
    client.read_exact(&mut status).await.unwrap();
    assert_eq!(&status, b"HTTP/1.1 200");
}

#[tokio::test]
async fn expiry_of_a_grant_ends_what_it_allowed() {
    let latch = Latch::new();
    let paused = latch.clone();
    let gate = Gate::with_replies(&Rules::default(), move |_| {
        OriginReply::text("hello").paused(&paused)
    });
    let mut asked = gate
        .connect_and_send(&get_request("asked.example", "/"))
        .await;
    let open = gate.operator.next_question().await;
    let time = Duration::from_secs(2);
    let until = gate.services.clock().tick() + time;
    open.answer(ApprovalAnswer::Allow { until: Some(until) });
    read_status(&mut asked).await;
    let mut granted = gate
        .connect_and_send(&get_request("asked.example", "/"))
        .await;
    read_status(&mut granted).await;
    assert!(gate.operator.is_idle(), "the second one had a grant");
    assert_eq!(gate.sandbox.in_flight.len(), 2);
    // The origin still holds its answers back: only the gate ends them.
    gate.assert_nothing_held().await;
    assert!(gate.services.clock().tick() >= until);
    for mut client in [asked, granted] {
        let mut rest = Vec::new();
        drop(client.read_to_end(&mut rest).await);
    }
    assert_eq!(gate.records().len(), 2);
    // From now on it is asked about again.
    let request_task = gate.spawn_get("asked.example", "/").await;
    gate.operator
        .next_question()
        .await
        .answer(ApprovalAnswer::Deny);
    assert_eq!(request_task.await.unwrap().reason(), "ask_denied");
    latch.open();
}

#[tokio::test]
async fn expiry_before_the_upstream_answers_is_a_refusal() {
    let latch = Latch::new();
    let held = latch.clone();
    let gate = Gate::with_replies(&Rules::default(), move |_| {
        OriginReply::text("hello").held(&held)
    });
    let request_task = gate.spawn_get("asked.example", "/").await;
    let answer = allow_for(&gate, Duration::from_millis(500));
    gate.operator.next_question().await.answer(answer);
    let answered = request_task.await.unwrap();
    assert_eq!(
        (answered.status, answered.reason()),
        (403, "ask_timeout".into())
    );
    assert!(answered.body.contains("has expired"), "{}", answered.body);
    gate.assert_nothing_held().await;
    latch.open();
}
