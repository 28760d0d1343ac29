//! Process guard: the process between a palisade server and a command it started, which ensures
//! that the command does not outlive the server.
//!
//! ```text
//!   palisade __leash --parent PID [--leave-rest] -- CMD ARG…
//!
//!   running ── CMD ends ─────────────▶ ending, or exit with --leave-rest
//!      │ parent ends, TERM, INT, HUP
//!      ▼
//!   ending: TERM to CMD's group ── 1 s ─────▶ KILL to every descendant, until none is left
//! ```
//!
//! After USR1 the parent enforces the deadline: CMD's group receives TERM, and KILL follows when
//! the parent sends TERM or ends.
//!
//! The guard is a child subreaper, so that everything CMD starts stays a descendant of this
//! process, also after setsid or a double fork. Its exit code is that of CMD, 128 + n after
//! signal n, 127 if CMD does not exist, 126 if it cannot be run, and 125 if the guard itself
//! fails.
//!
//! The guard has one thread and no async runtime, so that it is cheap enough for every command.

pub mod descendants;

use std::ffi::{CString, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawnp};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, dup2_stderr, dup2_stdin, dup2_stdout, getppid};
use rustix::process::{PidfdFlags, pidfd_open};

/// The argument that makes this program a process guard.
pub const GUARD_ARGUMENT: &str = "__leash";

/// How long a command may take to end after SIGTERM, also on a busy machine.
const GRACE: Duration = Duration::from_secs(1);

/// How long to retry killing: a process that is stuck in the kernel does not end.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval between two checks for remaining descendants.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// Exit code of failures of the guard itself, as with env(1) and timeout(1).
const FAILED: u8 = 125;

/// Entry point: parses the arguments, guards the command, and exits with its code.
pub fn process_guard_main() -> ExitCode {
    let outcome =
        GuardOptions::read(std::env::args_os().skip(2)).and_then(|options| options.guard());
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(GuardError { code, why }) => {
            crate::output::print_message(&format!("palisade: {}", crate::output::safe(&why)));
            ExitCode::from(code)
        }
    }
}

/// Why the guard failed.
#[derive(Debug)]
struct GuardError {
    code: u8,
    why: String,
}

impl GuardError {
    fn new(why: impl Into<String>) -> Self {
        Self {
            code: FAILED,
            why: why.into(),
        }
    }

    fn from_errno(what: &str, errno: Errno) -> Self {
        Self::new(format!("{what}: {}", errno.desc()))
    }
}

/// Arguments of the guard.
#[derive(Debug, PartialEq, Eq)]
struct GuardOptions {
    parent: i32,
    /// Whether descendants may keep running when the command ends by itself.
    leave_rest: bool,
    argv: Vec<CString>,
}

