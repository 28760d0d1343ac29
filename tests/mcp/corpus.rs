//! Recorded decisions about tool calls (`tests/corpus/`): through the bridge with and without
//! sessions, over HTTP with SSE, from a sandbox, and through both hook formats.

mod in_sandbox;
mod sse;

use serde_json::{Value, json};
use testkit::corpus::Corpus;
use testkit::http::HttpResponse;

use crate::bridge::{Bridge, messages, request};

/// The policy of the bundle for calls and results.
const AUTHZ_POLICY: &str = r#"package mcp.authz

default decision := {"action": "allow"}

decision := {"action": "block", "reason": "Not this text."} if {
	input.moment == "before"
	input.params.arguments.text == "blocked"
}

decision := {"action": "ask", "reason": "A person decides."} if {
	input.moment == "before"
	input.params.arguments.text == "ask"
}

decision := {"action": "redact", "outputs": {"redaction_rules": {"fields": ["arguments.key"]}}} if {
	input.moment == "before"
	input.params.arguments.key
}
"#;

/// The policy of the bundle for requests of a server to its client.
const ELICITATION_POLICY: &str = r#"package mcp.elicitation

default decision := {"action": "block", "reason": "No questions."}
"#;

/// The calls: a name, the tool, and its arguments.
fn calls() -> Vec<(&'static str, &'static str, Value)> {
    vec![
        ("plain", "echo_raw", json!({"text": "hello"})),
        ("unlisted by deny", "crash", json!({})),
        ("unknown tool", "no_such_tool", json!({})),
        (
            "blocked by a bundle",
            "echo_raw",
            json!({"text": "blocked"}),
        ),
        (
            "asked about by a bundle",
            "echo_raw",
            json!({"text": "ask"}),
        ),
        (
            "redacted by a bundle",
            "echo_raw",
            json!({"key": "k", "text": "x"}),
        ),
        ("an error of the tool", "test_error_handling", json!({})),
        (
            "a question of the server",
            "test_elicitation",
            json!({"message": "name?"}),
        ),
        (
            "prefixed name",
            "fixture__echo_raw",
            json!({"text": "hello"}),
        ),
        (
            "wrapped call",
            "mcp-exec",
            json!({"name": "crash", "arguments": {}}),
        ),
        (
            "wrapped call as text",
            "mcp-exec",
            json!({"name": "crash", "arguments": "{}"}),
        ),
    ]
}

/// A bridge with the fixture server, more lines of its entry, and both bundles.
fn with_bundles(entry: &str) -> Bridge {
    let program = testkit::mcp::fixture();
    let command = [program.to_str().unwrap()];
    let bridge = Bridge::new().tool("fixture", &command, entry);
    for (name, text) in [("authz", AUTHZ_POLICY), ("elicitation", ELICITATION_POLICY)] {
        std::fs::create_dir_all(bridge.path(name)).unwrap();
        std::fs::write(bridge.path(name).join("policy.rego"), text).unwrap();
    }
    bridge.section(
        "policies:\n  bundles:\n    - {id: authz, path: ./authz, entrypoint: mcp/authz}\n    - {id: elicitation, path: ./elicitation, entrypoint: mcp/elicitation}",
    )
}

/// A bridge that does not require client names.
fn start() -> Bridge {
    with_bundles("deny: [crash]").server("enforce_agent_id: false")
}

/// The status of a response, and the outcome of each of its messages.
fn outcome(answer: &HttpResponse) -> String {
    let mut outcomes = vec![format!("status {}", answer.status)];
    outcomes.extend(messages(answer).iter().filter_map(outcome_of_message));
    outcomes.join("\n")
}

fn outcome_of_message(message: &Value) -> Option<String> {
    if let Some(code) = message.pointer("/error/code") {
        return Some(format!("error {code}"));
    }
    if let Some(refusal) = message.pointer("/result/_meta/palisade~1refusal") {
        let (reason, rule) = (&refusal["reason"], &refusal["rule"]);
        return Some(format!("refused {reason} {rule}"));
    }
    if message.get("result").is_some() {
        let failed = message.pointer("/result/isError") == Some(&json!(true));
        return Some(format!("result{}", if failed { " isError" } else { "" }));
    }
    if let Some(action) = message.get("action") {
        return Some(format!("action {action}"));
    }
    if let Some(method) = message.get("method") {
        return Some(format!("method {method}"));
    }
    // The HTTP error body of a refusal by the gate, which is not an MCP message.
    let reason = message.get("reason")?;
    Some(format!("denied {reason}"))
}

