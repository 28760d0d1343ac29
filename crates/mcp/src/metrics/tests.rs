use prometheus_client::encoding::text::encode;

use super::gateway_tools::MAX_GATEWAY_TOOLS;
use super::*;

fn registered_metrics() -> (Metrics, Registry) {
    let (metrics, mut registry) = (Metrics::default(), Registry::default());
    metrics.register(&mut registry);
    (metrics, registry)
}

fn text(registry: &Registry) -> String {
    let mut text = String::new();
    encode(&mut text, registry).unwrap();
    text
}

#[test]
fn metrics_are_exported_with_expected_names_and_labels() {
    let (metrics, registry) = registered_metrics();
    metrics.set_tool_names(["fs".to_owned()]);
    metrics.record_intercept("before", "pass", "fs", Duration::from_micros(15));
    metrics.record_intercept("before", "block", "a b", Duration::from_micros(15));
    metrics.record_decision("guard", "allow", Duration::from_micros(15));
    metrics.record_policy_failure("guard", "timeout");
    let took = Duration::from_millis(3);
    metrics.record_execution("fs", RuntimeKind::Local, CallStatus::Error, took);
    let counts = [(); 3].map(|()| metrics.count_process("fs", RuntimeKind::Local));
    let [one, _two, _three] = counts;
    one.exited(Some(137));
    metrics.record_junk_line("fs");
    let text = text(&registry);
    for line in [
        r#"polis_sidecar_intercept_total{type="before",action="pass",tool_id="fs"} 1"#,
        r#"polis_sidecar_intercept_total{type="before",action="block",tool_id="unknown"} 1"#,
        r#"polis_sidecar_intercept_duration_seconds_bucket{le="0.00001",type="before",tool_id="fs"} 0"#,
        r#"polis_sidecar_policy_decisions_total{action="allow",bundle_id="guard"} 1"#,
        r#"polis_sidecar_policy_decision_duration_seconds_count{bundle_id="guard"} 1"#,
        r#"polis_sidecar_policy_failures_total{bundle_id="guard",failure="timeout"} 1"#,
        r#"polis_sidecar_tool_executions_total{tool_id="fs",runtime_type="local",status="error"} 1"#,
        r#"polis_sidecar_tool_execution_duration_seconds_count{tool_id="fs",runtime_type="local"} 1"#,
        r#"polis_sidecar_tool_exits_total{tool_id="fs",runtime_type="local",exit_code="137"} 1"#,
        r#"polis_sidecar_process_status{tool_id="fs",runtime_type="local"} 1"#,
        r#"polis_sidecar_processes{tool_id="fs",runtime_type="local"} 2"#,
        r#"polis_sidecar_tool_junk_total{tool_id="fs"} 1"#,
        "polis_sidecar_context_active 0",
    ] {
        assert!(text.contains(line), "{line} is missing in\n{text}");
    }
}

#[test]
fn gateway_tool_names_beyond_the_limit_are_counted_as_unknown() {
    let (metrics, registry) = registered_metrics();
    let count = |name: &str| metrics.record_intercept("before", "pass", name, Duration::ZERO);
    let long = "x".repeat(129);
    for invalid in ["", "a b", "a\"b", "é", &long] {
        count(invalid);
    }
    for number in 0..MAX_GATEWAY_TOOLS + 7 {
        count(&format!("tool-{number}"));
    }
    count("tool-0");
    let text = text(&registry);
    let counters = text
        .lines()
        .filter(|line| line.starts_with("polis_sidecar_intercept_total"));
    assert_eq!(counters.count(), MAX_GATEWAY_TOOLS + 1);
    for line in [r#"tool_id="tool-0"} 2"#, r#"tool_id="unknown"} 12"#] {
        assert!(text.contains(line), "{line} is missing in\n{text}");
    }
}

#[test]
fn process_of_a_removed_tool_is_counted_until_it_ends() {
    let (metrics, registry) = registered_metrics();
    let shown = |name: &str| {
        let text = text(&registry);
        let series = format!(r#"{name}{{tool_id="fs",runtime_type="local"}}"#);
        let mut lines = text.lines();
        lines.find_map(|line| Some(line.strip_prefix(&series)?.trim().to_owned()))
    };
    let status_and_count = || {
        let status = shown("polis_sidecar_process_status");
        (status, shown("polis_sidecar_processes"))
    };
    let expected =
        |status: &str, running: &str| (Some(status.to_owned()), Some(running.to_owned()));
    metrics.report_tools([("fs", RuntimeKind::Local)]);
    assert_eq!(status_and_count(), expected("0", "0"));
    let (one, two) = (
        metrics.count_process("fs", RuntimeKind::Local),
        metrics.count_process("fs", RuntimeKind::Local),
    );
    assert_eq!(status_and_count(), expected("1", "2"));
    drop(one);
    // A reload removes the tool while one of its processes still runs.
    metrics.report_tools([]);
    assert_eq!(status_and_count(), expected("1", "1"));
    two.exited(None);
    assert_eq!(status_and_count(), (None, None));
}
