//! Failures of clients and upstreams: recorded, and not counted as refusals.

use testkit::port::Port;
use testkit::{output, wait};

use crate::traffic_fixture::{Rules, TrafficFixture, describe, text};

/// The sum of a metric's series with this label.
fn count(fixture: &TrafficFixture, metric: &str, label: &str) -> f64 {
    let metrics = fixture.metrics();
    let lines = metrics
        .lines()
        .filter(|line| line.starts_with(metric) && line.contains(label));
    let values = lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap());
    values.sum()
}

/// A gate that allows api.example, where no server listens. The port stays reserved.
fn with_unreachable_upstream() -> (TrafficFixture, Port) {
    let fixture = TrafficFixture::new();
    let port = Port::take();
    let rules = Rules::new()
        .allow("api.example")
        .at("api.example", port.address());
    fixture.write(&rules);
    (fixture, port)
}

/// Metric and label that count refusals, by verdict.
const DENIED: (&str, &str) = ("proxy_request_duration_seconds_count", "verdict=\"deny\"");
/// Metric and label that count refusals, by upstream.
const REFUSED: (&str, &str) = ("proxy_requests_total", "upstream=\"refused\"");

// Issue 14, number 12.
#[test]
fn client_and_upstream_failures_are_not_counted_as_refusals() {
    let (fixture, _port) = with_unreachable_upstream();
    let agent = fixture.create("fix");
    let failed = agent
        .curl("http://api.example/")
        .refused(502, "connect_failed");
    // A TLS hello that ends after its first bytes.
    agent.stdout_of("exec 3<>/dev/tcp/192.0.2.1/443; printf '\\x16\\x03\\x01' >&3; exec 3>&-");
    let find_record = || {
        let mut records = fixture.records().into_iter();
        records.find(|record| record["reason"] == "client_left")
    };
    let left = wait::until("a record of the disconnected client", find_record);
    assert_eq!(left["verdict"], serde_json::Value::Null, "{left}");
    let record = fixture.record(&failed);
    assert_eq!(record["verdict"], "allow", "{record}");
    assert_eq!(record["reason"], "connect_failed", "{record}");
    assert_eq!(record["rule"], "allowlist:api.example", "{record}");
    assert_eq!(record["status"], 502, "{record}");
    let why = fixture.ok(&["why", &failed]);
    assert!(
        why.starts_with("allowed, but failed: GET api.example"),
        "{why}"
    );
    assert!(why.contains("connect_failed"), "{why}");

    assert_eq!(fixture.ok(&["audit", "export", "--verdict", "deny"]), "");
    for (metric, label) in [DENIED, REFUSED] {
        assert_eq!(count(&fixture, metric, label), 0.0, "{metric}");
    }
    // A refused request still counts.
    let refused = agent
        .curl("http://evil.example/")
        .refused(403, "host_denied");
    assert_eq!(fixture.record(&refused)["verdict"], "deny");
    for (metric, label) in [DENIED, REFUSED] {
        assert_eq!(count(&fixture, metric, label), 1.0, "{metric}");
    }
    assert!(fixture.ok(&["audit", "verify"]).starts_with("intact"));
}

// Issue 14, number 12.
#[test]
fn summary_of_a_run_lists_failed_upstreams_apart_from_refusals() {
    let (fixture, _port) = with_unreachable_upstream();
    let line = "curl -s http://api.example/ >/dev/null; true";
    let run = ["run", "--no-repo", "--rm"];
    let command = ["--", "bash", "-c", line];
    let printed = fixture.ok(&[&run[..], &["--json"], &command].concat());
    let value: serde_json::Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(value["refused"], serde_json::json!([]), "{value}");
    assert_eq!(text(&value["failed"][0]["host"]), "api.example", "{value}");
    assert_eq!(value["failed"][0]["count"], 1, "{value}");
    let reached = value["reached"].as_array().unwrap();
    let is_api =
        |endpoint: &serde_json::Value| endpoint["host"] == "api.example" && endpoint["port"] == 80;
    assert!(!reached.iter().any(is_api), "{value}");

    let output = fixture.run(&[&run[..], &command].concat());
    assert!(output.status.success(), "{}", describe(&output));
    let summary = output::stderr(&output);
    assert!(summary.contains("failed: api.example:80 (1×)"), "{summary}");
    assert!(!summary.contains("refused:"), "{summary}");
}
