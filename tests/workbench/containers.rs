//! Containers of `sandbox.remote`, as specification (seed) 001 requires: several per gate, shared
//! by sessions, running after the gate has ended, and named in errors when they are unreachable.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Output;

use serde_json::{Value, json};
use testkit::gate::GateDir;
use testkit::leftovers::start_time;
use testkit::operator::Operator;
use testkit::output::{stderr, stdout};
use testkit::wait;

use crate::PALISADE;
use crate::server::{Server, ServerAddress, SocketKind};

/// A timeout that no test reaches: an error before it was reported without waiting.
const ONE_DAY_MS: u64 = 86_400_000;

/// An entry of `sandbox.remote` for a workbench.
fn entry(name: &str, server: &Server) -> Value {
    match &server.address {
        ServerAddress::Unix(path) => json!({"name": name, "socket_path": path}),
        ServerAddress::Tcp(address) => {
            let (host, port) = (address.ip(), address.port());
            json!({"name": name, "tcp": {"host": host, "port": port}})
        }
    }
}

/// Writes a configuration with these containers.
fn configure(gate_dir: &GateDir, remote: &Value) {
    let sandbox = json!({"backend": "remote", "remote": remote});
    gate_dir.write_config(&format!("version: \"1.0\"\nsandbox: {sandbox}\n"));
}

fn ok(gate_dir: &GateDir, args: &[&str]) -> String {
    let output = gate_dir.run(args);
    assert!(output.status.success(), "{args:?}: {}", stderr(&output));
    stdout(&output)
}

#[test]
fn seed_001_separate_instances_keep_sessions_apart_behind_one_gate() {
    let gate_dir = GateDir::new(PALISADE);
    let servers = [
        Server::start(SocketKind::Unix),
        Server::start(SocketKind::Tcp),
    ];
    let [first, second] = &servers;
    let list = json!([entry("first", first), entry("second", second)]);
    configure(&gate_dir, &list);
    let _gate = gate_dir.start();

    let source = gate_dir.path().join("note");
    let back = gate_dir.path().join("back");
    for (name, server) in [("first", first), ("second", second)] {
        let root = std::fs::canonicalize(server.root()).unwrap();
        let pwd = ok(&gate_dir, &["exec", name, "--", "pwd"]);
        assert_eq!(pwd.trim_end(), root.to_str().unwrap());
        let line = format!("echo {name} > who");
        ok(&gate_dir, &["shell", name, "-c", &line]);
        let read = ok(&gate_dir, &["tool", name, "read", "{\"path\":\"who\"}"]);
        let read: Value = serde_json::from_str(&read).unwrap();
        assert_eq!(read["content"], format!("{name}\n"));
        std::fs::write(&source, name).unwrap();
        ok(&gate_dir, &["upload", name, source.to_str().unwrap(), "in"]);
        let to = back.join(name);
        ok(
            &gate_dir,
            &["download", name, "in/note", to.to_str().unwrap()],
        );
        assert_eq!(std::fs::read_to_string(to.join("note")).unwrap(), name);
    }
    // Each container has its own files.
    for (name, server) in [("first", first), ("second", second)] {
        assert_eq!(server.read("who"), format!("{name}\n").as_bytes());
        assert_eq!(server.read("in/note"), name.as_bytes());
    }

    let rows: Value = serde_json::from_str(&ok(&gate_dir, &["list", "--json"])).unwrap();
    let names: Vec<_> = rows
        .as_array()
        .unwrap()
        .iter()
        .map(|row| &row["name"])
        .collect();
    assert_eq!(names, ["first", "second"]);
    assert_eq!(rows[1]["status"], "active", "{rows}");
    for name in ["first", "second"] {
        let records = ok(&gate_dir, &["audit", "list", "--json", "--sandbox", name]);
        let records: Value = serde_json::from_str(&records).unwrap();
        assert_eq!(records.as_array().map(Vec::len), Some(5), "{records}");
        let output = gate_dir.run(&["pause", name]);
        assert!(
            stderr(&output).contains("managed elsewhere"),
            "{}",
            stderr(&output)
        );
        let output = gate_dir.run(&["create", "--backend", "namespace", "--no-repo", name]);
        assert!(
            stderr(&output).contains("managed elsewhere"),
            "{}",
            stderr(&output)
        );
    }
    let output = gate_dir.run(&["exec", "third", "--", "true"]);
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
}

#[test]
fn seed_001_sessions_read_each_others_files_and_are_logged() {
    let gate_dir = tempfile::tempdir().unwrap();
    let log = gate_dir.path().join("log");
    let file = std::fs::File::create(&log).unwrap();
    let server = Server::start_with(SocketKind::Unix, &[], |command| {
        command.stderr(file);
    });
    let write = json!({"sessionId": "session-of-anna", "path": "shared/a.txt", "content": "one"});
    assert_eq!(server.result("write", &write)["bytes"], 3);
    let read = json!({"sessionId": "session-of-ben", "path": "shared/a.txt"});
    assert_eq!(server.result("read", &read)["content"], "one");
    // A session is optional.
    let read = json!({"path": "shared/a.txt"});
    assert_eq!(server.result("read", &read)["content"], "one");
    // The workspace has no directory per session.
    let ls = server.result("ls", &json!({"sessionId": "session-of-cleo"}));
    assert_eq!(ls["output"], "shared/");
    for (session, path) in [
        ("session-of-anna", "/write"),
        ("session-of-ben", "/read"),
        ("session-of-cleo", "/ls"),
    ] {
        wait::until("the session in the log", || {
            let log_text = std::fs::read_to_string(&log).unwrap();
            let mut lines = log_text.lines();
            lines
                .any(|line| line.contains(session) && line.contains(path))
                .then_some(())
        });
    }
}

