//! Files as of some moment, and what comes before they are put back.

use crate::bench::Bench;

for_every_operator!(a_restore_takes_a_snapshot_first_and_says_where_it_is);

fn a_restore_takes_a_snapshot_first_and_says_where_it_is(bench: &Bench) {
    bench.create("fix");
    bench.ok(&["checkpoint", "fix", "start"]);
    bench.says("fix", "echo later > new.txt");
    let told = bench.ok(&["restore", "--yes", "fix", "start"]);
    let tip = bench.repo.git(&["rev-parse", "--short=12", "palisade/fix"]);
    assert!(
        told.contains(&format!("on palisade/fix at {tip}")),
        "{told}"
    );
    assert_eq!(
        bench.says("fix", "ls new.txt 2>/dev/null || echo gone"),
        "gone"
    );
    let kept = bench.repo.git(&["cat-file", "-p", "palisade/fix:new.txt"]);
    assert_eq!(kept, "later");
    let log = bench
        .repo
        .git(&["log", "-1", "--format=%s", "palisade/fix"]);
    assert_eq!(log, "before restoring start");
    // A label that does not exist costs no snapshot.
    bench.says("fix", "echo more > more.txt");
    bench.fails(3, &["restore", "--yes", "fix", "nothing"]);
    let still = bench.repo.git(&["rev-parse", "--short=12", "palisade/fix"]);
    assert_eq!(still, tip);
    // What a snapshot cannot take stops it, until it is given up in so many words.
    bench.says("fix", "git stash -q -u");
    let complaint = bench.fails(4, &["restore", "--yes", "fix", "start"]);
    assert!(complaint.contains("a stash at"), "{complaint}");
    assert!(complaint.contains("--no-snapshot"), "{complaint}");
    bench.ok(&["restore", "--yes", "--no-snapshot", "fix", "start"]);
    assert_eq!(bench.says("fix", "git stash list"), "");
}
