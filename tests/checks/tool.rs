//! Tool calls, their results and their questions (elicitations): at the bridge with a session or
//! without, and from a container.

use std::fmt::Write as _;
use std::io::BufReader;
use std::net::Ipv4Addr;
use std::path::PathBuf;

use serde_json::{Value, json};
use testkit::http::{self, HttpResponse};
use testkit::port::Port;

use crate::audit::Audit;
use crate::bridge::{Bridge, messages, request, stateless_request};
use crate::client::Client;
use crate::network::assert_has_request_id;

/// The IP address of the container.
const CONTAINER_IP: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// The agent that calls tools at the bridge.
const AGENT: &str = "anna";

/// Policy for calls and results. The argument `text` of a call selects what is denied; hooks have
/// the session id `gateway`.
const CALLS: &str = r#"package mcp.authz

default decision := {"action": "allow"}

decision := {"action": "block", "reason": "Not this call."} if {
	input.moment == "before"
	input.params.arguments.text == "blocked call"
}

decision := {"action": "block", "reason": "Not this result."} if {
	input.moment == "after"
	input.params.arguments.text == "blocked result"
}

decision := {"action": "block", "reason": "Not by this hook."} if {
	input.moment == "before"
	input.session_id == "gateway"
}
"#;

/// Policy for questions that a tool asks the user.
const QUESTIONS: &str = r#"package mcp.elicitation

default decision := {"action": "allow"}

decision := {"action": "block", "reason": "Not this question."} if {
	input.params.message == "blocked question"
}
"#;

/// How a client calls tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Caller {
    /// Calls the bridge with a session.
    Session,
    /// Calls the bridge without a session (MCP revision 2026-07-28).
    Stateless,
    /// Calls `palisade.internal` from a container.
    Container,
}

/// A gate with a tool server.
pub(crate) struct Tools {
    bridge: Bridge,
    audit: Audit,
    caller: Caller,
    proxy: Port,
    /// The file from which the tool server reads the description of `echo_raw` when it starts.
    description_file: PathBuf,
}

impl Tools {
    pub(crate) fn start(caller: Caller) -> Option<Self> {
        let (bridge, proxy) = (Bridge::new(), Port::take());
        for (name, text) in [("calls", CALLS), ("questions", QUESTIONS)] {
            std::fs::create_dir(bridge.path(name)).unwrap();
            std::fs::write(bridge.path(name).join("policy.rego"), text).unwrap();
        }
        let description_file = bridge.path("description");
        std::fs::write(&description_file, "Returns its arguments.").unwrap();
        let program = testkit::mcp::fixture();
        let [program, description_path] =
            [&program, &description_file].map(|path| path.to_str().unwrap());
        let command = [program, "--describe-from", description_path];
        let bridge = bridge
            .tool("fixture", &command, "expose: true\ndeny: [crash]")
            .section(&format!("egress: {{listen: [\"{}\"]}}", proxy.address()))
            .section(
                "policies:\n  bundles:\n    \
                 - {id: calls, path: ./calls, entrypoint: mcp/authz}\n    \
                 - {id: questions, path: ./questions, entrypoint: mcp/elicitation}",
            );
        bridge.write();
        let started = bridge.gate_dir.run(&["gate", "start"]);
        assert!(
            started.status.success(),
            "{}",
            testkit::output::stderr(&started)
        );
        let tools = Self {
            audit: Audit::new(bridge.gate_dir.control()),
            bridge,
            caller,
            proxy,
            description_file,
        };
        if caller == Caller::Container {
            let body = json!({
                "container_id": "container", "container_ip": CONTAINER_IP,
                "repos": [{"name": "acme/app"}],
            });
            tools.send_to_control("POST", "/internal/containers", &body.to_string());
        }
        Some(tools)
    }

    fn send_to_control(&self, method: &str, path: &str, body: &str) {
        let control = self.bridge.gate_dir.control();
        let answer = http::send(&control, method, path, body.as_bytes()).unwrap();
        assert!(matches!(answer.status, 200 | 201), "{}", answer.text());
    }

