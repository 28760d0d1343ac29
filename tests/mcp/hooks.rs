//! The hooks, called by a gateway on the same machine.

use serde_json::{Value, json};
use testkit::gate::GateProcess;
use testkit::http::HttpResponse;
use testkit::output;
use testkit::port::Port;

use crate::bridge::{Bridge, request};

/// Asserts that a response is a refusal in both hook formats, and returns the reason.
#[track_caller]
pub(crate) fn refused(answer: &HttpResponse) -> String {
    let body = answer.json();
    assert_eq!(body["action"], "block", "{}", answer.text());
    assert_eq!(body["isError"], true, "{}", answer.text());
    assert_eq!(body["content"][0]["type"], "text", "{}", answer.text());
    let text = body["content"][0]["text"].as_str().unwrap();
    let reason = body["reason"].as_str().unwrap();
    assert_eq!(text, format!("Blocked by policy: {reason}"));
    reason.to_owned()
}

/// The short envelope: one of the specification's two definitions of a hook request.
fn short(name: &str) -> Value {
    json!({
        "type": "before", "request_id": "r-1", "method": "tools/call",
        "params": {"name": name, "arguments": {}}, "tool_id": "files", "agent_id": "anna",
    })
}

/// A request of Docker's gateway.
fn docker(name: &str, text: &str) -> Value {
    json!({"method": "tools/call", "params": {"name": name, "arguments": {"text": text}}})
}

fn metrics(bridge: &Bridge) -> String {
    let answer = bridge.request("GET", "/metrics", &[], "");
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.text()
}

/// The value of a counter; zero if it has no series.
fn intercepts(bridge: &Bridge, moment: &str, action: &str, tool: &str) -> u64 {
    let series = format!(
        r#"polis_sidecar_intercept_total{{type="{moment}",action="{action}",tool_id="{tool}"}}"#
    );
    let text = metrics(bridge);
    let mut lines = text.lines();
    let found = lines.find_map(|line| line.strip_prefix(&series)?.trim().parse().ok());
    found.unwrap_or(0)
}

fn records(gate: &GateProcess<'_>) -> Vec<Value> {
    let answer = gate.get("/v1/audit?kind=mcp").json();
    answer["records"].as_array().unwrap().clone()
}

#[test]
fn seed_000_short_envelope_is_accepted_and_invalid_fields_are_named() {
    let policy = r#"
default decision := {"action": "allow"}
decision := {"action": "block", "reason": "no deleting"} if input.name == "delete"
decision := {"action": "block", "reason": "late"} if { input.moment == "after"; input.name == "read"; input.result.late }
"#;
    let bridge = Bridge::with_fixture().policy(policy);
    let _gate = bridge.start();
    let answer = bridge.hook("before", &short("delete"));
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json()["action"], "block");
    assert_eq!(answer.json()["reason"], "no deleting");
    let answer = bridge.hook("before", &short("read"));
    assert_eq!(answer.json()["action"], "pass", "{}", answer.text());
    let after = json!({
        "type": "after", "request_id": "r-1", "result": {"late": true},
        "tool_id": "files", "agent_id": "anna",
    });
    // The same request id: the after hook finds the called tool.
    assert_eq!(bridge.hook("after", &after).json()["reason"], "late");

    for (field, value) in [
        ("version", json!("2.0")),
        ("version", json!(1.0)),
        ("timestamp", json!("yesterday")),
        ("timestamp", json!(0)),
        ("session_id", json!(7)),
        ("session_id", json!("s".repeat(300))),
        ("type", json!("after")),
        ("request_id", json!("")),
        ("method", json!(null)),
        ("tool_id", json!(["files"])),
        ("agent_id", json!({})),
    ] {
        let mut wrong = short("read");
        wrong[field] = value;
        let answer = bridge.hook("before", &wrong);
        assert_eq!(answer.status, 400, "{wrong}: {}", answer.text());
        let body = answer.json();
        assert_eq!(body["field"], field, "{wrong}: {body}");
        assert!(body["error"].as_str().unwrap().starts_with(field), "{body}");
        assert_eq!(body["action"], "block", "{wrong}: {body}");
    }
    for field in ["type", "request_id", "method", "tool_id", "agent_id"] {
        let mut missing = short("read");
        missing.as_object_mut().unwrap().shift_remove(field);
        let answer = bridge.hook("before", &missing);
        assert_eq!(answer.status, 400, "{missing}: {}", answer.text());
        assert_eq!(answer.json()["field"], field, "{missing}");
    }
}

