//! Request context that the hooks of a gateway and the bridge share for one call.

use std::io::BufReader;

use serde_json::{Value, json};
use testkit::http;

use crate::bridge::{Bridge, messages, request};
use crate::relay::events;

/// The policy distinguishes hooks and bridge by the session id, so that a test controls where a
/// decision is made.
const POLICY: &str = r#"
default decision := {"action": "allow"}

decision := {"action": "allow", "reason": "reading is fine", "metadata": {"ticket": "T-1"}} if {
	input.moment == "before"
	input.name != "env"
}

decision := {"action": "block", "reason": "no secrets", "metadata": {"ticket": "T-2"}} if {
	input.moment == "before"
	input.name == "env"
	input.session_id == "gateway"
}

shared := {"before": input.before, "execution": input.execution}

decision := {"action": "redact", "outputs": {"modified_data": shared}} if {
	input.moment == "after"
	input.session_id == "gateway"
}

decision := {"action": "redact", "outputs": {"modified_data": {"content": [{"type": "text", "text": json.marshal(shared)}]}}} if {
	input.moment == "after"
	input.session_id != "gateway"
	input.params.arguments.show
}
"#;

/// The transport of a call to the bridge.
#[derive(Clone, Copy, Debug)]
enum Transport {
    Streamable,
    Sse,
    Sessionless,
}

/// The location of the request id in a call.
#[derive(Clone, Copy, Debug)]
enum IdLocation {
    Meta,
    Header,
}

