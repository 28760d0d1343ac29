//! The gate's stop has one deadline, and tools are terminated when it begins.

use std::io::{BufReader, Write};
use std::time::{Duration, Instant};

use testkit::gate::GateProcess;
use testkit::{http, wait};

use crate::bridge::Bridge;

/// Reports on stderr, which the gate logs, that it runs and that it was terminated.
const POLITE: &str = "trap 'echo was terminated >&2; exit 0' TERM
    echo is up >&2
    sleep 1000 & wait";

/// Needs two seconds to exit.
const SLOW: &str = "trap 'sleep 2; echo was terminated >&2; exit 0' TERM
    echo is up >&2
    sleep 1000 & wait";

/// Waits until a tool wrote a line to stderr.
fn wait_for_report(gate: &GateProcess<'_>, tool: &str, text: &str) {
    wait::until_or(
        || {
            let said = gate.stderr();
            let mut lines = said.lines();
            lines
                .any(|line| line.contains(tool) && line.contains(text))
                .then_some(())
        },
        || format!("'{text}' of {tool} in:\n{}", gate.stderr()),
    );
}

/// Starts a process of a tool, with a session of the older transport.
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
        .tool("outside", &["sh", "-c", POLITE], "")
        .tool("inside", &["sh", "-c", POLITE], "runtime: {type: sandbox}")
        .server("shutdown_timeout: 300s");
    let mut gate = bridge.start();
    let _streams = ["outside", "inside"].map(|tool| start(&bridge, &gate, tool));
    let mut held = gate.hold_request();
    gate.signal("TERM");
    wait_for_report(&gate, "outside", "was terminated");
    wait_for_report(&gate, "inside", "was terminated");
    // The request is still being waited for, and is answered.
    let rest = format!("{:>99}", "}");
    held.write_all(rest.as_bytes()).unwrap();
    let answer = http::read_response(&mut held).unwrap();
    assert_eq!(answer.status, 400, "{}", answer.text());
    assert_eq!(gate.wait().code(), Some(0), "{}", gate.stderr());
    let said = gate.stderr();
    assert!(
        !said.contains("is killed") && !said.contains("cut off"),
        "{said}"
    );
}

#[test]
fn seed_000_a_tool_may_use_the_time_of_the_stop() {
    let bridge = Bridge::new()
        .tool("slow", &["sh", "-c", SLOW], "")
        .server("shutdown_timeout: 100s");
    let mut gate = bridge.start();
    let _stream = start(&bridge, &gate, "slow");
    gate.signal("TERM");
    wait_for_report(&gate, "slow", "was terminated");
    assert_eq!(gate.wait().code(), Some(0), "{}", gate.stderr());
    assert!(!gate.stderr().contains("is killed"), "{}", gate.stderr());
}

#[test]
fn seed_000_a_tool_that_ignores_sigterm_is_killed_in_time() {
    let sandboxed = "trap '' TERM; echo is up >&2; while :; do sleep 1; done";
    let bridge = Bridge::new()
        .fixture("stubborn", &["--stubborn"])
        .tool(
            "inside",
            &["sh", "-c", sandboxed],
            "runtime: {type: sandbox}",
        )
        .server("shutdown_timeout: 2s");
    let mut gate = bridge.start();
    let _session = bridge.session("stubborn");
    let _stream = start(&bridge, &gate, "inside");
    assert_eq!(bridge.servers().len(), 1);
    // One deadline covers everything, also a request that never ends.
    let _held = gate.hold_request();
    let signalled = Instant::now();
    gate.signal("TERM");
    assert_eq!(gate.wait().code(), Some(0), "{}", gate.stderr());
    let took = signalled.elapsed();
    println!("a stop of 2 s took {took:?}");
    assert!(took < Duration::from_secs(30), "{took:?}");
    assert!(bridge.servers().is_empty(), "it was not killed");
    for tool in ["stubborn", "inside"] {
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
