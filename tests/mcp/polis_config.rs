//! The example configuration file of specification 000, verbatim.

use std::io::{BufReader, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::Stdio;

use serde_json::{Value, json};
use testkit::gate::GateDir;
use testkit::http::{self, HttpResponse};
use testkit::inside::{self, NetNamespace};
use testkit::{output, wait};

use crate::bridge::{Bridge, initialize};

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");

/// The file, verbatim.
const EXAMPLE: &str = include_str!("../../crates/config/tests/data/polis-config.yaml");

/// The address of all services in the example file.
pub(crate) const PORT_8090: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 8090);

/// One request to port 8090 of a network namespace.
pub(crate) fn exchange(
    network: &NetNamespace,
    method: &str,
    path: &str,
    body: &str,
) -> HttpResponse {
    let mut stream = network.connect(PORT_8090).unwrap();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: {PORT_8090}\r\nConnection: close\r\n\
         Content-Type: application/json\r\nAccept: application/json, text/event-stream\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).unwrap();
    http::read_response(BufReader::new(stream)).unwrap()
}

#[test]
fn seed_000_whole_configuration_serves_8090_without_its_secret() {
    if !testkit::require_root("making a network namespace") {
        return;
    }
    let gate_dir = GateDir::new(PALISADE);
    gate_dir.write_config(EXAMPLE);
    // Port 8090 of this machine may be taken, and `jaeger` must not be resolved.
    let gate = gate_dir.start_with(|command| {
        *command = inside::in_new_namespace(command);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(Stdio::piped())
    });
    let network = NetNamespace::of_process(gate.pid());

    let health = exchange(&network, "GET", "/health", "");
    assert_eq!(health.status, 200, "{}", health.text());
    let tools = health.json()["tools"].clone();
    assert_eq!(tools["filesystem"]["runtime"], "local", "{tools}");
    assert_eq!(tools["data-analyzer"]["runtime"], "e2b", "{tools}");
    assert_eq!(exchange(&network, "GET", "/metrics", "").status, 200);
    let answer = exchange(&network, "POST", "/mcp/data-analyzer", &initialize());
    assert_eq!(answer.status, 501, "{}", answer.text());
    assert!(answer.text().contains("e2b"), "{}", answer.text());
    let hook = json!({
        "version": "1.0", "type": "before", "request_id": "r-1",
        "timestamp": "2026-01-02T03:04:05Z", "method": "tools/call",
        "params": {"name": "read_file", "arguments": {}},
        "tool_id": "filesystem", "agent_id": "anna", "session_id": "s-1",
    });
    let answer = exchange(&network, "POST", "/intercept/before", &hook.to_string());
    assert_eq!(answer.json()["action"], "pass", "{}", answer.text());

    let has_warning = |text: &str| {
        let log = gate.stderr();
        let lines = log.lines().map(serde_json::from_str::<Value>);
        let mut lines = lines.filter_map(Result::ok);
        lines.any(|line| line["level"] == "WARN" && line.to_string().contains(text))
    };
    for text in [
        "the environment variable E2B_API_KEY is not set: secrets.e2b_api_key is empty",
        "/policies/mcp",
        "/policies/elicitation",
    ] {
        wait::until(text, || has_warning(text).then_some(()));
    }
}

#[test]
fn seed_000_flat_keys_are_refused_with_their_replacement() {
    let gate_dir = GateDir::new(PALISADE);
    let flat = "interceptor_addr: \":8090\"\nmcp_server_addr: \":8090\"\n\
                shutdown_timeout: 10s\nlog_level: info\n";
    gate_dir.write_config(&format!("{EXAMPLE}\n{flat}"));
    let output = gate_dir.run(&["gate", "run"]);
    let stderr = output::stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    for (key, new) in [
        ("interceptor_addr", "server.interceptor_addr"),
        ("mcp_server_addr", "server.mcp_server_addr"),
        ("shutdown_timeout", "server.shutdown_timeout"),
        ("log_level", "logging.level"),
    ] {
        let sentence = format!("unknown key '{key}' at the top level; write {new} instead");
        assert!(stderr.contains(&sentence), "{sentence}: {stderr}");
    }
}

#[test]
fn seed_000_tool_description_is_shown_in_all_lists() {
    let program = testkit::mcp::fixture();
    let command = [program.to_str().unwrap()];
    let described = "description: \"Filesystem access tool\"";
    let bridge = Bridge::new()
        .tool("files", &command, described)
        .tool("plain", &command, "");
    let gate = bridge.start();
    let health = bridge.request("GET", "/health", &[], "").json()["tools"].clone();
    assert_eq!(health["files"]["description"], "Filesystem access tool");
    assert_eq!(health["plain"]["description"], Value::Null);
    let listed = output::stdout(&bridge.gate_dir.run(&["bridge", "list", "--json"]));
    let listed: Value = serde_json::from_str(&listed).unwrap();
    for servers in [gate.get("/v1/tools").json(), listed] {
        assert_eq!(servers[0]["name"], "files", "{servers}");
        assert_eq!(servers[0]["description"], "Filesystem access tool");
        assert_eq!(servers[1]["description"], Value::Null);
    }
    let table = output::stdout(&bridge.gate_dir.run(&["bridge", "list"]));
    let line = |name: &str| table.lines().find(|line| line.starts_with(name)).unwrap();
    assert!(line("SERVER").ends_with("DESCRIPTION"), "{table}");
    assert!(line("files").ends_with("Filesystem access tool"), "{table}");
    assert!(line("plain").ends_with("(none listed yet)"), "{table}");
}