/// Makes the call `name` as `agent`, for the request `id`, and returns the whole response.
fn call(
    bridge: &Bridge,
    (transport, id_location): (Transport, IdLocation),
    agent: &str,
    id: &str,
    name: &str,
) -> Value {
    let mut params = json!({"name": name, "arguments": {}, "_meta": {}});
    let mut headers = vec![("X-Agent-ID", agent)];
    match id_location {
        IdLocation::Meta => params["_meta"]["palisade/request"] = json!(id),
        IdLocation::Header => headers.push(("X-Request-ID", id)),
    }
    match transport {
        Transport::Streamable => {
            let session = bridge.session_of("fixture", Some(agent)).ok().unwrap();
            let mut all = session.headers();
            all.extend(headers);
            let body = request(1, "tools/call", &params);
            answer_of(&bridge.request("POST", &session.path, &all, &body))
        }
        Transport::Sse => {
            let opened = bridge.send("GET", "/sse", &headers[..1], "");
            let mut stream = BufReader::new(opened);
            http::read_head(&mut stream).unwrap();
            let (_, endpoint) = events(&mut stream, "endpoint").remove(0);
            let post = |body: &str| {
                let answer = bridge.request("POST", &endpoint, &headers, body);
                assert_eq!(answer.status, 202, "{}", answer.text());
            };
            let client = json!({"name": "test", "version": "1"});
            let hello =
                json!({"protocolVersion": "2024-11-05", "capabilities": {}, "clientInfo": client});
            post(&request(0, "initialize", &hello));
            events(&mut stream, "protocolVersion");
            post(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#);
            post(&request(1, "tools/call", &params));
            let (_, answer) = events(&mut stream, "\"id\":1").remove(0);
            serde_json::from_str(&answer).unwrap()
        }
        Transport::Sessionless => {
            let meta = &mut params["_meta"];
            meta["io.modelcontextprotocol/protocolVersion"] = json!("2026-07-28");
            meta["io.modelcontextprotocol/clientCapabilities"] = json!({});
            headers.extend([
                ("MCP-Protocol-Version", "2026-07-28"),
                ("Mcp-Method", "tools/call"),
                ("Mcp-Name", name),
            ]);
            let body = request(1, "tools/call", &params);
            answer_of(&bridge.request("POST", "/mcp/fixture", &headers, &body))
        }
    }
}

fn answer_of(answer: &http::HttpResponse) -> Value {
    let mut all = messages(answer).into_iter();
    let found = all.find(|message| message["id"] == 1);
    found.unwrap_or_else(|| panic!("no answer: {}", answer.text()))
}

fn send_before_hook(bridge: &Bridge, id: &str, name: &str) -> Value {
    let body = json!({
        "version": "1.0", "type": "before", "request_id": id,
        "timestamp": "2026-01-02T03:04:05Z", "method": "tools/call",
        "params": {"name": name, "arguments": {}},
        "tool_id": "fixture", "agent_id": "anna", "session_id": "gateway",
    });
    let answer = bridge.hook("before", &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

/// The context of the call in the policy of the after hook.
fn send_after_hook(bridge: &Bridge, id: &str, answer: &Value) -> Value {
    let mut body = json!({
        "version": "1.0", "type": "after", "request_id": id,
        "timestamp": "2026-01-02T03:04:06Z",
        "tool_id": "fixture", "agent_id": "anna", "session_id": "gateway",
    });
    for field in ["result", "error"] {
        if let Some(value) = answer.get(field) {
            body[field] = value.clone();
        }
    }
    let answer = bridge.hook("after", &body).json();
    assert_eq!(answer["action"], "modify", "{answer}");
    answer["modified_data"].clone()
}

/// Follows a successful and a failed call from the before hook to the after hook.
fn check_shared_context(transport: Transport) {
    let bridge = Bridge::with_fixture().policy(POLICY);
    let _gate = bridge.start();
    let allowed =
        json!({"action": "allow", "reason": "reading is fine", "metadata": {"ticket": "T-1"}});
    for id_location in [IdLocation::Meta, IdLocation::Header] {
        for (name, failed) in [("test_simple_text", false), ("no_such_tool", true)] {
            let id = format!("{id_location:?}-{name}");
            let answer = send_before_hook(&bridge, &id, name);
            assert_eq!(answer["action"], "pass", "{answer}");
            assert_eq!(answer["metadata"]["ticket"], "T-1");
            let answer = call(&bridge, (transport, id_location), "anna", &id, name);
            assert_eq!(answer.get("error").is_some(), failed, "{answer}");
            let shared = send_after_hook(&bridge, &id, &answer);
            assert_eq!(shared["before"], allowed, "{id_location:?}");
            let execution = &shared["execution"];
            assert_eq!(execution["failed"], failed, "{execution}");
            assert_eq!(execution["exit_code"], 0, "{execution}");
            assert!(execution["duration_ms"].is_u64(), "{execution}");
        }
    }
    // Without a call the context has only the decision.
    send_before_hook(&bridge, "no-call", "test_simple_text");
    let shared = send_after_hook(&bridge, "no-call", &json!({"result": {}}));
    assert_eq!(shared, json!({"before": allowed, "execution": {}}));
    let shared = send_after_hook(&bridge, "no-hook", &json!({"result": {}}));
    assert_eq!(shared, json!({"before": {}, "execution": {}}));
}

#[test]
fn seed_000_context_is_shared_by_hooks_and_streamable_http() {
    check_shared_context(Transport::Streamable);
}

#[test]
fn seed_000_context_is_shared_by_hooks_and_sse() {
    check_shared_context(Transport::Sse);
}

#[test]
fn seed_000_context_is_shared_by_hooks_and_2026_07_28() {
    check_shared_context(Transport::Sessionless);
}

#[test]
fn seed_000_exit_code_of_a_crash_reaches_the_after_policy() {
    let bridge = Bridge::with_fixture().policy(POLICY);
    let _gate = bridge.start();
    send_before_hook(&bridge, "r", "crash");
    let transport = (Transport::Streamable, IdLocation::Header);
    let answer = call(&bridge, transport, "anna", "r", "crash");
    let shared = send_after_hook(&bridge, "r", &answer);
    assert_eq!(shared["execution"]["exit_code"], 7, "{shared}");
    assert_eq!(shared["execution"]["failed"], true, "{shared}");
}

#[test]
fn seed_000_bridge_refuses_a_call_whose_stored_decision_is_block() {
    let bridge = Bridge::with_fixture().policy(POLICY);
    let gate = bridge.start();
    for transport in [
        Transport::Streamable,
        Transport::Sse,
        Transport::Sessionless,
    ] {
        for id_location in [IdLocation::Meta, IdLocation::Header] {
            let id = format!("{transport:?}-{id_location:?}");
            let hook = send_before_hook(&bridge, &id, "env");
            assert_eq!(hook["action"], "block", "{hook}");
            let request = hook["metadata"]["request"].as_str().unwrap();
            let answer = call(&bridge, (transport, id_location), "anna", &id, "env");
            let result = &answer["result"];
            assert_eq!(result["isError"], true, "{id}: {answer}");
            let text = result["content"][0]["text"].as_str().unwrap();
            assert!(text.contains("no secrets"), "{id}: {text}");
            let about = &result["_meta"]["palisade/refusal"];
            assert_eq!(about["request_id"], request, "{id}");

            let path = format!("/v1/audit?request_id={request}");
            let records = gate.get(&path).json()["records"].clone();
            let records = records.as_array().unwrap().clone();
            let field = |name: &str| -> Vec<Value> {
                records.iter().map(|one| one[name].clone()).collect()
            };
            let events = field("event");
            assert_eq!(events, [Value::Null, json!("stored_decision")], "{id}");
            for (name, value) in [
                ("verdict", "deny"),
                ("bundle", "guard"),
                ("rule", "rego:guard"),
                ("reason", "rego_denied"),
                ("operation", "env"),
            ] {
                assert_eq!(field(name), [value, value], "{id}: {records:?}");
            }
        }
    }
    // The context of another agent is ignored, and the policies of the bridge allow the call.
    let transport = (Transport::Streamable, IdLocation::Header);
    let answer = call(&bridge, transport, "bob", "Streamable-Header", "env");
    assert!(answer["result"]["content"].is_array(), "{answer}");
    assert_ne!(answer["result"]["isError"], true, "{answer}");
}

#[test]
fn seed_000_bridge_policies_share_a_context_without_hooks() {
    let bridge = Bridge::with_fixture().policy(POLICY);
    let _gate = bridge.start();
    let session = bridge.session("fixture");
    let shared = session.text("test_simple_text", &json!({"show": true}));
    let shared: Value = serde_json::from_str(&shared).unwrap();
    let allowed =
        json!({"action": "allow", "reason": "reading is fine", "metadata": {"ticket": "T-1"}});
    assert_eq!(shared["before"], allowed);
    assert_eq!(shared["execution"]["failed"], false);
    assert_eq!(shared["execution"]["exit_code"], 0);
}
