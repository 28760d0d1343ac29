//! Metrics and logs of tool calls.

use std::io::BufReader;
use std::path::Path;

use serde_json::{Value, json};
use testkit::gate::GateProcess;
use testkit::http::{self, HttpResponse};
use testkit::{output, wait};

use crate::bridge::{Bridge, Session, initialize, messages, request};
use crate::relay::events;

/// The series of a tool's calls with that status.
fn calls(tool: &str, status: &str) -> String {
    format!(
        r#"polis_sidecar_tool_executions_total{{tool_id="{tool}",runtime_type="local",status="{status}"}}"#
    )
}

/// The series of a gauge of a tool's processes.
fn processes(name: &str, tool: &str) -> String {
    format!(r#"{name}{{tool_id="{tool}",runtime_type="local"}}"#)
}

/// Waits for a line of the gate's log that contains all of these texts.
fn wait_for_line(gate: &GateProcess<'_>, texts: &[&str]) -> String {
    wait::until_or(
        || {
            let log = gate.stderr();
            let mut lines = log.lines();
            let found = lines.find(|line| texts.iter().all(|text| line.contains(text)));
            found.map(str::to_owned)
        },
        || format!("a line with {texts:?} in:\n{}", gate.stderr()),
    )
}

/// Sends a call of revision 2026-07-28, and does not wait.
fn send_sessionless(
    bridge: &Bridge,
    tool: &str,
    name: &str,
    arguments: &Value,
) -> std::net::TcpStream {
    let meta = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    });
    let params = json!({"name": name, "arguments": arguments, "_meta": meta});
    let headers = [
        ("MCP-Protocol-Version", "2026-07-28"),
        ("Mcp-Method", "tools/call"),
        ("Mcp-Name", name),
        ("Connection", "close"),
    ];
    let body = request(1, "tools/call", &params);
    bridge.send("POST", &format!("/mcp/{tool}"), &headers, &body)
}

fn wait_for_start(file: &Path) {
    wait::until("the call to be in flight", || {
        let text = std::fs::read_to_string(file).ok()?;
        text.contains("started").then_some(())
    });
}

#[test]
fn seed_000_metrics_path_is_configurable_and_reloadable() {
    let bridge = Bridge::with_fixture().section("metrics: {path: /custom}");
    let gate = bridge.start();
    let get = |path: &str| bridge.request("GET", path, &[], "");
    let is_served = |answer: &HttpResponse| {
        let kind = answer.header("content-type").unwrap_or_default();
        let text = answer.text();
        answer.status == 200
            && kind.starts_with("application/openmetrics-text")
            && text.contains("polis_sidecar_process_status")
    };
    let answer = get("/custom");
    assert!(is_served(&answer), "{answer:?}");
    assert_eq!(get("/metrics").status, 404);

    bridge.reload_with("metrics: {path: /a/b}");
    assert!(is_served(&get("/a/b")));
    assert_eq!(get("/custom").status, 404);

    bridge.reload_with("metrics: {enabled: false, path: /a/b}");
    for path in ["/a/b", "/custom", "/metrics"] {
        assert_eq!(get(path).status, 404, "{path}");
    }
    // The control socket always serves the metrics.
    assert!(is_served(&gate.get("/internal/metrics")));

    bridge.reload_with("");
    assert!(is_served(&get("/metrics")));
}

#[test]
fn seed_000_metrics_path_of_another_endpoint_is_refused() {
    for path in ["/mcp/x", "/health", "/intercept", "/sse", "/message"] {
        let bridge = Bridge::with_fixture().section(&format!("metrics: {{path: {path}}}"));
        bridge.write();
        let output = bridge.gate_dir.run(&["config", "check"]);
        let stderr = output::stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{path}: {stderr}");
        assert!(
            stderr.contains("metrics.path") && stderr.contains(path),
            "{stderr}"
        );
    }
}

/// A server that initializes, closes its input, and keeps running.
const CLOSES_INPUT: &str = r#"read -r line
echo '{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{"name":"x","version":"1"}}}'
read -r line
exec 0<&-
echo closed >&2
exec sleep 1000"#;

#[test]
fn seed_000_failed_write_returns_500_and_is_logged() {
    let bridge = Bridge::with_fixture().tool("closes", &["sh", "-c", CLOSES_INPUT], "");
    let gate = bridge.start();
    let session = bridge.session("closes");
    wait_for_line(&gate, &["closes", "closed"]);
    let params = json!({"name": "x", "arguments": {}});
    let answer = session.post(&request(1, "tools/call", &params));
    assert_eq!(answer.status, 500, "{}", answer.text());
    let error = &messages(&answer)[0]["error"];
    let text = error["message"].as_str().unwrap_or_default();
    assert!(text.contains("writing to the server failed"), "{error}");
    let line = wait_for_line(&gate, &["mcp tool write failed"]);
    assert!(line.contains("ERROR") && line.contains("closes"), "{line}");
    bridge.wait_for_metric(&calls("closes", "error"), 1);
    // The server is unusable: it is ended with its session.
    bridge.wait_for_metric(&processes("polis_sidecar_processes", "closes"), 0);
    assert_eq!(session.post(&request(2, "ping", &json!({}))).status, 404);
    // HTTP with SSE returns the same statuses.
    let mut stream = BufReader::new(bridge.send("GET", "/sse/closes", &[], ""));
    assert_eq!(http::read_head(&mut stream).unwrap().status, 200);
    let (_, endpoint) = events(&mut stream, "endpoint").remove(0);
    let post = |body: &str| bridge.request("POST", &endpoint, &[], body).status;
    assert_eq!(post(&initialize()), 202);
    let initialized = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;
    assert_eq!(post(initialized), 202);
    wait::until("the server's input to be closed", || {
        let log = gate.stderr();
        let closed = log.lines().filter(|line| line.ends_with("closed\""));
        (closed.count() == 2).then_some(())
    });
    assert_eq!(post(&request(1, "tools/call", &params)), 500);
    bridge
        .session("fixture")
        .text("test_simple_text", &json!({}));
}

