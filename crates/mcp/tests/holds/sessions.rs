//! Held calls in the protocol revisions with sessions.

use std::time::Duration;

use config::Settings;
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use mcp::answer::McpBody;
use policy::answer::ApprovalAnswer;
use policy::reason::Reason;
use policy::verdict::VerdictKind;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::fixture::{Fixture, is_stream, read, read_until, within_timeout};
use crate::operator::APPROVE;

/// A test client with one session.
struct Client<'a> {
    fixture: &'a Fixture,
    session: String,
}

impl<'a> Client<'a> {
    async fn open(fixture: &'a Fixture) -> Self {
        Self::open_as(fixture, "2025-11-25").await
    }

    async fn open_as(fixture: &'a Fixture, revision: &str) -> Self {
        let params = json!({
            "protocolVersion": revision, "capabilities": {"elicitation": {}},
            "clientInfo": {"name": "test", "version": "1"},
        });
        let hello = request(0, "initialize", &params);
        let opened = fixture.post("/mcp/t", &[], &hello).await;
        assert_eq!(opened.status(), StatusCode::OK);
        let session = opened.headers()["mcp-session-id"].to_str().unwrap();
        let session = session.to_owned();
        Self { fixture, session }
    }

    async fn post(&self, body: &Value) -> Response<McpBody> {
        let headers = [("mcp-session-id", self.session.as_str())];
        self.fixture.post("/mcp/t", &headers, body).await
    }

    /// Calls the tool `name`.
    async fn call(&self, id: u64, name: &str, arguments: Value) -> Response<McpBody> {
        self.post(&call(id, name, arguments)).await
    }

    /// Makes a call that is held, and returns its response stream.
    async fn call_held(&self, id: u64) -> Response<McpBody> {
        let held = self.call(id, "echo", json!({"ask": true})).await;
        assert!(is_stream(&held), "the client receives the response head");
        self.fixture.operator.wait_open(1).await;
        held
    }

    async fn cancel(&self, id: u64) {
        let params = json!({"requestId": id});
        let body = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params});
        assert_eq!(self.post(&body).await.status(), StatusCode::ACCEPTED);
    }

    async fn delete(&self) {
        let request = Request::builder()
            .method(Method::DELETE)
            .uri("/mcp/t")
            .header("host", "127.0.0.1:8090")
            .header("mcp-session-id", &self.session)
            .body(Full::default());
        let deleted = self.fixture.send(request.unwrap()).await;
        assert_eq!(deleted.status(), StatusCode::NO_CONTENT);
    }
}

fn request(id: u64, method: &str, params: &Value) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
}

fn call(id: u64, name: &str, arguments: Value) -> Value {
    request(
        id,
        "tools/call",
        &json!({"name": name, "arguments": arguments}),
    )
}

#[tokio::test(start_paused = true)]
async fn held_call_passes_after_approval() {
    let fixture = Fixture::new();
    let client = Client::open(&fixture).await;
    let held = client.call_held(1).await;
    assert!(fixture.tool.calls().is_empty());
    assert!(fixture.records.of_stage("before").is_empty());
    fixture.operator.answer(APPROVE).await;
    let answer = read(held).await;
    assert_eq!(answer.last()["id"], 1);
    assert_eq!(answer.last()["result"]["content"][0]["text"], "done echo");
    assert_eq!(fixture.tool.calls(), ["echo"]);
    assert_eq!(fixture.operator.count(), 1);
    let records = fixture.records.of_stage("before");
    assert_eq!(records.len(), 1, "{records:?}");
    assert_eq!(records[0].verdict, Some(VerdictKind::Allow));
    assert_eq!(records[0].bundle.as_deref(), Some("calls"));
    assert!(records[0].ms.get("hold").is_some());
}

#[tokio::test(start_paused = true)]
async fn held_call_is_refused_after_denial_or_timeout() {
    for (operator_answer, reason) in [
        (ApprovalAnswer::Deny, Reason::AskDenied),
        (ApprovalAnswer::TimedOut, Reason::AskTimeout),
    ] {
        let fixture = Fixture::new();
        let client = Client::open(&fixture).await;
        let held = client.call_held(1).await;
        fixture.operator.answer(operator_answer).await;
        assert_eq!(read(held).await.reason(), reason.code());
        assert!(fixture.tool.calls().is_empty());
        let records = fixture.records.of_stage("before");
        assert_eq!(records.len(), 1, "{records:?}");
        assert_eq!(records[0].verdict, Some(VerdictKind::Deny));
        assert_eq!(records[0].reason, Some(reason));
        // The id is free again.
        let next = read(client.call(1, "echo", json!({})).await).await;
        assert_eq!(next.last()["result"]["content"][0]["text"], "done echo");
    }
}

