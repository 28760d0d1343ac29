//! `palisade delete`: what it removes, and what it refuses to lose.

use testkit::said;

use crate::bench::{Bench, told};

for_every_operator!(
    seed_004_idle_sandbox_is_deleted_without_force,
    seed_004_delete_is_refused_while_a_command_runs,
    seed_004_deleting_twice_is_not_found,
    seed_004_unmerged_work_is_not_deleted_without_force,
    a_workspace_without_a_repository_is_not_lost_without_force,
    a_sandbox_whose_directory_is_gone_is_deleted_without_force,
);

/// What `delete` without force complains of. It names what keeps the work, and never the option
/// that loses it.
pub(crate) fn refusal(bench: &Bench, name: &str) -> String {
    let complaint = bench.fails(4, &["delete", name]);
    for option in ["-f", "--force"] {
        let mut words = complaint.split_whitespace();
        assert!(words.all(|word| word != option), "{complaint}");
    }
    complaint
}

/// A line of bash that leaves `sleep` running, and ends when it is that.
fn sleeper(seconds: u32) -> String {
    format!(
        "sleep {seconds} >/dev/null 2>&1 & until pgrep -fx 'sleep {seconds}' >/dev/null; do :; done"
    )
}

fn seed_004_idle_sandbox_is_deleted_without_force(bench: &Bench) {
    bench.create("new");
    assert_eq!(bench.ok(&["delete", "new"]), "Deleted new\n");
    // One that was worked in and merged.
    let summary = bench.run(&[
        "run",
        "--name",
        "fix",
        "--",
        "bash",
        "-c",
        "echo hi > new.txt",
    ]);
    let next = said::err(&summary);
    assert!(next.contains("delete fix\n"), "{}", told(&summary));
    bench.ok(&["merge", "fix"]);
    assert_eq!(bench.ok(&["delete", "fix"]), "Deleted fix\n");
    assert_eq!(bench.repo.read("new.txt"), "hi\n");
    // One whose tools were called: the workbench inside waits for more, and is no command.
    bench.create("tools");
    bench.ok(&["tool", "tools", "ls", "{}"]);
    assert_eq!(bench.ok(&["delete", "tools"]), "Deleted tools\n");
    bench.assert_nothing_left();
}

fn seed_004_delete_is_refused_while_a_command_runs(bench: &Bench) {
    bench.create("fix");
    bench.says("fix", &sleeper(4000));
    let complaint = refusal(bench, "fix");
    assert!(
        complaint.contains("sandbox 'fix' is not idle: sleep is running")
            && complaint.contains("`palisade pause fix`"),
        "{complaint}"
    );
    bench.says("fix", &sleeper(4001));
    let complaint = refusal(bench, "fix");
    assert!(
        complaint.contains("2 processes are running (sleep, sleep)"),
        "{complaint}"
    );
    assert_eq!(bench.says("fix", "echo still here"), "still here");
    bench.ok(&["pause", "fix"]);
    assert_eq!(bench.ok(&["delete", "fix"]), "Deleted fix\n");
    // By force at once.
    bench.create("fix");
    bench.says("fix", &sleeper(4000));
    assert_eq!(bench.ok(&["delete", "--force", "fix"]), "Deleted fix\n");
    bench.assert_nothing_left();
}

fn seed_004_deleting_twice_is_not_found(bench: &Bench) {
    bench.create("fix");
    bench.ok(&["delete", "-f", "fix"]);
    for force in [&[][..], &["--force"][..]] {
        let complaint = bench.fails(3, &[&["delete", "fix"], force].concat());
        assert_eq!(
            complaint.trim(),
            "palisade: delete failed: Sandbox 'fix' not found."
        );
    }
    let complaint = bench.fails(3, &["exec", "fix", "--", "true"]);
    assert!(
        complaint.contains("Sandbox 'fix' not found."),
        "{complaint}"
    );
    bench.assert_nothing_left();
}

fn seed_004_unmerged_work_is_not_deleted_without_force(bench: &Bench) {
    bench.create("fix");
    let commits = "for n in 1 2; do echo $n > $n; git add -A; git commit -q -m $n; done";
    bench.says("fix", commits);
    // Whether it runs or is paused, and whether a snapshot was taken or not.
    for command in ["resume", "pause"] {
        bench.ok(&[command, "fix"]);
        let complaint = refusal(bench, "fix");
        assert!(
            complaint.contains("the branch 'palisade/fix' has 2 unmerged commit(s)")
                && complaint.contains("palisade merge fix"),
            "{complaint}"
        );
    }
    // Merged, it may go; but a workspace with more in it than the branch may not.
    bench.ok(&["resume", "fix"]);
    bench.ok(&["merge", "fix"]);
    bench.says("fix", "echo unsaved > unsaved.txt");
    let complaint = refusal(bench, "fix");
    assert!(
        complaint.contains("has 1 unmerged commit(s)"),
        "{complaint}"
    );
    assert_eq!(
        bench.repo.git(&["show", "palisade/fix:unsaved.txt"]),
        "unsaved"
    );
    let tip = bench.repo.git(&["rev-parse", "palisade/fix"]);
    let forced = bench.run(&["delete", "--force", "fix"]);
    assert!(forced.status.success(), "{}", told(&forced));
    // By force it goes, and how to have it again is said.
    let way = format!("git branch palisade/fix {tip}");
    assert!(said::err(&forced).contains(&way), "{}", told(&forced));
    bench.repo.git(&["branch", "palisade/fix", &tip]);
    assert_eq!(
        bench.repo.git(&["show", "palisade/fix:unsaved.txt"]),
        "unsaved"
    );
    bench.repo.git(&["branch", "-D", "palisade/fix"]);
    bench.assert_nothing_left();
}

fn a_workspace_without_a_repository_is_not_lost_without_force(bench: &Bench) {
    for name in ["empty", "full"] {
        bench.ok(&["create", "--no-repo", name]);
    }
    assert_eq!(bench.ok(&["delete", "empty"]), "Deleted empty\n");
    bench.says("full", "echo work > /workspace/file");
    for command in ["resume", "pause"] {
        bench.ok(&[command, "full"]);
        let complaint = refusal(bench, "full");
        assert!(
            complaint.contains("its workspace has files")
                && complaint.contains("`palisade download full .`"),
            "{complaint}"
        );
    }
    bench.ok(&["delete", "--force", "full"]);
    bench.assert_nothing_left();
}

fn a_sandbox_whose_directory_is_gone_is_deleted_without_force(bench: &Bench) {
    let id = bench.create("fix");
    bench.ok(&["pause", "fix"]);
    bench.ok(&["gate", "stop"]);
    // The row without its directory, as after a manual clean-up.
    let row = bench.place.state().join("rows").join(format!("{id}.json"));
    let kept = std::fs::read(&row).unwrap();
    bench.ok(&["delete", "fix"]);
    std::fs::write(&row, kept).unwrap();
    bench.place.operator().own(&row);
    assert_eq!(bench.json(&["list"])[0]["status"], "missing");
    assert_eq!(bench.ok(&["delete", "fix"]), "Deleted fix\n");
    bench.assert_nothing_left();
}
