//! A server that crashes, hangs, floods or ignores signals affects only its own sessions, which
//! receive an error at once.

use std::io::BufReader;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::{http, wait};

use crate::bridge::{Bridge, messages, request};

/// Limit for an immediate error: far below any timeout of the bridge, with slack for a busy
/// machine.
const IMMEDIATE: Duration = Duration::from_secs(5);

fn is_error(answer: &Value) -> bool {
    answer["error"]["code"].is_i64() && answer["error"]["message"].is_string()
}

#[test]
fn crashed_server_fails_all_open_calls_at_once() {
    for before in [false, true] {
        let bridge = Bridge::with_fixture();
        let _gate = bridge.start();
        let (session, other) = (bridge.session("fixture"), bridge.session("fixture"));
        let hang = json!({"name": "hang", "arguments": {}});
        let open = session.send(&request(5, "tools/call", &hang));
        let started = Instant::now();
        let answer = session.call("crash", &json!({"before": before}));
        assert!(is_error(&answer), "{answer}");
        let waiting = http::read_response(BufReader::new(open)).unwrap();
        let waiting = messages(&waiting);
        let waiting = waiting.iter().find(|message| message["id"] == 5);
        assert!(waiting.is_some_and(is_error), "{waiting:?}");
        assert!(started.elapsed() < IMMEDIATE, "{:?}", started.elapsed());
        other.text("test_simple_text", &json!({}));
        // The next call starts a new server.
        bridge
            .session("fixture")
            .text("test_simple_text", &json!({}));
    }
}

#[test]
fn hanging_call_does_not_block_other_calls() {
    let bridge = Bridge::with_fixture();
    let _gate = bridge.start();
    let session = bridge.session("fixture");
    let hang = json!({"name": "hang", "arguments": {}});
    let _open = session.send(&request(5, "tools/call", &hang));
    session.text("test_simple_text", &json!({}));
    bridge
        .session("fixture")
        .text("test_simple_text", &json!({}));
}

#[test]
fn junk_on_stdout_is_dropped_and_counted() {
    let bridge = Bridge::new().fixture("fixture", &["--junk-first"]);
    let gate = bridge.start();
    let session = bridge.session("fixture");
    let text = session.text("flood", &json!({"lines": 20_000}));
    assert_eq!(text, "Flooded.");
    session.text("test_simple_text", &json!({}));
    let metrics = bridge.request("GET", "/metrics", &[], "").text();
    let junk: f64 = metrics
        .lines()
        .filter(|line| line.contains("junk") && !line.starts_with('#'))
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .sum();
    assert!(junk >= 20_000.0, "{junk}\n{metrics}");
    // Logged, but not twenty thousand times.
    assert!(gate.stderr().lines().count() < 1000, "{}", gate.stderr());
}

