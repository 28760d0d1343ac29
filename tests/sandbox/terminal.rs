//! Interactive shells in a sandbox behave as on the host.

use std::process::Command;

use testkit::pty::Pty;
use testkit::{output, wait};

use crate::sandbox_fixture::{SandboxFixture, describe};

for_every_operator!(
    terminal_size_is_passed_and_follows_resizes,
    ctrl_c_interrupts_and_ctrl_z_suspends,
    pager_works_in_a_shell,
    editor_works_in_a_shell,
    top_works_in_a_shell,
    terminal_settings_are_restored_however_the_shell_ends,
    input_file_is_read_only_in_the_sandbox,
    large_input_is_passed_completely,
    three_interrupts_kill_a_command_that_ignores_them,
    shell_exit_code_is_returned,
    command_ends_when_its_terminal_closes,
    commands_in_an_unresponsive_sandbox_can_be_interrupted,
);

for_subid_user!(command_ends_when_its_terminal_closes,);

/// A prompt that differs from all typed input, so that an echo of input cannot match it.
const PROMPT: &str = "ready> ";

/// A shell at its prompt.
fn shell(fixture: &SandboxFixture) -> Pty {
    let mut terminal = fixture.on_terminal(&["run", "--name", "fix", "--", "bash", "--norc"]);
    terminal.expect("$ ");
    terminal.send("PS1='rea''dy> '\r");
    terminal.expect(PROMPT);
    terminal
}

/// Exits the shell and asserts that the terminal settings are restored.
fn leave(mut terminal: Pty) {
    terminal.send("exit 0\r");
    let status = terminal.wait();
    assert!(status.success(), "{status}: {}", terminal.shown());
    assert_eq!(terminal.settings(), terminal.initial_settings());
}

fn terminal_size_is_passed_and_follows_resizes(fixture: &SandboxFixture) {
    let mut terminal = shell(fixture);
    terminal.send("stty size\r");
    terminal.expect("24 80");
    terminal.expect(PROMPT);
    terminal.send("until [ \"$(stty size)\" = '40 100' ]; do :; done; echo fol''lowed\r");
    terminal.resize(40, 100);
    terminal.expect("followed");
    terminal.expect(PROMPT);
    terminal.send("tty; test -t 0 && test -t 1 && test -t 2 && echo al''l\r");
    terminal.expect("/dev/pts/0");
    terminal.expect("all");
    leave(terminal);
}

fn ctrl_c_interrupts_and_ctrl_z_suspends(fixture: &SandboxFixture) {
    let mut terminal = shell(fixture);
    terminal.send("sh -c 'echo beg\"\"un; exec sleep 10000'\r");
    terminal.expect("begun");
    terminal.send("\x03");
    terminal.expect(PROMPT);
    terminal.send("echo code=$?\r");
    terminal.expect("code=130");
    terminal.expect(PROMPT);
    terminal.send("sh -c 'echo wait\"\"ing; read line; echo \"got $line\"'\r");
    terminal.expect("waiting");
    terminal.send("\x1a");
    terminal.expect("Stopped");
    terminal.expect(PROMPT);
    terminal.send("fg\r");
    terminal.expect("read line");
    terminal.send("the rest\r");
    terminal.expect("got the rest");
    terminal.expect(PROMPT);
    leave(terminal);
}

fn pager_works_in_a_shell(fixture: &SandboxFixture) {
    let mut terminal = shell(fixture);
    terminal.send("seq 1 5000 > /tmp/numbers; less /tmp/numbers\r");
    // The pager shows the alternate screen with the first page of 23 lines.
    terminal.expect("\x1b[?1049h");
    terminal.expect("23");
    terminal.send("G");
    terminal.expect("5000");
    terminal.expect("(END)");
    terminal.send("q");
    terminal.expect("\x1b[?1049l");
    terminal.expect(PROMPT);
    leave(terminal);
}

fn editor_works_in_a_shell(fixture: &SandboxFixture) {
    let mut terminal = shell(fixture);
    terminal.send("vi written.txt\r");
    terminal.expect("\x1b[?1049h");
    terminal.expect("written.txt");
    terminal.send("ihello from within\x1b:wq\r");
    terminal.expect("\x1b[?1049l");
    terminal.expect(PROMPT);
    terminal.send("cat written.txt | tr a-z A-Z\r");
    terminal.expect("HELLO FROM WITHIN");
    leave(terminal);
    assert!(fixture.ok(&["diff", "fix"]).contains("+hello from within"));
}

fn top_works_in_a_shell(fixture: &SandboxFixture) {
    let mut terminal = shell(fixture);
    terminal.send("top\r");
    terminal.expect("load average");
    terminal.expect("COMMAND");
    terminal.expect("bash");
    terminal.send("q");
    terminal.expect(PROMPT);
    leave(terminal);
}

fn terminal_settings_are_restored_however_the_shell_ends(fixture: &SandboxFixture) {
    // One program exits and leaves the terminal in raw mode, and one is killed in raw mode.
    for (line, code) in [
        ("stty raw -echo; exit 3", 3),
        ("stty raw; kill -KILL $$", 137),
    ] {
        let mut terminal = fixture.on_terminal(&["run", "--name", "fix", "--", "bash", "-c", line]);
        let status = terminal.wait();
        assert_eq!(status.code(), Some(code), "{}", terminal.shown());
        assert_eq!(terminal.settings(), terminal.initial_settings(), "{line}");
    }
    // The sandbox is deleted while the shell runs.
    let mut terminal = shell(fixture);
    fixture.ok(&["delete", "--force", "fix"]);
    let status = terminal.wait();
    assert!(!status.success(), "{}", terminal.shown());
    assert_eq!(terminal.settings(), terminal.initial_settings());
}

