//! Process guard: the process between a server of ours and a command it started, which ensures
//! that the command never outlives its reason.
//!
//! ```text
//!   palisade __leash --parent PID [--leave-rest] -- CMD ARG…
//!
//!   running ── CMD ends ─────────────▶ ending, or done with --leave-rest
//!      │ the parent is gone, TERM, INT, HUP
//!      ▼
//!   ending: TERM to CMD's group ── 1 s ─────▶ KILL to every descendant, until there is none
//! ```
//!
//! USR1 leaves the deadline to the parent: CMD's group receives TERM, and KILL follows when the
//! parent sends TERM, or is gone.
//!
//! It is a child subreaper, so that whatever CMD starts stays a descendant of this process: a
//! session of its own or a double fork is no way out. It ends as CMD did, with 128 + n after
//! signal n; 127 and 126 when CMD is not there or cannot be run, and 125 when the leash itself
//! cannot do its work.
//!
//! One thread, and nothing of the async runtime: a process is cheap enough to have one of these
//! for every command.

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

/// The word that makes this program a leash.
pub const LEASH: &str = "__leash";

/// How long a command may take to end by itself, on a machine that is busy with others.
const GRACE: Duration = Duration::from_secs(1);

/// How long killing is tried: what is stuck in the kernel does not die.
const PATIENCE: Duration = Duration::from_secs(10);

/// Between two looks at what is still there.
const LOOK: Duration = Duration::from_millis(5);

/// Its own failures, as those of env(1) and timeout(1).
const FAILED: u8 = 125;

/// Reads the arguments, holds the command, and says how it ended.
pub fn process_guard_main() -> ExitCode {
    let outcome = Wish::read(std::env::args_os().skip(2)).and_then(|wish| wish.hold());
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(Refusal { code, why }) => {
            crate::output::say(&format!("palisade: {}", crate::output::safe(&why)));
            ExitCode::from(code)
        }
    }
}

/// Why there is nothing to hold.
#[derive(Debug)]
struct Refusal {
    code: u8,
    why: String,
}

impl Refusal {
    fn new(why: impl Into<String>) -> Self {
        Self {
            code: FAILED,
            why: why.into(),
        }
    }

    fn of_system(what: &str, errno: Errno) -> Self {
        Self::new(format!("{what}: {}", errno.desc()))
    }
}

/// What is asked for.
#[derive(Debug, PartialEq, Eq)]
struct Wish {
    parent: i32,
    /// Whether what the command left running may stay when it ends by itself.
    leave_rest: bool,
    argv: Vec<CString>,
}

impl Wish {
    fn read(arguments: impl Iterator<Item = OsString>) -> Result<Self, Refusal> {
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
                    return Err(Refusal::new(
                        "usage: --parent PID [--leave-rest] -- CMD ARG…",
                    ));
                }
            }
        }
        let parent = parent
            .filter(|parent| *parent > 0)
            .ok_or_else(|| Refusal::new("a leash needs --parent PID"))?;
        let argv = arguments
            .map(|word| CString::new(word.into_vec()))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|_| Refusal::new("an argument holds a NUL"))?;
        if argv.is_empty() {
            return Err(Refusal::new("a leash needs a command"));
        }
        Ok(Self {
            parent,
            leave_rest,
            argv,
        })
    }

    /// Starts the command and stays until nothing of it is left to hold.
    fn hold(&self) -> Result<u8, Refusal> {
        let parent = watch(self.parent)?;
        prctl::set_child_subreaper(true)
            .map_err(|errno| Refusal::of_system("cannot become a subreaper", errno))?;
        // Before there is a command: from here on no signal ends the leash alone.
        let signals = receive_signals(&[Signal::SIGUSR1])
            .map_err(|errno| Refusal::of_system("cannot receive signals", errno))?;
        let command = self.start()?;
        let_go_of_ends();
        let mut hold = Hold {
            parent,
            signals,
            command,
            leave_rest: self.leave_rest,
            grace: GRACE,
            terminated: false,
            code: None,
            ending: None,
        };
        Ok(hold.until_over())
    }

    /// The command in a group of its own, with the signals it would have without us.
    fn start(&self) -> Result<Pid, Refusal> {
        let (program, environment) = (self.program()?, environment());
        let attributes = spawn_attributes(PosixSpawnFlags::POSIX_SPAWN_SETPGROUP)
            .map_err(|errno| Refusal::of_system("cannot prepare the command", errno))?;
        let actions = PosixSpawnFileActions::init()
            .map_err(|errno| Refusal::of_system("cannot prepare the command", errno))?;
        posix_spawnp(program, &actions, &attributes, &self.argv, &environment).map_err(|errno| {
            let name = program.to_string_lossy();
            Refusal {
                code: if errno == Errno::ENOENT { 127 } else { 126 },
                why: format!("cannot run {name}: {}", errno.desc()),
            }
        })
    }

    fn program(&self) -> Result<&CString, Refusal> {
        self.argv
            .first()
            .ok_or_else(|| Refusal::new("a leash needs a command"))
    }
}

