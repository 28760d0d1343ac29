//! A background gate dies, and its watchdog restarts it. Issue 14, number 16.

use std::collections::BTreeSet;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use testkit::gate::GateDir;
use testkit::output::{stderr, stdout};
use testkit::{http, leftovers, wait};

use crate::{Background, PALISADE};

/// The process id of the gate that answers on the socket. Runs no command, because a command would
/// start a gate.
fn pid_of_answering_gate(gate_dir: &GateDir) -> Option<i32> {
    let answer = http::send(&gate_dir.control(), "GET", "/v1/health", b"").ok()?;
    i32::try_from(answer.json()["pid"].as_i64()?).ok()
}

/// Waits for a gate other than `before`.
fn next_gate(gate_dir: &GateDir, before: i32) -> i32 {
    wait::until("a gate that answers", || {
        pid_of_answering_gate(gate_dir).filter(|pid| *pid != before)
    })
}

fn kill_9(pid: i32) {
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
}

fn assert_no_process_left(gate_dir: &GateDir) {
    let left: Vec<i32> = leftovers::processes(gate_dir).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn killed_background_gate_is_restarted_by_its_watchdog() {
    let gate_dir = GateDir::new(PALISADE);
    let _cleanup = Background(&gate_dir);
    assert!(gate_dir.run(&["gate", "start"]).status.success());
    let first = pid_of_answering_gate(&gate_dir).unwrap();
    kill_9(first);
    let second = next_gate(&gate_dir, first);
    let status = stdout(&gate_dir.run(&["gate", "status"]));
    assert!(status.contains(&format!("pid {second}")), "{status}");
    assert!(
        status.contains("restarted: after the gate died: killed by SIGKILL"),
        "{status}"
    );
    assert!(stdout(&gate_dir.run(&["gate", "start"])).starts_with("gate already running"));
    assert_eq!(stdout(&gate_dir.run(&["gate", "stop"])), "gate stopped\n");
    assert_no_process_left(&gate_dir);
}

#[test]
fn repeatedly_dying_gate_stays_down_with_its_cause() {
    let gate_dir = GateDir::new(PALISADE);
    let _cleanup = Background(&gate_dir);
    assert!(gate_dir.run(&["gate", "start"]).status.success());
    let watchdog = gate_dir.watchdog().unwrap();
    let failure = gate_dir.state().join("gate.failed");
    let mut killed = BTreeSet::new();
    wait::until("the watchdog to give up", || {
        if let Some(gate) = pid_of_answering_gate(&gate_dir).filter(|gate| killed.insert(*gate)) {
            kill_9(gate);
        }
        failure.exists().then_some(())
    });
    assert!(killed.len() >= 5, "{killed:?}");
    wait::until("the end of the watchdog", || {
        (!leftovers::processes(&gate_dir).any(|pid| pid == watchdog)).then_some(())
    });
    assert_no_process_left(&gate_dir);
    let why = "it died 5 times within 60 s";
    for command in [["gate", "status"].as_slice(), &["health"]] {
        let output = gate_dir.run(command);
        assert_eq!(output.status.code(), Some(5), "{command:?}");
        let printed = stderr(&output);
        assert!(
            printed.contains(why) && printed.contains("last cause: killed by SIGKILL"),
            "{printed}"
        );
    }
    let status = stdout(&gate_dir.run(&["gate", "status", "--json"]));
    let status: Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["running"], false);
    assert!(status["failure"].as_str().unwrap().contains(why));
    assert!(stdout(&gate_dir.run(&["gate", "logs"])).contains(why));

    // A command that needs a gate starts it again.
    let output = gate_dir.run(&["registry", "list"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains(why), "{}", stderr(&output));
    assert!(!failure.exists());
    assert!(pid_of_answering_gate(&gate_dir).is_some());
}

#[test]
fn stopped_background_gate_is_not_restarted() {
    let gate_dir = GateDir::new(PALISADE);
    let _cleanup = Background(&gate_dir);
    let started = || {
        let output = gate_dir.run(&["gate", "start"]);
        assert!(output.status.success(), "{}", stderr(&output));
        pid_of_answering_gate(&gate_dir).unwrap()
    };
    // A command stops the gate between its death and its restart.
    for _ in 0..3 {
        kill_9(started());
        assert_eq!(stdout(&gate_dir.run(&["gate", "stop"])), "gate stopped\n");
        assert_no_process_left(&gate_dir);
    }
    // A signal to the gate or to its watchdog stops both.
    for whose in ["gate", "watchdog"] {
        let gate = started();
        let pid = match whose {
            "gate" => gate,
            _ => gate_dir.watchdog().unwrap(),
        };
        kill(Pid::from_raw(pid), Signal::SIGTERM).unwrap();
        wait::until("the end of gate and watchdog", || {
            leftovers::processes(&gate_dir)
                .next()
                .is_none()
                .then_some(())
        });
        assert!(
            !gate_dir.control().exists(),
            "{whose}: the gate ended gracefully"
        );
    }
    // A service manager signals both processes. The gate must still stop gracefully.
    for pid in [started(), gate_dir.watchdog().unwrap()] {
        kill(Pid::from_raw(pid), Signal::SIGTERM).unwrap();
    }
    wait::until("the end of gate and watchdog", || {
        leftovers::processes(&gate_dir)
            .next()
            .is_none()
            .then_some(())
    });
    assert!(!gate_dir.control().exists(), "the gate ended gracefully");
    // A gate that does not answer is stopped by force.
    kill(Pid::from_raw(started()), Signal::SIGSTOP).unwrap();
    let output = gate_dir.run(&["gate", "stop", "--force"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_no_process_left(&gate_dir);
    assert!(!gate_dir.state().join("gate.failed").exists());
}

#[test]
fn gate_keeps_running_when_its_watchdog_is_killed() {
    let gate_dir = GateDir::new(PALISADE);
    let _cleanup = Background(&gate_dir);
    assert!(gate_dir.run(&["gate", "start"]).status.success());
    let gate = pid_of_answering_gate(&gate_dir).unwrap();
    kill_9(gate_dir.watchdog().unwrap());
    assert!(stdout(&gate_dir.run(&["gate", "start"])).starts_with("gate already running"));
    assert_eq!(pid_of_answering_gate(&gate_dir), Some(gate));
    assert!(gate_dir.run(&["gate", "restart"]).status.success());
    let gate = next_gate(&gate_dir, gate);
    kill_9(gate);
    next_gate(&gate_dir, gate);
    assert_eq!(stdout(&gate_dir.run(&["gate", "stop"])), "gate stopped\n");
    assert_no_process_left(&gate_dir);
}
