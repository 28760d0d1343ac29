//! The gate's shutdown has one deadline, and tools are terminated at its start.

use std::io::{BufReader, Write};
use std::time::{Duration, Instant};

use testkit::gate::GateProcess;
use testkit::{http, wait};

use crate::bridge::Bridge;

/// A tool that reports its start and its SIGTERM on stderr, which the gate logs.
const REPORTING_TOOL: &str = "trap 'echo was terminated >&2; exit 0' TERM
    echo is up >&2
    sleep 1000 & wait";

/// A tool that needs two seconds to exit.
const SLOW_TOOL: &str = "trap 'sleep 2; echo was terminated >&2; exit 0' TERM
    echo is up >&2
    sleep 1000 & wait";

/// Waits until a tool wrote a line to stderr.
fn wait_for_report(gate: &GateProcess<'_>, tool: &str, text: &str) {
    wait::until_or(
        || {
            let log = gate.stderr();
            let mut lines = log.lines();
            lines
                .any(|line| line.contains(tool) && line.contains(text))
                .then_some(())
        },
        || format!("'{text}' of {tool} in:\n{}", gate.stderr()),
    );
}

/// Starts a process of a tool with a session over HTTP with SSE.
fn start(bridge: &Bridge, gate: &GateProcess<'_>, tool: &str) -> impl Sized + use<> {
    let mut stream = BufReader::new(bridge.send("GET", &format!("/sse/{tool}"), &[], ""));
    let head = http::read_head(&mut stream).unwrap();
    assert_eq!(head.status, 200, "{head:?}");
    wait_for_report(gate, tool, "is up");
    stream
}

#[test]
fn seed_000_tools_are_terminated_before_requests_are_drained() {
    let bridge = Bridge::new()
        .tool("host-tool", &["sh", "-c", REPORTING_TOOL], "")
        .tool(
            "sandbox-tool",
            &["sh", "-c", REPORTING_TOOL],
            "runtime: {type: sandbox}",
        )
        .server("shutdown_timeout: 300s");
    let mut gate = bridge.start();
    let _streams = ["host-tool", "sandbox-tool"].map(|tool| start(&bridge, &gate, tool));
    let mut held = gate.hold_request();
    gate.signal("TERM");
    wait_for_report(&gate, "host-tool", "was terminated");
    wait_for_report(&gate, "sandbox-tool", "was terminated");
    // The gate still waits for the request, and answers it.
    let rest = format!("{:>99}", "}");
    held.write_all(rest.as_bytes()).unwrap();
    let answer = http::read_response(&mut held).unwrap();
    assert_eq!(answer.status, 400, "{}", answer.text());
    assert_eq!(gate.wait().code(), Some(0), "{}", gate.stderr());
    let log = gate.stderr();
    assert!(
        !log.contains("is killed") && !log.contains("cut off"),
        "{log}"
    );
}

#[test]
fn seed_000_tool_may_use_the_whole_shutdown_timeout() {
    let bridge = Bridge::new()
        .tool("slow", &["sh", "-c", SLOW_TOOL], "")
        .server("shutdown_timeout: 100s");
    let mut gate = bridge.start();
    let _stream = start(&bridge, &gate, "slow");
    gate.signal("TERM");
    wait_for_report(&gate, "slow", "was terminated");
    assert_eq!(gate.wait().code(), Some(0), "{}", gate.stderr());
    assert!(!gate.stderr().contains("is killed"), "{}", gate.stderr());
}

#[test]
fn seed_000_tool_that_ignores_sigterm_is_killed_at_the_deadline() {
    let ignores_sigterm = "trap '' TERM; echo is up >&2; while :; do sleep 1; done";
    let bridge = Bridge::new()
        .fixture("stubborn", &["--stubborn"])
        .tool(
            "sandbox-tool",
            &["sh", "-c", ignores_sigterm],
            "runtime: {type: sandbox}",
        )
        .server("shutdown_timeout: 2s");
    let mut gate = bridge.start();
    let _session = bridge.session("stubborn");
    let _stream = start(&bridge, &gate, "sandbox-tool");
    assert_eq!(bridge.servers().len(), 1);
    // One deadline covers everything, also a request that never ends.
    let _held = gate.hold_request();
    let signalled = Instant::now();
    gate.signal("TERM");
    assert_eq!(gate.wait().code(), Some(0), "{}", gate.stderr());
    let took = signalled.elapsed();
    println!("a shutdown of 2 s took {took:?}");
    assert!(took < Duration::from_secs(30), "{took:?}");
    assert!(bridge.servers().is_empty(), "the server was not killed");
    for tool in ["stubborn", "sandbox-tool"] {
        wait_for_report(&gate, tool, "mcp tool did not end on SIGTERM and is killed");
    }
    wait::until("the request to be cut off", || {
        gate.stderr().contains("cut off").then_some(())
    });
    assert!(
        !gate.stderr().contains("did not end in time"),
        "{}",
        gate.stderr()
    );
}