/// A descriptor that speaks up when the parent is gone.
fn watch(parent: i32) -> Result<OwnedFd, Refusal> {
    let gone = || Refusal::new("the process to watch is not the parent, or is gone");
    let pid = rustix::process::Pid::from_raw(parent).ok_or_else(gone)?;
    let watched = pidfd_open(pid, PidfdFlags::empty()).map_err(|_| gone())?;
    // Only now: a number that is still the parent's is the one the descriptor was made for.
    if getppid() != Pid::from_raw(parent) {
        return Err(gone());
    }
    Ok(watched)
}

/// Blocks the signals that end a process, that of an ended child and those in `more`, and receives
/// them on a descriptor instead.
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

/// Attributes that undo what this process did to its signals; with `SETPGROUP` in `more`, for a
/// group of its own.
pub fn spawn_attributes(more: PosixSpawnFlags) -> nix::Result<PosixSpawnAttr> {
    let mut attributes = PosixSpawnAttr::init()?;
    attributes.set_flags(
        PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK | PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF | more,
    )?;
    attributes.set_pgroup(Pid::from_raw(0))?;
    attributes.set_sigmask(&SigSet::empty())?;
    // The Rust runtime ignores it.
    let mut default = SigSet::empty();
    default.add(Signal::SIGPIPE);
    attributes.set_sigdefault(&default)?;
    Ok(attributes)
}

/// This process's environment, for a process that it spawns.
pub fn environment() -> Vec<CString> {
    std::env::vars_os()
        .filter_map(|(name, value)| {
            let pair = [name.into_vec(), value.into_vec()].join(&b'=');
            CString::new(pair).ok()
        })
        .collect()
}

/// Lets go of the command's input and output: who is at the other end must see it close them.
fn let_go_of_ends() {
    if let Ok(nothing) = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/null")
    {
        let _ = dup2_stdin(&nothing);
        let _ = dup2_stdout(&nothing);
        let _ = dup2_stderr(&nothing);
    }
}

/// A command that is held.
struct Hold {
    parent: OwnedFd,
    signals: SignalFd,
    command: Pid,
    leave_rest: bool,
    /// From the beginning of the end until everything is killed.
    grace: Duration,
    /// The command's group has received TERM, and the parent keeps the deadline.
    terminated: bool,
    /// How the command ended, once it has.
    code: Option<u8>,
    /// When the end began.
    ending: Option<Instant>,
}

/// Who is left.
#[derive(PartialEq, Eq)]
enum Left {
    Somebody,
    Nobody,
}

impl Hold {
    fn until_over(&mut self) -> u8 {
        loop {
            self.wait();
            let left = self.reap();
            let alone = self.ending.is_none();
            if left == Left::Nobody || (alone && self.leave_rest && self.code.is_some()) {
                break;
            }
            match self.ending {
                None if self.code.is_some() => self.begin_ending(),
                None => {}
                Some(since) if since.elapsed() < self.grace => {}
                Some(since) if since.elapsed() < self.grace + PATIENCE => descendants::kill_all(),
                Some(_) => break,
            }
        }
        // Only its parent, which we are, can reap it.
        self.code.unwrap_or(FAILED)
    }

    /// Until something happened, or it is time to look.
    fn wait(&mut self) {
        let patience = match self.ending {
            None => PollTimeout::NONE,
            Some(since) => {
                let rest = self.grace.saturating_sub(since.elapsed()).max(LOOK);
                PollTimeout::try_from(rest).unwrap_or(PollTimeout::ZERO)
            }
        };
        let mut ends = vec![PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
        if self.ending.is_none() {
            ends.push(PollFd::new(self.parent.as_fd(), PollFlags::POLLIN));
        }
        // A failure is an interruption; whatever it was, it is looked at again.
        let _ = poll(&mut ends, patience);
        let parent_gone = ends
            .get(1)
            .is_some_and(|parent| parent.any().unwrap_or(false));
        drop(ends);
        let mut told = false;
        while let Ok(Some(signal)) = self.signals.read_signal() {
            match i32::try_from(signal.ssi_signo).map(Signal::try_from) {
                Ok(Ok(Signal::SIGCHLD)) => {}
                Ok(Ok(Signal::SIGUSR1)) => {
                    self.terminated = true;
                    self.terminate_group();
                }
                _ => told = true,
            }
        }
        if parent_gone || told {
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

    /// Takes in everybody who has ended.
    fn reap(&mut self) -> Left {
        loop {
            let (pid, code) = match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, code)) => (pid, code),
                Ok(WaitStatus::Signaled(pid, signal, _)) => (pid, 128 + signal as i32),
                Ok(WaitStatus::StillAlive) => return Left::Somebody,
                Ok(_) | Err(Errno::EINTR) => continue,
                Err(_) => return Left::Nobody,
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

    fn read(words: &[&str]) -> Result<Wish, String> {
        Wish::read(words.iter().map(OsString::from)).map_err(|refusal| refusal.why)
    }

    #[test]
    fn a_wish_is_read_up_to_the_command() {
        let wish = read(&["--parent", "7", "--leave-rest", "--", "a", "--parent"]).unwrap();
        assert_eq!((wish.parent, wish.leave_rest), (7, true));
        assert_eq!(wish.argv, [c"a".to_owned(), c"--parent".to_owned()]);
    }

    #[test]
    fn a_wish_without_parent_or_command_is_refused() {
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
