//! Tests of `mcp-fixture`: tests of the bridge rely on its behaviour.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "a test that cannot continue has failed"
)]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

struct Server {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Server {
    fn new(switches: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_mcp-fixture"))
            .args(switches)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self {
            child,
            input,
            output,
        }
    }

    fn send(&mut self, line: &str) {
        let input = self.input.as_mut().unwrap();
        input.write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    fn read_line(&mut self) -> String {
        let mut line = Vec::new();
        self.output.read_until(b'\n', &mut line).unwrap();
        String::from_utf8_lossy(&line).trim_end().to_owned()
    }

    fn request(&mut self, method: &str, params: &Value) -> Value {
        self.send(
            &json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).to_string(),
        );
        serde_json::from_str(&self.read_line()).unwrap()
    }

    fn initialize(&mut self, revision: &str) -> Value {
        let client = json!({"name": "test", "version": "1"});
        let params = json!({"protocolVersion": revision, "capabilities": {}, "clientInfo": client});
        self.request("initialize", &params)["result"].clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn arguments_are_echoed_byte_for_byte() {
    let mut server = Server::new(&[]);
    let params = "{\"name\":\"echo_raw\",\"unknown\":[1],\"arguments\":\
        {\"z\":123456789012345678901234567890,\"a\":1e400,\"f\":1.10,\"u\":\"\\u00e9é\"}}";
    server.send(&format!(
        "{{\"jsonrpc\":\"2.0\",\"id\":\"x\",\"method\":\"tools/call\",\"params\":{params}}}"
    ));
    let line = server.read_line();
    let arguments = &params[params.find("{\"z\"").unwrap()..params.len() - 1];
    assert!(
        line.contains(&format!("\"structuredContent\":{arguments}}}")),
        "{line}"
    );
    assert!(line.contains(&Value::from(params).to_string()), "{line}");
}

#[test]
fn initialize_offers_the_newest_supported_revision() {
    let mut server = Server::new(&[]);
    assert_eq!(
        server.initialize("2024-11-05")["protocolVersion"],
        "2024-11-05"
    );
    assert_eq!(
        server.initialize("2026-07-28")["protocolVersion"],
        "2025-11-25"
    );
    let mut old = Server::new(&["--revision", "2025-03-26"]);
    assert_eq!(
        old.initialize("2025-06-18")["protocolVersion"],
        "2025-03-26"
    );
}

#[test]
fn cancelled_call_gets_no_response_and_is_recorded() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("notification");
    let mut server = Server::new(&[]);
    let params = json!({"name": "cancellable", "arguments": {"file": file}});
    server.send(
        &json!({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}).to_string(),
    );
    testkit::wait::until("the call to start", || file.exists().then_some(()));
    server.send(r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":7,"reason":"tired"}}"#);
    testkit::wait::until("the notification to be written", || {
        let written = std::fs::read_to_string(&file).ok()?;
        (written == "started\n{\"requestId\":7,\"reason\":\"tired\"}\n").then_some(())
    });
    assert_eq!(
        server.request("ping", &json!({})),
        json!({"jsonrpc": "2.0", "id": 1, "result": {}})
    );
}

#[test]
fn client_responses_are_matched_to_requests_by_id() {
    let mut server = Server::new(&[]);
    let params = json!({"name": "test_input_required_result_multiple_inputs", "arguments": {}});
    server.send(
        &json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).to_string(),
    );
    let questions: Vec<Value> = (0..3)
        .map(|_| serde_json::from_str(&server.read_line()).unwrap())
        .collect();
    for (number, question) in questions.iter().enumerate().rev() {
        let answer = json!({"jsonrpc": "2.0", "id": question["id"], "result": {"n": number}});
        server.send(&answer.to_string());
    }
    let answer: Value = serde_json::from_str(&server.read_line()).unwrap();
    let text = answer["result"]["content"][0]["text"].as_str().unwrap();
    assert_eq!(text, r#"[{"n":0},{"n":1},{"n":2}]"#);
}

#[test]
fn describe_option_changes_the_tool_description() {
    let mut server = Server::new(&["--describe", "Something else"]);
    let listed = server.request("tools/list", &json!({}));
    assert_eq!(
        listed["result"]["tools"][0]["description"],
        "Something else"
    );
}

#[test]
fn pages_option_paginates_lists() {
    let mut server = Server::new(&["--pages", "20"]);
    let first = server.request("tools/list", &json!({}));
    assert_eq!(first["result"]["tools"].as_array().unwrap().len(), 20);
    let next = json!({"cursor": first["result"]["nextCursor"]});
    let second = server.request("tools/list", &next);
    assert_ne!(second["result"]["tools"][0], first["result"]["tools"][0]);
}

#[test]
fn misbehaviour_options_take_effect() {
    let mut dead = Server::new(&["--die"]);
    assert_eq!(dead.child.wait().unwrap().code(), Some(3));
    let mut junk = Server::new(&["--junk-first"]);
    assert_eq!(junk.read_line(), "Starting server...");
    let mut crashing = Server::new(&[]);
    let params = json!({"name": "crash", "arguments": {"code": 9}});
    crashing.send(
        &json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).to_string(),
    );
    assert!(serde_json::from_str::<Value>(&crashing.read_line()).is_err());
    assert_eq!(crashing.child.wait().unwrap().code(), Some(9));
}

#[test]
fn server_ends_with_its_input_unless_stubborn() {
    let mut good = Server::new(&[]);
    good.input = None;
    assert!(good.child.wait().unwrap().success());
    let mut stubborn = Server::new(&["--stubborn"]);
    stubborn.request("ping", &json!({}));
    stubborn.input = None;
    let pid = stubborn.child.id().to_string();
    let signalled = Command::new("kill").args(["-TERM", &pid]).status().unwrap();
    assert!(signalled.success());
    // SIGTERM is pending and not handled (proc_pid_status(5), ShdPnd; SIGTERM is 15).
    testkit::wait::until("the signal to be pending", || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let pending = status
            .lines()
            .find_map(|line| line.strip_prefix("ShdPnd:"))?;
        let pending = u64::from_str_radix(pending.trim(), 16).ok()?;
        (pending & (1 << 14) != 0).then_some(())
    });
    assert!(stubborn.child.try_wait().unwrap().is_none());
}
