//! `run --name` continues in the sandbox of that name, or reports why it does not.

use std::process::Command;

use serde_json::json;
use testkit::{output, wait};

use crate::sandbox_fixture::{SandboxFixture, describe, text};

for_every_operator!(
    concurrent_runs_of_one_name_share_one_sandbox,
    run_with_different_options_is_refused_and_lists_them,
    run_with_the_same_options_reuses_the_sandbox,
    publish_and_rm_apply_to_an_existing_sandbox,
    run_restarts_a_sandbox_without_processes,
    failed_removal_is_reported_with_a_remedy,
);

fn concurrent_runs_of_one_name_share_one_sandbox(fixture: &SandboxFixture) {
    fixture.ok(&["gate", "start"]);
    let line = "echo x >> /workspace/runs; echo well";
    let outputs: Vec<_> = std::thread::scope(|scope| {
        let run = || fixture.run(&["run", "--name", "fix", "--", "bash", "-c", line]);
        let all: Vec<_> = (0..6).map(|_| scope.spawn(run)).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    for output in &outputs {
        assert!(output.status.success(), "{}", describe(output));
        assert_eq!(output::stdout(output), "well\n");
    }
    assert_eq!(fixture.json(&["list"]).as_array().unwrap().len(), 1);
    assert_eq!(fixture.stdout_of("fix", "grep -c x runs"), "6");
}

fn run_with_different_options_is_refused_and_lists_them(fixture: &SandboxFixture) {
    fixture.ok(&["create", "fix", "--repo", "octo/spoon"]);
    fixture.ok(&["pause", "fix"]);
    for (options, named) in [
        (&["--dirty"][..], &["--dirty"][..]),
        (&["--depth", "1"], &["--depth"]),
        (
            &["--nested"],
            &["--nested: the sandbox was created without this option"],
        ),
        (
            &["--root"],
            &["--root: the sandbox was created without this option"],
        ),
        (
            &["--repo", "octo/fork", "--dirty"],
            &[
                "--repo octo/fork: the sandbox may use octo/spoon",
                "--dirty",
            ],
        ),
        (
            &["--auth-mode", "bot"],
            &["--auth-mode bot: the sandbox has the mode user"],
        ),
        (&["--backend", "docker"], &["--backend docker"]),
    ] {
        let run = [&["run", "--name", "fix"], options, &["--", "touch", "ran"]].concat();
        let complaint = fixture.fails(4, &run);
        for named in named.iter().chain(&["palisade delete fix"]) {
            assert!(complaint.contains(named), "{options:?}: {complaint}");
        }
    }
    // The sandbox was not even resumed.
    assert_eq!(fixture.json(&["list"])[0]["status"], "paused");
    fixture.ok(&["resume", "fix"]);
    assert_eq!(fixture.stdout_of("fix", "ls"), "README.md\nsrc");
}

fn run_with_the_same_options_reuses_the_sandbox(fixture: &SandboxFixture) {
    let options = [
        "--repo",
        "octo/spoon",
        "--repo",
        "octo/fork",
        "--auth-mode",
        "bot",
    ];
    for _ in 0..2 {
        let run = [&["run", "--name", "fix"], &options[..], &["--", "true"]].concat();
        fixture.ok(&run);
    }
    assert_eq!(fixture.json(&["list"]).as_array().unwrap().len(), 1);
}

fn publish_and_rm_apply_to_an_existing_sandbox(fixture: &SandboxFixture) {
    fixture.create("fix");
    fixture.ok(&["run", "--name", "fix", "--publish", "0:3000", "--", "true"]);
    let published = fixture.json(&["ports", "fix"])["published"].clone();
    assert_eq!(published[0]["port"], 3000);
    // The same options do not count as a difference.
    let host = text(&published[0]["host"]);
    let same = format!("{host}:3000");
    fixture.ok(&["run", "--name", "fix", "--publish", &same, "--", "true"]);
    assert_eq!(fixture.json(&["ports", "fix"])["published"], published);
    // A sandbox with unmerged work is kept; one without is removed.
    fixture.ok(&["run", "--name", "fix", "--rm", "--", "touch", "new.txt"]);
    assert_eq!(fixture.json(&["list"]).as_array().unwrap().len(), 1);
    fixture.ok(&["merge", "fix"]);
    fixture.ok(&["run", "--name", "fix", "--rm", "--", "true"]);
    assert_eq!(fixture.json(&["list"]), json!([]));
    fixture.assert_nothing_left();
}

fn run_restarts_a_sandbox_without_processes(fixture: &SandboxFixture) {
    let id = fixture.create("fix");
    fixture.stdout_of("fix", "echo kept > kept.txt");
    let init = fixture.init(&id).to_string();
    assert!(
        Command::new("kill")
            .args(["-KILL", &init])
            .status()
            .unwrap()
            .success()
    );
    wait::until("the error", || {
        (fixture.json(&["list"])[0]["status"] == "error").then_some(())
    });
    let output = fixture.run(&["run", "--name", "fix", "--", "cat", "kept.txt"]);
    assert!(output.status.success(), "{}", describe(&output));
    assert_eq!(output::stdout(&output), "kept\n");
    assert!(
        output::stderr(&output).contains("was restarted"),
        "{}",
        describe(&output)
    );
}

fn failed_removal_is_reported_with_a_remedy(fixture: &SandboxFixture) {
    let id = fixture.create("fix");
    // The removal of the file fails, because a directory is at its path.
    let rows = fixture.gate_dir.state().join("rows");
    let manifest = rows.join(format!("{id}.manifest"));
    std::fs::remove_file(&manifest).unwrap();
    std::fs::create_dir(&manifest).unwrap();
    fixture.fails(1, &["delete", "--force", "fix"]);
    let complaint = fixture.fails(4, &["run", "--name", "fix", "--", "true"]);
    for named in ["could not be removed", "palisade delete fix"] {
        assert!(complaint.contains(named), "{complaint}");
    }
    std::fs::remove_dir(&manifest).unwrap();
    fixture.ok(&["delete", "fix"]);
    fixture.ok(&["run", "--name", "fix", "--rm", "--", "true"]);
    fixture.assert_nothing_left();
}