impl GuardOptions {
    fn read(arguments: impl Iterator<Item = OsString>) -> Result<Self, GuardError> {
        let mut arguments = arguments.into_iter();
        let (mut parent, mut leave_rest) = (None, false);
        loop {
            let word = arguments.next();
            match word.as_deref().and_then(|word| word.to_str()) {
                Some("--parent") => {
                    let number = arguments.next().and_then(|word| word.into_string().ok());
                    parent = number.and_then(|text| text.parse().ok());
                }
                Some("--leave-rest") => leave_rest = true,
                Some("--") => break,
                _ => {
                    return Err(GuardError::new(
                        "usage: --parent PID [--leave-rest] -- CMD ARG…",
                    ));
                }
            }
        }
        let parent = parent
            .filter(|parent| *parent > 0)
            .ok_or_else(|| GuardError::new("missing --parent PID"))?;
        let argv = arguments
            .map(|word| CString::new(word.into_vec()))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|_| GuardError::new("an argument contains a NUL byte"))?;
        if argv.is_empty() {
            return Err(GuardError::new("missing command"));
        }
        Ok(Self {
            parent,
            leave_rest,
            argv,
        })
    }

    /// Starts the command and waits until it and its descendants have ended.
    fn guard(&self) -> Result<u8, GuardError> {
        let parent = watch(self.parent)?;
        prctl::set_child_subreaper(true)
            .map_err(|errno| GuardError::from_errno("cannot become a subreaper", errno))?;
        // Signals are blocked before the command starts: from then on no signal ends only the
        // guard.
        let signals = receive_signals(&[Signal::SIGUSR1])
            .map_err(|errno| GuardError::from_errno("cannot receive signals", errno))?;
        let command = self.start()?;
        release_stdio();
        let mut guarded = GuardedCommand {
            parent,
            signals,
            command,
            leave_rest: self.leave_rest,
            grace: GRACE,
            terminated: false,
            code: None,
            ending: None,
        };
        Ok(guarded.wait_until_ended())
    }

    /// Starts the command in its own process group, with default signal handling.
    fn start(&self) -> Result<Pid, GuardError> {
        let (program, environment) = (self.program()?, environment());
        let attributes = spawn_attributes(PosixSpawnFlags::POSIX_SPAWN_SETPGROUP)
            .map_err(|errno| GuardError::from_errno("cannot prepare the command", errno))?;
        let actions = PosixSpawnFileActions::init()
            .map_err(|errno| GuardError::from_errno("cannot prepare the command", errno))?;
        posix_spawnp(program, &actions, &attributes, &self.argv, &environment).map_err(|errno| {
            let name = program.to_string_lossy();
            GuardError {
                code: if errno == Errno::ENOENT { 127 } else { 126 },
                why: format!("cannot run {name}: {}", errno.desc()),
            }
        })
    }

    fn program(&self) -> Result<&CString, GuardError> {
        self.argv
            .first()
            .ok_or_else(|| GuardError::new("missing command"))
    }
}

/// A pidfd that becomes readable when the parent ends.
fn watch(parent: i32) -> Result<OwnedFd, GuardError> {
    let not_parent = || GuardError::new("the process of --parent is not the parent, or has ended");
    let pid = rustix::process::Pid::from_raw(parent).ok_or_else(not_parent)?;
    let watched = pidfd_open(pid, PidfdFlags::empty()).map_err(|_| not_parent())?;
    // Checked after opening: if the pid is still the parent's, the pidfd refers to the parent.
    if getppid() != Pid::from_raw(parent) {
        return Err(not_parent());
    }
    Ok(watched)
}

/// Blocks the signals that end a process, SIGCHLD and those in `more`, and receives them on a
/// descriptor instead.
pub fn receive_signals(more: &[Signal]) -> nix::Result<SignalFd> {
    let mut mask = SigSet::empty();
    let common = [
        Signal::SIGTERM,
        Signal::SIGINT,
        Signal::SIGHUP,
        Signal::SIGCHLD,
    ];
    for signal in common.iter().chain(more) {
        mask.add(*signal);
    }
    mask.thread_block()?;
    SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
}

/// Spawn attributes that restore default signal handling; with `SETPGROUP` in `more`, the child
/// gets its own process group.
pub fn spawn_attributes(more: PosixSpawnFlags) -> nix::Result<PosixSpawnAttr> {
    let mut attributes = PosixSpawnAttr::init()?;
    attributes.set_flags(
        PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK | PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF | more,
    )?;
    attributes.set_pgroup(Pid::from_raw(0))?;
    attributes.set_sigmask(&SigSet::empty())?;
    // The Rust runtime ignores SIGPIPE.
    let mut default = SigSet::empty();
    default.add(Signal::SIGPIPE);
    attributes.set_sigdefault(&default)?;
    Ok(attributes)
}

/// This process's environment, for a child process.
pub fn environment() -> Vec<CString> {
    std::env::vars_os()
        .filter_map(|(name, value)| {
            let pair = [name.into_vec(), value.into_vec()].join(&b'=');
            CString::new(pair).ok()
        })
        .collect()
}

/// Closes the guard's copies of the command's stdio, so that the other end sees the command
/// close them.
fn release_stdio() {
    if let Ok(null) = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/null")
    {
        let _ = dup2_stdin(&null);
        let _ = dup2_stdout(&null);
        let _ = dup2_stderr(&null);
    }
}

/// A running command and its state.
struct GuardedCommand {
    parent: OwnedFd,
    signals: SignalFd,
    command: Pid,
    leave_rest: bool,
    /// Time from SIGTERM to SIGKILL.
    grace: Duration,
    /// The command's group received SIGTERM, and the parent enforces the deadline.
    terminated: bool,
    /// The command's exit code, once it has ended.
    code: Option<u8>,
    /// When the ending began.
    ending: Option<Instant>,
}

