//! A command on a pseudo-terminal, with simulated key presses.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use crate::operator::Operator;
use crate::{output, wait};

/// A marker that no command writes.
const END: &[u8] = b"\x1ethe end of what the command wrote\x1e";

/// A pseudo-terminal and the command that has it as its controlling terminal. Dropping it
/// kills the command.
#[derive(Debug)]
pub struct Pty {
    child: Child,
    keys: File,
    /// Kept open to read the settings after the command has ended, and to write the marker.
    screen: OwnedFd,
    shown: Arc<Mutex<Vec<u8>>>,
    /// Length of the output that [`Pty::expect`] has matched.
    seen: usize,
    /// The settings before the command had the terminal.
    initial_settings: String,
}

#[expect(
    clippy::expect_used,
    reason = "a test without a terminal cannot continue"
)]
impl Pty {
    /// Starts a command on a terminal of 24 rows and 80 columns.
    pub fn start(operator: Operator, command: &Command) -> Self {
        let pair = nix::pty::openpty(None, None).expect("a terminal");
        let keys = File::from(pair.master);
        let end = || Stdio::from(pair.slave.try_clone().expect("a descriptor"));
        // The command gets a session of its own with this controlling terminal.
        let mut started = with_controlling_terminal(operator, command);
        let shown = Arc::new(Mutex::new(Vec::new()));
        stty(&pair.slave, &["rows", "24", "cols", "80"]);
        let initial_settings = stty(&pair.slave, &["-g"]);
        let child = started
            .stdin(end())
            .stdout(end())
            .stderr(end())
            .spawn()
            .expect("setsid");
        let mut reader = keys.try_clone().expect("a descriptor");
        let keep = Arc::clone(&shown);
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // A read fails with EIO when the terminal has closed.
            while let Ok(length @ 1..) = reader.read(&mut buffer) {
                let fresh = buffer.get(..length).unwrap_or_default();
                keep.lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .extend_from_slice(fresh);
            }
        });
        Self {
            child,
            keys,
            screen: pair.slave,
            shown,
            seen: 0,
            initial_settings,
        }
    }

    /// Presses keys.
    pub fn send(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("a terminal");
    }

    /// Waits for `text` in the output after the previous match.
    pub fn expect(&mut self, text: &str) {
        let shown = Arc::clone(&self.shown);
        let seen = self.seen;
        let found = wait::until_or(
            || {
                let shown = shown.lock().unwrap_or_else(PoisonError::into_inner);
                let fresh = shown.get(seen..).unwrap_or_default();
                let mut windows = fresh.windows(text.len());
                windows.position(|window| window == text.as_bytes())
            },
            || format!("{text:?} on the terminal, which shows:\n{}", self.shown()),
        );
        self.seen += found + text.len();
    }

    /// All output so far.
    pub fn shown(&self) -> String {
        let shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&shown).into_owned()
    }

    /// Changes the window size; the kernel sends SIGWINCH to the foreground process group.
    pub fn resize(&self, rows: u16, columns: u16) {
        let (rows, columns) = (rows.to_string(), columns.to_string());
        stty(&self.screen, &["rows", &rows, "cols", &columns]);
    }

    /// Every setting of the terminal, in stty's own form.
    pub fn settings(&self) -> String {
        stty(&self.screen, &["-g"])
    }

    /// The settings before the command started.
    pub fn initial_settings(&self) -> &str {
        &self.initial_settings
    }

    /// The command's process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the command to exit and for all of its output.
    pub fn wait(&mut self) -> ExitStatus {
        let shown = Arc::clone(&self.shown);
        let status = wait::until_or(
            || self.child.try_wait().ok().flatten(),
            || {
                let shown = shown.lock().unwrap_or_else(PoisonError::into_inner);
                format!(
                    "the command's end; the terminal shows:\n{}",
                    String::from_utf8_lossy(&shown)
                )
            },
        );
        self.wait_for_output();
        status
    }

    /// Waits until all output has arrived: a terminal keeps the order of its output, so a marker
    /// that is written last arrives last.
    fn wait_for_output(&self) {
        let mut screen = File::from(self.screen.try_clone().expect("a descriptor"));
        screen.write_all(END).expect("a terminal");
        wait::until("the last output of the command", || {
            let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
            let at = shown.windows(END.len()).position(|window| window == END)?;
            shown.drain(at..at + END.len());
            Some(())
        });
    }
}

impl Drop for Pty {
    fn drop(&mut self) {
        // Both fail if the process has exited already, which is expected.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The same command, started by `setsid`: the standard library has no safe way to give a child
/// a controlling terminal.
fn with_controlling_terminal(operator: Operator, command: &Command) -> Command {
    let mut arguments = vec![command.get_program()];
    arguments.extend(command.get_args());
    let mut outer = match operator {
        // The command needs root to create its mount namespace, and switches the user itself.
        Operator::SubidUser => Command::new("setsid"),
        Operator::CurrentUser | Operator::Unprivileged => operator.command("setsid"),
    };
    outer.args(["--ctty", "--wait"]).args(arguments).env_clear();
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            outer.env(name, value);
        }
    }
    if let Some(dir) = command.get_current_dir() {
        outer.current_dir(dir);
    }
    outer
}

#[expect(
    clippy::expect_used,
    reason = "a test without a terminal cannot continue"
)]
fn stty(screen: &OwnedFd, args: &[&str]) -> String {
    let screen = screen.try_clone().expect("a descriptor");
    let output = Command::new("stty")
        .args(args)
        .stdin(Stdio::from(screen))
        .output()
        .expect("stty");
    assert!(output.status.success(), "stty: {}", output::stderr(&output));
    output::stdout(&output).trim().to_owned()
}
