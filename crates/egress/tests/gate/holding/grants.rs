//! Grants: answers that apply to the sandbox until they expire.

use std::time::Duration;

use policy::answer::ApprovalAnswer;
use testkit::origin::{Latch, OriginReply};
use tokio::io::{AsyncReadExt, DuplexStream};

use super::fixture::{Gate, Rules, get_request};

/// An answer that allows the subject of the question for `time`.
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
    // The grant is for the host, so it covers every path.
    assert_eq!(gate.get("asked.example", "/").await.status, 200);
    assert_eq!(gate.get("asked.example", "/else").await.status, 200);
    assert!(gate.operator.is_idle());
    let other_host = gate.spawn_get("other.example", "/").await;
    gate.operator
        .next_question()
        .await
        .answer(ApprovalAnswer::Deny);
    assert_eq!(other_host.await.unwrap().reason(), "ask_denied");
    assert_eq!(gate.records().len(), 4);
}

/// Reads the status line of a response, which must be 200.
async fn expect_status_200(client: &mut DuplexStream) {
    let mut status = [0; 12];
    client.read_exact(&mut status).await.unwrap();
    assert_eq!(&status, b"HTTP/1.1 200");
}

#[tokio::test]
async fn expiry_of_a_grant_ends_the_requests_it_allowed() {
    let latch = Latch::new();
    let paused = latch.clone();
    let gate = Gate::with_replies(&Rules::default(), move |_| {
        OriginReply::text("hello").body_held_until(&paused)
    });
    let mut approved = gate
        .connect_and_send(&get_request("asked.example", "/"))
        .await;
    let open = gate.operator.next_question().await;
    let time = Duration::from_secs(2);
    let until = gate.services.clock().tick() + time;
    open.answer(ApprovalAnswer::Allow { until: Some(until) });
    expect_status_200(&mut approved).await;
    let mut granted = gate
        .connect_and_send(&get_request("asked.example", "/"))
        .await;
    expect_status_200(&mut granted).await;
    assert!(gate.operator.is_idle(), "the second request had a grant");
    assert_eq!(gate.sandbox.in_flight.len(), 2);
    // The origin has not finished its responses, so only the gate can have ended the requests.
    gate.assert_nothing_held().await;
    assert!(gate.services.clock().tick() >= until);
    for mut client in [approved, granted] {
        let mut rest = Vec::new();
        drop(client.read_to_end(&mut rest).await);
    }
    assert_eq!(gate.records().len(), 2);
    // After the expiry the gate asks again.
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
        OriginReply::text("hello").held_until(&held)
    });
    let request_task = gate.spawn_get("asked.example", "/").await;
    let answer = allow_for(&gate, Duration::from_millis(500));
    gate.operator.next_question().await.answer(answer);
    let response = request_task.await.unwrap();
    assert_eq!(
        (response.status, response.reason()),
        (403, "ask_timeout".into())
    );
    assert!(response.body.contains("has expired"), "{}", response.body);
    gate.assert_nothing_held().await;
    latch.open();
}
