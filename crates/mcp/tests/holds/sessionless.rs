//! Held calls in revision 2026-07-28, which has no sessions.

use config::Settings;
use http::{Response, StatusCode};
use mcp::answer::McpBody;
use policy::answer::ApprovalAnswer;
use policy::reason::Reason;
use serde_json::{Value, json};

use crate::fixture::{Fixture, is_stream, read, read_until};
use crate::operator::APPROVE;

const REVISION: &str = "2026-07-28";

/// Posts a request as `agent`. `name` is the called tool.
async fn request(
    fixture: &Fixture,
    agent: &str,
    method: &str,
    name: &str,
    mut params: Value,
) -> Response<McpBody> {
    params["_meta"] = json!({
        "io.modelcontextprotocol/protocolVersion": REVISION,
        "io.modelcontextprotocol/clientCapabilities": {"elicitation": {}},
    });
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
    let headers = [
        ("mcp-protocol-version", REVISION),
        ("mcp-method", method),
        ("mcp-name", name),
        ("x-agent-id", agent),
        ("x-request-id", "r"),
    ];
    fixture.post("/mcp/t", &headers, &body).await
}

/// Posts a call of the tool `name` as `agent`, with more fields in its params.
async fn post(
    fixture: &Fixture,
    agent: &str,
    name: &str,
    arguments: Value,
    more: Value,
) -> Response<McpBody> {
    let mut params = json!({"name": name, "arguments": arguments});
    let fields = params.as_object_mut().unwrap();
    fields.extend(more.as_object().unwrap().clone());
    request(fixture, agent, "tools/call", name, params).await
}

/// Makes a call that is held, and returns its response stream.
async fn call_held(fixture: &Fixture) -> Response<McpBody> {
    let held = post(fixture, "a", "echo", json!({"ask": true}), json!({})).await;
    assert!(is_stream(&held));
    fixture.operator.wait_open(1).await;
    held
}

#[tokio::test(start_paused = true)]
async fn held_call_passes_after_approval_and_is_refused_after_denial() {
    let fixture = Fixture::new();
    let held = call_held(&fixture).await;
    assert!(fixture.tool.calls().is_empty());
    fixture.operator.answer(APPROVE).await;
    let answer = read(held).await;
    assert_eq!(answer.last()["result"]["content"][0]["text"], "done echo");
    assert_eq!(answer.last()["result"]["resultType"], "complete");
    let held = call_held(&fixture).await;
    fixture.operator.answer(ApprovalAnswer::Deny).await;
    assert_eq!(read(held).await.reason(), "ask_denied");
    assert_eq!(fixture.tool.calls(), ["echo"]);
    assert_eq!(fixture.records.of_stage("before").len(), 2);
}

#[tokio::test(start_paused = true)]
async fn call_without_operator_is_refused_at_once() {
    let fixture = Fixture::unattended();
    let refused = post(&fixture, "a", "echo", json!({"ask": true}), json!({})).await;
    assert!(!is_stream(&refused));
    assert_eq!(read(refused).await.reason(), "ask_unattended");
}

