//! The gate as a process: start, stop, one per directory, exit codes.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot go on has failed"
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
fn a_gate_in_the_background_starts_answers_logs_and_stops() {
    let gate_dir = GateDir::new(PALISADE);
    let _cleanup = Background(&gate_dir);
    let output = gate_dir.run(&["gate", "status"]);
    assert_eq!(output.status.code(), Some(5));
    assert!(
        stderr(&output).contains("no gate runs in"),
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
    assert!(stdout(&gate_dir.run(&["gate", "logs"])).contains("the gate is up"));

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
fn commands_that_need_a_gate_start_one_and_agree_on_it() {
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
        assert_eq!(stdout(&output), "nothing is registered\n");
    }
    let starts = stdout(&gate_dir.run(&["audit", "list", "--json"]));
    assert_eq!(starts.matches("gate_started").count(), 1, "{starts}");
}

#[test]
fn the_command_line_registers_lists_and_removes() {
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
fn a_second_gate_in_the_same_directory_is_refused_and_the_first_lives_on() {
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
fn two_gates_in_two_directories_do_not_disturb_each_other() {
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
fn a_gate_does_not_take_the_socket_of_another() {
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
fn a_socket_left_behind_by_a_kill_is_replaced_and_another_file_is_not() {
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
fn the_first_signal_stops_in_order_and_leaves_nothing_behind() {
    for signal in ["TERM", "INT"] {
        let gate_dir = GateDir::new(PALISADE);
        let mut gate = gate_dir.start();
        gate.signal(signal);
        assert_eq!(gate.wait().code(), Some(0), "{}", gate.stderr());
        assert!(!gate_dir.control().exists());
        assert!(
            !gate_dir.state().join("palisade.db-wal").exists(),
            "the log was folded in"
        );
        wait::until("its last word", || {
            gate.stderr().contains("stopped").then_some(())
        });
    }
}

#[test]
fn the_second_signal_ends_it_at_once() {
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
fn a_request_that_never_ends_is_cut_off_at_the_limit() {
    let gate_dir = GateDir::new(PALISADE);
    gate_dir.write_config("version: \"1.0\"\nserver: { shutdown_timeout: 300ms }\n");
    let mut gate = gate_dir.start();
    let _held = gate.hold_request();
    gate.signal("TERM");
    assert_eq!(gate.wait().code(), Some(0), "{}", gate.stderr());
    wait::until("its complaint", || {
        gate.stderr().contains("cut off").then_some(())
    });
}

#[test]
fn a_wrong_configuration_stops_the_start_with_every_mistake() {
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
        let said = stderr(&output);
        assert!(
            said.contains("palisade.yaml:2:") && said.contains("loud"),
            "{said}"
        );
        assert!(
            said.contains("palisade.yaml:3:1") && said.contains("did you mean 'server'"),
            "{said}"
        );
    }
    assert_eq!(gate_dir.run(&["gate", "status"]).status.code(), Some(5));
}

#[test]
fn a_state_directory_open_to_others_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let gate_dir = GateDir::new(PALISADE);
    std::fs::create_dir(gate_dir.state()).unwrap();
    std::fs::set_permissions(gate_dir.state(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let output = gate_dir.run(&["gate", "run"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("chmod 700"), "{}", stderr(&output));
}

#[test]
fn a_broken_database_is_set_aside_and_everything_is_refused_until_told() {
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
        // Also after a restart: an empty registry must not replace a broken one.
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
        "it asks first: {}",
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
fn the_binary_teaches_without_a_gate() {
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
    assert!(!gate_dir.control().exists(), "none of these starts a gate");
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
fn an_idle_gate_is_idle() {
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
fn a_hangup_in_the_first_moment_is_a_reload_and_not_the_end() {
    for _ in 0..3 {
        let gate_dir = GateDir::new(PALISADE);
        let gate = gate_dir.start();
        gate.signal("HUP");
        wait::until("the reload", || {
            gate.stderr().contains("was reloaded").then_some(())
        });
        assert_eq!(gate.get("/internal/health").status, 200);
    }
}

#[test]
fn a_second_gate_is_kept_out_even_when_the_lock_file_is_gone() {
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
fn a_signal_after_a_request_to_stop_is_not_the_second_signal() {
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
fn a_gate_that_does_not_answer_is_reported_and_can_be_ended() {
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
    assert_eq!(gate.wait().code(), None, "it was killed");
}

#[test]
fn a_configuration_that_appears_later_is_taken_and_named() {
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
    wait::until("health to say so", || {
        (palisade(&["health"]).status.code() == Some(1)).then_some(())
    });
    // The path of the caller is not the file of the gate.
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
fn scripts_get_json_and_a_closed_stderr_is_no_crash() {
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
