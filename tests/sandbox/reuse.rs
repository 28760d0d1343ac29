//! `run --name` continues in the sandbox of that name, or reports why it does not.

use std::process::Command;

use serde_json::json;
use testkit::{output, wait};

use crate::sandbox_fixture::{SandboxFixture, describe, text};

for_every_operator!(
    of_many_runs_of_a_name_one_makes_it_and_all_run_in_it,
    a_run_that_asks_for_something_else_is_refused_with_what_differs,
    a_run_that_asks_for_the_same_goes_on,
    publish_and_rm_apply_to_a_sandbox_that_is_there,
    a_sandbox_whose_processes_are_gone_is_started_again,
    a_sandbox_that_could_not_be_removed_is_said_to_be_so,
);

fn of_many_runs_of_a_name_one_makes_it_and_all_run_in_it(fixture: &SandboxFixture) {
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

fn a_run_that_asks_for_something_else_is_refused_with_what_differs(fixture: &SandboxFixture) {
    fixture.ok(&["create", "fix", "--repo", "octo/spoon"]);
    fixture.ok(&["pause", "fix"]);
    for (options, named) in [
        (&["--dirty"][..], &["--dirty"][..]),
        (&["--depth", "1"], &["--depth"]),
        (&["--nested"], &["--nested: it was made without"]),
        (&["--root"], &["--root: it was made without"]),
        (
            &["--repo", "octo/fork", "--dirty"],
            &["--repo octo/fork: it may speak to octo/spoon", "--dirty"],
        ),
        (&["--auth-mode", "bot"], &["--auth-mode bot: it is user"]),
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

fn a_run_that_asks_for_the_same_goes_on(fixture: &SandboxFixture) {
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

fn publish_and_rm_apply_to_a_sandbox_that_is_there(fixture: &SandboxFixture) {
    fixture.create("fix");
    fixture.ok(&["run", "--name", "fix", "--publish", "0:3000", "--", "true"]);
    let published = fixture.json(&["ports", "fix"])["published"].clone();
    assert_eq!(published[0]["port"], 3000);
    // The same options again are no difference.
    let host = text(&published[0]["host"]);
    let same = format!("{host}:3000");
    fixture.ok(&["run", "--name", "fix", "--publish", &same, "--", "true"]);
    assert_eq!(fixture.json(&["ports", "fix"])["published"], published);
    // With unmerged work the sandbox stays, and without it is removed.
    fixture.ok(&["run", "--name", "fix", "--rm", "--", "touch", "new.txt"]);
    assert_eq!(fixture.json(&["list"]).as_array().unwrap().len(), 1);
    fixture.ok(&["merge", "fix"]);
    fixture.ok(&["run", "--name", "fix", "--rm", "--", "true"]);
    assert_eq!(fixture.json(&["list"]), json!([]));
    fixture.assert_nothing_left();
}

fn a_sandbox_whose_processes_are_gone_is_started_again(fixture: &SandboxFixture) {
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
        output::stderr(&output).contains("started again"),
        "{}",
        describe(&output)
    );
}

fn a_sandbox_that_could_not_be_removed_is_said_to_be_so(fixture: &SandboxFixture) {
    let id = fixture.create("fix");
    // A directory in the place of a file cannot be removed as a file.
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
