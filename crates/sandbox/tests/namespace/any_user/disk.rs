//! Disk limit of a sandbox.

use sandbox::contract::{SandboxBackend, SandboxCommand, SandboxError, SandboxStatus};

use crate::fixture::{NamespaceFixture, until};

pub(crate) fn small() -> (NamespaceFixture, policy::id::SandboxId) {
    let fixture = NamespaceFixture::new();
    let id = fixture.create("small", |config| config.limits.disk = 32 << 20);
    (fixture, id)
}

pub(crate) fn assert_stopped_by_disk_limit(
    fixture: &NamespaceFixture,
    id: &policy::id::SandboxId,
    line: &str,
) {
    let mut command = SandboxCommand::shell(line);
    command.timeout = Some(std::time::Duration::from_secs(60));
    let error = fixture.backend.exec(id, &command).unwrap_err();
    assert!(matches!(error, SandboxError::Stopped { .. }), "{error}");
    let printed = error.to_string();
    assert!(
        printed.contains("disk limit: the sandbox holds"),
        "{printed}"
    );
}

fn assert_stops(line: &str) {
    let (fixture, id) = small();
    assert_stopped_by_disk_limit(&fixture, &id, line);
    let SandboxStatus::Error(printed) = fixture.backend.status(&id) else {
        panic!("{}", fixture.backend.status(&id));
    };
    assert!(printed.starts_with("disk limit"), "{printed}");
    let error = fixture
        .backend
        .exec(&id, &SandboxCommand::shell("true"))
        .unwrap_err();
    assert!(matches!(error, SandboxError::Stopped { .. }), "{error}");
}

#[test]
fn endlessly_growing_file_stops_the_sandbox() {
    assert_stops("dd if=/dev/zero of=/workspace/big bs=64k");
}

#[test]
fn too_many_files_stop_the_sandbox() {
    assert_stops("i=0; mkdir /tmp/d; while :; do i=$((i+1)); : > /tmp/d/$i; done");
}

#[test]
fn open_deleted_files_count_towards_the_limit() {
    let (fixture, id) = small();
    fixture.install_probe(&id);
    for line in [
        "exec 9> /tmp/x; rm /tmp/x; for i in $(seq 4096); do head -c 65536 /dev/zero >&9; done; \
         sleep 1000",
        // In a thread's own descriptor table.
        "/tmp/probe fill-deleted-file /tmp/x; sleep 1000",
    ] {
        assert_stopped_by_disk_limit(&fixture, &id, line);
        until("the sandbox to run again", || {
            fixture.backend.status(&id) == SandboxStatus::Active
        });
        assert_eq!(fixture.stdout_of(&id, "echo well"), "well\n");
    }
}

#[test]
fn inaccessible_directory_counts_towards_the_disk_limit() {
    assert_stops(
        "mkdir /tmp/d; exec 9> /tmp/d/big; chmod 0 /tmp/d; while :; do head -c 65536 /dev/zero >&9; done",
    );
}

#[test]
fn sandbox_restarts_after_space_is_freed() {
    let (fixture, id) = small();
    let line = "dd if=/dev/zero of=/tmp/a bs=1M count=8 2>/dev/null; echo well";
    assert_eq!(fixture.stdout_of(&id, line), "well\n");
    let line = "dd if=/dev/zero of=/workspace/b bs=1M count=64; sleep 1000";
    fixture
        .backend
        .exec(&id, &SandboxCommand::shell(line))
        .unwrap_err();
    std::fs::remove_file(fixture.backend.workspace(&id).join("b")).unwrap();
    until("the sandbox to run again", || {
        fixture.backend.status(&id) == SandboxStatus::Active
    });
    assert_eq!(fixture.stdout_of(&id, "ls /tmp"), "a\n");
}
