//! The workbench as the first process of a real container, on both kinds of socket, and a
//! gate with the container in `sandbox.remote`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use testkit::docker::{Container, Docker, Network};
use testkit::gate::GateDir;
use testkit::output::{stderr, stdout};
use testkit::port::Port;
use testkit::wait;
use workbench::client::address::WorkbenchAddress;
use workbench::client::{WorkbenchClient, WorkbenchClientError};
use workbench::request::BashRequest;

use crate::PALISADE;
use crate::server::{ServerAddress, lines};

const TOKEN: &str = "open-sesame";

fn docker() -> Option<Docker> {
    Docker::start(Path::new(PALISADE))
}

/// A host directory that a container sees as `/run/shared`.
fn shared() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("wb").tempdir().unwrap()
}

fn start<'a>(docker: &'a Docker, shared: &Path) -> (Container<'a>, PathBuf) {
    let environment = ["SOCKET_PATH=/run/shared/w.sock"];
    let container = docker.run(&["workbench"], &environment, Network::None, shared);
    let socket = shared.join("w.sock");
    wait::until("the socket", || socket.exists().then_some(()));
    (container, socket)
}

fn call(address: &ServerAddress, tool: &str, body: &Value) -> testkit::http::HttpResponse {
    let head = format!("Content-Type: application/json\r\nAuthorization: Bearer {TOKEN}\r\n");
    let body = body.to_string();
    address.request("POST", &format!("/{tool}"), &head, body.as_bytes())
}

/// Calls every route and checks the responses.
fn call_every_route(address: &ServerAddress) {
    let health = address.request(
        "GET",
        "/health",
        &format!("Authorization: Bearer {TOKEN}\r\n"),
        b"",
    );
    assert_eq!(
        (health.status, &health.json()["ok"]),
        (200, &Value::Bool(true))
    );
    let result = |tool: &str, body: Value| {
        let answer = call(address, tool, &body);
        assert_eq!(answer.status, 200, "{tool}: {}", answer.text());
        answer.json()["result"].clone()
    };
    let write = json!({ "path": "a/b.txt", "content": "one\ntwo\n" });
    assert_eq!(result("write", write)["bytes"], 8);
    let edit = json!({ "path": "a/b.txt", "oldText": "two", "newText": "zwei" });
    assert_eq!(result("edit", edit)["ok"], true);
    assert_eq!(
        result("read", json!({ "path": "/workspace/a/b.txt" }))["content"],
        "one\nzwei\n"
    );
    assert_eq!(result("ls", json!({}))["output"], "a/");
    let found = result("find", json!({ "pattern": "*.txt" }));
    assert_eq!(found["files"], json!(["a/b.txt"]));
    let found = result("grep", json!({ "pattern": "zw" }));
    assert_eq!(found["content"], "a/b.txt:2: zwei");
    let escape = call(address, "read", &json!({ "path": "../etc/passwd" }));
    assert_eq!(escape.status, 400);

    // Process 1 of the container reaps orphaned processes.
    let command = "cat a/b.txt; (sleep 0.01 &); exit 3";
    let printed = lines(&call(address, "bash", &json!({ "command": command })));
    assert_eq!(printed[0]["data"], "one\nzwei\n");
    assert_eq!(
        printed.last().unwrap(),
        &json!({ "type": "done", "exitCode": 3 })
    );
    let zombies = json!({ "command": "grep -l 'State:.Z' /proc/[0-9]*/status; true" });
    wait::until("zombies to be reaped", || {
        let printed = lines(&call(address, "bash", &zombies));
        (printed.len() == 1).then_some(())
    });
    let slow = json!({ "command": "sleep 3007", "timeoutSeconds": 0.2 });
    let printed = lines(&call(address, "bash", &slow));
    let timed_out = json!({ "type": "done", "exitCode": -1, "timedOut": true });
    assert_eq!(printed.last().unwrap(), &timed_out);
    let left = json!({ "command": "grep -l 300[7] /proc/[0-9]*/cmdline; true" });
    assert_eq!(lines(&call(address, "bash", &left)).len(), 1);
}

#[test]
fn every_route_answers_in_a_container_on_either_socket() {
    let Some(docker) = docker() else { return };
    let shared = shared();
    let (_alone, socket) = start(&docker, shared.path());
    call_every_route(&ServerAddress::Unix(socket));

    let port = Port::take();
    let address = port.address();
    let environment = [
        "TCP_HOST=127.0.0.1",
        &format!("TCP_PORT={}", address.port()),
        &format!("SIDECAR_AUTH_TOKEN={TOKEN}"),
        "SIDECAR_REQUIRE_AUTH=1",
    ];
    let _open = docker.run(&["workbench"], &environment, Network::Host, shared.path());
    wait::until("the port", || {
        std::net::TcpStream::connect(address).ok().map(drop)
    });
    let address = ServerAddress::Tcp(address);
    let without_token = address.request("GET", "/health", "", b"");
    assert_eq!(without_token.status, 401);
    call_every_route(&address);
}

