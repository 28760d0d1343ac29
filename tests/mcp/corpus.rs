//! The recorded decisions about tool calls: through the bridge in both eras and the older
//! HTTP with SSE, and through both dialects of the hooks (`tests/corpus/`).

use serde_json::{Value, json};
use testkit::corpus::Corpus;
use testkit::http::Answer;

use crate::bridge::{Bridge, messages, request};

/// One bundle about calls and answers, and one about what a server asks of its client.
const AUTHZ: &str = r#"package mcp.authz

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

const ELICITATION: &str = r#"package mcp.elicitation

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

fn start() -> Bridge {
    let program = testkit::mcp::fixture();
    let command = [program.to_str().unwrap()];
    let bridge = Bridge::new().tool("fixture", &command, "deny: [crash]");
    for (name, text) in [("authz", AUTHZ), ("elicitation", ELICITATION)] {
        std::fs::create_dir_all(bridge.path(name)).unwrap();
        std::fs::write(bridge.path(name).join("policy.rego"), text).unwrap();
    }
    bridge.server(
        "enforce_agent_id: false\npolicies:\n  bundles:\n    - {id: authz, path: ./authz, entrypoint: mcp/authz}\n    - {id: elicitation, path: ./elicitation, entrypoint: mcp/elicitation}",
    )
}

/// What a client sees of an answer: its status, and the outcome of each message.
fn outcome(answer: &Answer) -> String {
    let mut seen = vec![format!("status {}", answer.status)];
    for message in messages(answer) {
        if let Some(code) = message.pointer("/error/code") {
            seen.push(format!("error {code}"));
        } else if let Some(refusal) = message.pointer("/result/_meta/palisade~1refusal") {
            seen.push(format!("refused {} {}", refusal["reason"], refusal["rule"]));
        } else if message.get("result").is_some() {
            let failed = message.pointer("/result/isError") == Some(&json!(true));
            seen.push(format!("result{}", if failed { " isError" } else { "" }));
        } else if let Some(action) = message.get("action") {
            seen.push(format!("action {action}"));
        } else if let Some(method) = message.get("method") {
            seen.push(format!("method {method}"));
        }
    }
    seen.join("\n")
}

#[test]
fn corpus_of_tool_calls() {
    let bridge = start();
    let _gate = bridge.start();
    let mut corpus = Corpus::open("tool-calls", &bridge.place.control());

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
            outcome(&stateless(
                &bridge,
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
            outcome(&stateless(&bridge, method, None, &json!({})))
        });
    }

    for (name, path) in [
        ("unknown tool", "/mcp/nothing"),
        ("no session", "/mcp/fixture"),
    ] {
        corpus.case(&format!("bridge: {name}"), || {
            outcome(&bridge.ask("POST", path, &[], &request(1, "tools/list", &json!({}))))
        });
    }
    corpus.finish();
}

/// A request of revision 2026-07-28.
fn stateless(bridge: &Bridge, method: &str, name: Option<&str>, params: &Value) -> Answer {
    let mut params = params.clone();
    params["_meta"] = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {"elicitation": {}},
    });
    let mut headers = vec![
        ("MCP-Protocol-Version", "2026-07-28"),
        ("Mcp-Method", method),
    ];
    headers.extend(name.map(|name| ("Mcp-Name", name)));
    bridge.ask(
        "POST",
        "/mcp/fixture",
        &headers,
        &request(1, method, &params),
    )
}

#[test]
fn corpus_of_the_hooks() {
    let bridge = start();
    let _gate = bridge.start();
    let mut corpus = Corpus::open("hooks", &bridge.place.control());
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
                let answer = bridge.ask("POST", &path, &[], &body.to_string());
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
                let answer = bridge.ask("POST", "/intercept/before", &[], &body.to_string());
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
            let answer = bridge.ask("POST", "/intercept/after", &[], body);
            let empty = answer.body.is_empty();
            let failed = answer.json()["isError"] == true;
            format!("{} empty={empty} isError={failed}", answer.status)
        });
    }
    corpus.finish();
}