#[tokio::test(start_paused = true)]
async fn call_without_operator_is_refused_at_once() {
    let fixture = Fixture::unattended();
    let client = Client::open(&fixture).await;
    let refused = client.call(1, "echo", json!({"ask": true})).await;
    assert!(!is_stream(&refused));
    assert_eq!(read(refused).await.reason(), "ask_unattended");
    let records = fixture.records.of_stage("before");
    assert_eq!(records.len(), 1);
    assert_eq!(records[0].reason, Some(Reason::AskUnattended));
    assert!(records[0].ms.get("hold").is_none());
}

#[tokio::test(start_paused = true)]
async fn cancelled_held_call_never_reaches_the_server() {
    let fixture = Fixture::new();
    let client = Client::open(&fixture).await;
    let held = client.call_held(1).await;
    client.cancel(1).await;
    // The operator's question is withdrawn.
    fixture.operator.wait_open(0).await;
    assert!(read(held).await.messages.is_empty());
    let again = read(client.call(1, "again", json!({})).await).await;
    assert_eq!(again.last()["result"]["content"][0]["text"], "done again");
    assert_eq!(fixture.tool.calls(), ["again"]);
    let is_cancelled = |message: &Value| message["method"] == "notifications/cancelled";
    assert!(!fixture.tool.any(is_cancelled));
    let records = fixture.records.of_stage("before");
    assert_eq!(records.len(), 2, "{records:?}");
    assert_eq!(records[0].reason, Some(Reason::ClientLeft));
    assert_eq!(records[0].verdict, None);
}

#[tokio::test(start_paused = true)]
async fn same_id_during_a_hold_is_refused() {
    let fixture = Fixture::new();
    let client = Client::open(&fixture).await;
    let held = client.call_held(1).await;
    for arguments in [json!({}), json!({"ask": true})] {
        let twice = read(client.call(1, "echo", arguments).await).await;
        assert_eq!(twice.status, StatusCode::BAD_REQUEST);
        assert_eq!(
            twice.last()["error"]["message"],
            "another open request has this id"
        );
    }
    fixture.operator.answer(APPROVE).await;
    let answer = read(held).await;
    assert_eq!(answer.last()["result"]["content"][0]["text"], "done echo");
    assert_eq!(fixture.tool.calls(), ["echo"]);
}

#[tokio::test(start_paused = true)]
async fn end_of_session_tool_or_bridge_ends_a_hold() {
    for (end, reason) in [
        ("session", Reason::ClientLeft),
        ("process", Reason::ClientLeft),
        ("tool", Reason::ToolDenied),
        ("bridge", Reason::ToolDenied),
    ] {
        let fixture = Fixture::new();
        let client = Client::open(&fixture).await;
        let held = client.call_held(1).await;
        match end {
            "session" => client.delete().await,
            "process" => fixture.tool.crash(),
            "tool" => fixture.mcp_server.bridge.apply(&Settings::default()),
            _ => within_timeout(fixture.mcp_server.bridge.end(Instant::now())).await,
        }
        fixture.operator.wait_open(0).await;
        let answer = read(held).await;
        assert_eq!(
            answer.last()["error"]["message"],
            "the server ended",
            "{end}"
        );
        assert!(fixture.tool.calls().is_empty(), "{end}");
        let records = fixture.records.of_stage("before");
        assert_eq!(records.len(), 1, "{end}: {records:?}");
        assert_eq!(records[0].reason, Some(reason), "{end}");
    }
}

#[tokio::test(start_paused = true)]
async fn reload_during_a_hold_decides_again() {
    let allow = "package mcp.authz\nallow := true";
    let block = "package mcp.authz\nallow := false";
    for (policy, is_allowed) in [(allow, true), (block, false)] {
        let fixture = Fixture::new();
        let client = Client::open(&fixture).await;
        let held = client.call_held(1).await;
        fixture.reload(policy);
        let answer = read(held).await;
        match is_allowed {
            true => assert_eq!(answer.last()["result"]["content"][0]["text"], "done echo"),
            false => assert_eq!(answer.reason(), "rego_denied"),
        }
        assert_eq!(fixture.tool.calls().len(), usize::from(is_allowed));
        fixture.operator.wait_open(0).await;
        assert_eq!(fixture.operator.count(), 1);
        assert_eq!(fixture.records.of_stage("before").len(), 1);
    }
    // If the new policy also asks, the operator receives a new question.
    let fixture = Fixture::new();
    let client = Client::open(&fixture).await;
    let held = client.call_held(1).await;
    fixture.reload(crate::fixture::ASKING_POLICY);
    fixture
        .operator
        .wait(|questions| questions.count == 2)
        .await;
    fixture.operator.answer(APPROVE).await;
    let answer = read(held).await;
    assert_eq!(answer.last()["result"]["content"][0]["text"], "done echo");
}

