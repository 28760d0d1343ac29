//! Creation, deletion, and recovery after crashes.

use std::path::{Path, PathBuf};

use sandbox::contract::{Force, SandboxBackend, SandboxCommand, SandboxError, SandboxStatus};

use crate::fixture::{NamespaceFixture, config, poll_without_pause, until};

#[test]
fn pause_is_idempotent_and_stops_every_process() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    fixture.stdout_of(
        &id,
        "(while :; do echo x >> /tmp/ticks; done) >/dev/null 2>&1 &",
    );
    let ticks = fixture.backend.workspace(&id).join("../tmp/ticks");
    let length = || std::fs::metadata(&ticks).map_or(0, |data| data.len());
    until("a tick", || length() > 0);
    for _ in 0..2 {
        fixture.backend.pause(&id).unwrap();
        assert_eq!(fixture.backend.status(&id), SandboxStatus::Paused);
    }
    let before = length();
    let error = fixture
        .backend
        .exec(&id, &SandboxCommand::shell("true"))
        .unwrap_err();
    assert!(matches!(error, SandboxError::Paused(_)), "{error}");
    for _ in 0..10_000 {
        std::thread::yield_now();
    }
    assert_eq!(length(), before);
    for _ in 0..2 {
        fixture.backend.resume(&id).unwrap();
        assert_eq!(fixture.backend.status(&id), SandboxStatus::Active);
    }
    until("another tick", || length() > before);
}

#[test]
fn deletion_leaves_no_process_mount_or_directory() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    let line = "mkdir -p /tmp/a/b && chmod 0 /tmp/a; ln -s / /tmp/root; \
                (setsid sleep 4242 &) ; sleep 4242 >/dev/null 2>&1 & ";
    fixture.stdout_of(&id, line);
    let directory = fixture.directory.path().join("sandboxes/one");
    let cgroups = cgroups_of(&directory);
    fixture.backend.pause(&id).unwrap();
    fixture.backend.delete(&id, Force::No).unwrap();
    assert!(!directory.exists());
    assert_nothing_is_left(fixture.directory.path());
    assert!(cgroups.iter().all(|cgroup| !cgroup.exists()), "{cgroups:?}");
}

#[test]
fn sandbox_with_killed_init_has_error_status_until_deleted() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    let record = fixture.directory.path().join("sandboxes/one/record.json");
    let record: serde_json::Value =
        serde_json::from_slice(&std::fs::read(record).unwrap()).unwrap();
    let pid = i32::try_from(record["init"]["pid"].as_i64().unwrap()).unwrap();
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(pid),
        nix::sys::signal::Signal::SIGKILL,
    )
    .unwrap();
    // Before the kernel has removed init, the status is only that the sandbox does not respond.
    let gone = SandboxStatus::Error("its processes are gone; resume the sandbox".to_owned());
    until("the end of init", || fixture.backend.status(&id) == gone);
    let error = fixture
        .backend
        .exec(&id, &SandboxCommand::shell("true"))
        .unwrap_err();
    assert!(matches!(error, SandboxError::NotResponding(_)), "{error}");
    fixture.backend.delete(&id, Force::No).unwrap();
    assert_nothing_is_left(fixture.directory.path());
}

#[test]
fn init_of_another_protocol_version_has_unknown_status() {
    use nix::sys::socket::{
        AddressFamily, Backlog, MsgFlags, SockFlag, SockType, UnixAddr, accept, bind, listen, send,
        socket,
    };
    use std::os::fd::AsRawFd;
    let (fixture, id) = NamespaceFixture::with_sandbox();
    let init_socket = fixture.directory.path().join("sandboxes/one/init.sock");
    std::fs::rename(&init_socket, init_socket.with_extension("real")).unwrap();
    let fake = socket(
        AddressFamily::Unix,
        SockType::SeqPacket,
        SockFlag::empty(),
        None,
    )
    .unwrap();
    bind(fake.as_raw_fd(), &UnixAddr::new(&init_socket).unwrap()).unwrap();
    listen(&fake, Backlog::new(8).unwrap()).unwrap();
    let server = std::thread::spawn(move || {
        for _ in 0..3 {
            let client = accept(fake.as_raw_fd()).unwrap();
            let hello = br#"{"protocol":99,"and":"something new"}"#;
            send(client, hello, MsgFlags::empty()).unwrap();
            nix::unistd::close(client).unwrap();
        }
    });
    assert_eq!(fixture.backend.status(&id), SandboxStatus::Unknown);
    let error = fixture
        .backend
        .exec(&id, &SandboxCommand::shell("true"))
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "the sandbox uses protocol 99, this program 3; restart the sandbox"
    );
    let error = fixture.backend.listeners(&id).unwrap_err();
    assert!(matches!(error, SandboxError::Protocol { .. }), "{error}");
    server.join().unwrap();
    // Deletion does not depend on the protocol.
    fixture.backend.delete(&id, Force::Yes).unwrap();
    assert_eq!(fixture.backend.status(&id), SandboxStatus::Missing);
}

