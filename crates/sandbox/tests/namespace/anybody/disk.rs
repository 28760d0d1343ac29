//! What a sandbox holds on disk ends at its limit.

use sandbox::contract::{SandboxBackend, SandboxCommand, SandboxError, SandboxStatus};

use crate::bench::{Bench, until};

pub(crate) fn small() -> (Bench, policy::id::SandboxId) {
    let bench = Bench::new();
    let id = bench.create("small", |config| config.limits.disk = 32 << 20);
    (bench, id)
}

pub(crate) fn assert_ends(bench: &Bench, id: &policy::id::SandboxId, line: &str) {
    let mut command = SandboxCommand::shell(line);
    command.timeout = Some(std::time::Duration::from_secs(60));
    let error = bench.backend.exec(id, &command).unwrap_err();
    assert!(matches!(error, SandboxError::Stopped { .. }), "{error}");
    let said = error.to_string();
    assert!(said.contains("disk limit: the sandbox holds"), "{said}");
}

fn assert_stops(line: &str) {
    let (bench, id) = small();
    assert_ends(&bench, &id, line);
    let SandboxStatus::Error(said) = bench.backend.status(&id) else {
        panic!("{}", bench.backend.status(&id));
    };
    assert!(said.starts_with("disk limit"), "{said}");
    let error = bench
        .backend
        .exec(&id, &SandboxCommand::shell("true"))
        .unwrap_err();
    assert!(matches!(error, SandboxError::Stopped { .. }), "{error}");
}

#[test]
fn a_file_that_grows_without_end_stops_the_sandbox() {
    assert_stops("dd if=/dev/zero of=/workspace/big bs=64k");
}

#[test]
fn files_without_number_stop_the_sandbox() {
    assert_stops("i=0; mkdir /tmp/d; while :; do i=$((i+1)); : > /tmp/d/$i; done");
}

#[test]
fn deleted_files_that_stay_open_count_and_end_with_whoever_has_them() {
    let (bench, id) = small();
    bench.bring_probe(&id);
    for line in [
        "exec 9> /tmp/x; rm /tmp/x; for i in $(seq 4096); do head -c 65536 /dev/zero >&9; done; \
         sleep 1000",
        // In a table of a thread's own.
        "/tmp/probe hoard /tmp/x; sleep 1000",
    ] {
        assert_ends(&bench, &id, line);
        until("room", || {
            bench.backend.status(&id) == SandboxStatus::Active
        });
        assert_eq!(bench.says(&id, "echo well"), "well\n");
    }
}

#[test]
fn a_closed_directory_hides_nothing_from_the_limit() {
    assert_stops(
        "mkdir /tmp/d; exec 9> /tmp/d/big; chmod 0 /tmp/d; while :; do head -c 65536 /dev/zero >&9; done",
    );
}

#[test]
fn what_is_within_the_limit_goes_on_and_room_made_outside_starts_it_again() {
    let (bench, id) = small();
    let line = "dd if=/dev/zero of=/tmp/a bs=1M count=8 2>/dev/null; echo well";
    assert_eq!(bench.says(&id, line), "well\n");
    let line = "dd if=/dev/zero of=/workspace/b bs=1M count=64; sleep 1000";
    bench
        .backend
        .exec(&id, &SandboxCommand::shell(line))
        .unwrap_err();
    std::fs::remove_file(bench.backend.workspace(&id).join("b")).unwrap();
    until("room", || {
        bench.backend.status(&id) == SandboxStatus::Active
    });
    assert_eq!(bench.says(&id, "ls /tmp"), "a\n");
}