    /// Calls a tool with additional headers and returns the HTTP response.
    fn send(&self, tool: &str, arguments: &Value, headers: &[(&str, &str)]) -> HttpResponse {
        self.audit.mark();
        let params = json!({"name": tool, "arguments": arguments});
        let headers = [headers, &[("X-Agent-ID", AGENT)]].concat();
        if self.caller == Caller::Session {
            let session = self.bridge.session_of("fixture", Some(AGENT));
            let session = session.expect("a session");
            let headers = [session.headers(), headers].concat();
            let body = request(1, "tools/call", &params);
            return self.bridge.request("POST", &session.path, &headers, &body);
        }
        let (own_headers, body) = stateless_request("tools/call", Some(tool), &params);
        let headers = [own_headers, headers].concat();
        match self.caller {
            Caller::Session | Caller::Stateless => {
                self.bridge.request("POST", "/mcp/fixture", &headers, &body)
            }
            Caller::Container => self.send_from_container(&headers, &body),
        }
    }

    fn send_from_container(&self, headers: &[(&str, &str)], body: &str) -> HttpResponse {
        let client = Client::Proxy(CONTAINER_IP, self.proxy.address());
        let mut lines = format!(
            "Content-Type: application/json\r\nAccept: application/json, text/event-stream\r\n\
             Content-Length: {}\r\n",
            body.len()
        );
        for (name, value) in headers {
            write!(lines, "{name}: {value}\r\n").unwrap();
        }
        let mut connection = client.open("palisade.internal");
        connection
            .send_head("POST", "/mcp/fixture", &lines)
            .unwrap();
        connection.write(body.as_bytes()).unwrap();
        connection.read().unwrap()
    }

    /// Calls a tool, and returns its result.
    #[track_caller]
    fn call(&self, tool: &str, arguments: &Value, headers: &[(&str, &str)]) -> Value {
        let answer = self.send(tool, arguments, headers);
        let mut all = messages(&answer).into_iter();
        let found = all.find(|message| message["id"] == 1);
        let found = found.unwrap_or_else(|| panic!("no answer: {}", answer.text()));
        found["result"].clone()
    }

    /// Calls a tool, which must succeed.
    #[track_caller]
    fn assert_allowed(&self, tool: &str, arguments: &Value) {
        let result = self.call(tool, arguments, &[]);
        assert!(result.is_object() && result["isError"] != true, "{result}");
        for stage in ["before", "after"] {
            let fields = [("stage", stage), ("operation", tool)];
            self.audit.wait_for_allowed(&fields);
        }
    }

    /// Calls a tool, which must be refused at this stage.
    #[track_caller]
    fn assert_denied(
        &self,
        (tool, arguments, headers): (&str, &Value, &[(&str, &str)]),
        (stage, reason, rule): (&str, &str, &str),
    ) -> Value {
        let result = self.call(tool, arguments, headers);
        assert_eq!(result["isError"], true, "{result}");
        let refusal = &result["_meta"]["palisade/refusal"];
        assert_eq!(
            (&refusal["reason"], &refusal["rule"]),
            (&reason.into(), &rule.into())
        );
        let fields = [("kind", "mcp"), ("stage", stage)];
        let record = self.audit.wait_for_denied(reason, rule, &fields);
        assert_eq!(record["request_id"], refusal["request_id"], "{record}");
        record
    }
}

pub(crate) fn stored_decision(tools: &Tools) {
    let arguments = json!({"text": "fine"});
    tools.assert_allowed("echo_raw", &arguments);
    let hook = json!({
        "version": "1.0", "type": "before", "request_id": "hooked",
        "timestamp": "2026-01-02T03:04:05Z", "method": "tools/call",
        "params": {"name": "echo_raw", "arguments": arguments},
        "tool_id": "fixture", "agent_id": AGENT, "session_id": "gateway",
    });
    let hook = tools.bridge.hook("before", &hook);
    assert_eq!(hook.json()["action"], "block", "{}", hook.text());
    let call = ("echo_raw", &arguments, &[("X-Request-ID", "hooked")][..]);
    let record = tools.assert_denied(call, ("before", "rego_denied", "rego:calls"));
    assert_eq!(record["event"], "stored_decision", "{record}");
}

pub(crate) fn tool_list(tools: &Tools) {
    let arguments = json!({});
    tools.assert_allowed("echo_raw", &arguments);
    let denial = ("before", "tool_denied", "tools:fixture:deny:crash");
    tools.assert_denied(("crash", &arguments, &[]), denial);
}