#[test]
fn gate_works_with_a_container_that_has_only_busybox() {
    let Some(docker) = docker() else { return };
    let shared = shared();
    let (container, socket) = start(&docker, shared.path());
    let gate_dir = GateDir::new(PALISADE);
    gate_dir.write_config(&format!(
        "version: \"1.0\"\nsandbox:\n  remote:\n    socket_path: {}\n    \
         wait_for_ready_ms: 20000\n",
        socket.display()
    ));
    let ok = |args: &[&str]| -> String {
        let output: Output = gate_dir.run(args);
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        stdout(&output)
    };
    assert_eq!(ok(&["exec", "remote", "--", "pwd"]), "/workspace\n");
    let network = ok(&["exec", "remote", "--", "ls", "/sys/class/net"]);
    assert_eq!(network, "lo\n");
    let files = tempfile::tempdir().unwrap();
    let tree = files.path().join("tree");
    std::fs::create_dir(&tree).unwrap();
    let bytes: Vec<u8> = (0..100_000_u32)
        .map(|n| n.to_le_bytes()[0] ^ 0x5a)
        .collect();
    std::fs::write(tree.join("bytes"), &bytes).unwrap();
    ok(&["upload", "remote", tree.to_str().unwrap(), "in"]);
    // The client reconnects after the restart.
    container.restart();
    let back = files.path().join("back");
    ok(&["download", "remote", "in/tree", back.to_str().unwrap()]);
    assert_eq!(std::fs::read(back.join("tree/bytes")).unwrap(), bytes);
    let listed = ok(&["tool", "remote", "ls", "{\"path\":\"in\"}"]);
    assert!(listed.contains("tree/"), "{listed}");
    let table = ok(&["list"]);
    assert!(table.contains("managed elsewhere, reachable"), "{table}");
}

#[test]
fn calls_continue_after_a_container_restart_and_run_once() {
    const RESTARTS: u32 = 10;
    let Some(docker) = docker() else { return };
    let shared = shared();
    let (container, socket) = start(&docker, shared.path());
    let client = WorkbenchClient::new(
        WorkbenchAddress::Unix(socket),
        Duration::from_secs(30),
        None,
    )
    .unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let answered = AtomicU32::new(0);
    let mut known: HashMap<String, bool> = HashMap::new();
    std::thread::scope(|scope| {
        let restarts = scope.spawn(|| {
            for round in 0..RESTARTS {
                let before = answered.load(Ordering::Relaxed);
                wait::until("calls to be answered", || {
                    (answered.load(Ordering::Relaxed) > before + 2).then_some(())
                });
                if round % 3 == 2 {
                    container.kill_and_start();
                } else {
                    container.restart();
                }
            }
        });
        let calls = async {
            let mut calls_after_restarts = 0;
            for number in 0.. {
                let call = number.to_string();
                // Appending a line with one write is atomic.
                let request = BashRequest {
                    command: format!("echo {call} >> /run/shared/log"),
                    timeout_seconds: None,
                };
                match client.run(&request).await {
                    Ok(result) if result.ok => {
                        answered.fetch_add(1, Ordering::Relaxed);
                        known.insert(call, true);
                    }
                    Ok(_)
                    | Err(
                        WorkbenchClientError::ConnectionLost { .. }
                        | WorkbenchClientError::Refused(_),
                    ) => {
                        known.insert(call, false);
                    }
                    Err(other) => panic!("{other}"),
                }
                // Calls also succeed after the last restart.
                calls_after_restarts += u32::from(restarts.is_finished());
                if calls_after_restarts > 5 {
                    break;
                }
            }
        };
        runtime.block_on(calls);
        restarts.join().unwrap();
    });
    let log = std::fs::read_to_string(shared.path().join("log")).unwrap();
    let mut times: HashMap<&str, u32> = HashMap::new();
    for line in log.lines() {
        *times.entry(line).or_default() += 1;
    }
    println!("{} calls, {} executed", known.len(), times.len());
    assert!(times.values().all(|times| *times == 1), "{times:?}");
    for (call, done) in &known {
        assert!(!done || times.contains_key(call.as_str()), "{call}");
    }
    let unknown = known.values().filter(|done| !**done).count();
    assert!(
        unknown <= usize::try_from(2 * RESTARTS).unwrap(),
        "{unknown}"
    );
}