#[tokio::test(start_paused = true)]
async fn client_that_hangs_up_ends_a_hold() {
    let fixture = Fixture::new();
    // Either the call or its result is held.
    for (arguments, stage) in [
        (json!({"ask": true}), "before"),
        (json!({"result": true}), "after"),
    ] {
        // The client hangs up during the stream, or before the response head.
        let held = post(&fixture, "a", "echo", arguments.clone(), json!({})).await;
        assert!(is_stream(&held));
        fixture.operator.wait_open(1).await;
        drop(held);
        fixture.operator.wait_open(0).await;
        tokio::select! {
            _ = post(&fixture, "a", "echo", arguments, json!({})) => panic!("the call was answered"),
            () = fixture.operator.wait_open(1) => {}
        }
        fixture.operator.wait_open(0).await;
        let records = fixture.records.of_stage(stage);
        let withdrawn = records
            .iter()
            .filter(|record| record.reason == Some(Reason::ClientLeft));
        assert_eq!(withdrawn.count(), 2, "{records:?}");
    }
    // Only the calls whose result was held have reached the tool.
    assert_eq!(fixture.tool.calls().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn removed_tool_ends_a_hold() {
    let fixture = Fixture::new();
    let held = call_held(&fixture).await;
    fixture.mcp_server.bridge.apply(&Settings::default());
    assert_eq!(read(held).await.reason(), "tool_denied");
    fixture.operator.wait_open(0).await;
    assert!(fixture.tool.calls().is_empty());
}

#[tokio::test(start_paused = true)]
async fn held_calls_and_results_occupy_no_process() {
    // A shared server has one process: an unreturned lease would block the next call.
    let fixture = Fixture::with_tool_settings(&json!({"shared": true}));
    let held = call_held(&fixture).await;
    let other = read(post(&fixture, "a", "second", json!({}), json!({})).await).await;
    assert_eq!(other.last()["result"]["content"][0]["text"], "done second");
    fixture.operator.answer(APPROVE).await;
    read(held).await;
    let held = post(&fixture, "a", "third", json!({"result": true}), json!({})).await;
    fixture.operator.wait_open(1).await;
    let other = read(post(&fixture, "a", "fourth", json!({}), json!({})).await).await;
    assert_eq!(
        other.last()["result"]["content"][0]["text"],
        "done fourth",
        "{other:?}"
    );
    fixture.operator.answer(APPROVE).await;
    let answer = read(held).await;
    assert_eq!(answer.last()["result"]["content"][0]["text"], "done third");
}

#[tokio::test(start_paused = true)]
async fn held_subscription_occupies_no_process() {
    let fixture = Fixture::with_tool_settings(&json!({"shared": true}));
    let wanted = json!({"notifications": {"resourceSubscriptions": ["ask:me"]}});
    let subscribing = request(&fixture, "a", "subscriptions/listen", "", wanted);
    let calling = async {
        fixture.operator.wait_open(1).await;
        let other = read(post(&fixture, "a", "echo", json!({}), json!({})).await).await;
        assert_eq!(other.last()["result"]["content"][0]["text"], "done echo");
        fixture.operator.answer(APPROVE).await;
    };
    let (mut stream, ()) = tokio::join!(subscribing, calling);
    let granted = read_until(&mut stream, "acknowledged").await;
    let granted = &granted["params"]["notifications"]["resourceSubscriptions"];
    assert_eq!(*granted, json!(["ask:me"]));
}

#[tokio::test(start_paused = true)]
async fn held_question_does_not_stall_server_notifications() {
    let fixture = Fixture::new();
    // More messages than fit into the queue of a call.
    let arguments = json!({"question": true, "more": 1000});
    let mut stream = post(&fixture, "a", "elicit", arguments, json!({})).await;
    fixture.operator.wait_open(1).await;
    for _ in 0..999 {
        read_until(&mut stream, "notifications/test").await;
    }
    fixture.operator.answer(APPROVE).await;
    let result = read_until(&mut stream, "input_required").await;
    assert_eq!(result["result"]["resultType"], "input_required");
}

/// Makes a call whose server asks the client a question, and has the operator approve the call.
/// Returns the `requestState` of the held call.
async fn call_until_input(fixture: &Fixture, arguments: &Value) -> Value {
    let begun = async {
        let begun = post(fixture, "a", "elicit", arguments.clone(), json!({})).await;
        read(begun).await
    };
    let (begun, ()) = tokio::join!(begun, fixture.operator.answer(APPROVE));
    let result = &begun.last()["result"];
    assert_eq!(result["resultType"], "input_required", "{begun:?}");
    result["requestState"].clone()
}

fn with_responses(state: &Value, action: &str) -> Value {
    json!({"requestState": state, "inputResponses": {"input-1": {"action": action}}})
}

#[tokio::test(start_paused = true)]
async fn continuation_of_an_approved_call_needs_no_new_approval() {
    let fixture = Fixture::new();
    let arguments = json!({"ask": true});
    let state = call_until_input(&fixture, &arguments).await;
    let more = with_responses(&state, "accept");
    let done = read(post(&fixture, "a", "elicit", arguments, more).await).await;
    assert_eq!(done.last()["result"]["resultType"], "complete", "{done:?}");
    assert_eq!(fixture.operator.count(), 1);
    let records = fixture.records.of_stage("before");
    assert_eq!(records.len(), 2, "one for each POST: {records:?}");
}

#[tokio::test(start_paused = true)]
async fn continuation_that_a_policy_refuses_is_refused() {
    let fixture = Fixture::new();
    let arguments = json!({"ask": true});
    let state = call_until_input(&fixture, &arguments).await;
    let mut more = with_responses(&state, "accept");
    more["inputResponses"]["input-1"]["content"] = json!({"text": "refuse"});
    let refused = read(post(&fixture, "a", "elicit", arguments, more).await).await;
    assert_eq!(refused.reason(), "rego_denied");
    assert_eq!(fixture.operator.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn approval_does_not_apply_to_other_callers_or_calls() {
    let fixture = Fixture::new();
    let arguments = json!({"ask": true});
    let state = call_until_input(&fixture, &arguments).await;
    let more = with_responses(&state, "accept");
    for (agent, name) in [("b", "elicit"), ("a", "other")] {
        let earlier = fixture.operator.count();
        let other = async {
            let other = post(&fixture, agent, name, arguments.clone(), more.clone()).await;
            read(other).await
        };
        let (answer, ()) = tokio::join!(other, fixture.operator.answer(APPROVE));
        assert_eq!(fixture.operator.count(), earlier + 1);
        let error = &answer.last()["error"]["message"];
        assert_eq!(error, "Invalid or expired requestState", "{answer:?}");
    }
    // The call still waits for its own client.
    let done = read(post(&fixture, "a", "elicit", arguments, more).await).await;
    assert_eq!(done.last()["result"]["resultType"], "complete");
}

#[tokio::test(start_paused = true)]
async fn held_question_is_gathered_when_it_is_approved() {
    let fixture = Fixture::new();
    let arguments = json!({"question": true});
    let state = call_until_input(&fixture, &arguments).await;
    let more = with_responses(&state, "accept");
    let done = read(post(&fixture, "a", "elicit", arguments.clone(), more).await).await;
    assert_eq!(done.last()["result"]["resultType"], "complete");
    // A refused question returns an error to the server, and the client does not receive it.
    let refused = async { read(post(&fixture, "a", "elicit", arguments, json!({})).await).await };
    let (refused, ()) = tokio::join!(refused, fixture.operator.answer(ApprovalAnswer::Deny));
    let text = refused.last()["result"].to_string();
    assert!(text.contains("ask_denied"), "{refused:?}");
    assert_eq!(fixture.records.of_stage("elicitation").len(), 2);
}

#[tokio::test(start_paused = true)]
async fn client_that_hangs_up_ends_the_hold_of_a_question() {
    let fixture = Fixture::new();
    let held = post(
        &fixture,
        "a",
        "elicit",
        json!({"question": true}),
        json!({}),
    )
    .await;
    fixture.operator.wait_open(1).await;
    drop(held);
    fixture.operator.wait_open(0).await;
    let cancelled = |message: &Value| message["method"] == "notifications/cancelled";
    fixture.tool.wait_received(cancelled).await;
    let records = fixture.records.of_stage("elicitation");
    assert_eq!(records.len(), 1);
    assert_eq!(records[0].reason, Some(Reason::ClientLeft));
}

/// A before hook of the gateway about a call of the tool `name`, which the operator approves.
async fn hook(fixture: &Fixture, name: &str, arguments: &Value) {
    let envelope = json!({
        "version": "1.0", "type": "before", "request_id": "r", "method": "tools/call",
        "params": {"arguments": arguments, "name": name},
        "tool_id": "t", "agent_id": "a", "session_id": "gateway",
    });
    let hook = async { read(fixture.post("/intercept/before", &[], &envelope).await).await };
    let (passed, ()) = tokio::join!(hook, fixture.operator.answer(APPROVE));
    assert_eq!(passed.last()["action"], "pass");
}

#[tokio::test(start_paused = true)]
async fn call_approved_at_its_hook_needs_no_second_approval() {
    let fixture = Fixture::new();
    let arguments = json!({"ask": true});
    hook(&fixture, "echo", &arguments).await;
    let done = read(post(&fixture, "a", "echo", arguments, json!({})).await).await;
    assert_eq!(done.last()["result"]["content"][0]["text"], "done echo");
    assert_eq!(fixture.operator.count(), 1);
    // The approval was valid for one call only.
    let held = call_held(&fixture).await;
    assert_eq!(fixture.operator.count(), 2);
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn call_that_differs_from_its_hook_needs_new_approval() {
    for (agent, arguments) in [
        ("a", json!({"ask": true, "path": "/"})),
        ("b", json!({"ask": true})),
    ] {
        let fixture = Fixture::new();
        hook(&fixture, "echo", &json!({"ask": true})).await;
        let held = post(&fixture, agent, "echo", arguments, json!({})).await;
        fixture.operator.wait_open(1).await;
        assert_eq!(held.status(), StatusCode::OK);
        assert_eq!(fixture.operator.count(), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn continuation_of_a_hook_approved_call_needs_no_approval() {
    let fixture = Fixture::new();
    let arguments = json!({"ask": true});
    hook(&fixture, "elicit", &arguments).await;
    let begun = post(&fixture, "a", "elicit", arguments.clone(), json!({})).await;
    let state = read(begun).await.last()["result"]["requestState"].clone();
    let more = with_responses(&state, "accept");
    let done = read(post(&fixture, "a", "elicit", arguments, more).await).await;
    assert_eq!(done.last()["result"]["resultType"], "complete", "{done:?}");
    assert_eq!(fixture.operator.count(), 1);
}
