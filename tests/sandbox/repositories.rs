//! The operator's repository when it is not as it was.

use serde_json::json;
use testkit::said;

use crate::bench::{Bench, told};

for_every_operator!(
    worktrees_of_one_repository_share_their_sandboxes,
    a_repository_that_was_moved_is_named_with_the_way_out,
    a_branch_that_was_deleted_is_named_with_the_way_out,
    a_branch_that_is_checked_out_survives_a_delete_and_it_says_so,
    a_branch_that_a_crash_left_locked_is_named_with_the_fix,
    a_crash_before_the_branch_was_made_leaves_an_equal_one_alone,
);

fn worktrees_of_one_repository_share_their_sandboxes(bench: &Bench) {
    let id = bench.create("fix");
    let linked = bench
        .repo
        .linked(&bench.place.path().join("linked"), "side");
    let run = |args: &[&str]| bench.palisade_in(linked.dir(), args).output().unwrap();
    let twice = run(&["create", "fix"]);
    assert_eq!(twice.status.code(), Some(4), "{}", told(&twice));
    let complaint = said::err(&twice);
    assert!(
        complaint.contains("Sandbox 'fix' already exists"),
        "{complaint}"
    );
    assert!(said::out(&run(&["list", "--here"])).contains(&id));
    let ran = run(&["run", "--name", "fix", "--", "touch", "new.txt"]);
    assert!(ran.status.success(), "{}", told(&ran));
    assert_eq!(bench.json(&["list"]).as_array().unwrap().len(), 1);
    // It comes home where the operator stands.
    let merged = run(&["merge", "fix"]);
    assert!(merged.status.success(), "{}", told(&merged));
    assert!(linked.path("new.txt").exists() && !bench.repo.path("new.txt").exists());
    // Made in a worktree that is gone, it still has its repository.
    let made = run(&["create", "other"]);
    assert!(made.status.success(), "{}", told(&made));
    bench.says("other", "touch more.txt");
    bench
        .repo
        .git(&["worktree", "remove", "--force", "../linked"]);
    assert!(
        bench
            .ok(&["diff", "--stat", "other"])
            .contains("A more.txt")
    );
}

fn a_repository_that_was_moved_is_named_with_the_way_out(bench: &Bench) {
    bench.create("fix");
    bench.says("fix", "touch new.txt");
    let (from, to) = (bench.repo.dir(), bench.place.path().join("moved"));
    std::fs::rename(from, &to).unwrap();
    let run = |args: &[&str]| {
        bench
            .palisade_in(bench.place.path(), args)
            .output()
            .unwrap()
    };
    for args in [&["snapshot", "fix"][..], &["diff", "fix"]] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(4), "{}", told(&output));
        let complaint = said::err(&output);
        for named in ["no longer at", "/project'", "palisade download fix"] {
            assert!(complaint.contains(named), "{args:?}: {complaint}");
        }
    }
    assert_eq!(run(&["delete", "fix"]).status.code(), Some(4));
    // With a link in its place, or back in it, all is well.
    std::os::unix::fs::symlink(&to, from).unwrap();
    bench.ok(&["diff", "fix"]);
    std::fs::remove_file(from).unwrap();
    std::fs::rename(&to, from).unwrap();
    bench.ok(&["diff", "fix"]);
    std::fs::rename(from, &to).unwrap();
    let deleted = run(&["delete", "--force", "fix"]);
    assert!(deleted.status.success(), "{}", told(&deleted));
    let said = said::err(&deleted);
    assert!(said.contains("palisade/fix was not deleted"), "{said}");
    std::fs::rename(&to, from).unwrap();
    assert_eq!(bench.repo.sandbox_branches(), ["palisade/fix"]);
}

fn a_branch_that_was_deleted_is_named_with_the_way_out(bench: &Bench) {
    bench.create("fix");
    bench.says("fix", "touch new.txt");
    bench.repo.git(&["branch", "-q", "-D", "palisade/fix"]);
    let complaint = bench.fails(4, &["diff", "fix"]);
    assert!(
        complaint.contains("'palisade/fix' of sandbox 'fix' is gone"),
        "{complaint}"
    );
    let (_, rest) = complaint.split_once("`git -C ").unwrap();
    let (line, _) = rest.split_once('`').unwrap();
    let words: Vec<&str> = line.split(' ').skip(1).collect();
    bench.repo.git(&words);
    assert!(bench.ok(&["diff", "--stat", "fix"]).contains("A new.txt"));
}

fn a_branch_that_is_checked_out_survives_a_delete_and_it_says_so(bench: &Bench) {
    bench.create("fix");
    bench.repo.git(&["checkout", "-q", "palisade/fix"]);
    let output = bench.run(&["delete", "--force", "fix"]);
    assert!(output.status.success(), "{}", told(&output));
    let said = said::err(&output);
    assert!(said.contains("palisade/fix was not deleted"), "{said}");
    assert!(said.contains("checked out"), "{said}");
    assert_eq!(
        bench.repo.git(&["branch", "--show-current"]),
        "palisade/fix"
    );
    assert_eq!(bench.json(&["list"]), json!([]));
}

fn a_branch_that_a_crash_left_locked_is_named_with_the_fix(bench: &Bench) {
    bench.create("fix");
    bench.says("fix", "touch new.txt");
    let lock = bench.repo.path(".git/refs/heads/palisade/fix.lock");
    for args in [&["snapshot", "fix"][..], &["delete", "--force", "fix"]] {
        std::fs::write(&lock, "").unwrap();
        let output = bench.run(args);
        assert!(!output.status.success(), "{}", told(&output));
        let complaint = said::err(&output);
        assert!(
            complaint.contains("refs/heads/palisade/fix.lock"),
            "{complaint}"
        );
        assert!(complaint.contains("remove"), "{complaint}");
        std::fs::remove_file(&lock).unwrap();
        bench.ok(args);
    }
    bench.assert_nothing_left();
}

fn a_crash_before_the_branch_was_made_leaves_an_equal_one_alone(bench: &Bench) {
    let head = bench.repo.git(&["rev-parse", "HEAD"]);
    bench.repo.git(&["branch", "palisade/fix"]);
    bench.ok(&["list"]);
    bench.ok(&["gate", "stop"]);
    let repository = bench.repo.dir().canonicalize().unwrap();
    let row = json!({
        "id": "fix-0011223344", "name": "fix", "repository": repository,
        "common": repository.join(".git"), "base": head, "start": head, "created": 0,
        "stage": "making", "published": [],
    });
    let path = bench.place.state().join("rows/fix-0011223344.json");
    std::fs::write(&path, row.to_string()).unwrap();
    bench.place.operator().own(&path);
    assert_eq!(bench.json(&["list"]), json!([]));
    assert!(!path.exists(), "the row was not looked at");
    assert_eq!(bench.repo.sandbox_branches(), ["palisade/fix"]);
}
