//! The gate crashes: sandboxes keep running, and nothing is left over.
//!
//! The short form runs in `./test`; `just crashes` runs more.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use testkit::{leftovers, output, wait};

use crate::sandbox_fixture::{SandboxFixture, describe};

for_every_operator!(
    sandbox_outlives_its_gate_and_works_with_the_next,
    gate_killed_during_a_run_is_restarted,
    paused_sandbox_outlives_its_gate,
    sandbox_with_killed_init_can_be_deleted,
    stale_branch_lock_does_not_prevent_the_start_of_the_gate,
    undeletable_sandbox_does_not_prevent_the_start_of_the_gate,
    kills_at_random_moments_leave_complete_sandboxes_or_none,
);

for_subid_user!(
    sandbox_outlives_its_gate_and_works_with_the_next,
    gate_killed_during_a_run_is_restarted,
    paused_sandbox_outlives_its_gate,
    sandbox_with_killed_init_can_be_deleted,
    stale_branch_lock_does_not_prevent_the_start_of_the_gate,
    undeletable_sandbox_does_not_prevent_the_start_of_the_gate,
    kills_at_random_moments_leave_complete_sandboxes_or_none,
);

/// Kills the gate with SIGKILL. The next command may find a gate that is still exiting.
fn kill_gate(fixture: &SandboxFixture) {
    kill(Pid::from_raw(fixture.gate()), Signal::SIGKILL).unwrap();
}

/// Whether a process has exited. A zombie counts as exited.
fn has_exited(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ")
        .is_none_or(|(_, rest)| rest.starts_with('Z'))
}

fn sandbox_outlives_its_gate_and_works_with_the_next(fixture: &SandboxFixture) {
    let id = fixture.create("fix");
    let init = fixture.init(&id);
    let curl = "curl -sS --noproxy '*' --max-time 20 http://192.0.2.1/";
    assert!(fixture.stdout_of("fix", curl).contains(&id));
    let mut sleeper = fixture
        .palisade(&[
            "exec",
            "fix",
            "--",
            "bash",
            "-c",
            "touch /tmp/begun; exec sleep 10000",
        ])
        .spawn()
        .unwrap();
    wait::until("the sleeper", || {
        fixture
            .bash("fix", "test -e /tmp/begun")
            .status
            .success()
            .then_some(())
    });
    let first = fixture.gate();
    kill_gate(fixture);
    let list = fixture.json(&["list"]);
    assert_eq!(
        (&list[0]["id"], &list[0]["status"]),
        (&id.as_str().into(), &"active".into())
    );
    assert_ne!(fixture.gate(), first);
    assert!(
        fixture.stdout_of("fix", curl).contains(&id),
        "the new gate answers"
    );
    assert_eq!(fixture.init(&id), init);
    assert!(
        fixture
            .stdout_of("fix", "cat /proc/[0-9]*/comm 2>/dev/null; true")
            .lines()
            .any(|name| name == "sleep")
    );
    assert_eq!(
        sleeper.try_wait().unwrap(),
        None,
        "the command keeps running"
    );
    // The sandbox also outlives a gate that is stopped.
    fixture.ok(&["gate", "restart"]);
    assert!(fixture.stdout_of("fix", curl).contains(&id));
    assert_eq!(
        sleeper.try_wait().unwrap(),
        None,
        "the command keeps running"
    );
    fixture.ok(&["delete", "-f", "fix"]);
    assert!(!sleeper.wait().unwrap().success());
    fixture.assert_nothing_left();
}

