//! What only root can try: being somebody else, and limits by cgroup.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;

use sandbox::contract::Sandbox;

use crate::bench::{Bench, config, program};

const NOBODY: u32 = 65534;

#[test]
fn everything_holds_for_an_unprivileged_user() {
    let place = tempfile::tempdir().unwrap();
    let open = |path: &std::path::Path| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    };
    open(place.path());
    for name in ["sandbox-init", "sandbox-probe"] {
        std::fs::copy(program(name), place.path().join(name)).unwrap();
        open(&place.path().join(name));
    }
    let tests = place.path().join("tests");
    std::fs::copy(std::env::current_exe().unwrap(), &tests).unwrap();
    open(&tests);
    let temporary = place.path().join("tmp");
    std::fs::create_dir(&temporary).unwrap();
    std::os::unix::fs::chown(&temporary, Some(NOBODY), Some(NOBODY)).unwrap();
    let output = std::process::Command::new(&tests)
        .args(["anybody::", "--test-threads=2"])
        .env("PALISADE_TEST_PROGRAMS", place.path())
        .env("TMPDIR", &temporary)
        .current_dir("/")
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}");
    assert!(!said.contains(" 0 passed"), "{said}");
}

#[test]
fn a_fork_bomb_ends_at_the_limit() {
    let bench = Bench::new();
    let mut small = config("small");
    small.limits.pids = 40;
    bench.backend.create(&small).unwrap();
    bench.bring_probe(&small.id);
    let forked: u32 = bench
        .says(&small.id, "/tmp/probe fork 500")
        .trim()
        .parse()
        .unwrap();
    assert!((10..40).contains(&forked), "{forked}");
}

#[test]
fn memory_ends_at_the_limit() {
    let bench = Bench::new();
    let mut small = config("small");
    small.limits.memory = 64 << 20;
    bench.backend.create(&small).unwrap();
    bench.bring_probe(&small.id);
    let result = bench.shell(&small.id, "/tmp/probe eat 300");
    assert_ne!(result.stdout, b"300\n");
}

#[test]
fn the_agent_is_nobody_the_host_knows() {
    let (bench, id) = Bench::with_sandbox();
    bench.says(&id, "touch /workspace/mine");
    let data = std::fs::metadata(bench.backend.workspace(&id).join("mine")).unwrap();
    let uid = std::os::unix::fs::MetadataExt::uid(&data);
    assert!(uid >= 1 << 30, "{uid}");
    assert_eq!(uid % (1 << 16), 1000);
}
