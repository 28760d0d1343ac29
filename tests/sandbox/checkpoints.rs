//! Checkpoints, and the snapshot before a restore.

use crate::sandbox_fixture::SandboxFixture;

for_every_operator!(restore_takes_a_snapshot_first_and_names_it);

fn restore_takes_a_snapshot_first_and_names_it(fixture: &SandboxFixture) {
    fixture.create("fix");
    fixture.ok(&["checkpoint", "fix", "start"]);
    fixture.stdout_of("fix", "echo later > new.txt");
    let output = fixture.ok(&["restore", "--yes", "fix", "start"]);
    let tip = fixture
        .repo
        .git(&["rev-parse", "--short=12", "palisade/fix"]);
    assert!(
        output.contains(&format!("on palisade/fix at {tip}")),
        "{output}"
    );
    assert_eq!(
        fixture.stdout_of("fix", "ls new.txt 2>/dev/null || echo gone"),
        "gone"
    );
    let kept = fixture
        .repo
        .git(&["cat-file", "-p", "palisade/fix:new.txt"]);
    assert_eq!(kept, "later");
    let log = fixture
        .repo
        .git(&["log", "-1", "--format=%s", "palisade/fix"]);
    assert_eq!(log, "before restoring start");
    // An unknown label takes no snapshot.
    fixture.stdout_of("fix", "echo more > more.txt");
    fixture.fails(3, &["restore", "--yes", "fix", "nothing"]);
    let still = fixture
        .repo
        .git(&["rev-parse", "--short=12", "palisade/fix"]);
    assert_eq!(still, tip);
    // If a snapshot cannot save all work, the restore is refused until the operator discards the
    // work.
    fixture.stdout_of("fix", "git stash -q -u");
    let complaint = fixture.fails(4, &["restore", "--yes", "fix", "start"]);
    assert!(complaint.contains("a stash at"), "{complaint}");
    assert!(complaint.contains("--no-snapshot"), "{complaint}");
    fixture.ok(&["restore", "--yes", "--no-snapshot", "fix", "start"]);
    assert_eq!(fixture.stdout_of("fix", "git stash list"), "");
}