// Regression test for issue 14, item 16.
fn gate_killed_during_a_run_is_restarted(fixture: &SandboxFixture) {
    // The command sends one request for each line of input.
    let line = "while read -r _; do curl -sS --noproxy '*' --max-time 10 http://192.0.2.1/ 2>&1 | \
                tr -d '\\n'; echo; done";
    let mut command = fixture.palisade(&["run", "--name", "fix", "-T", "--", "bash", "-c", line]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut run = command.spawn().unwrap();
    let mut input = run.stdin.take().unwrap();
    let mut output = BufReader::new(run.stdout.take().unwrap());
    let mut request = || {
        input.write_all(b"\n").unwrap();
        let mut answer = String::new();
        output.read_line(&mut answer).unwrap();
        answer
    };
    assert!(request().contains("request_id"), "the gate answers");
    kill_gate(fixture);
    // From now on the test runs no command, because a command would restart the gate.
    wait::until("an answer of the next gate", || {
        request().contains("request_id").then_some(())
    });
    drop((input, output));
    assert!(run.wait().unwrap().success());
}

fn paused_sandbox_outlives_its_gate(fixture: &SandboxFixture) {
    let id = fixture.create("fix");
    fixture.ok(&["pause", "fix"]);
    kill_gate(fixture);
    assert_eq!(fixture.json(&["list"])[0]["status"], "paused");
    fixture.ok(&["resume", "fix"]);
    let answer = fixture.stdout_of(
        "fix",
        "curl -sS --noproxy '*' --max-time 20 http://192.0.2.1/",
    );
    assert!(answer.contains(&id), "{answer}");
}

fn sandbox_with_killed_init_can_be_deleted(fixture: &SandboxFixture) {
    let id = fixture.create("fix");
    fixture.stdout_of("fix", "echo hi > new.txt");
    let init = fixture.init(&id);
    kill(Pid::from_raw(init), Signal::SIGKILL).unwrap();
    wait::until("init's end", || has_exited(init).then_some(()));
    let list = fixture.json(&["list"]);
    assert_eq!(list[0]["status"], "error", "{list}");
    assert!(list[0]["reason"].is_string(), "{list}");
    let output = fixture.run(&["exec", "fix", "--", "true"]);
    assert!(!output.status.success(), "{}", describe(&output));
    // The work can still be imported.
    fixture.ok(&["merge", "fix"]);
    assert_eq!(fixture.repo.read("new.txt"), "hi\n");
    fixture.ok(&["delete", "--force", "fix"]);
    fixture.assert_nothing_left();
}

/// Changes the row of a sandbox to the state after a crash of the whole machine during its removal.
/// The watchdog is killed, so nothing restarts the gate.
fn crash_in_removal(fixture: &SandboxFixture, id: &str) {
    let (gate, watchdog) = (fixture.gate(), fixture.gate_dir.watchdog().unwrap());
    for pid in [watchdog, gate] {
        kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    }
    wait::until("the end of gate and watchdog", || {
        (has_exited(gate) && has_exited(watchdog)).then_some(())
    });
    let path = fixture.gate_dir.state().join(format!("rows/{id}.json"));
    let row = std::fs::read_to_string(&path).unwrap();
    assert!(row.contains("kept"), "{row}");
    std::fs::write(&path, row.replace("kept", "removing")).unwrap();
}

fn stale_branch_lock_does_not_prevent_the_start_of_the_gate(fixture: &SandboxFixture) {
    let id = fixture.create("fix");
    crash_in_removal(fixture, &id);
    fixture.repo.write(".git/refs/heads/palisade/fix.lock", "");
    // Temporary files that the crash left are added as well.
    for half in ["never-1.new".to_owned(), format!("{id}.manifest.fresh")] {
        let half = fixture.gate_dir.state().join("rows").join(half);
        std::fs::write(&half, "half").unwrap();
        fixture.gate_dir.operator().chown(&half);
    }
    assert_eq!(fixture.json(&["list"]), serde_json::json!([]));
    assert!(
        !fixture
            .repo
            .path(".git/refs/heads/palisade/fix.lock")
            .exists()
    );
    fixture.create("fix");
    fixture.ok(&["delete", "-f", "fix"]);
    fixture.assert_nothing_left();
}

fn undeletable_sandbox_does_not_prevent_the_start_of_the_gate(fixture: &SandboxFixture) {
    let id = fixture.create("fix");
    fixture.create("other");
    crash_in_removal(fixture, &id);
    // The operator's git holds this lock while it packs refs, so the gate must not remove it.
    fixture.repo.git(&["pack-refs", "--all"]);
    fixture.repo.write(".git/packed-refs.lock", "");
    let list = fixture.json(&["list"]);
    assert_eq!(list.as_array().unwrap().len(), 2, "{list}");
    assert_eq!(list[0]["status"], "error", "it is shown with its reason");
    assert_eq!(list[1]["status"], "active");
    assert_eq!(fixture.stdout_of("other", "cat README.md"), "hello");
    // Afterwards the sandbox can be deleted, and the next start would remove it as well.
    std::fs::remove_file(fixture.repo.path(".git/packed-refs.lock")).unwrap();
    fixture.ok(&["delete", "fix"]);
    assert_eq!(fixture.repo.sandbox_branches(), ["palisade/other"]);
    fixture.ok(&["delete", "-f", "other"]);
    fixture.assert_nothing_left();
}

/// Default number of kills.
const DEFAULT_KILLS: u32 = 20;

/// A deterministic random number generator. A failing run prints the seed.
struct Rng(u64);

impl Rng {
    fn next_below(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % below
    }
}

/// The kill has to come at a random moment; there is no condition to wait for.
#[expect(clippy::disallowed_methods, reason = "a random moment is the point")]
fn pause(delay: Duration) {
    std::thread::sleep(delay);
}

fn start(fixture: &SandboxFixture, args: &[&str]) -> Child {
    let mut command = fixture.palisade(args);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

fn kills_at_random_moments_leave_complete_sandboxes_or_none(fixture: &SandboxFixture) {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse().ok());
    let kills = number("PALISADE_CRASHES").unwrap_or(u64::from(DEFAULT_KILLS));
    let seed = number("PALISADE_SEED").unwrap_or(u64::from(std::process::id()) << 20 | 1);
    println!("{kills} kills, PALISADE_SEED={seed}");
    let mut rng = Rng(seed);
    let mut kept: Vec<String> = Vec::new();
    let (mut made, mut removed, mut cut) = (0, 0, 0);
    for turn in 0..kills {
        fixture.ok(&["gate", "start"]);
        let gate = fixture.gate();
        let name = format!("turn-{turn}");
        let doomed = (rng.next_below(2) == 0).then(|| kept.pop()).flatten();
        let command = match &doomed {
            Some(doomed) => start(fixture, &["delete", "--force", doomed]),
            None => start(fixture, &["create", &name]),
        };
        let victim = rng.next_below(4);
        pause(Duration::from_micros(rng.next_below(120_000)));
        if victim == 0 {
            kill_launchers(fixture, gate);
        } else {
            kill(Pid::from_raw(gate), Signal::SIGKILL).unwrap();
        }
        let acknowledged = wait_for(command);
        match (doomed, acknowledged) {
            (None, true) => {
                kept.push(name);
                made += 1;
            }
            (Some(_), true) => removed += 1,
            (None, false) => cut += 1,
            (Some(doomed), false) => {
                // The sandbox existed before and is now complete or deleted.
                cut += 1;
                if names(fixture).contains(&doomed) {
                    kept.push(doomed);
                }
            }
        }
        assert_sandboxes_work(fixture, &kept, turn);
    }
    println!("{made} made, {removed} removed, {cut} cut off");
    for name in kept {
        fixture.ok(&["delete", "--force", &name]);
    }
    fixture.assert_nothing_left();
}

/// Kills the children of the gate that are creating a sandbox.
fn kill_launchers(fixture: &SandboxFixture, gate: i32) {
    let tasks = std::fs::read_dir(format!("/proc/{gate}/task"))
        .into_iter()
        .flatten();
    for task in tasks.flatten() {
        let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        for child in children.split_whitespace() {
            let pid: i32 = child.parse().unwrap();
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
    // The gate continues and cleans up.
    assert_eq!(fixture.gate(), gate);
}

fn wait_for(mut command: Child) -> bool {
    let status = wait::until("the command's end", || command.try_wait().ok().flatten());
    status.success()
}

fn names(fixture: &SandboxFixture) -> Vec<String> {
    let list = fixture.json(&["list"]);
    let rows = list.as_array().unwrap().iter();
    rows.map(|row| row["name"].as_str().unwrap().to_owned())
        .collect()
}

/// Asserts after the next start that exactly the acknowledged sandboxes exist, and work.
fn assert_sandboxes_work(fixture: &SandboxFixture, kept: &[String], turn: u64) {
    let mut found = names(fixture);
    // A create that was interrupted after its last step is complete but unacknowledged: the sandbox
    // may exist, and must then work, too. It is deleted before the next turn.
    for name in found.clone() {
        let output = fixture.bash(&name, "cat README.md; git log -1 --format=%s");
        assert_eq!(
            output::stdout(&output),
            "hello\nsecond\n",
            "turn {turn}, {name}: {}",
            describe(&output)
        );
        if !kept.contains(&name) {
            assert_eq!(name, format!("turn-{turn}"), "an unacknowledged sandbox");
            fixture.ok(&["delete", "--force", &name]);
            found.retain(|other| *other != name);
        }
    }
    let sorted = |mut names: Vec<String>| {
        names.sort();
        names
    };
    assert_eq!(sorted(found), sorted(kept.to_vec()), "turn {turn}");
    let branches = fixture.repo.sandbox_branches();
    let expected = kept.iter().map(|name| format!("palisade/{name}")).collect();
    assert_eq!(sorted(branches), sorted(expected), "turn {turn}");
    for directory in ["sandboxes", "rows"] {
        let entries = std::fs::read_dir(fixture.gate_dir.state().join(directory))
            .into_iter()
            .flatten();
        let of_others = entries
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .filter(|entry| entry != ".lock")
            .filter(|entry| {
                !kept
                    .iter()
                    .any(|name| entry.starts_with(&format!("{name}-")))
            });
        assert_eq!(
            of_others.collect::<Vec<_>>(),
            [""; 0],
            "turn {turn}, {directory}"
        );
    }
    if kept.is_empty() {
        let expected = [Some(fixture.gate()), fixture.gate_dir.watchdog()];
        let processes: Vec<i32> = leftovers::processes(&fixture.gate_dir).collect();
        assert!(
            processes.iter().all(|pid| expected.contains(&Some(*pid))),
            "turn {turn}: {processes:?}, not only {expected:?}"
        );
    }
}
