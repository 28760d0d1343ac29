//! What an agent does, and what its operator finds.

use crate::bench::Bench;

const JOURNEY: [&str; 9] = [
    "create", "write", "bash", "read", "grep", "edit", "patch", "diff", "states",
];

#[test]
fn a_client_works_in_a_sandbox_and_the_operators_files_stay_as_they_are() {
    for mode in ["auto", "legacy"] {
        let bench = Bench::new();
        let before = bench.repo.fingerprint();
        let head = bench.repo.git(&["rev-parse", "HEAD"]);
        bench.drive("journey", mode, &JOURNEY);
        let changed = before.differences(&bench.repo.fingerprint());
        assert!(changed.is_empty(), "{changed:?}");
        assert_eq!(bench.repo.git(&["status", "--porcelain"]), "");
        assert_eq!(bench.repo.git(&["rev-parse", "HEAD"]), head);
        assert_eq!(
            bench.diary("palisade/fix-it"),
            [
                "write: src/new/main.py",
                "bash: python3 src/new/main.py > out.txt; cat out.txt; pwd",
                "edit: src/new/main.py",
                "patch: README.md, docs/new.md",
                "patch: docs/new.md",
            ]
        );
        bench.drive("leave", mode, &["kept"]);
        bench.ok(&["delete", "--force", "fix-it"]);
        bench.assert_nothing_left();
    }
}

#[test]
fn a_sandbox_is_deleted_when_nothing_is_lost_or_by_force() {
    let bench = Bench::new();
    bench.drive("whole", "auto", &["delete"]);
    bench.assert_nothing_left();
}

#[test]
fn what_is_asked_for_wrongly_is_said_in_a_sentence() {
    let bench = Bench::new();
    bench.drive("errors", "auto", &["names", "paths", "tools", "which"]);
    assert_eq!(bench.diary("palisade/one"), Vec::<String>::new());
}

#[test]
fn a_call_that_is_given_up_ends_its_command() {
    let bench = Bench::new();
    bench.drive("cancel", "auto", &["cancel"]);
    let diary = bench.diary("palisade/patient");
    assert_eq!(diary, ["bash: echo begun > begun.txt; sleep 4321"]);
}

#[test]
fn calls_at_the_same_time_lose_nothing() {
    let bench = Bench::new();
    bench.drive("crowd", "auto", &["crowd"]);
}

#[test]
fn every_tool_is_described() {
    let bench = Bench::new();
    for mode in ["auto", "legacy"] {
        bench.drive("describes", mode, &["describes"]);
    }
}

#[test]
fn it_ends_when_its_client_hangs_up() {
    let bench = Bench::new();
    let output = bench.run(&["mcp"]);
    assert!(output.status.success());
    assert!(output.stdout.is_empty(), "stdout is the protocol's");
}