/// Must be the last driver of its list, because the definition of the tool stays changed.
pub(crate) fn fingerprint(tools: &Tools) {
    // The gate reads the definitions of tools when a client lists them. Each new session starts a
    // new server.
    let list_tools = || {
        let session = tools.bridge.session("fixture");
        session.post(&request(2, "tools/list", &json!({}))).text()
    };
    assert!(list_tools().contains("echo_raw"));
    let arguments = json!({});
    tools.assert_allowed("echo_raw", &arguments);
    std::fs::write(&tools.description_file, "Returns more than its arguments.").unwrap();
    assert!(!list_tools().contains("echo_raw"));
    let denial = ("before", "tool_changed", "tools:fixture:fingerprint");
    tools.assert_denied(("echo_raw", &arguments, &[]), denial);
}

pub(crate) fn bundles(tools: &Tools) {
    tools.assert_allowed("echo_raw", &json!({"text": "fine"}));
    let arguments = json!({"text": "blocked call"});
    let denial = ("before", "rego_denied", "rego:calls");
    tools.assert_denied(("echo_raw", &arguments, &[]), denial);
}

pub(crate) fn result_bundles(tools: &Tools) {
    tools.assert_allowed("echo_raw", &json!({"text": "fine"}));
    let arguments = json!({"text": "blocked result"});
    let denial = ("after", "rego_denied", "rego:calls");
    tools.assert_denied(("echo_raw", &arguments, &[]), denial);
}

pub(crate) fn question_bundles(tools: &Tools) {
    let question = |message: &str| json!({"message": message});
    match tools.caller {
        Caller::Session => answer_question(tools, &question("fine question")),
        Caller::Stateless | Caller::Container => {
            // The result of the call is the question; the client would send the answer in its next
            // call.
            let result = tools.call("test_elicitation", &question("fine question"), &[]);
            assert!(result.to_string().contains("fine question"), "{result}");
        }
    }
    let fields = [("stage", "elicitation"), ("method", "elicitation/create")];
    tools.audit.wait_for_allowed(&fields);
    // The tool receives the refusal and reports it in its own error.
    let result = tools.call("test_elicitation", &question("blocked question"), &[]);
    assert_eq!(result["isError"], true, "{result}");
    assert!(result.to_string().contains("rego_denied"), "{result}");
    tools
        .audit
        .wait_for_denied("rego_denied", "rego:questions", &fields);
}

/// Calls a tool in a session, and answers the question that arrives in the stream of the call.
fn answer_question(tools: &Tools, arguments: &Value) {
    tools.audit.mark();
    let session = tools.bridge.session_of("fixture", Some(AGENT));
    let session = session.expect("a session");
    let params = json!({"name": "test_elicitation", "arguments": arguments});
    let mut stream = BufReader::new(session.send(&request(1, "tools/call", &params)));
    http::read_head(&mut stream).unwrap();
    let mut read_until = |text: &str| {
        let mut read = String::new();
        while !read.contains(text) {
            let chunk = http::read_chunk(&mut stream)
                .unwrap()
                .expect("more of the stream");
            read += &String::from_utf8(chunk).unwrap();
        }
        read
    };
    let question = read_until("elicitation/create");
    let mut data = question
        .lines()
        .filter_map(|line| line.strip_prefix("data:"));
    let question = data
        .find(|data| data.contains("elicitation/create"))
        .unwrap();
    let question: Value = serde_json::from_str(question).unwrap();
    let answer = json!({
        "jsonrpc": "2.0", "id": question["id"],
        "result": {"action": "accept", "content": {"username": "a", "email": "a@b.example"}},
    });
    assert_eq!(session.post(&answer.to_string()).status, 202);
    read_until("User response");
}

pub(crate) fn identity(tools: &Tools) {
    let arguments = json!({});
    tools.assert_allowed("echo_raw", &arguments);
    tools.send_to_control("DELETE", "/internal/containers/container", "");
    let answer = tools.send("echo_raw", &arguments, &[]);
    assert_eq!(answer.status, 403, "{}", answer.text());
    let fields = [("method", "POST")];
    let record = tools
        .audit
        .wait_for_denied("identity_unknown", "identity", &fields);
    assert_has_request_id(&answer, &record);
}
