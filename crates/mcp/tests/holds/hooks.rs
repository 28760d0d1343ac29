//! Held hooks of an MCP gateway, in both hook formats.

use std::time::Duration;

use mcp::interceptor::MAX_HOOK_HOLD;
use policy::answer::ApprovalAnswer;
use policy::reason::Reason;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::fixture::{Fixture, read};
use crate::operator::APPROVE;

/// A before hook in the versioned envelope format.
fn seed(id: &str, params: &Value) -> Value {
    json!({
        "version": "1.0", "type": "before", "request_id": id, "method": "tools/call",
        "params": params, "tool_id": "t", "agent_id": "default", "session_id": "gateway",
    })
}

fn params() -> Value {
    json!({"name": "echo", "arguments": {"ask": true}})
}

/// A before hook in the format of Docker's MCP gateway.
fn docker() -> Value {
    json!({"method": "tools/call", "params": params()})
}

/// Whether the hook was answered with a pass.
async fn passes(fixture: &Fixture, hook: &Value) -> bool {
    let answer = read(fixture.post("/intercept/before", &[], hook).await).await;
    match answer.messages.first() {
        // In Docker's format a pass has an empty body.
        None => true,
        Some(answer) => answer["action"] == "pass",
    }
}

#[tokio::test(start_paused = true)]
async fn held_hook_passes_after_approval_and_blocks_after_denial() {
    for hook in [seed("r", &params()), docker()] {
        for (answer, expected) in [(APPROVE, true), (ApprovalAnswer::Deny, false)] {
            let fixture = Fixture::new();
            let (passed, ()) =
                tokio::join!(passes(&fixture, &hook), fixture.operator.answer(answer));
            assert_eq!(passed, expected, "{hook}");
            assert_eq!(fixture.records.of_stage("before").len(), 1);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn hook_without_an_answer_blocks_after_the_limit() {
    for hook in [seed("r", &params()), docker()] {
        let fixture = Fixture::new();
        let began = Instant::now();
        let reload = async {
            fixture.operator.wait_open(1).await;
            tokio::time::sleep(MAX_HOOK_HOLD / 2).await;
            // The new question after a reload does not extend the limit.
            fixture.reload(crate::fixture::ASKING_POLICY);
        };
        let (passed, ()) = tokio::join!(passes(&fixture, &hook), reload);
        assert!(!passed);
        let took = began.elapsed();
        assert!(took >= MAX_HOOK_HOLD, "{took:?}");
        assert!(took < MAX_HOOK_HOLD + Duration::from_secs(1), "{took:?}");
        let records = fixture.records.of_stage("before");
        assert_eq!(records.len(), 1);
        assert_eq!(records[0].reason, Some(Reason::AskTimeout));
        assert_eq!(fixture.operator.count(), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn hook_without_operator_blocks_at_once() {
    for hook in [seed("r", &params()), docker()] {
        let fixture = Fixture::unattended();
        let began = Instant::now();
        assert!(!passes(&fixture, &hook).await);
        assert_eq!(began.elapsed(), Duration::ZERO);
        let records = fixture.records.of_stage("before");
        assert_eq!(records[0].reason, Some(Reason::AskUnattended));
    }
}

#[tokio::test(start_paused = true)]
async fn gate_stop_ends_a_held_hook() {
    let fixture = Fixture::new();
    let stop = async {
        fixture.operator.wait_open(1).await;
        fixture.stop.cancel();
    };
    let hook = seed("r", &params());
    let (passed, ()) = tokio::join!(passes(&fixture, &hook), stop);
    assert!(!passed);
    fixture.operator.wait_open(0).await;
    assert_eq!(fixture.records.of_stage("before").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn gateway_that_hangs_up_ends_a_held_hook() {
    let fixture = Fixture::new();
    let hook = seed("r", &params());
    tokio::select! {
        _ = passes(&fixture, &hook) => panic!("the hook was answered"),
        () = fixture.operator.wait_open(1) => {}
    }
    fixture.operator.wait_open(0).await;
    let records = fixture.records.of_stage("before");
    assert_eq!(records.len(), 1);
    assert_eq!(records[0].reason, Some(Reason::ClientLeft));
}