fn input_file_is_read_only_in_the_sandbox(fixture: &SandboxFixture) {
    let path = fixture.gate_dir.path().join("given.txt");
    std::fs::write(&path, "one\n").unwrap();
    fixture.gate_dir.operator().chown(&path);
    // The file is opened for writing as well, as a terminal is.
    let given = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let line = "cat; echo x >> /proc/self/fd/0; echo y > /proc/self/fd/0; echo z >&0";
    let output = fixture
        .palisade(&["run", "--name", "fix", "--", "bash", "-c", line])
        .stdin(given)
        .output()
        .unwrap();
    assert_eq!(output::stdout(&output), "one\n", "{}", describe(&output));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "one\n");
}

fn large_input_is_passed_completely(fixture: &SandboxFixture) {
    // The input is larger than the buffer of a pipe, and the reader starts late.
    let path = fixture.gate_dir.path().join("much");
    let much: Vec<u8> = (0..5_000_000_u32).map(|n| n.to_le_bytes()[0]).collect();
    std::fs::write(&path, &much).unwrap();
    fixture.gate_dir.operator().chown(&path);
    let output = fixture
        .palisade(&[
            "run",
            "--name",
            "fix",
            "--",
            "bash",
            "-c",
            "cat; cat; echo over >&2",
        ])
        .stdin(std::fs::File::open(&path).unwrap())
        .output()
        .unwrap();
    assert!(output.status.success());
    assert!(
        output.stdout == much,
        "{} bytes came back",
        output.stdout.len()
    );
    assert!(
        output::stderr(&output).contains("\nover\n"),
        "{}",
        output::stderr(&output)
    );
}

fn three_interrupts_kill_a_command_that_ignores_them(fixture: &SandboxFixture) {
    fixture.create("fix");
    let mut terminal = fixture.on_terminal(&[
        "exec",
        "-T",
        "fix",
        "--",
        // The command is not bash, because bash loses an interrupt that arrives while it handles
        // another.
        "perl",
        "-e",
        "$| = 1; $SIG{INT} = sub { print \"no\\n\" }; print \"begun\\n\"; sleep 1 while 1",
    ]);
    terminal.expect("begun");
    for _ in 0..2 {
        terminal.send("\x03");
        terminal.expect("no");
    }
    terminal.send("\x03");
    let status = terminal.wait();
    assert_eq!(status.code(), Some(137), "{}", terminal.shown());
}

fn shell_exit_code_is_returned(fixture: &SandboxFixture) {
    fixture.create("fix");
    let mut terminal = fixture.on_terminal(&["shell", "fix"]);
    terminal.expect("$ ");
    terminal.send("pwd; id -un; (exit 5)\r");
    terminal.expect("/workspace");
    terminal.expect("agent");
    terminal.expect("$ ");
    // The typed end of input (Ctrl+D).
    terminal.send("\x04");
    let status = terminal.wait();
    assert_eq!(status.code(), Some(5), "{}", terminal.shown());
    assert_eq!(terminal.settings(), terminal.initial_settings());
}

fn command_ends_when_its_terminal_closes(fixture: &SandboxFixture) {
    fixture.create("fix");
    let line = "while :; do sleep 0.1; done";
    let runs = || {
        let processes = fixture.stdout_of("fix", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '");
        processes.contains(line)
    };
    for signal in ["HUP", "TERM", "KILL"] {
        let mut terminal = fixture.on_terminal(&["exec", "fix", "--", "bash", "-c", line]);
        wait::until("the command", || runs().then_some(()));
        let pid = terminal.pid().to_string();
        let kill = Command::new("kill").args(["-s", signal, &pid]).status();
        assert!(kill.unwrap().success());
        terminal.wait();
        wait::until(&format!("the end inside after {signal}"), || {
            (!runs()).then_some(())
        });
    }
}

fn commands_in_an_unresponsive_sandbox_can_be_interrupted(fixture: &SandboxFixture) {
    let id = fixture.create("fix");
    let init = fixture.init(&id).to_string();
    let kill = |signal: &str, pid: &str| {
        let status = Command::new("kill").args(["-s", signal, pid]).status();
        assert!(status.unwrap().success());
    };
    let line = "trap '' TERM HUP; echo beg''un; while :; do sleep 0.1; done";
    for (command, signal, code) in [("exec", "TERM", 143), ("run", "HUP", 129)] {
        let arguments = match command {
            "run" => &["run", "--name", "fix", "--"][..],
            _ => &["exec", "fix", "--"],
        };
        for stop in ["init", "sandbox"] {
            let mut terminal = fixture.on_terminal(&[arguments, &["bash", "-c", line]].concat());
            terminal.expect("begun");
            if stop == "init" {
                kill("STOP", &init);
            } else {
                fixture.ok(&["pause", "fix"]);
            }
            kill(signal, &terminal.pid().to_string());
            let status = terminal.wait();
            assert_eq!(status.code(), Some(code), "{stop}: {}", terminal.shown());
            assert_eq!(terminal.settings(), terminal.initial_settings());
            terminal.expect("does not respond");
            if stop == "init" {
                kill("CONT", &init);
            } else {
                fixture.ok(&["resume", "fix"]);
            }
        }
    }
    // A command that handles the signal is not killed if init responds.
    let line =
        "trap 'echo he''ard; sleep 3; exit 7' TERM; echo beg''un; while :; do sleep 0.1; done";
    let mut terminal = fixture.on_terminal(&["exec", "fix", "--", "bash", "-c", line]);
    terminal.expect("begun");
    kill("TERM", &terminal.pid().to_string());
    terminal.expect("heard");
    assert_eq!(terminal.wait().code(), Some(7), "{}", terminal.shown());
}