#[tokio::test(start_paused = true)]
async fn definition_changed_during_a_hold_refuses_the_call() {
    let fixture = Fixture::new();
    let client = Client::open(&fixture).await;
    let fingerprints = fixture.mcp_server.bridge.fingerprints();
    fingerprints.record("t", "echo", r#"{"name":"echo"}"#);
    let held = client.call_held(1).await;
    fingerprints.record("t", "echo", r#"{"name":"echo","description":"other"}"#);
    fixture.operator.answer(APPROVE).await;
    assert_eq!(read(held).await.reason(), "tool_changed");
    assert!(fixture.tool.calls().is_empty());
    assert_eq!(fixture.records.of_stage("before").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn held_result_does_not_stall_another_call() {
    let fixture = Fixture::new();
    let client = Client::open(&fixture).await;
    let held = client.call(1, "first", json!({"result": true})).await;
    assert!(is_stream(&held));
    fixture.operator.wait_open(1).await;
    let second = read(client.call(2, "second", json!({})).await).await;
    assert_eq!(second.last()["result"]["content"][0]["text"], "done second");
    fixture.operator.answer(APPROVE).await;
    let first = read(held).await;
    assert_eq!(first.last()["result"]["content"][0]["text"], "done first");
    let records = fixture.records.of_stage("after");
    assert_eq!(records.len(), 2, "{records:?}");
}

#[tokio::test(start_paused = true)]
async fn held_result_is_refused_after_denial_and_dropped_when_cancelled() {
    let fixture = Fixture::new();
    let client = Client::open(&fixture).await;
    let held = client.call(1, "first", json!({"result": true})).await;
    fixture.operator.answer(ApprovalAnswer::Deny).await;
    assert_eq!(read(held).await.reason(), "ask_denied");
    let held = client.call(2, "second", json!({"result": true})).await;
    fixture.operator.wait_open(1).await;
    client.cancel(2).await;
    fixture.operator.wait_open(0).await;
    assert!(read(held).await.messages.is_empty());
    let records = fixture.records.of_stage("after");
    let reasons: Vec<_> = records
        .iter()
        .map(|record| record.reason.unwrap())
        .collect();
    assert_eq!(reasons, [Reason::AskDenied, Reason::ClientLeft]);
}

#[tokio::test(start_paused = true)]
async fn held_question_does_not_stall_another_call() {
    let fixture = Fixture::new();
    let client = Client::open(&fixture).await;
    let mut asking = client.call(1, "elicit", json!({"question": true})).await;
    assert!(is_stream(&asking));
    fixture.operator.wait_open(1).await;
    let second = read(client.call(2, "second", json!({})).await).await;
    assert_eq!(second.last()["result"]["content"][0]["text"], "done second");
    fixture.operator.answer(APPROVE).await;
    // The client receives the question on the stream of its call.
    let question = read_until(&mut asking, "elicitation/create").await;
    let answer = json!({"jsonrpc": "2.0", "id": question["id"], "result": {"action": "accept"}});
    assert_eq!(client.post(&answer).await.status(), StatusCode::ACCEPTED);
    let done = read(asking).await;
    assert!(done.last()["result"].to_string().contains("accept"));
    assert_eq!(fixture.records.of_stage("elicitation").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn refused_question_returns_an_error_to_the_server() {
    let fixture = Fixture::new();
    let client = Client::open(&fixture).await;
    let asking = client.call(1, "elicit", json!({"question": true})).await;
    fixture.operator.answer(ApprovalAnswer::Deny).await;
    let done = read(asking).await;
    assert!(
        done.last()["result"].to_string().contains("ask_denied"),
        "{done:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn question_withdrawn_by_the_server_ends_its_hold() {
    let fixture = Fixture::new();
    let client = Client::open(&fixture).await;
    let asking = client.call(1, "elicit", json!({"question": true})).await;
    fixture.operator.wait_open(1).await;
    let other = read(client.call(2, "withdraw_question", json!({})).await).await;
    assert_eq!(other.last()["result"]["content"], json!([]));
    fixture.operator.wait_open(0).await;
    // The client never received the question, and the server received no answer to it.
    let done = read(asking).await;
    assert_eq!(done.messages.len(), 1, "{done:?}");
    let is_answer = |message: &Value| message["method"].is_null();
    assert!(!fixture.tool.any(is_answer));
    assert_eq!(
        fixture.records.of_stage("elicitation")[0].reason,
        Some(Reason::ClientLeft)
    );
}

#[tokio::test(start_paused = true)]
async fn held_call_receives_no_question_of_a_shared_server() {
    let fixture = Fixture::with_tool_settings(&json!({"shared": true}));
    let (waiting, asking) = (Client::open(&fixture).await, Client::open(&fixture).await);
    let held = waiting.call_held(1).await;
    let mut stream = asking.call(1, "elicit", json!({})).await;
    assert!(is_stream(&stream));
    let question = read_until(&mut stream, "elicitation/create").await;
    assert_eq!(question["method"], "elicitation/create");
    fixture.operator.answer(APPROVE).await;
    let answer = read(held).await;
    assert_eq!(answer.last()["result"]["content"][0]["text"], "done echo");
}

#[tokio::test(start_paused = true)]
async fn reconnecting_client_receives_the_answer_of_a_held_call() {
    let fixture = Fixture::new();
    let client = Client::open(&fixture).await;
    drop(client.call_held(1).await);
    fixture.operator.answer(APPROVE).await;
    fixture
        .tool
        .wait_received(|message| message["method"] == "tools/call")
        .await;
    let request = Request::get("/mcp/t")
        .header("host", "127.0.0.1:8090")
        .header("mcp-session-id", &client.session)
        .header("last-event-id", "2-0");
    let stream = fixture.send(request.body(Full::default()).unwrap()).await;
    let answer = read(stream).await;
    assert_eq!(answer.last()["result"]["content"][0]["text"], "done echo");
}

#[tokio::test(start_paused = true)]
async fn batch_waits_for_its_held_call() {
    let fixture = Fixture::with_tool_settings(&json!({"runtime": {"timeout": "1s"}}));
    let client = Client::open_as(&fixture, "2025-03-26").await;
    let batch = json!([
        call(1, "first", json!({"ask": true})),
        call(2, "second", json!({}))
    ]);
    let answering = async {
        fixture
            .tool
            .wait_received(|message| message["params"]["name"] == "second")
            .await;
        // Longer than the call timeout, which does not include the wait for the operator.
        tokio::time::sleep(Duration::from_secs(5)).await;
        fixture.operator.answer(APPROVE).await;
    };
    let (answer, ()) = tokio::join!(client.post(&batch), answering);
    let answer = read(answer).await;
    let texts = answer.last().as_array().unwrap().iter();
    let texts: Vec<_> = texts
        .map(|one| one["result"]["content"][0]["text"].clone())
        .collect();
    assert_eq!(texts, ["done first", "done second"]);
}

#[tokio::test(start_paused = true)]
async fn held_call_over_http_sse_is_accepted() {
    let fixture = Fixture::new();
    let request = Request::get("/sse").header("host", "127.0.0.1:8090");
    let mut stream = fixture.send(request.body(Full::default()).unwrap()).await;
    let session = stream.headers()["x-session-id"]
        .to_str()
        .unwrap()
        .to_owned();
    let headers = [("x-session-id", session.as_str())];
    let params = json!({"protocolVersion": "2024-11-05", "capabilities": {}});
    let hello = self::request(0, "initialize", &params);
    let accepted = fixture.post("/message", &headers, &hello).await;
    assert_eq!(accepted.status(), StatusCode::ACCEPTED);
    let held = call(1, "echo", json!({"ask": true}));
    let accepted = fixture.post("/message", &headers, &held).await;
    assert_eq!(accepted.status(), StatusCode::ACCEPTED);
    let twice = fixture.post("/message", &headers, &held).await;
    assert_eq!(twice.status(), StatusCode::BAD_REQUEST);
    fixture.operator.answer(APPROVE).await;
    read_until(&mut stream, "done echo").await;
    assert_eq!(fixture.tool.calls(), ["echo"]);
}

#[tokio::test(start_paused = true)]
async fn request_dropped_while_it_is_written_frees_its_id() {
    let fixture = Fixture::new();
    let client = Client::open(&fixture).await;
    fixture.tool.stop_reading();
    // Larger than the pipe buffer: the write blocks.
    let large = call(1, "echo", json!({"text": "x".repeat(200_000)}));
    let writing = tokio::time::timeout(Duration::from_millis(100), client.post(&large));
    assert!(writing.await.is_err());
    let again = client.call(1, "echo", json!({})).await;
    assert_ne!(again.status(), StatusCode::BAD_REQUEST);
}

#[tokio::test(start_paused = true)]
async fn too_many_held_calls_are_refused() {
    let fixture = Fixture::new();
    let client = Client::open(&fixture).await;
    let mut held = Vec::new();
    for id in 1..=64 {
        held.push(client.call(id, "echo", json!({"ask": true})).await);
    }
    fixture.operator.wait_open(64).await;
    let refused = read(client.call(65, "echo", json!({"ask": true})).await).await;
    assert_eq!(refused.reason(), "rate_limited");
    client.cancel(1).await;
    fixture.operator.wait_open(63).await;
    assert!(is_stream(
        &client.call(66, "echo", json!({"ask": true})).await
    ));
    fixture.operator.wait_open(64).await;
}
