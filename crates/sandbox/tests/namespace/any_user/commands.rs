//! Commands: input, output and exit.

use std::io::{Read, Write};
use std::time::Duration;

use sandbox::contract::{SandboxBackend, SandboxCommand, SandboxError};
use sandbox::namespace::protocol::TerminalSize;

use crate::fixture::{NamespaceFixture, text};

#[test]
fn input_environment_and_directory_arrive() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    let mut command = SandboxCommand::shell("cat; echo \"$WORD $HOME $USER\"; pwd; id -u; id -g");
    command.stdin = b"fed\n".to_vec();
    command.environment = vec![("WORD".into(), "said".into())];
    command.directory = Some("/tmp".into());
    let result = fixture.backend.exec(&id, &command).unwrap();
    assert_eq!(
        text(&result.stdout),
        "fed\nsaid /home/agent agent\n/tmp\n1000\n1000\n",
        "{}",
        text(&result.stderr)
    );
    assert_eq!(fixture.stdout_of(&id, "pwd; hostname"), "/workspace\none\n");
}

#[test]
fn large_inputs_and_outputs_are_complete() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    let mut command = SandboxCommand::new(["cat"]);
    command.stdin = (0..3_000_000_u32).map(|n| n.to_le_bytes()[0]).collect();
    let result = fixture.backend.exec(&id, &command).unwrap();
    assert!(result.stdout == command.stdin);
}

#[test]
fn missing_program_is_a_clear_error() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    for (argv, printed) in [
        (vec!["no-such-program"], "running it: No such file"),
        (vec!["/etc/passwd"], "running it: Permission denied"),
        (vec![], "reading the command"),
    ] {
        let error = fixture
            .backend
            .exec(&id, &SandboxCommand::new(argv))
            .unwrap_err();
        assert!(matches!(error, SandboxError::Start { .. }), "{error}");
        assert!(error.to_string().contains(printed), "{error}");
    }
    let mut lost = SandboxCommand::shell("true");
    lost.directory = Some("/nowhere".into());
    let error = fixture.backend.exec(&id, &lost).unwrap_err().to_string();
    assert!(error.contains("entering the directory"), "{error}");
}

#[test]
fn a_command_that_takes_too_long_is_killed_with_its_tree() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    let mut command = SandboxCommand::shell("sleep 1000 & (setsid sleep 1000 &) ; sleep 1000");
    command.timeout = Some(Duration::from_millis(300));
    let error = fixture.backend.exec(&id, &command).unwrap_err();
    assert!(matches!(error, SandboxError::TimedOut { .. }), "{error}");
    crate::fixture::until("the end of its tree", || fixture.sleepers(&id) == 0);
}

#[test]
fn command_that_kills_its_subreaper_is_killed() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    fixture.stdout_of(&id, "sleep 777 >/dev/null 2>&1 &");
    let line = "(setsid sleep 1000 &); sh -c 'kill -9 '$PPID; kill -9 $PPID; sleep 1000";
    let mut command = SandboxCommand::shell(line);
    command.timeout = Some(Duration::from_secs(2));
    // With a separate agent id the kill fails and the command times out; with init's id the command
    // kills itself.
    match fixture.backend.exec(&id, &command) {
        Ok(result) => assert_eq!(result.exit_code, 137),
        Err(error) => assert!(matches!(error, SandboxError::TimedOut { .. }), "{error}"),
    }
    // Except processes that another command left running on purpose.
    crate::fixture::until("the end of its tree", || fixture.sleepers(&id) == 1);
    assert_eq!(fixture.stdout_of(&id, "echo alive"), "alive\n");
}

#[test]
fn command_that_stops_its_subreaper_is_still_reported() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    let mut command =
        SandboxCommand::shell("kill -STOP $PPID 2>/dev/null; kill -STOP $PPID; exit 3");
    command.timeout = Some(Duration::from_secs(20));
    let result = fixture.backend.exec(&id, &command).unwrap();
    assert_eq!(result.exit_code, 3);
}

#[test]
fn background_process_survives_without_delaying_the_command() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    assert_eq!(fixture.stdout_of(&id, "sleep 1000 & echo done"), "done\n");
    crate::fixture::until("the process in the background", || {
        fixture.sleepers(&id) == 1
    });
}

#[test]
fn a_dropped_command_is_killed() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    let running = fixture
        .backend
        .start(&id, &SandboxCommand::shell("sleep 1000; true"), None)
        .unwrap();
    drop(running);
    crate::fixture::until("the end of the command", || fixture.sleepers(&id) == 0);
}

#[test]
fn terminal_is_private_and_can_be_resized() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    let line = "stty size; tty; read x; stty size; echo ok > /dev/tty";
    let size = TerminalSize {
        rows: 31,
        columns: 97,
    };
    let running = fixture
        .backend
        .start(&id, &SandboxCommand::shell(line), Some(size))
        .unwrap();
    let mut master = std::fs::File::from(running.stdio()[0].try_clone().unwrap());
    let mut seen = Vec::new();
    let mut read_until = |word: &str| {
        let mut buffer = [0; 512];
        while !text(&seen).contains(word) {
            let length = master.read(&mut buffer).unwrap();
            seen.extend_from_slice(&buffer[..length]);
        }
        text(&seen)
    };
    assert!(read_until("/dev/pts/0").contains("31 97"));
    running
        .resize(TerminalSize {
            rows: 5,
            columns: 6,
        })
        .unwrap();
    let mut writer = std::fs::File::from(running.stdio()[0].try_clone().unwrap());
    writer.write_all(b"\n").unwrap();
    assert!(read_until("ok").contains("5 6"));
    assert_eq!(running.wait().unwrap().code, 0);
}

#[test]
fn a_signal_reaches_the_command() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    let line = "trap 'exit 42' TERM; echo ready; while :; do sleep 0.05; done";
    let running = fixture
        .backend
        .start(&id, &SandboxCommand::shell(line), None)
        .unwrap();
    let mut out = std::fs::File::from(running.stdio()[1].try_clone().unwrap());
    let mut word = [0; 6];
    out.read_exact(&mut word).unwrap();
    running.signal(15).unwrap();
    assert_eq!(running.wait().unwrap().code, 42);
}

#[test]
fn command_has_no_descriptor_of_the_host() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    let listed = fixture.stdout_of(
        &id,
        "for f in /proc/self/fd/*; do readlink $f || true; done",
    );
    assert_eq!(listed.lines().count(), 3, "{listed}");
    assert!(
        listed.lines().all(|line| line.starts_with("pipe:")),
        "{listed}"
    );
    // A process can reopen its own output, which is the same pipe.
    assert_eq!(
        fixture.stdout_of(&id, "echo again > /dev/stdout"),
        "again\n"
    );
}
