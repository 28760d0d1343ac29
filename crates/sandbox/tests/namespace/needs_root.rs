//! Tests that need root: other users, and limits by cgroup.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use sandbox::contract::{Force, SandboxBackend, SandboxCommand, SandboxStatus};

use crate::any_user::disk::{assert_stopped_by_disk_limit, small};
use crate::fixture::{NamespaceFixture, program, until};

const NOBODY: u32 = 65534;

#[test]
fn all_tests_pass_for_an_unprivileged_user() {
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
        .args(["any_user::", "--test-threads=2"])
        .env("PALISADE_TEST_PROGRAMS", place.path())
        .env("TMPDIR", &temporary)
        .current_dir("/")
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{printed}");
    assert!(!printed.contains(" 0 passed"), "{printed}");
}

#[test]
fn fork_bomb_stops_at_the_limit_and_others_continue() {
    let (fixture, other) = NamespaceFixture::with_sandbox();
    let small = fixture.create("small", |config| config.limits.pids = 40);
    fixture.install_probe(&small);
    let forked: u32 = fixture
        .stdout_of(&small, "/tmp/probe fork 500")
        .trim()
        .parse()
        .unwrap();
    assert!((10..40).contains(&forked), "{forked}");
    // A fork bomb: every process forks again.
    let line = "b() { b | b & }; b; sleep 1000";
    let bomb = fixture
        .backend
        .start(&small, &SandboxCommand::shell(line), None)
        .unwrap();
    for _ in 0..5 {
        assert_eq!(fixture.stdout_of(&other, "echo here"), "here\n");
    }
    drop(bomb);
    until("the end of the bomb", || {
        fixture
            .backend
            .exec(&small, &SandboxCommand::shell("echo well"))
            .is_ok_and(|result| result.stdout == b"well\n")
    });
}

#[test]
fn nested_cgroups_are_removed_with_the_sandbox() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    fixture.stdout_of(&id, "sleep 1000 >/dev/null 2>&1 &");
    until("the sleeper", || fixture.sleepers(&id) == 1);
    let record = fixture.directory.path().join("sandboxes/one/record.json");
    let record: serde_json::Value =
        serde_json::from_slice(&std::fs::read(record).unwrap()).unwrap();
    let cgroups: Vec<_> = record["cgroups"].as_array().unwrap().iter().collect();
    assert!(!cgroups.is_empty(), "{record}");
    for cgroup in &cgroups {
        let cgroup = std::path::Path::new(cgroup.as_str().unwrap());
        let below = cgroup.join("agents/own");
        std::fs::create_dir_all(&below).unwrap();
        // The cgroup has a process and, where possible, is frozen. The last member may be the
        // exiting shell of the line above.
        until("a member that can be moved", || {
            let members = std::fs::read_to_string(cgroup.join("cgroup.procs")).unwrap();
            let last = members.lines().last().unwrap();
            std::fs::write(below.join("cgroup.procs"), last).is_ok()
        });
        let _ = std::fs::write(below.join("freezer.state"), "FROZEN");
    }
    fixture.backend.delete(&id, Force::Yes).unwrap();
    for cgroup in cgroups {
        let cgroup = std::path::Path::new(cgroup.as_str().unwrap());
        assert!(!cgroup.exists(), "{}", cgroup.display());
    }
}

#[test]
fn memory_limit_kills_the_command_not_the_sandbox() {
    let fixture = NamespaceFixture::new();
    let small = fixture.create("small", |config| config.limits.memory = 64 << 20);
    fixture.install_probe(&small);
    let result = fixture.shell(&small, "/tmp/probe allocate 300");
    assert_ne!(result.stdout, b"300\n");
    assert_ne!(result.exit_code, 0);
    assert_eq!(fixture.stdout_of(&small, "echo well"), "well\n");
}

