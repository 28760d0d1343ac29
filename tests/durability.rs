//! `kill -9` at random moments under load: no acknowledged write is lost.
//!
//! `./test` runs a few kills; `just kills` runs a thousand.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot continue has failed"
)]

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use testkit::gate::GateDir;
use testkit::{http, wait};

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");

/// Default number of kills.
const DEFAULT_KILLS: u32 = 40;

/// A small deterministic generator: a failing run prints its seed.
struct Rng(u64);

impl Rng {
    fn next_below(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % below
    }
}

/// Writes that the gate acknowledged to one client before it was killed.
#[derive(Default)]
struct Acknowledged {
    registered: Vec<String>,
    removed: Vec<String>,
    /// Writes without a response.
    unclear: Vec<String>,
}

/// Sends registrations, and some removals of `previous`, until the gate stops answering.
fn load(socket: &Path, life: u32, previous: &[String], acknowledged: &AtomicU64) -> Acknowledged {
    let mut writes = Acknowledged::default();
    let mut to_remove = previous.iter();
    for turn in 0_u32.. {
        let number = life * 4096 + turn % 4096;
        let id = format!("c-{life}-{turn}");
        let [_, b, c, d] = number.to_be_bytes();
        let body =
            json!({"container_ip": format!("10.{b}.{c}.{d}"), "container_id": id, "repos": []});
        match http::send(
            socket,
            "POST",
            "/internal/containers",
            body.to_string().as_bytes(),
        ) {
            Ok(answer) if answer.status == 201 => {
                writes.registered.push(id);
                acknowledged.fetch_add(1, Ordering::Relaxed);
            }
            Ok(answer) if answer.status == 429 => {}
            Ok(answer) => panic!("{}: {}", answer.status, answer.text()),
            Err(_) => {
                writes.unclear.push(id);
                return writes;
            }
        }
        if turn % 4 == 3
            && let Some(id) = to_remove.next()
        {
            match http::send(socket, "DELETE", &format!("/internal/containers/{id}"), b"") {
                Ok(answer) if answer.status == 200 => writes.removed.push(id.clone()),
                Ok(answer) if answer.status == 429 => {}
                Ok(answer) => panic!("{}: {}", answer.status, answer.text()),
                Err(_) => {
                    writes.unclear.push(id.clone());
                    return writes;
                }
            }
        }
    }
    writes
}

#[test]
fn killed_gate_loses_no_acknowledged_write() {
    let kills = std::env::var("PALISADE_KILLS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(DEFAULT_KILLS);
    let seed = u64::from(std::process::id()) << 20 | u64::from(kills);
    println!("{kills} kills, seed {seed}");
    let mut rng = Rng(seed | 1);
    let gate_dir = GateDir::new(PALISADE);
    let started = Instant::now();
    let mut live: Vec<String> = Vec::new();
    let mut all: Vec<String> = Vec::new();
    let mut removed_ids: Vec<String> = Vec::new();
    let mut unclear: Vec<String> = Vec::new();

    for life in 0..kills {
        // The kill comes before the gate is ready, right after, or in the middle of the load,
        // depending on the speed of this machine's disk.
        let delay = Duration::from_micros(rng.next_below(60_000));
        let mut child = gate_dir
            .palisade(&["gate", "run"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the binary");
        let socket = gate_dir.control();
        let (send, writes) = mpsc::channel();
        let recent: Vec<String> = live.iter().rev().take(3).cloned().collect();
        let (kill, killed) = mpsc::channel::<()>();
        let acknowledged = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&acknowledged);
        let loader = thread::spawn(move || {
            // The socket appears when the gate listens; a kill may come first.
            while !socket_answers(&socket) {
                if killed.try_recv().is_ok() {
                    return;
                }
            }
            send.send(load(&socket, life, &recent, &count))
                .expect("the test receives the writes");
        });
        let early = rng.next_below(8) == 0;
        if !early {
            wait::until("the socket", || {
                socket_answers(&gate_dir.control()).then_some(())
            });
        }
        pause(delay);
        let enough = if early { 0 } else { rng.next_below(4) };
        wait::until("the load", || {
            (acknowledged.load(Ordering::Relaxed) >= enough).then_some(())
        });
        child.kill().expect("kill");
        child.wait().expect("wait");
        kill.send(()).ok();
        loader.join().expect("the load");
        if let Ok(writes) = writes.try_recv() {
            live.retain(|id| !writes.removed.contains(id) && !writes.unclear.contains(id));
            live.extend(writes.registered.iter().cloned());
            all.extend(writes.registered);
            removed_ids.extend(writes.removed);
            unclear.extend(writes.unclear);
        }
    }

    let gate = gate_dir.start();
    let answer = gate.get("/v1/registrations").json();
    let present: std::collections::HashSet<&str> = answer
        .as_array()
        .expect("rows")
        .iter()
        .filter_map(|row| row["container_id"].as_str())
        .collect();
    for id in &live {
        assert!(
            present.contains(id.as_str()),
            "{id} was acknowledged and is lost"
        );
    }
    for id in &removed_ids {
        assert!(
            !present.contains(id.as_str()),
            "{id} was removed and is back"
        );
    }
    let export = gate_dir.run(&["audit", "export"]);
    let export = String::from_utf8(export.stdout).expect("text");
    let recorded = |event: &str| -> std::collections::HashSet<String> {
        export
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("a record"))
            .filter(|record| record["event"] == event)
            .map(|record| record["sandbox"].as_str().unwrap_or_default().to_owned())
            .collect()
    };
    let registered = recorded("registered");
    let lost: Vec<&String> = all.iter().filter(|id| !registered.contains(*id)).collect();
    assert!(lost.is_empty(), "registrations without a record: {lost:?}");
    let removed = recorded("unregistered");
    assert!(removed_ids.iter().all(|id| removed.contains(id)));
    let verify = gate_dir.run(&["audit", "verify"]);
    let printed = String::from_utf8_lossy(&verify.stdout).into_owned();
    assert!(
        verify.status.success() && printed.starts_with("intact:"),
        "{printed}"
    );
    assert!(!gate_dir.state().join("registry.unavailable").exists());
    assert!(
        all.len() > kills as usize / 4,
        "the load was too light to mean anything: {}",
        all.len()
    );
    println!(
        "{kills} kills in {:?}: {} registrations acknowledged, {} removals, {} answers cut off; {printed}",
        started.elapsed(),
        all.len(),
        removed_ids.len(),
        unclear.len()
    );
}

fn socket_answers(socket: &Path) -> bool {
    http::send(socket, "GET", "/v1/health", b"").is_ok()
}

/// Waits until the random moment of the kill; there is no condition to wait for.
#[expect(clippy::disallowed_methods, reason = "the test needs a random moment")]
fn pause(delay: Duration) {
    thread::sleep(delay);
}

#[test]
fn database_opens_with_the_sqlite_shell() {
    let gate_dir = GateDir::new(PALISADE);
    let gate = gate_dir.start();
    let body = json!({"container_ip": "10.0.0.1", "container_id": "a", "repos": []});
    assert_eq!(
        gate.request("POST", "/internal/containers", &body).status,
        201
    );
    gate.kill();
    let output = Command::new("sqlite3")
        .arg(gate_dir.database())
        .arg("PRAGMA integrity_check")
        .output()
        .expect("sqlite3");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "ok");
}
