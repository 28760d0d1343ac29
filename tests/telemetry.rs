//! Logs, metrics and traces of the built binary.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot continue has failed"
)]

use std::io::Write;
use std::net::TcpStream;

use serde_json::{Value, json};
use testkit::collector::Collector;
use testkit::gate::GateDir;
use testkit::port::Port;
use testkit::{output, wait};

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");

fn row(id: &str) -> Value {
    json!({"container_ip": "10.0.0.1", "container_id": id, "repos": []})
}

#[test]
fn configured_secret_never_appears_in_the_log() {
    let gate_dir = GateDir::new(PALISADE);
    gate_dir.write_config(
        "version: \"1.0\"\nsecrets: { api_key: \"${THE_KEY}\" }\nlogging: { format: json }\n",
    );
    let gate = gate_dir.start_with(|command| command.env("THE_KEY", "sekrit-0123456789"));
    // A program registers a container whose name is the secret, so it would be logged.
    assert_eq!(
        gate.request("POST", "/internal/containers", &row("sekrit-0123456789"))
            .status,
        201
    );
    wait::until("the log line", || {
        gate.stderr()
            .contains("\"message\":\"container registered\"")
            .then_some(())
    });
    let log = gate.stderr();
    assert!(log.contains("[redacted: secrets.api_key]"), "{log}");
    assert!(!log.contains("sekrit-0123456789"), "{log}");
    let shown = gate.get("/v1/config").text();
    assert!(
        !shown.contains("sekrit-0123456789") && shown.contains("api_key"),
        "{shown}"
    );
}

#[test]
fn json_log_has_one_object_per_line() {
    let gate_dir = GateDir::new(PALISADE);
    gate_dir.write_config("version: \"1.0\"\nlogging: { format: json, level: debug }\n");
    let gate = gate_dir.start();
    assert_eq!(
        gate.request("POST", "/internal/containers", &row("a"))
            .status,
        201
    );
    let log = wait::until("the log line", || {
        let log = gate.stderr();
        log.contains("\"sandbox\":\"a\"").then_some(log)
    });
    for line in log.lines().filter(|line| *line != "ready") {
        let event: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        assert!(
            event["level"].is_string() && event["message"].is_string(),
            "{line}"
        );
    }
}

#[test]
fn metrics_are_prometheus_text_with_documented_names() {
    let gate_dir = GateDir::new(PALISADE);
    let gate = gate_dir.start();
    assert_eq!(
        gate.request("POST", "/internal/containers", &row("a"))
            .status,
        201
    );
    let answer = gate.get("/internal/metrics");
    assert!(
        answer
            .header("content-type")
            .unwrap()
            .starts_with("application/openmetrics-text")
    );
    let text = answer.text();
    for line in [
        "proxy_registered_containers 1",
        "polis_sidecar_config_reloads_total{status=\"failed\"} 0",
        "palisade_control_requests_total{action=\"registrations.put\",status=\"201\"} 1",
        "palisade_audit_records_total{kind=\"lifecycle\"} 2",
        "# EOF",
    ] {
        assert!(
            text.lines().any(|metric| metric == line),
            "no '{line}' in:\n{text}"
        );
    }
    assert!(!text.contains("_total_total"));
}

#[test]
fn traces_reach_a_collector_over_otlp() {
    let collector = Collector::start();
    let gate_dir = GateDir::new(PALISADE);
    gate_dir.write_config(&format!(
        "version: \"1.0\"\nmetrics: {{ tracing: {{ enabled: true, endpoint: \"http://{}\" }} }}\n\
         secrets: {{ key: sekrit-0123456789 }}\n",
        collector.address()
    ));
    let mut gate = gate_dir.start();
    let secret = "sekrit-0123456789";
    assert_eq!(
        gate.request("POST", "/internal/containers", &row(secret))
            .status,
        201
    );
    // The last batch is sent when the gate stops.
    gate.signal("TERM");
    assert_eq!(gate.wait().code(), Some(0));
    let received = collector.received();
    let contains =
        |body: &[u8], text: &str| body.windows(text.len()).any(|part| part == text.as_bytes());
    let span = received
        .iter()
        .find(|request| contains(&request.body, "registrations.put"));
    let span = span.unwrap_or_else(|| panic!("no span among {} requests", received.len()));
    assert!(contains(&span.body, "[redacted: secrets.key]"));
    assert!(
        received
            .iter()
            .all(|request| !contains(&request.body, secret))
    );
    assert_eq!(span.path, "/v1/traces");
    assert!(contains(&span.body, "palisade"));
    assert!(
        span.head
            .iter()
            .any(|line| line.eq_ignore_ascii_case("content-type: application/x-protobuf")),
        "{:?}",
        span.head
    );
}

#[test]
fn unreachable_trace_collector_has_no_effect() {
    let gate_dir = GateDir::new(PALISADE);
    gate_dir.write_config(
        "version: \"1.0\"\nmetrics: { tracing: { enabled: true, endpoint: \"http://127.0.0.1:1\" } }\n",
    );
    let mut gate = gate_dir.start();
    assert_eq!(
        gate.request("POST", "/internal/containers", &row("a"))
            .status,
        201
    );
    gate.signal("TERM");
    assert_eq!(gate.wait().code(), Some(0));
}

/// Issue 14, number 11.
#[test]
fn verbose_flag_enables_debug_logs_of_every_component() {
    let gate_dir = GateDir::new(PALISADE);
    let port = Port::take();
    gate_dir.write_config(&format!(
        "version: \"1.0\"\nlogging: {{ format: json }}\n\
         egress: {{ listen: [\"{}\"], timeouts: {{ header: 1s }} }}\n",
        port.address()
    ));
    let gate = gate_dir.start_with(|command| command.arg("-v"));
    // A client that does not finish its request.
    let mut client = TcpStream::connect(port.address()).unwrap();
    client
        .write_all(b"GET / HTTP/1.1\r\nHost: x.example\r\n")
        .unwrap();
    let made = gate_dir.run(&["create", "one", "--no-repo"]);
    assert!(made.status.success(), "{}", output::stderr(&made));
    for target in ["egress::", "sandbox::"] {
        wait::until_or(
            || {
                let log = gate.stderr();
                let mut events = log
                    .lines()
                    .filter_map(|line| serde_json::from_str::<Value>(line).ok());
                let is_debug = |event: &Value| {
                    let from = event["target"].as_str().unwrap_or_default();
                    event["level"] == "DEBUG" && from.starts_with(target)
                };
                events.any(|event| is_debug(&event)).then_some(())
            },
            || format!("a debug line of {target} in:\n{}", gate.stderr()),
        );
    }
}
