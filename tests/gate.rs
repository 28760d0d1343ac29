//! The gate as a process: start, stop, one per directory, exit codes.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot continue has failed"
)]

#[path = "gate/watchdog.rs"]
mod watchdog;

use std::process::Stdio;
use std::time::Instant;

use serde_json::{Value, json};
use testkit::gate::GateDir;
use testkit::output::{stderr, stdout};
use testkit::wait;

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");

/// Stops the background gate of a directory when it is dropped.
struct Background<'a>(&'a GateDir);

impl Drop for Background<'_> {
    fn drop(&mut self) {
        let _ = self.0.run(&["gate", "stop", "--force"]);
    }
}

#[test]
fn background_gate_starts_responds_logs_and_stops() {
    let gate_dir = GateDir::new(PALISADE);
    let _cleanup = Background(&gate_dir);
    let output = gate_dir.run(&["gate", "status"]);
    assert_eq!(output.status.code(), Some(5));
    assert!(
        stderr(&output).contains("the gate is not running in"),
        "{}",
        stderr(&output)
    );

    let output = gate_dir.run(&["gate", "start"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(
        stdout(&output).starts_with("gate started (pid "),
        "{}",
        stdout(&output)
    );
    assert!(stdout(&gate_dir.run(&["gate", "start"])).starts_with("gate already running"));

    let status: Value =
        serde_json::from_str(&stdout(&gate_dir.run(&["gate", "status", "--json"]))).unwrap();
    assert_eq!(
        (&status["running"], &status["status"]),
        (&json!(true), &json!("healthy"))
    );
    assert!(stdout(&gate_dir.run(&["gate", "logs"])).contains("gate is up"));

    let before = status["pid"].clone();
    assert!(gate_dir.run(&["gate", "restart"]).status.success());
    let status: Value =
        serde_json::from_str(&stdout(&gate_dir.run(&["gate", "status", "--json"]))).unwrap();
    assert_ne!(status["pid"], before);

    assert_eq!(stdout(&gate_dir.run(&["gate", "stop"])), "gate stopped\n");
    assert!(!gate_dir.control().exists(), "the socket is removed");
    assert_eq!(
        stdout(&gate_dir.run(&["gate", "stop"])),
        "gate not running\n"
    );
}

#[test]
fn concurrent_commands_start_one_gate_and_share_it() {
    let gate_dir = GateDir::new(PALISADE);
    let _cleanup = Background(&gate_dir);
    let children: Vec<_> = (0..4)
        .map(|_| {
            gate_dir
                .palisade(&["registry", "list"])
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(stdout(&output), "no registrations\n");
    }
    let starts = stdout(&gate_dir.run(&["audit", "list", "--json"]));
    assert_eq!(starts.matches("gate_started").count(), 1, "{starts}");
}

#[test]
fn registry_commands_add_list_and_remove() {
    let gate_dir = GateDir::new(PALISADE);
    let _gate = gate_dir.start();
    let add = [
        "registry",
        "add",
        "abc",
        "--ip",
        "10.0.0.1",
        "--repo",
        "o/r",
        "--auth-mode",
        "bot",
    ];
    assert_eq!(stdout(&gate_dir.run(&add)), "registered abc\n");
    let list = stdout(&gate_dir.run(&["registry", "list"]));
    assert!(list.contains("abc  10.0.0.1  bot   o/r"), "{list}");
    assert_eq!(
        gate_dir.run(&["registry", "remove", "abc"]).status.code(),
        Some(0)
    );
    assert_eq!(
        gate_dir.run(&["registry", "remove", "abc"]).status.code(),
        Some(3)
    );
    assert_eq!(
        gate_dir.run(&["registry", "remove", "../x"]).status.code(),
        Some(2)
    );
}

#[test]
fn second_gate_in_one_directory_is_refused() {
    let gate_dir = GateDir::new(PALISADE);
    let gate = gate_dir.start();
    let output = gate_dir.run(&["gate", "run"]);
    assert_eq!(output.status.code(), Some(4));
    assert!(
        stderr(&output).contains(&format!("(pid {})", gate.pid())),
        "{}",
        stderr(&output)
    );
    assert_eq!(gate.get("/internal/health").status, 200);
}

#[test]
fn gates_in_two_directories_are_independent() {
    let (one, two) = (GateDir::new(PALISADE), GateDir::new(PALISADE));
    let (first, second) = (one.start(), two.start());
    let row = json!({"container_ip": "10.0.0.1", "container_id": "a", "repos": []});
    assert_eq!(
        first.request("POST", "/internal/containers", &row).status,
        201
    );
    assert_eq!(second.get("/internal/containers").json()["count"], 0);
    first.kill();
    assert_eq!(second.get("/internal/health").status, 200);
}

#[test]
fn gate_does_not_replace_the_socket_of_another_process() {
    let (one, two) = (GateDir::new(PALISADE), GateDir::new(PALISADE));
    let first = one.start();
    let control = one.control();
    let output = two.run(&["gate", "run", "--control", control.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("another process already listens on"),
        "{}",
        stderr(&output)
    );
    assert_eq!(first.get("/internal/health").status, 200);
}

#[test]
fn stale_socket_is_replaced_and_other_files_are_kept() {
    let gate_dir = GateDir::new(PALISADE);
    gate_dir.start().kill();
    assert!(gate_dir.control().exists(), "a kill leaves the socket");
    drop(gate_dir.start());
    std::fs::remove_file(gate_dir.control()).unwrap();
    std::fs::write(gate_dir.control(), "mine").unwrap();
    let output = gate_dir.run(&["gate", "run"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("is not a socket"),
        "{}",
        stderr(&output)
    );
    assert_eq!(std::fs::read_to_string(gate_dir.control()).unwrap(), "mine");
}

#[test]
fn first_signal_shuts_down_gracefully_and_cleans_up() {
    for signal in ["TERM", "INT"] {
        let gate_dir = GateDir::new(PALISADE);
        let mut gate = gate_dir.start();
        gate.signal(signal);
        assert_eq!(gate.wait().code(), Some(0), "{}", gate.stderr());
        assert!(!gate_dir.control().exists());
        assert!(
            !gate_dir.state().join("palisade.db-wal").exists(),
            "the write-ahead log was checkpointed"
        );
        wait::until("the last log line", || {
            gate.stderr().contains("stopped").then_some(())
        });
    }
}

#[test]
fn second_signal_ends_the_gate_immediately() {
    let gate_dir = GateDir::new(PALISADE);
    gate_dir.write_config("version: \"1.0\"\nserver: { shutdown_timeout: 60s }\n");
    let mut gate = gate_dir.start();
    let _held = gate.hold_request();
    gate.signal("TERM");
    wait::until("the stop to begin", || {
        gate.stderr().contains("stopping").then_some(())
    });
    gate.signal("TERM");
    assert_eq!(gate.wait().code(), Some(128 + 15), "{}", gate.stderr());
}

#[test]
fn shutdown_cuts_off_an_endless_request_at_its_timeout() {
    let gate_dir = GateDir::new(PALISADE);
    gate_dir.write_config("version: \"1.0\"\nserver: { shutdown_timeout: 300ms }\n");
    let mut gate = gate_dir.start();
    let _held = gate.hold_request();
    gate.signal("TERM");
    assert_eq!(gate.wait().code(), Some(0), "{}", gate.stderr());
    wait::until("the warning in the log", || {
        gate.stderr().contains("cut off").then_some(())
    });
}

#[test]
fn invalid_configuration_prevents_the_start_and_lists_every_mistake() {
    let gate_dir = GateDir::new(PALISADE);
    gate_dir.write_config("version: \"1.0\"\nlogging: { level: loud }\nservr: {}\n");
    for command in [["gate", "run"], ["gate", "start"]] {
        let output = gate_dir.run(&command);
        assert_eq!(
            output.status.code(),
            Some(2),
            "{command:?}: {}",
            stderr(&output)
        );
        let printed = stderr(&output);
        assert!(
            printed.contains("palisade.yaml:2:") && printed.contains("loud"),
            "{printed}"
        );
        assert!(
            printed.contains("palisade.yaml:3:1") && printed.contains("did you mean 'server'"),
            "{printed}"
        );
    }
    assert_eq!(gate_dir.run(&["gate", "status"]).status.code(), Some(5));
}

#[test]
fn state_directory_accessible_to_others_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let gate_dir = GateDir::new(PALISADE);
    std::fs::create_dir(gate_dir.state()).unwrap();
    std::fs::set_permissions(gate_dir.state(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let output = gate_dir.run(&["gate", "run"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("chmod 700"), "{}", stderr(&output));
}

#[test]
fn corrupt_database_is_set_aside_and_traffic_refused_until_restore() {
    let gate_dir = GateDir::new(PALISADE);
    let gate = gate_dir.start();
    let row = json!({"container_ip": "10.0.0.1", "container_id": "a", "repos": []});
    assert_eq!(
        gate.request("POST", "/internal/containers", &row).status,
        201
    );
    let backup = gate_dir.path().join("backup.db");
    assert!(
        gate_dir
            .run(&["registry", "backup", backup.to_str().unwrap()])
            .status
            .success()
    );
    assert_eq!(
        gate_dir
            .run(&["registry", "backup", backup.to_str().unwrap()])
            .status
            .code(),
        Some(4)
    );
    gate.kill();
    std::fs::write(
        gate_dir.database(),
        "this is no database, and it is long enough to be looked at",
    )
    .unwrap();

    for _ in 0..2 {
        // The second round shows that a restart does not replace the broken registry by an empty
        // one.
        let gate = gate_dir.start();
        let health = gate.get("/internal/health");
        assert_eq!(
            (
                health.status,
                &health.json()["checks"]["registry_accessible"]
            ),
            (503, &json!(false))
        );
        assert_eq!(gate.get("/internal/containers").status, 503);
        let refused = gate.request("POST", "/internal/containers", &row);
        assert_eq!(refused.status, 503);
        assert!(
            refused.text().contains("palisade registry restore"),
            "{}",
            refused.text()
        );
        gate.kill();
    }
    let aside = std::fs::read_dir(gate_dir.state())
        .unwrap()
        .filter_map(Result::ok);
    let aside: Vec<_> = aside
        .filter(|e| e.file_name().to_string_lossy().contains("corrupt"))
        .collect();
    assert!(!aside.is_empty(), "the broken file is kept");

    let gate = gate_dir.start();
    let output = gate_dir.run(&["registry", "restore", backup.to_str().unwrap()]);
    assert_eq!(
        output.status.code(),
        Some(2),
        "a confirmation is required: {}",
        stderr(&output)
    );
    let output = gate_dir.run(&["registry", "restore", "--yes", backup.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(gate.get("/internal/health").status, 200);
    assert_eq!(
        gate.get("/internal/containers").json()["containers"][0]["container_id"],
        "a"
    );

    assert!(
        gate_dir
            .run(&["registry", "reset", "--yes"])
            .status
            .success()
    );
    assert_eq!(gate.get("/internal/containers").json()["count"], 0);
    assert_eq!(gate_dir.run(&["audit", "verify"]).status.code(), Some(0));
}

#[test]
fn help_commands_work_without_a_gate() {
    let gate_dir = GateDir::new(PALISADE);
    let help = stdout(&gate_dir.run(&["--help"]));
    assert!(
        help.contains("Getting started:") && help.contains("Exit codes:"),
        "{help}"
    );
    assert_eq!(gate_dir.run(&["gate", "strat"]).status.code(), Some(2));
    let doctor = gate_dir.run(&["doctor", "--json"]);
    let findings: Value = serde_json::from_str(&stdout(&doctor)).unwrap();
    assert!(
        findings
            .as_array()
            .unwrap()
            .iter()
            .any(|f| f["name"] == "user namespaces"),
        "{findings}"
    );
    assert!(stdout(&gate_dir.run(&["completions", "bash"])).contains("complete -F _palisade"));
    let man = gate_dir.path().join("man");
    assert!(
        gate_dir
            .run(&["man", man.to_str().unwrap()])
            .status
            .success()
    );
    assert!(man.join("palisade-gate-start.1").exists());
    assert!(
        !gate_dir.control().exists(),
        "none of these commands starts a gate"
    );
}

/// Processor time of a process, in ticks of a hundredth of a second.
fn ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn idle_gate_uses_almost_no_processor_time() {
    let gate_dir = GateDir::new(PALISADE);
    let gate = gate_dir.start();
    let (before, started) = (ticks(gate.pid()), Instant::now());
    wait::until("three seconds of idling", || {
        (started.elapsed().as_secs() >= 3).then_some(())
    });
    let used = ticks(gate.pid()) - before;
    assert!(
        used < 60,
        "{used} hundredths of a second of work in three idle seconds"
    );
}

#[test]
fn early_hangup_signal_reloads_and_does_not_kill() {
    for _ in 0..3 {
        let gate_dir = GateDir::new(PALISADE);
        let gate = gate_dir.start();
        gate.signal("HUP");
        wait::until("the reload", || {
            gate.stderr()
                .contains("configuration reloaded")
                .then_some(())
        });
        assert_eq!(gate.get("/internal/health").status, 200);
    }
}

#[test]
fn second_gate_is_refused_without_the_lock_file() {
    let gate_dir = GateDir::new(PALISADE);
    let gate = gate_dir.start();
    std::fs::remove_file(gate_dir.state().join("lock")).unwrap();
    assert_eq!(gate_dir.run(&["gate", "run"]).status.code(), Some(4));
    let row = json!({"container_ip": "10.0.0.1", "container_id": "a", "repos": []});
    assert_eq!(
        gate.request("POST", "/internal/containers", &row).status,
        201
    );
    assert_eq!(gate_dir.run(&["audit", "verify"]).status.code(), Some(0));
}

#[test]
fn signal_after_a_stop_request_is_not_the_second() {
    let gate_dir = GateDir::new(PALISADE);
    gate_dir.write_config("version: \"1.0\"\nserver: { shutdown_timeout: 2s }\n");
    let mut gate = gate_dir.start();
    let _held = gate.hold_request();
    assert_eq!(
        gate.request("POST", "/v1/shutdown", &Value::Null).status,
        202
    );
    gate.signal("TERM");
    assert_eq!(gate.wait().code(), Some(0), "{}", gate.stderr());
    assert!(!gate_dir.control().exists());
}

#[test]
fn unresponsive_gate_is_reported_and_can_be_killed() {
    let gate_dir = GateDir::new(PALISADE);
    let mut gate = gate_dir.start();
    gate.signal("STOP");
    let output = gate_dir.run(&["gate", "status"]);
    assert_eq!(output.status.code(), Some(5));
    assert!(
        stderr(&output).contains("does not answer"),
        "{}",
        stderr(&output)
    );
    let output = gate_dir.run(&["gate", "stop", "--force"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(gate.wait().code(), None, "the gate was killed");
}

#[test]
fn configuration_file_created_later_is_loaded_and_named() {
    let gate_dir = GateDir::new(PALISADE);
    let usual = gate_dir.path().join(".config/palisade/palisade.yaml");
    let palisade = |args: &[&str]| {
        let mut command = std::process::Command::new(PALISADE);
        command.env_clear().env("HOME", gate_dir.path());
        command.arg("--state-dir").arg(gate_dir.state()).args(args);
        command.output().unwrap()
    };
    let _cleanup = Background(&gate_dir);
    assert!(palisade(&["gate", "start"]).status.success());
    assert!(stdout(&palisade(&["gate", "status"])).contains("none, all defaults"));
    assert!(palisade(&["config", "init"]).status.success());
    wait::until("the gate to name the file", || {
        stdout(&palisade(&["gate", "status"]))
            .contains(usual.to_str()?)
            .then_some(())
    });
    std::fs::write(&usual, "bad: [").unwrap();
    wait::until("health to report the error", || {
        (palisade(&["health"]).status.code() == Some(1)).then_some(())
    });
    // `--config` of this command does not change the file of the gate.
    let other = gate_dir.config();
    let status = stdout(&palisade(&[
        "--config",
        other.to_str().unwrap(),
        "gate",
        "status",
    ]));
    assert!(status.contains(usual.to_str().unwrap()), "{status}");
}

#[test]
fn json_output_works_with_closed_stderr() {
    let gate_dir = GateDir::new(PALISADE);
    std::fs::write(gate_dir.path().join(".palisade.yaml"), "ports: [3000]\n").unwrap();
    let repository = gate_dir.path().to_str().unwrap();
    let man = gate_dir.path().join("man");
    for args in [
        vec!["trust", "--yes", repository, "--json"],
        vec!["trust", "--yes", repository, "--json"],
        vec!["trust", "--revoke", repository, "--json"],
        vec!["man", man.to_str().unwrap(), "--json"],
        vec!["gate", "stop", "--json"],
    ] {
        let output = gate_dir.run(&args);
        let value: Result<Value, _> = serde_json::from_slice(&output.stdout);
        assert!(
            value.is_ok_and(|v| v["status"].is_string()),
            "{args:?}: {}",
            stdout(&output)
        );
    }
    gate_dir.write_config("nonsense: [1, 2");
    let mut child = gate_dir
        .palisade(&["config", "check"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stderr.take());
    assert_eq!(child.wait().unwrap().code(), Some(2));
}
