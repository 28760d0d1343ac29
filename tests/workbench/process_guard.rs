//! The process guard ends its command with the parent.

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use testkit::wait;

use crate::PALISADE;
use crate::processes::{self, MARK, marked, wait_for, wait_for_none};

/// A process guard whose parent is this test.
struct GuardedCommand {
    child: Child,
    mark: String,
}

impl GuardedCommand {
    fn start(options: &[&str], script: &str) -> Self {
        let mark = processes::mark();
        let child = Command::new(PALISADE)
            .args(["__leash", "--parent", &std::process::id().to_string()])
            .args(options)
            .args(["--", "bash", "-c", script])
            .env(MARK, &mark)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self { child, mark }
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().cast_signed());
        kill(pid, signal).unwrap();
    }

    fn code(&mut self) -> Option<i32> {
        wait::until("the process guard to end", || {
            self.child.try_wait().unwrap()
        })
        .code()
    }
}

impl Drop for GuardedCommand {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        for (pid, _) in marked(&self.mark) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// A command that ignores TERM, and starts processes in separate sessions, one by a double fork.
const STUBBORN: &str = "trap '' TERM
    setsid sleep 1001 &
    (setsid bash -c 'trap \"\" TERM; sleep 1002; true' & )
    sleep 1003
    true";

fn wait_for_all(mark: &str) {
    for args in ["sleep 1001", "sleep 1002", "sleep 1003"] {
        wait_for(mark, args);
    }
}

#[test]
fn command_gets_input_output_and_exit_code() {
    let mut guarded = GuardedCommand::start(&[], "cat; echo talk >&2; exit 7");
    let mut input = guarded.child.stdin.take().unwrap();
    input.write_all(b"in\xffand out").unwrap();
    drop(input);
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let mut stdout = guarded.child.stdout.take().unwrap();
    stdout.read_to_end(&mut out).unwrap();
    let mut stderr = guarded.child.stderr.take().unwrap();
    stderr.read_to_end(&mut err).unwrap();
    assert_eq!(
        (out.as_slice(), err.as_slice()),
        (&b"in\xffand out"[..], &b"talk\n"[..])
    );
    assert_eq!(guarded.code(), Some(7));
}

#[test]
fn signal_that_killed_the_command_is_reported() {
    assert_eq!(GuardedCommand::start(&[], "kill -9 $$").code(), Some(137));
    // The Rust runtime ignores SIGPIPE; the guard must not pass this on to its command.
    assert_eq!(
        GuardedCommand::start(&[], "kill -PIPE $$").code(),
        Some(141)
    );
}

#[test]
fn missing_command_exits_127_and_unexecutable_one_126() {
    let code = |command: &str| {
        let output = Command::new(PALISADE)
            .args(["__leash", "--parent", &std::process::id().to_string()])
            .args(["--", command])
            .output()
            .unwrap();
        assert!(String::from_utf8_lossy(&output.stderr).contains("cannot run"));
        output.status.code()
    };
    assert_eq!(code("/nonexistent/command"), Some(127));
    assert_eq!(code("/etc/passwd"), Some(126));
}

#[test]
fn reader_sees_the_command_close_its_output() {
    let mut guarded = GuardedCommand::start(&[], "exec 1>&- 2>&-; exec sleep 1004");
    let mut out = Vec::new();
    let mut stdout = guarded.child.stdout.take().unwrap();
    stdout.read_to_end(&mut out).unwrap();
    wait_for(&guarded.mark, "sleep 1004");
    guarded.signal(Signal::SIGTERM);
    assert_eq!(guarded.code(), Some(143));
}

#[test]
fn terminating_the_guard_kills_every_process() {
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let mut guarded = GuardedCommand::start(&[], STUBBORN);
        wait_for_all(&guarded.mark);
        guarded.signal(signal);
        assert_eq!(guarded.code(), Some(137), "{signal}");
        assert_eq!(marked(&guarded.mark), []);
    }
}

#[test]
fn command_that_ends_on_sigterm_causes_no_delay() {
    let script = "trap 'exit 3' TERM; sleep 1007 & echo up; wait";
    let mut guarded = GuardedCommand::start(&[], script);
    let mut up = [0; 3];
    guarded
        .child
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut up)
        .unwrap();
    let signalled = Instant::now();
    guarded.signal(Signal::SIGTERM);
    assert_eq!(guarded.code(), Some(3));
    assert!(signalled.elapsed() < Duration::from_secs(8));
}

#[test]
fn usr1_terminates_and_leaves_the_deadline_to_the_parent() {
    let script = "trap 'echo term' TERM; echo up; while :; do sleep 0.05; done";
    let mut guarded = GuardedCommand::start(&[], script);
    let mut stdout = guarded.child.stdout.take().unwrap();
    let mut printed = [0; 3];
    stdout.read_exact(&mut printed).unwrap();
    guarded.signal(Signal::SIGUSR1);
    let mut printed = [0; 5];
    stdout.read_exact(&mut printed).unwrap();
    assert_eq!(&printed, b"term\n");
    guarded.signal(Signal::SIGTERM);
    assert_eq!(guarded.code(), Some(137));
    assert_eq!(marked(&guarded.mark), []);
}

#[test]
fn background_processes_are_killed_or_kept_as_configured() {
    let script = "setsid sleep 1005 </dev/null >/dev/null 2>&1 & exit 4";
    let mut guarded = GuardedCommand::start(&[], script);
    assert_eq!(guarded.code(), Some(4));
    assert_eq!(marked(&guarded.mark), []);

    let mut guarded = GuardedCommand::start(&["--leave-rest"], script);
    assert_eq!(guarded.code(), Some(4));
    wait_for(&guarded.mark, "sleep 1005");
}

#[test]
fn killed_parent_ends_every_process() {
    let mark = processes::mark();
    let mut parent = Command::new("bash")
        .args([
            "-c",
            r#""$0" __leash --parent $$ --leave-rest -- bash -c "$1"; true"#,
        ])
        .args([PALISADE, STUBBORN])
        .env(MARK, &mark)
        .spawn()
        .unwrap();
    wait_for_all(&mark);
    parent.kill().unwrap();
    parent.wait().unwrap();
    wait_for_none(&mark);
}

#[test]
fn guard_without_its_parent_starts_nothing() {
    // The test is not the parent of process 1.
    let output = Command::new(PALISADE)
        .args(["__leash", "--parent", "1", "--", "echo", "started"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert_eq!(output.stdout, b"");
}

#[test]
fn forking_process_tree_is_killed() {
    // Each process starts two others, to a depth of six: 127 processes in all.
    let script = "f() { [ $1 -gt 0 ] && { f $(($1 - 1)) & f $(($1 - 1)) & }; sleep 1006; }; f 6";
    let mut guarded = GuardedCommand::start(&[], script);
    wait::until("many processes", || {
        (marked(&guarded.mark).len() > 20).then_some(())
    });
    guarded.signal(Signal::SIGTERM);
    guarded.code();
    assert_eq!(marked(&guarded.mark), []);
}