#[test]
fn configured_directory_in_a_closed_home_is_visible() {
    let home = tempfile::tempdir().unwrap();
    let tools = home.path().join("tools");
    std::fs::create_dir(&tools).unwrap();
    std::fs::set_permissions(&tools, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::set_permissions(home.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    std::fs::write(tools.join("file"), "x").unwrap();
    std::fs::write(home.path().join("beside"), "x").unwrap();
    let fixture = NamespaceFixture::new();
    let id = fixture.create("one", |config| {
        config.system.host_paths = vec![tools.clone()];
    });
    let (tools, home) = (tools.display(), home.path().display());
    assert_eq!(fixture.stdout_of(&id, &format!("cat {tools}/file")), "x");
    assert_eq!(fixture.stdout_of(&id, &format!("ls {home}")), "tools\n");
}

#[test]
fn disk_floor_stops_only_sandboxes_that_grew() {
    // A small file system in a mount namespace of this thread.
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
    let none = None::<&str>;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(none, "/", none, private, none).unwrap();
    let place = tempfile::tempdir().unwrap();
    let (kind, size) = (Some("tmpfs"), Some("size=200m"));
    mount(kind, place.path(), kind, MsFlags::empty(), size).unwrap();
    let fixture = NamespaceFixture::in_directory(tempfile::tempdir_in(place.path()).unwrap());
    let innocent = fixture.create("innocent", |_| {});
    fixture.stdout_of(&innocent, "sleep 1000 >/dev/null 2>&1 &");
    let id = fixture.create("one", |_| {});
    // The file system is filled slowly, for a floor of ten megabytes.
    let line = "exec 9> /tmp/x; rm /tmp/x; head -c 150M /dev/zero >&9; \
                while head -c 256K /dev/zero >&9; do sleep 0.1; done; echo full";
    let error = fixture
        .backend
        .exec(&id, &SandboxCommand::shell(line))
        .unwrap_err()
        .to_string();
    assert!(error.contains("the host's file system has only"), "{error}");
    // Killing the processes frees space, and the sandbox runs again.
    until("the sandbox to run again", || {
        fixture.backend.status(&id) == SandboxStatus::Active
    });
    assert_eq!(fixture.stdout_of(&id, "echo well"), "well\n");
    assert_eq!(fixture.sleepers(&innocent), 1, "it was not stopped");
    drop(fixture);
    umount2(place.path(), MntFlags::MNT_DETACH).unwrap();
}

#[test]
fn undumpable_process_hides_no_deleted_file() {
    let (fixture, id) = small();
    fixture.install_probe(&id);
    assert_stopped_by_disk_limit(
        &fixture,
        &id,
        "/tmp/probe fill-deleted-file-undumpable /tmp/x; sleep 1000",
    );
}

#[test]
fn agent_id_is_unknown_on_the_host() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    fixture.stdout_of(&id, "touch /workspace/mine");
    let data = std::fs::metadata(fixture.backend.workspace(&id).join("mine")).unwrap();
    let uid = std::os::unix::fs::MetadataExt::uid(&data);
    assert!(uid >= 1 << 30, "{uid}");
    assert_eq!(uid % (1 << 16), 1000);
}

#[test]
fn root_files_are_read_only_for_the_agent() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    // A missing Landlock is the only expected warning.
    let warnings = fixture.backend.warnings(&id).unwrap();
    assert!(
        !warnings.iter().any(|one| one.contains("nobody")),
        "{warnings:?}"
    );
    assert_eq!(
        fixture.stdout_of(&id, "stat -c %u:%g /usr/bin/env"),
        "0:0\n"
    );
    for line in ["touch /usr/x", "echo > /usr/bin/env", "rm /usr/bin/env"] {
        assert_ne!(fixture.shell(&id, line).exit_code, 0, "{line}");
    }
}

