//! An operator's repository that was moved, locked or changed.

use serde_json::json;
use testkit::output;

use crate::sandbox_fixture::{SandboxFixture, describe};

for_every_operator!(
    worktrees_of_one_repository_share_sandboxes,
    moved_repository_error_names_the_remedy,
    deleted_branch_error_names_the_remedy,
    delete_keeps_and_reports_a_checked_out_branch,
    stale_branch_lock_error_names_the_remedy,
    recovery_keeps_a_branch_the_sandbox_did_not_create,
);

fn worktrees_of_one_repository_share_sandboxes(fixture: &SandboxFixture) {
    let id = fixture.create("fix");
    let linked = fixture
        .repo
        .linked(&fixture.gate_dir.path().join("linked"), "side");
    let run = |args: &[&str]| fixture.palisade_in(linked.dir(), args).output().unwrap();
    let twice = run(&["create", "fix"]);
    assert_eq!(twice.status.code(), Some(4), "{}", describe(&twice));
    let complaint = output::stderr(&twice);
    assert!(
        complaint.contains("Sandbox 'fix' already exists"),
        "{complaint}"
    );
    assert!(output::stdout(&run(&["list", "--here"])).contains(&id));
    let ran = run(&["run", "--name", "fix", "--", "touch", "new.txt"]);
    assert!(ran.status.success(), "{}", describe(&ran));
    assert_eq!(fixture.json(&["list"]).as_array().unwrap().len(), 1);
    // The work is imported in the worktree of the operator.
    let merged = run(&["merge", "fix"]);
    assert!(merged.status.success(), "{}", describe(&merged));
    assert!(linked.path("new.txt").exists() && !fixture.repo.path("new.txt").exists());
    // A sandbox of a removed worktree still has its repository.
    let made = run(&["create", "other"]);
    assert!(made.status.success(), "{}", describe(&made));
    fixture.stdout_of("other", "touch more.txt");
    fixture
        .repo
        .git(&["worktree", "remove", "--force", "../linked"]);
    assert!(
        fixture
            .ok(&["diff", "--stat", "other"])
            .contains("A more.txt")
    );
}

fn moved_repository_error_names_the_remedy(fixture: &SandboxFixture) {
    fixture.create("fix");
    fixture.stdout_of("fix", "touch new.txt");
    let (from, to) = (fixture.repo.dir(), fixture.gate_dir.path().join("moved"));
    std::fs::rename(from, &to).unwrap();
    let run = |args: &[&str]| {
        fixture
            .palisade_in(fixture.gate_dir.path(), args)
            .output()
            .unwrap()
    };
    for args in [&["snapshot", "fix"][..], &["diff", "fix"]] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(4), "{}", describe(&output));
        let complaint = output::stderr(&output);
        for named in ["no longer at", "/project'", "palisade download fix"] {
            assert!(complaint.contains(named), "{args:?}: {complaint}");
        }
    }
    assert_eq!(run(&["delete", "fix"]).status.code(), Some(4));
    // The commands work again with a link to the new path, or after the repository is moved back.
    std::os::unix::fs::symlink(&to, from).unwrap();
    fixture.ok(&["diff", "fix"]);
    std::fs::remove_file(from).unwrap();
    std::fs::rename(&to, from).unwrap();
    fixture.ok(&["diff", "fix"]);
    std::fs::rename(from, &to).unwrap();
    let deleted = run(&["delete", "--force", "fix"]);
    assert!(deleted.status.success(), "{}", describe(&deleted));
    let printed = output::stderr(&deleted);
    assert!(
        printed.contains("palisade/fix was not deleted"),
        "{printed}"
    );
    std::fs::rename(&to, from).unwrap();
    assert_eq!(fixture.repo.sandbox_branches(), ["palisade/fix"]);
}

fn deleted_branch_error_names_the_remedy(fixture: &SandboxFixture) {
    fixture.create("fix");
    fixture.stdout_of("fix", "touch new.txt");
    fixture.repo.git(&["branch", "-q", "-D", "palisade/fix"]);
    let complaint = fixture.fails(4, &["diff", "fix"]);
    assert!(
        complaint.contains("'palisade/fix' of sandbox 'fix' is gone"),
        "{complaint}"
    );
    let (_, rest) = complaint.split_once("`git -C ").unwrap();
    let (line, _) = rest.split_once('`').unwrap();
    let args: Vec<&str> = line.split(' ').skip(1).collect();
    fixture.repo.git(&args);
    assert!(fixture.ok(&["diff", "--stat", "fix"]).contains("A new.txt"));
}

fn delete_keeps_and_reports_a_checked_out_branch(fixture: &SandboxFixture) {
    fixture.create("fix");
    fixture.repo.git(&["checkout", "-q", "palisade/fix"]);
    let output = fixture.run(&["delete", "--force", "fix"]);
    assert!(output.status.success(), "{}", describe(&output));
    let printed = output::stderr(&output);
    assert!(
        printed.contains("palisade/fix was not deleted"),
        "{printed}"
    );
    assert!(printed.contains("checked out"), "{printed}");
    assert_eq!(
        fixture.repo.git(&["branch", "--show-current"]),
        "palisade/fix"
    );
    assert_eq!(fixture.json(&["list"]), json!([]));
}

fn stale_branch_lock_error_names_the_remedy(fixture: &SandboxFixture) {
    fixture.create("fix");
    fixture.stdout_of("fix", "touch new.txt");
    let lock = fixture.repo.path(".git/refs/heads/palisade/fix.lock");
    for args in [&["snapshot", "fix"][..], &["delete", "--force", "fix"]] {
        std::fs::write(&lock, "").unwrap();
        let output = fixture.run(args);
        assert!(!output.status.success(), "{}", describe(&output));
        let complaint = output::stderr(&output);
        assert!(
            complaint.contains("refs/heads/palisade/fix.lock"),
            "{complaint}"
        );
        assert!(complaint.contains("remove"), "{complaint}");
        std::fs::remove_file(&lock).unwrap();
        fixture.ok(args);
    }
    fixture.assert_nothing_left();
}

fn recovery_keeps_a_branch_the_sandbox_did_not_create(fixture: &SandboxFixture) {
    let head = fixture.repo.git(&["rev-parse", "HEAD"]);
    fixture.repo.git(&["branch", "palisade/fix"]);
    fixture.ok(&["list"]);
    fixture.ok(&["gate", "stop"]);
    let repository = fixture.repo.dir().canonicalize().unwrap();
    let row = json!({
        "id": "fix-0011223344", "name": "fix", "repository": repository,
        "common": repository.join(".git"), "base": head, "start": head, "created": 0,
        "stage": "making", "published": [],
    });
    let path = fixture.gate_dir.state().join("rows/fix-0011223344.json");
    std::fs::write(&path, row.to_string()).unwrap();
    fixture.gate_dir.operator().chown(&path);
    assert_eq!(fixture.json(&["list"]), json!([]));
    assert!(!path.exists(), "the row was not looked at");
    assert_eq!(fixture.repo.sandbox_branches(), ["palisade/fix"]);
}