#[test]
fn seed_000_e2b_and_failed_starts_return_errors_and_are_logged() {
    let e2b = "runtime: {type: e2b, template: data, timeout: 300s}";
    let bridge =
        Bridge::new()
            .tool("cloud", &["python"], e2b)
            .tool("broken", &["/nonexistent/program"], "");
    let gate = bridge.start();
    let answer = bridge.try_session("cloud").err().unwrap();
    assert_eq!(answer.status, 501);
    assert!(answer.text().contains("e2b"), "{}", answer.text());
    let line = wait_for_line(&gate, &["mcp tool runtime not implemented"]);
    assert!(line.contains("INFO") && line.contains("cloud"), "{line}");

    let answer = bridge.try_session("broken").err().unwrap();
    assert_eq!(answer.status, 503);
    let line = wait_for_line(&gate, &["mcp tool failed to start"]);
    assert!(line.contains("ERROR") && line.contains("broken"), "{line}");

    let answer = bridge.try_session("unknown").err().unwrap();
    assert_eq!(answer.status, 404);
    assert!(
        answer.text().contains("Tool not found"),
        "{}",
        answer.text()
    );
}

#[test]
fn seed_000_timed_out_and_cancelled_calls_are_counted() {
    let program = testkit::mcp::fixture();
    let command = [program.to_str().unwrap()];
    let bridge = Bridge::with_fixture().tool("short", &command, "runtime: {timeout: 1s}");
    let _gate = bridge.start();
    let hang = json!({"name": "hang", "arguments": {}});
    // On a busy machine a second may be too short for the initialization.
    let short: Session<'_> = wait::until("a session", || bridge.try_session("short").ok());
    let answer = short.post(&request(1, "tools/call", &hang));
    assert!(
        answer.text().contains("timed out after"),
        "{}",
        answer.text()
    );
    bridge.wait_for_metric(&calls("short", "timeout"), 1);
    let answer = send_sessionless(&bridge, "short", "hang", &json!({}));
    let answer = http::read_response(answer).unwrap();
    assert!(
        answer.text().contains("timed out after"),
        "{}",
        answer.text()
    );
    bridge.wait_for_metric(&calls("short", "timeout"), 2);

    let session = bridge.session("fixture");
    let file = bridge.path("cancelled");
    let arguments = json!({ "file": file });
    let params = json!({"name": "cancellable", "arguments": arguments});
    let _open = session.send(&request(7, "tools/call", &params));
    wait_for_start(&file);
    let cancel = json!({
        "jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7},
    });
    assert_eq!(session.post(&cancel.to_string()).status, 202);
    bridge.wait_for_metric(&calls("fixture", "cancelled"), 1);
    // A client of revision 2026-07-28 cancels by disconnecting.
    let file = bridge.path("disconnected");
    let open = send_sessionless(&bridge, "fixture", "cancellable", &json!({ "file": file }));
    wait_for_start(&file);
    drop(open);
    bridge.wait_for_metric(&calls("fixture", "cancelled"), 2);
}

#[test]
fn seed_000_process_status_is_one_or_zero() {
    let bridge = Bridge::with_fixture();
    let _gate = bridge.start();
    let status = processes("polis_sidecar_process_status", "fixture");
    let running = processes("polis_sidecar_processes", "fixture");
    let status_and_count = || (bridge.metric(&status), bridge.metric(&running));
    assert_eq!(status_and_count(), (Some(0), Some(0)));
    let (one, two) = (bridge.session("fixture"), bridge.session("fixture"));
    assert_eq!(status_and_count(), (Some(1), Some(2)));
    assert_eq!(one.delete(), 204);
    bridge.wait_for_metric(&running, 1);
    assert_eq!(status_and_count(), (Some(1), Some(1)));
    assert_eq!(two.delete(), 204);
    bridge.wait_for_metric(&running, 0);
    assert_eq!(status_and_count(), (Some(0), Some(0)));
    // A tool that is removed while it runs ends, and has no series.
    bridge.session("fixture");
    bridge.rewrite(&[("other", &[])]);
    let output = bridge.gate_dir.run(&["config", "reload"]);
    assert!(output.status.success(), "{}", output::stderr(&output));
    wait::until("the series to be removed", || {
        (status_and_count() == (None, None)).then_some(())
    });
    assert_eq!(
        bridge.metric(&processes("polis_sidecar_process_status", "unknown")),
        None
    );
    bridge.reload_with("");
    assert_eq!(status_and_count(), (Some(0), Some(0)));
}