#[test]
fn corpus_of_tool_calls() {
    let bridge = start();
    let _gate = bridge.start();
    let mut corpus = Corpus::open("tool-calls", &bridge.gate_dir.control());

    for (name, tool, arguments) in calls() {
        let session = bridge.session("fixture");
        corpus.case(&format!("session: {name}"), || {
            let params = json!({"name": tool, "arguments": arguments});
            outcome(&session.post(&request(1, "tools/call", &params)))
        });
    }
    for (name, method) in [
        ("tools", "tools/list"),
        ("prompts", "prompts/list"),
        ("ping", "ping"),
        ("no such method", "no/such"),
    ] {
        let session = bridge.session("fixture");
        corpus.case(&format!("session: {name}"), || {
            outcome(&session.post(&request(1, method, &json!({}))))
        });
    }

    for (name, tool, arguments) in calls() {
        corpus.case(&format!("stateless: {name}"), || {
            outcome(&bridge.stateless(
                "tools/call",
                Some(tool),
                &json!({"name": tool, "arguments": arguments}),
            ))
        });
    }
    for (name, method) in [
        ("tools", "tools/list"),
        ("discovery", "server/discover"),
        ("no such method", "no/such"),
    ] {
        corpus.case(&format!("stateless: {name}"), || {
            outcome(&bridge.stateless(method, None, &json!({})))
        });
    }

    for (name, path) in [
        ("unknown tool", "/mcp/nothing"),
        ("no session", "/mcp/fixture"),
    ] {
        corpus.case(&format!("bridge: {name}"), || {
            outcome(&bridge.request("POST", path, &[], &request(1, "tools/list", &json!({}))))
        });
    }
    corpus.finish();
}

#[test]
fn corpus_of_the_hooks() {
    let bridge = start();
    let _gate = bridge.start();
    let mut corpus = Corpus::open("hooks", &bridge.gate_dir.control());
    for (at, (name, tool, arguments)) in calls().into_iter().enumerate() {
        let params = json!({"name": tool, "arguments": arguments});
        let common = json!({
            "version": "1.0", "request_id": format!("request-{at}"),
            "timestamp": "2026-01-01T00:00:00Z", "tool_id": "fixture",
            "agent_id": "tester", "session_id": "one",
        });
        let mut before = common.clone();
        before["type"] = "before".into();
        before["method"] = "tools/call".into();
        before["params"] = params.clone();
        let mut after = common;
        after["type"] = "after".into();
        after["result"] = json!({"content": [{"type": "text", "text": "hello"}]});
        for (moment, body) in [("before", before), ("after", after)] {
            corpus.case(&format!("seed, {moment}: {name}"), || {
                let path = format!("/intercept/{moment}");
                let answer = bridge.request("POST", &path, &[], &body.to_string());
                let action = answer.json()["action"].clone();
                format!("{} {action}", answer.status)
            });
        }
        for (form, body) in [
            (
                "lower case",
                json!({"method": "tools/call", "params": params}),
            ),
            (
                "field names of Go",
                json!({"Session": {}, "Params": params, "Extra": {"Header": {"Authorization": ["x"]}}}),
            ),
        ] {
            corpus.case(&format!("docker, before, {form}: {name}"), || {
                let answer = bridge.request("POST", "/intercept/before", &[], &body.to_string());
                let empty = answer.body.is_empty();
                let failed = answer.json()["isError"] == true;
                format!("{} empty={empty} isError={failed}", answer.status)
            });
        }
    }
    for (name, body) in [
        (
            "bare result",
            r#"{"content":[{"type":"text","text":"hello"}]}"#,
        ),
        ("null", "null"),
        ("no json", "nothing"),
        ("no result", "{}"),
    ] {
        corpus.case(&format!("docker, after: {name}"), || {
            let answer = bridge.request("POST", "/intercept/after", &[], body);
            let empty = answer.body.is_empty();
            let failed = answer.json()["isError"] == true;
            format!("{} empty={empty} isError={failed}", answer.status)
        });
    }
    corpus.finish();
}