#[test]
fn seed_001_gate_that_ends_leaves_the_container_and_its_commands() {
    let gate_dir = GateDir::new(PALISADE);
    let server = Server::start(SocketKind::Unix);
    configure(&gate_dir, &entry("remote", &server));
    let gate = gate_dir.start();
    let line = "sleep 3600 >/dev/null 2>&1 & echo $!";
    let pid = ok(&gate_dir, &["exec", "remote", "--", "sh", "-c", line]);
    let pid: i32 = pid.trim().parse().unwrap();
    let started = start_time(pid).unwrap();
    let assert_still_running = || {
        let health = server.address.request("GET", "/health", "", b"");
        assert_eq!(health.status, 200, "{}", health.text());
        assert_eq!(start_time(pid), Some(started), "the command has ended");
    };
    assert_still_running();

    let mut stopped = gate;
    ok(&gate_dir, &["gate", "stop"]);
    stopped.wait();
    assert_still_running();
    gate_dir.start().kill();
    assert_still_running();

    let _gate = gate_dir.start();
    assert_eq!(
        ok(&gate_dir, &["exec", "remote", "--", "echo", "on"]),
        "on\n"
    );
}

/// Runs a command in an unreachable container.
fn refused(gate_dir: &GateDir) -> Output {
    let output = gate_dir.run(&["exec", "remote", "--", "true"]);
    assert!(!output.status.success());
    output
}

#[test]
fn seed_001_path_that_is_no_socket_is_reported_without_waiting() {
    let gate_dir = GateDir::new(PALISADE);
    let file = gate_dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    for (path, what) in [
        (file.as_path(), "it is a file and not a socket"),
        (gate_dir.path(), "it is a directory and not a socket"),
    ] {
        configure(
            &gate_dir,
            &json!({"socket_path": path, "wait_for_ready_ms": ONE_DAY_MS}),
        );
        let gate = gate_dir.start();
        let printed = stderr(&refused(&gate_dir));
        let address = format!("cannot connect to unix:{}", path.display());
        assert!(
            printed.contains(&address) && printed.contains(what),
            "{printed}"
        );
        assert!(printed.contains("SOCKET_PATH"), "{printed}");
        let table = ok(&gate_dir, &["list"]);
        assert!(table.contains(what), "{table}");
        gate.kill();
    }
}

#[test]
fn seed_001_permission_error_is_reported_without_waiting_and_with_the_fix() {
    if !testkit::require_root("being two users") {
        return;
    }
    let gate_dir = GateDir::with_operator(Operator::Unprivileged, PALISADE);
    let server = Server::start(SocketKind::Unix);
    let ServerAddress::Unix(socket) = &server.address else {
        panic!("not a Unix socket");
    };
    configure(
        &gate_dir,
        &json!({"socket_path": socket, "wait_for_ready_ms": ONE_DAY_MS}),
    );
    let _gate = gate_dir.start();
    let open = |path: &Path, mode: u32| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let directory = server.parent_dir();
    open(directory, 0o700);
    let printed = stderr(&refused(&gate_dir));
    let sentence = format!(
        "cannot connect to unix:{}: permission denied: uid 65534 may not enter the directory {}",
        socket.display(),
        directory.display()
    );
    assert!(printed.contains(&sentence), "{printed}");

    open(directory, 0o755);
    open(socket.parent().unwrap(), 0o755);
    let printed = stderr(&refused(&gate_dir));
    let sentence = "permission denied: uid 65534 may not write to the socket, which belongs to \
                    uid 0 and has mode 600";
    assert!(printed.contains(sentence), "{printed}");
    assert!(printed.contains("--socket-mode 666"), "{printed}");
    open(socket, 0o666);
    ok(&gate_dir, &["exec", "remote", "--", "true"]);
}

#[test]
fn seed_001_inaccessible_socket_directory_is_reported_with_uid() {
    if !testkit::require_root("being two users") {
        return;
    }
    let gate_dir = GateDir::with_operator(Operator::Unprivileged, PALISADE);
    let owned = tempfile::tempdir().unwrap();
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(owned.path(), mode).unwrap();
    let root = gate_dir.path().to_str().unwrap();
    for name in ["w.sock", "run/w.sock"] {
        let socket = owned.path().join(name);
        let socket = socket.to_str().unwrap();
        let args = [
            "workbench",
            "--socket-path",
            socket,
            "--workspace-root",
            root,
        ];
        let output = gate_dir.run(&args);
        let printed = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{printed}");
        let sentence = format!(
            "cannot create the socket {socket}: Permission denied (os error 13); uid 65534 must \
             be able to create files in {} (owner uid 0, mode 755)",
            owned.path().display()
        );
        assert!(printed.contains(&sentence), "{printed}");
    }
}