#[test]
fn forced_delete_kills_processes_of_an_unreadable_record() {
    for paused in [false, true] {
        let (fixture, id) = NamespaceFixture::with_sandbox();
        fixture.stdout_of(&id, "(setsid sleep 4243 &) ; sleep 4243 >/dev/null 2>&1 &");
        let directory = fixture.directory.path().join("sandboxes/one");
        let cgroups = cgroups_of(&directory);
        let record: serde_json::Value =
            serde_json::from_slice(&std::fs::read(directory.join("record.json")).unwrap()).unwrap();
        let init = record["init"]["pid"].as_i64().unwrap();
        if paused {
            fixture.backend.pause(&id).unwrap();
        }
        std::fs::write(directory.join("record.json"), "{").unwrap();
        fixture.backend.delete(&id, Force::Yes).unwrap();
        // A zombie is reaped by its new parent.
        let stat = std::fs::read_to_string(format!("/proc/{init}/stat")).unwrap_or_default();
        assert!(stat.is_empty() || stat.contains(") Z "), "{stat}");
        assert!(cgroups.iter().all(|cgroup| !cgroup.exists()), "{cgroups:?}");
        assert_nothing_is_left(fixture.directory.path());
    }
}

#[test]
fn unreadable_record_is_never_cleaned_up() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    fixture.backend.pause(&id).unwrap();
    let directory = fixture.directory.path().join("sandboxes/one");
    let whole = std::fs::read(directory.join("record.json")).unwrap();
    std::fs::write(directory.join("record.json"), "").unwrap();
    assert_eq!(fixture.backend.cleanup().unwrap(), []);
    assert!(matches!(
        fixture.backend.status(&id),
        SandboxStatus::Error(_)
    ));
    fixture.backend.delete(&id, Force::No).unwrap_err();
    assert!(directory.join("fs/root/workspace").exists());
    std::fs::write(directory.join("record.json"), whole).unwrap();
    fixture.backend.delete(&id, Force::No).unwrap();
}

#[test]
fn failed_create_leaves_nothing() {
    let fixture = NamespaceFixture::new();
    let mut impossible = config("one");
    impossible.ports.tcp = vec![80, 80];
    let error = fixture.backend.create(&impossible).unwrap_err();
    assert!(
        error.to_string().contains("building the network"),
        "{error}"
    );
    assert_eq!(
        fixture.backend.status(&impossible.id),
        SandboxStatus::Missing
    );
    assert_nothing_is_left(fixture.directory.path());
    fixture.backend.create(&config("one")).unwrap();
}

#[test]
fn killed_create_leaves_nothing_after_cleanup() {
    let fixture = NamespaceFixture::new();
    for round in 0..12_u64 {
        let id = format!("crash{}x{round}", std::process::id());
        let mut creator = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "any_user::lifecycle::created_sandbox_is_active_immediately",
            ])
            .env("PALISADE_TEST_CREATE", fixture.directory.path())
            .env("PALISADE_TEST_ID", &id)
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let directory = fixture.directory.path().join("sandboxes").join(&id);
        poll_without_pause("the directory", || directory.exists());
        // Each round kills later: between the first file and a running sandbox.
        let kill_time = std::time::Instant::now() + std::time::Duration::from_micros(round * 1500);
        poll_without_pause("the time of the kill", || {
            std::time::Instant::now() >= kill_time
        });
        creator.kill().unwrap();
        creator.wait().unwrap();
        fixture.backend.cleanup().unwrap();
        let id = policy::id::SandboxId::parse(&id).unwrap();
        match fixture.backend.status(&id) {
            SandboxStatus::Missing => {}
            // The sandbox was recorded before the kill.
            SandboxStatus::Active => {
                assert_eq!(fixture.stdout_of(&id, "echo whole"), "whole\n");
                fixture.backend.delete(&id, Force::Yes).unwrap();
            }
            other => panic!("{other}"),
        }
        assert!(!directory.exists());
        assert_nothing_is_left(fixture.directory.path());
        assert_no_cgroup_is_left(&format!("palisade-{id}-"));
    }
}

/// Also run as the creator process that the test above kills.
#[test]
fn created_sandbox_is_active_immediately() {
    let fixture = NamespaceFixture::new();
    let setting = std::env::var_os("PALISADE_TEST_CREATE");
    let directory = setting
        .as_deref()
        .map_or(fixture.directory.path(), Path::new);
    let id = std::env::var("PALISADE_TEST_ID").unwrap_or_else(|_| "one".to_owned());
    let backend = crate::fixture::backend(directory.join("sandboxes"));
    let made = backend.create(&config(&id)).unwrap();
    assert_eq!(made.status, SandboxStatus::Active);
}

/// Asserts that the directory contains no mount and no sandbox.
fn assert_nothing_is_left(directory: &Path) {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(directory.to_str().unwrap()), "{mounts}");
    let left: Vec<_> = std::fs::read_dir(directory.join("sandboxes"))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name())
        .filter(|name| name != ".lock")
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

/// The cgroups on a sandbox's record.
fn cgroups_of(directory: &Path) -> Vec<PathBuf> {
    let record = std::fs::read(directory.join("record.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    serde_json::from_value(record.pointer("/cgroups").unwrap().clone()).unwrap()
}

/// Asserts that no cgroup has this prefix. Other tests create sandboxes at the same time.
fn assert_no_cgroup_is_left(start: &str) {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    for point in mounts
        .lines()
        .filter(|line| line.contains(" - cgroup"))
        .filter_map(|line| line.split(' ').nth(4))
    {
        for entry in std::fs::read_dir(point).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            assert!(!name.starts_with(start), "{name}");
        }
    }
}