#[test]
fn seed_000_hook_refusals_have_the_block_form() {
    let bridge = Bridge::with_fixture();
    let _gate = bridge.start();
    let body = docker("read", "x").to_string();
    let page = [("Origin", "http://page.example")];
    for (method, path, headers, body, status) in [
        ("POST", "/intercept/before", &page[..], body.as_str(), 403),
        ("POST", "/intercept/after", &page[..], "null", 403),
        ("GET", "/intercept/before", &[], "", 405),
        ("PUT", "/intercept/after", &[], "null", 405),
        ("POST", "/intercept/befor", &[], body.as_str(), 404),
        ("POST", "/intercept", &[], body.as_str(), 404),
        ("POST", "/intercept/before", &[], "", 400),
        ("POST", "/intercept/after", &[], "[", 400),
    ] {
        let answer = bridge.request(method, path, headers, body);
        assert_eq!(answer.status, status, "{method} {path}: {}", answer.text());
        refused(&answer);
    }
    // A host name of a web page that resolves to this address (DNS rebinding).
    let rebound = "POST /intercept/before HTTP/1.1\r\nHost: rebound.example\r\nConnection: close\r\n\
                   Content-Length: 4\r\n\r\nnull";
    assert_eq!(
        refused(&bridge.raw(rebound)),
        "The Host header names another host"
    );
    let hostless = rebound.replace("Host: rebound.example\r\n", "");
    refused(&bridge.raw(&hostless));
}

#[test]
fn seed_000_calls_of_dockers_gateway_are_counted_by_tool() {
    let policy = r#"
default decision := {"action": "allow"}
decision := {"action": "block", "reason": "no deleting"} if input.name == "delete"
"#;
    let bridge = Bridge::with_fixture().policy(policy);
    let _gate = bridge.start();
    let wrapped = json!({"method": "tools/call", "params": {"name": "mcp-exec", "arguments": {"name": "fetch", "arguments": "{}"}}});
    for (body, blocks) in [
        (docker("search", "x"), false),
        (docker("search", "y"), false),
        (docker("delete", "x"), true),
        (docker("fixture__env", "x"), false),
        (wrapped, false),
    ] {
        let answer = bridge.hook("before", &body);
        assert_eq!(answer.body.is_empty(), !blocks, "{body}: {}", answer.text());
    }
    for (action, tool, count) in [
        ("pass", "search", 2),
        ("block", "delete", 1),
        // A prefixed name counts for the configured server.
        ("pass", "fixture", 1),
        ("pass", "fetch", 1),
        ("pass", "unknown", 0),
    ] {
        assert_eq!(intercepts(&bridge, "before", action, tool), count, "{tool}");
    }
    // An agent that invents names creates no further series.
    for number in 0..200 {
        bridge.hook("before", &docker(&format!("made_up_{number}"), "x"));
    }
    let text = metrics(&bridge);
    let series = text
        .lines()
        .filter(|line| line.starts_with("polis_sidecar_intercept_total"));
    assert!(series.count() < 140, "{text}");
    assert!(intercepts(&bridge, "before", "pass", "unknown") > 0);
}

#[test]
fn seed_000_audit_list_names_the_tool_of_a_call() {
    let bridge = Bridge::with_fixture();
    let _gate = bridge.start();
    assert_eq!(bridge.hook("before", &docker("search", "x")).text(), "");
    let session = bridge.session("fixture");
    session.text("test_simple_text", &json!({}));
    let listed = output::stdout(&bridge.gate_dir.run(&["audit", "list", "--kind", "mcp"]));
    let row = |parts: &[&str]| {
        let mut lines = listed.lines();
        lines.any(|line| parts.iter().all(|part| line.contains(part)))
    };
    assert!(row(&[" tools/call search "]), "{listed}");
    let called = [" fixture ", " tools/call test_simple_text "];
    assert!(row(&called), "{listed}");
}

