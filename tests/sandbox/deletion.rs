//! `palisade delete`: what it removes, and which work it refuses to discard.

use testkit::output;

use crate::sandbox_fixture::{SandboxFixture, describe};

for_every_operator!(
    seed_004_idle_sandbox_is_deleted_without_force,
    seed_004_delete_is_refused_while_a_command_runs,
    seed_004_deleting_twice_is_not_found,
    seed_004_unmerged_work_is_not_deleted_without_force,
    workspace_without_repository_is_deleted_only_by_force,
    sandbox_with_missing_directory_is_deleted_without_force,
);

/// Runs `delete` without force, which must fail. The error names how to keep the work, and never
/// the option that discards the work.
pub(crate) fn refusal(fixture: &SandboxFixture, name: &str) -> String {
    let complaint = fixture.fails(4, &["delete", name]);
    for option in ["-f", "--force"] {
        let mut words = complaint.split_whitespace();
        assert!(words.all(|word| word != option), "{complaint}");
    }
    complaint
}

/// A line of bash that leaves `sleep` running, and returns once it runs.
fn sleeper(seconds: u32) -> String {
    format!(
        "sleep {seconds} >/dev/null 2>&1 & until pgrep -fx 'sleep {seconds}' >/dev/null; do :; done"
    )
}

fn seed_004_idle_sandbox_is_deleted_without_force(fixture: &SandboxFixture) {
    fixture.create("new");
    assert_eq!(fixture.ok(&["delete", "new"]), "Deleted new\n");
    // A sandbox whose work was merged.
    let summary = fixture.run(&[
        "run",
        "--name",
        "fix",
        "--",
        "bash",
        "-c",
        "echo hi > new.txt",
    ]);
    let next = output::stderr(&summary);
    assert!(next.contains("delete fix\n"), "{}", describe(&summary));
    fixture.ok(&["merge", "fix"]);
    assert_eq!(fixture.ok(&["delete", "fix"]), "Deleted fix\n");
    assert_eq!(fixture.repo.read("new.txt"), "hi\n");
    // A sandbox whose tools were called: the waiting workbench is not a running command.
    fixture.create("tools");
    fixture.ok(&["tool", "tools", "ls", "{}"]);
    assert_eq!(fixture.ok(&["delete", "tools"]), "Deleted tools\n");
    fixture.assert_nothing_left();
}

fn seed_004_delete_is_refused_while_a_command_runs(fixture: &SandboxFixture) {
    fixture.create("fix");
    fixture.stdout_of("fix", &sleeper(4000));
    let complaint = refusal(fixture, "fix");
    assert!(
        complaint.contains("sandbox 'fix' is not idle: sleep is running")
            && complaint.contains("`palisade pause fix`"),
        "{complaint}"
    );
    fixture.stdout_of("fix", &sleeper(4001));
    let complaint = refusal(fixture, "fix");
    assert!(
        complaint.contains("2 processes are running (sleep, sleep)"),
        "{complaint}"
    );
    assert_eq!(fixture.stdout_of("fix", "echo still here"), "still here");
    fixture.ok(&["pause", "fix"]);
    assert_eq!(fixture.ok(&["delete", "fix"]), "Deleted fix\n");
    // With force the sandbox is deleted at once.
    fixture.create("fix");
    fixture.stdout_of("fix", &sleeper(4000));
    assert_eq!(fixture.ok(&["delete", "--force", "fix"]), "Deleted fix\n");
    fixture.assert_nothing_left();
}

fn seed_004_deleting_twice_is_not_found(fixture: &SandboxFixture) {
    fixture.create("fix");
    fixture.ok(&["delete", "-f", "fix"]);
    for force in [&[][..], &["--force"][..]] {
        let complaint = fixture.fails(3, &[&["delete", "fix"], force].concat());
        assert_eq!(
            complaint.trim(),
            "palisade: delete failed: Sandbox 'fix' not found."
        );
    }
    let complaint = fixture.fails(3, &["exec", "fix", "--", "true"]);
    assert!(
        complaint.contains("Sandbox 'fix' not found."),
        "{complaint}"
    );
    fixture.assert_nothing_left();
}

fn seed_004_unmerged_work_is_not_deleted_without_force(fixture: &SandboxFixture) {
    fixture.create("fix");
    let commits = "for n in 1 2; do echo $n > $n; git add -A; git commit -q -m $n; done";
    fixture.stdout_of("fix", commits);
    // The deletion is refused for a running and a paused sandbox, before and after a snapshot.
    for command in ["resume", "pause"] {
        fixture.ok(&[command, "fix"]);
        let complaint = refusal(fixture, "fix");
        assert!(
            complaint.contains("the branch 'palisade/fix' has 2 unmerged commit(s)")
                && complaint.contains("palisade merge fix"),
            "{complaint}"
        );
    }
    // After the merge the sandbox could be deleted, but its workspace has work that is not on the
    // branch.
    fixture.ok(&["resume", "fix"]);
    fixture.ok(&["merge", "fix"]);
    fixture.stdout_of("fix", "echo unsaved > unsaved.txt");
    let complaint = refusal(fixture, "fix");
    assert!(
        complaint.contains("has 1 unmerged commit(s)"),
        "{complaint}"
    );
    assert_eq!(
        fixture.repo.git(&["show", "palisade/fix:unsaved.txt"]),
        "unsaved"
    );
    let tip = fixture.repo.git(&["rev-parse", "palisade/fix"]);
    let forced = fixture.run(&["delete", "--force", "fix"]);
    assert!(forced.status.success(), "{}", describe(&forced));
    // With force the sandbox is deleted, and the output names the command that restores the branch.
    let undo = format!("git branch palisade/fix {tip}");
    assert!(
        output::stderr(&forced).contains(&undo),
        "{}",
        describe(&forced)
    );
    fixture.repo.git(&["branch", "palisade/fix", &tip]);
    assert_eq!(
        fixture.repo.git(&["show", "palisade/fix:unsaved.txt"]),
        "unsaved"
    );
    fixture.repo.git(&["branch", "-D", "palisade/fix"]);
    fixture.assert_nothing_left();
}

fn workspace_without_repository_is_deleted_only_by_force(fixture: &SandboxFixture) {
    for name in ["empty", "full"] {
        fixture.ok(&["create", "--no-repo", name]);
    }
    assert_eq!(fixture.ok(&["delete", "empty"]), "Deleted empty\n");
    fixture.stdout_of("full", "echo work > /workspace/file");
    for command in ["resume", "pause"] {
        fixture.ok(&[command, "full"]);
        let complaint = refusal(fixture, "full");
        assert!(
            complaint.contains("its workspace has files")
                && complaint.contains("`palisade download full .`"),
            "{complaint}"
        );
    }
    fixture.ok(&["delete", "--force", "full"]);
    fixture.assert_nothing_left();
}

fn sandbox_with_missing_directory_is_deleted_without_force(fixture: &SandboxFixture) {
    let id = fixture.create("fix");
    fixture.ok(&["pause", "fix"]);
    fixture.ok(&["gate", "stop"]);
    // The row of the sandbox remains without its directory, as after a manual clean-up.
    let row = fixture
        .gate_dir
        .state()
        .join("rows")
        .join(format!("{id}.json"));
    let kept = std::fs::read(&row).unwrap();
    fixture.ok(&["delete", "fix"]);
    std::fs::write(&row, kept).unwrap();
    fixture.gate_dir.operator().chown(&row);
    assert_eq!(fixture.json(&["list"])[0]["status"], "missing");
    assert_eq!(fixture.ok(&["delete", "fix"]), "Deleted fix\n");
    fixture.assert_nothing_left();
}