#[test]
fn root_in_the_sandbox_changes_nothing_on_the_host() {
    let fixture = NamespaceFixture::new();
    let id = fixture.create("one", |config| config.system.root = true);
    assert_eq!(fixture.stdout_of(&id, "id -u; echo $USER"), "0\nroot\n");
    let before = std::fs::read("/usr/bin/env").unwrap();
    let line = "touch /usr/local/x /usr/x && chown 33:33 /usr/x && mkdir -p /opt/new && \
                echo '#!/bin/sh' > /usr/bin/env && echo 'echo mine' >> /usr/bin/env && \
                rm /usr/bin/yes && mv /usr/bin/env /usr/bin/other && mv /usr/bin/other /usr/bin/env; \
                env; stat -c %u /usr/x; cat /home/agent/f /workspace/f 2>/dev/null; \
                echo x > /home/agent/f && echo x > /workspace/f && echo well";
    assert_eq!(fixture.stdout_of(&id, line), "mine\n33\nwell\n");
    assert_eq!(std::fs::read("/usr/bin/env").unwrap(), before);
    assert!(std::path::Path::new("/usr/bin/yes").exists());
    for not_there in ["/usr/x", "/usr/local/x"] {
        assert!(!std::path::Path::new(not_there).exists(), "{not_there}");
    }
}

#[test]
fn root_in_the_sandbox_can_only_install() {
    let fixture = NamespaceFixture::new();
    let id = fixture.create("one", |config| config.system.root = true);
    let status = fixture.stdout_of(&id, "cat /proc/self/status");
    for line in [
        "CapPrm:\t00000000000000db",
        "CapEff:\t00000000000000db",
        "CapBnd:\t00000000000000db",
        "CapAmb:\t0000000000000000",
        "NoNewPrivs:\t1",
        "Seccomp:\t2",
    ] {
        assert!(status.contains(line), "{line}: {status}");
    }
    for line in [
        "mount -t tmpfs x /tmp",
        "unshare -U true",
        "mknod /tmp/sda b 8 0",
        "hostname other && test $(hostname) = other",
        "echo x > /proc/sys/kernel/hostname",
        "echo x > /proc/1/oom_score_adj",
        "cat /proc/1/environ",
        "cat /proc/kcore",
        "ip link set lo down",
        "umount /proc/sys",
    ] {
        let tried = fixture.shell(&id, line);
        assert_ne!(tried.exit_code, 0, "{line}: {tried:?}");
    }
    fixture.shell(&id, "kill -9 1; kill -STOP 1");
    assert_eq!(fixture.stdout_of(&id, "echo alive"), "alive\n");
    // A setuid bit has no effect in a sandbox.
    let line = "cp /usr/bin/id /tmp/id && chmod 4755 /tmp/id && \
                setpriv --reuid 1000 --regid 1000 --clear-groups /tmp/id -u";
    assert_eq!(fixture.stdout_of(&id, line), "1000\n");
}

#[test]
fn root_in_the_sandbox_cannot_read_closed_host_files() {
    let tools = tempfile::tempdir().unwrap();
    let at = |name: &str| tools.path().join(name);
    std::fs::set_permissions(tools.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    for (name, mode) in [("open", 0o644), ("token", 0o600)] {
        std::fs::write(at(name), name).unwrap();
        std::fs::set_permissions(at(name), std::fs::Permissions::from_mode(mode)).unwrap();
    }
    std::os::unix::fs::chown(at("open"), Some(1000), Some(1000)).unwrap();
    let fixture = NamespaceFixture::new();
    let id = fixture.create("one", |config| {
        config.system.root = true;
        config.system.host_paths = vec![tools.path().to_owned()];
    });
    let path = tools.path().display();
    assert_eq!(fixture.stdout_of(&id, &format!("ls {path}")), "open\n");
    // A user's file is mapped to another id, and never to the agent's own.
    let line = format!("stat -c %u {path}/open; echo more >> {path}/open; cat {path}/open");
    assert_eq!(fixture.stdout_of(&id, &line), "20000\nopenmore\n");
    assert_eq!(std::fs::read_to_string(at("open")).unwrap(), "open");
    // A hidden path cannot be made visible again.
    let line = format!("mv {path} /tmp/t 2>/dev/null; cat {path}/token /tmp/t/token 2>/dev/null");
    assert_eq!(fixture.shell(&id, &line).stdout, b"");
}