#[test]
fn seed_000_redaction_without_effect_is_a_pass() {
    let policy = r#"
decision := {"action": "redact", "outputs": {"redaction_rules": {"replacements": {"s3cret": "*"}}}}
"#;
    let bridge = Bridge::with_fixture().policy(policy);
    let gate = bridge.start();
    let mut envelope = short("read");
    envelope["tool_id"] = json!("fixture");
    let answer = bridge.hook("before", &envelope).json();
    assert_eq!(answer["action"], "pass", "{answer}");
    assert_eq!(answer.get("modified_data"), None, "{answer}");
    assert_eq!(
        bridge.hook("before", &docker("fixture__t", "fine")).text(),
        ""
    );
    let result = json!({"content": [{"type": "text", "text": "fine"}]});
    assert_eq!(bridge.hook("after", &result).text(), "");
    let session = bridge.session("fixture");
    let text = session.text("test_simple_text", &json!({}));
    assert_eq!(text, "This is a simple text response for testing.");
    for moment in ["before", "after"] {
        assert_eq!(intercepts(&bridge, moment, "modify", "fixture"), 0);
    }
    assert_eq!(intercepts(&bridge, "before", "pass", "fixture"), 3);
    let verdicts = || records(&gate).into_iter().map(|one| one["verdict"].clone());
    assert!(verdicts().all(|verdict| verdict == "allow"));

    envelope["params"]["arguments"] = json!({"text": "a s3cret"});
    let answer = bridge.hook("before", &envelope).json();
    assert_eq!(answer["action"], "modify", "{answer}");
    assert_eq!(answer["modified_data"]["arguments"]["text"], "a *");
    assert_eq!(intercepts(&bridge, "before", "modify", "fixture"), 1);
    assert!(verdicts().any(|verdict| verdict == "modify"));
}

#[test]
fn seed_000_hooks_and_mcp_are_served_at_separate_addresses() {
    let (hooks, tools) = (Port::take(), Port::take());
    let program = testkit::mcp::fixture();
    let hooks = Bridge::at_address(hooks.address());
    hooks.gate_dir.write_config(&format!(
        "version: \"1.0\"\nserver:\n  interceptor_addr: \"{}\"\n  mcp_server_addr: \"{}\"\n\
         tools:\n  - {{name: fixture, command: [{program:?}]}}\n",
        hooks.address,
        tools.address()
    ));
    let _gate = hooks.gate_dir.start();
    let tools = Bridge::at_address(tools.address());
    let call = docker("read", "x");
    assert_eq!(hooks.hook("before", &call).status, 200);
    assert_eq!(hooks.hook("after", &json!(null)).status, 200);
    tools
        .session("fixture")
        .text("test_simple_text", &json!({}));
    let stream = tools.send("GET", "/sse", &[], "");
    assert_eq!(testkit::http::read_head(stream).unwrap().status, 200);

    for moment in ["before", "after"] {
        let answer = tools.hook(moment, &call);
        assert_eq!(answer.status, 404, "{}", answer.text());
        refused(&answer);
    }
    let body = request(0, "initialize", &json!({}));
    for (method, path) in [
        ("POST", "/mcp"),
        ("POST", "/mcp/fixture"),
        ("GET", "/sse"),
        ("POST", "/message?session_id=1"),
    ] {
        let answer = hooks.request(method, path, &[], &body);
        assert_eq!(answer.status, 404, "{path}: {}", answer.text());
    }
    for address in [&hooks, &tools] {
        let health = address.request("GET", "/health", &[], "");
        assert_eq!(health.status, 200, "{}", health.text());
        for part in ["interceptor", "bridge", "policy"] {
            assert!(!health.json()["components"][part].is_null(), "{part}");
        }
        assert!(metrics(address).contains("polis_sidecar_intercept_total"));
    }
}
