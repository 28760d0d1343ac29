//! The bridge relays messages unchanged, and only to their own session.

use std::io::{BufReader, Read, Write};

use serde_json::{Value, json};
use testkit::{http, wait};

use crate::bridge::{Bridge, messages, request};

/// Numbers that no Rust type can hold, unordered keys, escapes.
const ARGUMENTS: &str = r#"{"z":123456789012345678901234567890,"a":-0.10000000000000000555111512312578270211815834045410156250e+400,"f":1.10,"u":"\u00e9é✓ \ud83d\ude00","nested":{"b":[1,2,{"y":null,"x":true}],"a":{}},"":"\/"}"#;

#[test]
fn call_and_result_are_relayed_without_changes() {
    let bridge = Bridge::with_fixture();
    let _gate = bridge.start();
    let session = bridge.session("fixture");
    let body = format!(
        r#"{{"jsonrpc":"2.0","id":99999999999999999999,"method":"tools/call","params":{{"unknown":[1.0],"name":"echo_raw","arguments":{ARGUMENTS}}}}}"#
    );
    let answer = session.post(&body);
    let text = answer.text();
    assert!(
        text.contains(&format!("\"structuredContent\":{ARGUMENTS}")),
        "{text}"
    );
    assert!(text.contains("\"id\":99999999999999999999"), "{text}");
    // The arguments that the server received, returned as a text.
    let params = format!(r#"{{"unknown":[1.0],"name":"echo_raw","arguments":{ARGUMENTS}}}"#);
    assert!(text.contains(&Value::from(params).to_string()), "{text}");
}

#[test]
fn call_of_2026_07_28_is_relayed_without_changes() {
    let bridge = Bridge::with_fixture();
    let _gate = bridge.start();
    let meta = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    });
    let body = format!(
        r#"{{"jsonrpc":"2.0","id":"é\u00e9","method":"tools/call","params":{{"name":"echo_raw","arguments":{ARGUMENTS},"_meta":{meta}}}}}"#
    );
    let headers = [
        ("MCP-Protocol-Version", "2026-07-28"),
        ("Mcp-Method", "tools/call"),
        ("Mcp-Name", "echo_raw"),
    ];
    let text = bridge
        .request("POST", "/mcp/fixture", &headers, &body)
        .text();
    assert!(
        text.contains(&format!("\"structuredContent\":{ARGUMENTS}")),
        "{text}"
    );
    assert!(text.contains(r#""id":"é\u00e9""#), "{text}");
}

#[test]
fn large_answer_is_relayed_completely() {
    let bridge = Bridge::with_fixture();
    let _gate = bridge.start();
    let session = bridge.session("fixture");
    let bytes = 3_000_000;
    let text = session.text("big", &json!({"bytes": bytes}));
    assert_eq!(text.len(), bytes);
    assert!(text.bytes().all(|byte| byte == b'x'));
}

#[test]
fn sessions_with_equal_request_ids_receive_only_their_own_answers() {
    let bridge = Bridge::with_fixture();
    let _gate = bridge.start();
    let (one, two) = (bridge.session("fixture"), bridge.session("fixture"));
    assert_ne!(one.id, two.id);
    let slow = json!({"name": "sleep", "arguments": {"ms": 300}});
    let waiting = one.send(&request(1, "tools/call", &slow));
    let text = two.text("test_simple_text", &json!({}));
    assert_eq!(text, "This is a simple text response for testing.");
    let answer = http::read_response(BufReader::new(waiting)).unwrap();
    let slept = &messages(&answer)[0]["result"]["content"][0]["text"];
    assert_eq!(slept, "Slept.", "{}", answer.text());
    // Each session has its own process.
    let pid = |text: String| serde_json::from_str::<Value>(&text).unwrap()["pid"].clone();
    assert_ne!(
        pid(one.text("who", &json!({}))),
        pid(two.text("who", &json!({})))
    );
}

#[test]
fn shared_server_routes_messages_to_the_right_session() {
    let program = testkit::mcp::fixture();
    let command = [program.to_str().unwrap()];
    let bridge = Bridge::new().tool("fixture", &command, "shared: true");
    let _gate = bridge.start();
    let (one, two) = (bridge.session("fixture"), bridge.session("fixture"));
    let pid = |text: String| serde_json::from_str::<Value>(&text).unwrap()["pid"].clone();
    assert_eq!(
        pid(one.text("who", &json!({}))),
        pid(two.text("who", &json!({})))
    );
    let progress = |token: &str, steps: u64| {
        let meta = json!({"progressToken": token});
        let arguments = json!({"steps": steps, "ms": 20});
        let params = json!({"name": "progress", "arguments": arguments, "_meta": meta});
        request(7, "tools/call", &params)
    };
    // Both sessions use the same id and the same token.
    let first = one.send(&progress("t", 4));
    let second = two.send(&progress("t", 6));
    for (stream, steps) in [(first, 4), (second, 6)] {
        let answer = http::read_response(BufReader::new(stream)).unwrap();
        let messages = messages(&answer);
        let progress = messages.iter().filter(|message| {
            message["method"] == "notifications/progress" && message["params"]["total"] == steps
        });
        assert_eq!(
            progress.count(),
            usize::try_from(steps).unwrap(),
            "{messages:?}"
        );
        assert_eq!(
            messages.len(),
            usize::try_from(steps).unwrap() + 1,
            "{messages:?}"
        );
        assert_eq!(messages.last().unwrap()["id"], 7);
    }
}

/// The ids and data of a stream's events, up to the event that contains `until`.
pub(crate) fn events(stream: &mut impl Read, until: &str) -> Vec<(String, String)> {
    let mut text = String::new();
    while !text.contains(until) || !text.ends_with("\n\n") {
        let chunk = http::read_chunk(&mut *stream).unwrap();
        text += &String::from_utf8(chunk.expect("the stream continues")).unwrap();
    }
    let field = |event: &str, name: &str| {
        let line = event.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or("").trim().to_owned()
    };
    let events = text.split("\n\n").filter(|event| event.contains("data:"));
    events
        .map(|event| (field(event, "id:"), field(event, "data:")))
        .collect()
}

#[test]
fn interrupted_sse_stream_resumes_at_the_last_event() {
    let bridge = Bridge::with_fixture();
    let _gate = bridge.start();
    let mut stream = BufReader::new(bridge.send("GET", "/sse", &[], ""));
    let head = http::read_head(&mut stream).unwrap();
    let session = head.header("x-session-id").unwrap().to_owned();
    let (_, endpoint) = events(&mut stream, "endpoint").remove(0);
    let post = |body: &str| assert_eq!(bridge.request("POST", &endpoint, &[], body).status, 202);
    let client = json!({"name": "test", "version": "1"});
    let params = json!({"protocolVersion": "2024-11-05", "capabilities": {}, "clientInfo": client});
    post(&request(0, "initialize", &params));
    events(&mut stream, "protocolVersion");
    post(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#);
    let meta = json!({"progressToken": "t"});
    let arguments = json!({"steps": 20, "ms": 20});
    let params = json!({"name": "progress", "arguments": arguments, "_meta": meta});
    post(&request(1, "tools/call", &params));
    let mut received = events(&mut stream, "\"progress\":3");
    drop(stream);
    let (last, _) = received.last().unwrap().clone();
    assert_eq!(last.split(':').next(), Some(session.as_str()), "{last}");
    let resumed = bridge.send("GET", "/sse", &[("Last-Event-ID", &last)], "");
    let mut resumed = BufReader::new(resumed);
    let head = http::read_head(&mut resumed).unwrap();
    assert_eq!(head.header("x-session-id"), Some(session.as_str()));
    received.extend(events(&mut resumed, "Done."));
    let steps = received.iter().filter_map(|(_, data)| {
        let message: Value = serde_json::from_str(data).ok()?;
        message["params"]["progress"].as_u64()
    });
    let steps: Vec<u64> = steps.collect();
    assert_eq!(steps, (1..=20).collect::<Vec<u64>>(), "{received:?}");
}

#[test]
fn server_stderr_is_logged_with_the_tool_name() {
    let bridge = Bridge::with_fixture();
    let gate = bridge.start();
    let session = bridge.session("fixture");
    session.text("stderr_lines", &json!({"count": 1, "text": "over and out"}));
    wait::until("the line", || {
        let log = gate.stderr();
        let line = log.lines().find(|line| line.contains("over and out 0"))?;
        line.contains("fixture").then_some(())
    });
}

#[test]
fn deleted_session_ends_its_server() {
    let bridge = Bridge::with_fixture();
    let _gate = bridge.start();
    let session = bridge.session("fixture");
    session.text("test_simple_text", &json!({}));
    assert_eq!(bridge.servers().len(), 1);
    let status = session.delete();
    assert!((200..300).contains(&status), "{status}");
    assert_eq!(session.post(&request(2, "ping", &json!({}))).status, 404);
    wait::until("the server to end", || {
        bridge.servers().is_empty().then_some(())
    });
}

#[test]
fn incomplete_body_does_not_block_other_requests() {
    let bridge = Bridge::with_fixture();
    let _gate = bridge.start();
    let session = bridge.session("fixture");
    let mut stuck = bridge.connect();
    let head = format!(
        "POST /mcp/fixture HTTP/1.1\r\nHost: {}\r\nMcp-Session-Id: {}\r\nContent-Length: 1000\r\n\r\n{{",
        bridge.address, session.id
    );
    stuck.write_all(head.as_bytes()).unwrap();
    session.text("test_simple_text", &json!({}));
    drop(stuck);
    session.text("test_simple_text", &json!({}));
}
