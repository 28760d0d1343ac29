//! A command on a real terminal, with somebody at the keys.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use crate::operator::Operator;
use crate::{said, wait};

/// What no command ever writes.
const END: &[u8] = b"\x1ethe end of what the command wrote\x1e";

/// A pseudo-terminal and the command that has it as its controlling terminal. Dropping it
/// kills the command.
#[derive(Debug)]
pub struct Pty {
    child: Child,
    keys: File,
    /// Ours as well, so that the settings can be looked at after the command's end, and a
    /// mark be put there.
    screen: OwnedFd,
    shown: Arc<Mutex<Vec<u8>>>,
    /// What was waited for already.
    seen: usize,
    /// The settings before the command had the terminal.
    at_first: String,
}

#[expect(clippy::expect_used, reason = "a test without a terminal cannot go on")]
impl Pty {
    /// Starts a command on a terminal of 24 rows and 80 columns.
    pub fn start(operator: Operator, command: &Command) -> Self {
        let pair = nix::pty::openpty(None, None).expect("a terminal");
        let keys = File::from(pair.master);
        let end = || Stdio::from(pair.slave.try_clone().expect("a descriptor"));
        // A session of its own, with this terminal as its own.
        let mut started = rebuilt(operator, command);
        let shown = Arc::new(Mutex::new(Vec::new()));
        stty(&pair.slave, &["rows", "24", "cols", "80"]);
        let at_first = stty(&pair.slave, &["-g"]);
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
            // EIO is how a terminal ends.
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
            at_first,
        }
    }

    /// Presses keys.
    pub fn send(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("a terminal");
    }

    /// Waits until a text appears after what was waited for before.
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

    /// All that was shown so far.
    pub fn shown(&self) -> String {
        let shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&shown).into_owned()
    }

    /// Changes the size, as pulling at a window does: the kernel tells the foreground.
    pub fn resize(&self, rows: u16, columns: u16) {
        let (rows, columns) = (rows.to_string(), columns.to_string());
        stty(&self.screen, &["rows", &rows, "cols", &columns]);
    }

    /// Every setting of the terminal, in stty's own form.
    pub fn settings(&self) -> String {
        stty(&self.screen, &["-g"])
    }

    /// What they were before the command began.
    pub fn settings_at_first(&self) -> &str {
        &self.at_first
    }

    /// The command's process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the command's end, and until all it wrote is shown.
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
        self.catch_up();
        status
    }

    /// A terminal keeps the order: when a mark of ours has come, so has all before it.
    fn catch_up(&self) {
        let mut screen = File::from(self.screen.try_clone().expect("a descriptor"));
        screen.write_all(END).expect("a terminal");
        wait::until("the last that the command wrote", || {
            let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
            let at = shown.windows(END.len()).position(|window| window == END)?;
            shown.drain(at..at + END.len());
            Some(())
        });
    }
}

impl Drop for Pty {
    fn drop(&mut self) {
        // Both fail when it has ended already, which is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The same command, begun by `setsid`: the standard library has no safe way to give a
/// child a controlling terminal.
fn rebuilt(operator: Operator, command: &Command) -> Command {
    let mut words = vec![command.get_program()];
    words.extend(command.get_args());
    let mut outer = match operator {
        // What it begins with makes a place that only root can make, and then becomes another.
        Operator::Borrower => Command::new("setsid"),
        Operator::Oneself | Operator::Nobody => operator.command("setsid"),
    };
    outer.args(["--ctty", "--wait"]).args(words).env_clear();
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

#[expect(clippy::expect_used, reason = "a test without a terminal cannot go on")]
fn stty(screen: &OwnedFd, args: &[&str]) -> String {
    let screen = screen.try_clone().expect("a descriptor");
    let output = Command::new("stty")
        .args(args)
        .stdin(Stdio::from(screen))
        .output()
        .expect("stty");
    assert!(output.status.success(), "stty: {}", said::err(&output));
    said::out(&output).trim().to_owned()
}