/// Issue 14, number 4.
#[test]
fn server_that_floods_stderr_is_rate_limited_in_the_log() {
    let program = testkit::mcp::fixture();
    let script = format!("seq 5000 >&2; exec '{}'", program.display());
    let bridge = Bridge::with_fixture().tool("noisy", &["sh", "-c", &script], "");
    let gate = bridge.start();
    bridge.session("noisy").text("test_simple_text", &json!({}));
    let lines_with = |what: &str| {
        let log = gate.stderr();
        let lines = log.lines().filter(|line| line.contains(what));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let summary = wait::until("a summary", || {
        lines_with("similar log lines suppressed").pop()
    });
    assert!(summary.contains("noisy"), "{summary}");
    let written = lines_with("mcp tool stderr").len();
    assert!((1..500).contains(&written), "{written} lines");
}

#[test]
fn endless_output_line_uses_bounded_memory() {
    let bridge = Bridge::with_fixture();
    let gate = bridge.start();
    let other = bridge.session("fixture");
    let before = memory(gate.pid());
    let session = bridge.session("fixture");
    // The bridge may end the session or not, but it must answer.
    let answer = session.call("flood", &json!({"lines": 0, "bytes": 300_000_000}));
    assert!(
        is_error(&answer) || answer["result"].is_object(),
        "{answer}"
    );
    let after = memory(gate.pid());
    assert!(
        after < before + 100_000_000,
        "memory grew from {before} to {after}"
    );
    other.text("test_simple_text", &json!({}));
}

#[test]
fn server_that_fails_to_start_is_unavailable_and_retried() {
    let bridge = Bridge::new();
    let allowed = bridge.path("start-allowed");
    let allowed = allowed.to_str().unwrap().to_owned();
    let bridge = bridge
        .fixture("fixture", &["--die-unless", &allowed])
        .fixture("good", &[]);
    let _gate = bridge.start();
    let Err(answer) = bridge.try_session("fixture") else {
        panic!("the failed server has a session");
    };
    assert_eq!(answer.status, 503, "{}", answer.text());
    bridge.session("good").text("test_simple_text", &json!({}));
    std::fs::write(&allowed, "").unwrap();
    let session = wait::until("the server to be tried again", || {
        bridge.try_session("fixture").ok()
    });
    session.text("test_simple_text", &json!({}));
}

#[test]
fn missing_program_is_unavailable() {
    let bridge = Bridge::new().tool("gone", &["/nonexistent/program"], "");
    let _gate = bridge.start();
    let Err(answer) = bridge.try_session("gone") else {
        panic!("the missing program has a session");
    };
    assert_eq!(answer.status, 503, "{}", answer.text());
    let body = request(0, "initialize", &json!({}));
    assert_eq!(
        bridge.request("POST", "/mcp/unknown", &[], &body).status,
        404
    );
}

#[test]
fn server_that_ignores_sigterm_ends_with_its_session() {
    let bridge = Bridge::new().fixture("fixture", &["--stubborn"]);
    let _gate = bridge.start();
    let session = bridge.session("fixture");
    session.text("test_simple_text", &json!({}));
    session.delete();
    wait::until("the server to end", || {
        bridge.servers().is_empty().then_some(())
    });
}

#[test]
fn descendants_of_a_server_end_with_it() {
    let bridge = Bridge::with_fixture();
    let _gate = bridge.start();
    for end in ["delete", "crash"] {
        let session = bridge.session("fixture");
        let file = bridge.path(&format!("pid-{end}"));
        session.text("spawn_grandchild", &json!({"file": file}));
        let pid = wait::until("the grandchild", || std::fs::read_to_string(&file).ok());
        let running = Path::new("/proc").join(pid.trim());
        assert!(running.exists());
        if end == "delete" {
            session.delete();
        } else {
            session.call("crash", &json!({}));
        }
        wait::until("the grandchild to end", || {
            (!running.exists()).then_some(())
        });
    }
}

#[test]
fn servers_end_when_the_gate_is_killed() {
    let bridge = Bridge::with_fixture();
    let gate = bridge.start();
    let session = bridge.session("fixture");
    let file = bridge.path("pid");
    session.text("spawn_grandchild", &json!({"file": file}));
    let pid = wait::until("the grandchild", || std::fs::read_to_string(&file).ok());
    assert_eq!(bridge.servers().len(), 1);
    gate.kill();
    wait::until("the server to end", || {
        bridge.servers().is_empty().then_some(())
    });
    let running = Path::new("/proc").join(pid.trim());
    wait::until("the grandchild to end", || {
        (!running.exists()).then_some(())
    });
}

#[test]
fn server_receives_only_its_configured_environment() {
    let program = testkit::mcp::fixture();
    let command = [program.to_str().unwrap()];
    let bridge = Bridge::new().tool("fixture", &command, "env: [\"GIVEN=yes\"]");
    bridge.write();
    let _gate = bridge
        .gate_dir
        .start_with(|command| command.env("GATE_SECRET", "for the gate alone"));
    let session = bridge.session("fixture");
    let env: Value = serde_json::from_str(&session.text("env", &json!({}))).unwrap();
    assert_eq!(env["GIVEN"], "yes");
    assert_eq!(env.get("GATE_SECRET"), None, "{env}");
}

/// Anonymous memory of a process, in bytes (RssAnon in proc_pid_status(5)).
pub(crate) fn memory(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let mut lines = status.lines();
    let line = lines.find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap() * 1024
}