/// Whether child processes are left.
#[derive(PartialEq, Eq)]
enum Children {
    Some,
    None,
}

impl GuardedCommand {
    fn wait_until_ended(&mut self) -> u8 {
        loop {
            self.wait();
            let children = self.reap();
            let ended_by_itself = self.ending.is_none();
            if children == Children::None
                || (ended_by_itself && self.leave_rest && self.code.is_some())
            {
                break;
            }
            match self.ending {
                None if self.code.is_some() => self.begin_ending(),
                None => {}
                Some(since) if since.elapsed() < self.grace => {}
                Some(since) if since.elapsed() < self.grace + KILL_TIMEOUT => {
                    descendants::kill_all();
                }
                Some(_) => break,
            }
        }
        // `reap` has set the code: only this process, the command's parent, can reap the command.
        self.code.unwrap_or(FAILED)
    }

    /// Waits for a signal, the end of the parent, or the next check.
    fn wait(&mut self) {
        let timeout = match self.ending {
            None => PollTimeout::NONE,
            Some(since) => {
                let rest = self
                    .grace
                    .saturating_sub(since.elapsed())
                    .max(CHECK_INTERVAL);
                PollTimeout::try_from(rest).unwrap_or(PollTimeout::ZERO)
            }
        };
        let mut ends = vec![PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
        if self.ending.is_none() {
            ends.push(PollFd::new(self.parent.as_fd(), PollFlags::POLLIN));
        }
        // An error is an interruption: everything is checked again.
        let _ = poll(&mut ends, timeout);
        let parent_gone = ends
            .get(1)
            .is_some_and(|parent| parent.any().unwrap_or(false));
        drop(ends);
        let mut must_end = false;
        while let Ok(Some(signal)) = self.signals.read_signal() {
            match i32::try_from(signal.ssi_signo).map(Signal::try_from) {
                Ok(Ok(Signal::SIGCHLD)) => {}
                Ok(Ok(Signal::SIGUSR1)) => {
                    self.terminated = true;
                    self.terminate_group();
                }
                _ => must_end = true,
            }
        }
        if parent_gone || must_end {
            if self.terminated {
                // The parent's deadline is over.
                self.grace = Duration::ZERO;
            }
            self.begin_ending();
        }
    }

    fn begin_ending(&mut self) {
        if self.ending.is_none() {
            self.ending = Some(Instant::now());
            self.terminate_group();
        }
    }

    fn terminate_group(&self) {
        let _ = kill(Pid::from_raw(-self.command.as_raw()), Signal::SIGTERM);
    }

    /// Reaps every child that has ended.
    fn reap(&mut self) -> Children {
        loop {
            let (pid, code) = match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, code)) => (pid, code),
                Ok(WaitStatus::Signaled(pid, signal, _)) => (pid, 128 + signal as i32),
                Ok(WaitStatus::StillAlive) => return Children::Some,
                Ok(_) | Err(Errno::EINTR) => continue,
                Err(_) => return Children::None,
            };
            if pid == self.command {
                self.code = Some(u8::try_from(code).unwrap_or(FAILED));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(words: &[&str]) -> Result<GuardOptions, String> {
        GuardOptions::read(words.iter().map(OsString::from)).map_err(|error| error.why)
    }

    #[test]
    fn arguments_are_parsed_up_to_the_command() {
        let options = read(&["--parent", "7", "--leave-rest", "--", "a", "--parent"]).unwrap();
        assert_eq!((options.parent, options.leave_rest), (7, true));
        assert_eq!(options.argv, [c"a".to_owned(), c"--parent".to_owned()]);
    }

    #[test]
    fn arguments_without_parent_or_command_are_refused() {
        for words in [
            &["--", "a"][..],
            &["--parent", "x", "--", "a"],
            &["--parent", "-1", "--", "a"],
            &["--parent", "7", "--"],
            &["--parent", "7", "a"],
            &["--parent", "7"],
            &[],
        ] {
            assert!(read(words).is_err(), "{words:?}");
        }
    }
}
