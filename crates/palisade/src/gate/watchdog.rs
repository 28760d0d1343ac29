//! The watchdog: the parent process of a gate in the background, which restarts it when it
//! dies.
//!
//! ```text
//!   palisade __watchdog STATE_DIR ARG…       ARG… are the arguments of `gate run --detached`
//!
//!              spawn              'ready'              dies
//!   (start) ─────────▶ starting ──────────▶ running ─────────▶ backoff ──▶ starting
//!                         │                    │                  │
//!                         │ dies before the    │ graceful stop    │ the fifth death in a
//!                         │ first 'ready'      │                  │ minute, or SIGTERM
//!                         ▼                    ▼                  ▼
//!                    exit with its code       exit 0             exit; reason in gate.failed
//! ```
//!
//! A gate that shuts down gracefully writes 'stopping' first, so that its end does not count as
//! a death. SIGTERM and SIGINT stop the gate gracefully, and the watchdog ends with it. If the
//! watchdog is killed, its gate runs without one until it is restarted.
//!
//! The watchdog has one thread and no async runtime: it only waits while the gate runs.

use std::collections::VecDeque;
use std::ffi::{CString, OsString};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::spawn::{PosixSpawnFileActions, PosixSpawnFlags, posix_spawn};
use nix::sys::signal::{Signal, kill};
use nix::sys::signalfd::SignalFd;
use nix::sys::stat::Mode;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, dup2_stderr, dup2_stdin, dup2_stdout, pipe2};
use tokio::signal::unix::SignalKind;

use crate::exit::{CliError, CliExit, exit_of};
use crate::gate::lock::WatchdogLock;
use crate::paths;
use crate::process_guard;

/// The argument that makes this program a watchdog.
pub const WATCHDOG_ARGUMENT: &str = "__watchdog";

/// Timeout for a gate to become ready.
pub const START_LIMIT: Duration = Duration::from_secs(30);

/// Number of deaths within [`WINDOW`] that ends the restarts.
const MAX_DEATHS: usize = 5;

/// Time span in which deaths are counted for [`MAX_DEATHS`].
const WINDOW: Duration = Duration::from_secs(60);

/// The wait after the first death; each further death within [`WINDOW`] doubles the wait.
const FIRST_BACKOFF: Duration = Duration::from_millis(100);

/// The signal by which a watchdog stops its gate gracefully.
pub const STOP: SignalKind = SignalKind::user_defined1();

/// The line that a gate writes when all its listeners are open.
const READY: &str = "ready";

/// The line that a gate writes when a graceful shutdown begins.
const STOPPING: &str = "stopping";

/// Maximum length of a line that a gate writes to its watchdog.
const MAX_LINE: usize = 256;

/// Entry point: parses the arguments and watches the gate until it is stopped.
pub fn watchdog_main() -> ExitCode {
    match watch() {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            let message = format!("palisade: {error:#}");
            crate::output::print_message(&crate::output::safe(&message));
            exit_of(&error).into()
        }
    }
}

fn watch() -> Result<u8> {
    // An inherited lock or pipe of the operator's shell would stay open for months.
    sandbox::namespace::hardening::close_from(3).context("cannot close inherited descriptors")?;
    let mut arguments = std::env::args_os().skip(2);
    let usage = || CliError::new(CliExit::Usage, "usage: __watchdog STATE_DIR ARG…");
    let state_dir = PathBuf::from(arguments.next().ok_or_else(usage)?);
    nix::unistd::setsid().context("cannot detach from the terminal")?;
    // The environment may contain secrets of the operator.
    nix::sys::prctl::set_dumpable(false).context("cannot forbid core dumps")?;
    nix::sys::stat::umask(Mode::from_bits_truncate(0o077));
    let lock = WatchdogLock::take(&state_dir.join(paths::WATCHDOG_LOCK))?;
    let signals = process_guard::receive_signals(&[]).context("cannot receive signals")?;
    let watchdog = Watchdog {
        state_dir,
        lock,
        arguments: arguments.collect(),
        signals,
        stop_requested: false,
        announced: false,
    };
    Ok(watchdog.run())
}

/// The watchdog of one state directory.
struct Watchdog {
    state_dir: PathBuf,
    lock: WatchdogLock,
    arguments: Vec<OsString>,
    signals: SignalFd,
    /// SIGTERM or SIGINT was received.
    stop_requested: bool,
    /// Whether the ready gate was reported to the command that started it.
    announced: bool,
}

/// The process of a gate.
struct GateProcess {
    pid: Pid,
    /// The gate's stdout, until the gate closes it.
    lines: Option<File>,
    /// The start of a line whose end has not arrived yet.
    partial: Vec<u8>,
    ready: bool,
    /// The gate reported a graceful shutdown.
    stopping: bool,
    /// [`STOP`] was sent to the gate.
    stop_sent: bool,
    /// The gate was killed because it was not ready in time.
    overdue: bool,
    started: Instant,
}

/// How a gate ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// The gate was stopped, or another gate holds the state directory.
    Stopped(u8),
    /// The gate must be restarted.
    Died { cause: String, code: u8 },
}

impl Watchdog {
    fn run(mut self) -> u8 {
        let mut deaths = Deaths::default();
        let mut last_cause = None;
        loop {
            let (pid, end) = match self.spawn(last_cause.as_deref()) {
                Ok(gate) => (Some(gate.pid), self.follow(gate)),
                Err(error) => (None, spawn_failed(&error)),
            };
            let (cause, code) = match end {
                End::Stopped(code) => return code,
                End::Died { cause, code } => (cause, code),
            };
            if !self.announced {
                return code;
            }
            let pid = pid.map_or_else(String::new, |pid| format!(" pid={pid}"));
            let Some(wait) = deaths.record(Instant::now()) else {
                self.log("ERROR", &format!("gate died{pid} cause=\"{cause}\""));
                self.give_up(&cause);
                return CliExit::Failed.code();
            };
            let line = format!("gate died, restarting{pid} cause=\"{cause}\" wait={wait:?}");
            self.log("WARN", &line);
            if self.pause(wait) || !self.lock.is_in_place() {
                return CliExit::Ok.code();
            }
            last_cause = Some(cause);
        }
    }

    /// Starts a gate from the running executable, also after an update has replaced its file: a
    /// crash must not cause an upgrade.
    fn spawn(&self, last_cause: Option<&str>) -> nix::Result<GateProcess> {
        let (reader, writer) = pipe2(OFlag::O_CLOEXEC)?;
        fcntl(&reader, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        let mut actions = PosixSpawnFileActions::init()?;
        actions.add_open(0, "/dev/null", OFlag::O_RDONLY, Mode::empty())?;
        actions.add_dup2(writer.as_raw_fd(), 1)?;
        let append = OFlag::O_WRONLY | OFlag::O_APPEND | OFlag::O_CREAT;
        let log = self.state_dir.join(paths::LOG);
        actions.add_open(2, &log, append, Mode::from_bits_truncate(0o600))?;
        let mut words = vec![OsString::from("palisade")];
        words.extend(self.arguments.iter().cloned());
        if let Some(cause) = last_cause {
            words.extend(["--after-death".into(), cause.into()]);
        }
        let words: Vec<CString> = words
            .into_iter()
            .map(|word| CString::new(word.into_vec()).map_err(|_| Errno::EINVAL))
            .collect::<nix::Result<_>>()?;
        let pid = posix_spawn(
            own_program().as_path(),
            &actions,
            &process_guard::spawn_attributes(PosixSpawnFlags::empty())?,
            &words,
            &process_guard::environment(),
        )?;
        Ok(GateProcess {
            pid,
            lines: Some(File::from(reader)),
            partial: Vec::new(),
            ready: false,
            stopping: false,
            stop_sent: false,
            overdue: false,
            started: Instant::now(),
        })
    }

    /// Waits until the gate has ended.
    fn follow(&mut self, mut gate: GateProcess) -> End {
        loop {
            let timeout = if gate.ready || gate.overdue {
                PollTimeout::NONE
            } else {
                poll_timeout(START_LIMIT.saturating_sub(gate.started.elapsed()))
            };
            let mut ends = vec![PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
            if let Some(lines) = &gate.lines {
                ends.push(PollFd::new(lines.as_fd(), PollFlags::POLLIN));
            }
            // An error is an interruption: everything is checked again.
            let _ = poll(&mut ends, timeout);
            drop(ends);
            if self.is_stop_requested() && !gate.stop_sent {
                gate.stop_sent = true;
                let _ = kill(gate.pid, Signal::try_from(STOP.as_raw_value()).ok());
            }
            let status = match waitpid(gate.pid, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::StillAlive) | Err(Errno::EINTR) => None,
                Ok(ended) => Some(ended),
                Err(_) => Some(WaitStatus::Exited(gate.pid, 0)),
            };
            gate.read_lines();
            if gate.ready && !self.announced {
                self.announce(gate.pid);
            }
            if let Some(status) = status {
                return gate.classify(status);
            }
            if !gate.ready && !gate.overdue && gate.started.elapsed() >= START_LIMIT {
                gate.overdue = true;
                let _ = kill(gate.pid, Signal::SIGKILL);
            }
        }
    }

    /// Whether SIGTERM or SIGINT was received. From then on the gate is not restarted.
    fn is_stop_requested(&mut self) -> bool {
        while let Ok(Some(signal)) = self.signals.read_signal() {
            let number = i32::try_from(signal.ssi_signo).ok();
            self.stop_requested |= [Signal::SIGTERM, Signal::SIGINT]
                .iter()
                .any(|signal| Some(*signal as i32) == number);
        }
        self.stop_requested
    }

    /// Waits for a restart; `true` when a signal ended the wait.
    fn pause(&mut self, wait: Duration) -> bool {
        let until = Instant::now() + wait;
        while !self.is_stop_requested() {
            let rest = until.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return false;
            }
            let mut ends = [PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
            let _ = poll(&mut ends, poll_timeout(rest));
        }
        true
    }

    /// Reports the first gate to the command that started this watchdog, and closes that
    /// command's stdio.
    fn announce(&mut self, pid: Pid) {
        self.announced = true;
        let mut stdout = io::stdout();
        let _ = writeln!(stdout, "{READY} {pid}").and_then(|()| stdout.flush());
        if let Ok(null) = open_null() {
            let _ = dup2_stdin(&null);
            let _ = dup2_stdout(&null);
            let _ = dup2_stderr(&null);
        }
        // Most of the mapped memory was needed only at the start.
        let _ = sandbox::startup_memory::release_startup_memory();
    }

    fn give_up(&self, cause: &str) {
        let (now, window) = (jiff::Timestamp::now(), WINDOW.as_secs());
        let why = format!(
            "it died {MAX_DEATHS} times within {window} s and has been down since {now:.0}, last cause: \
             {cause}"
        );
        self.log("ERROR", &format!("gate is no longer restarted: {why}"));
        if let Err(error) = write_failure(&self.state_dir, &why) {
            self.log("ERROR", &format!("writing gate.failed failed: {error}"));
        }
    }

    /// Appends a line to the gate's log. The file is opened each time: a gate rotates it.
    fn log(&self, level: &str, text: &str) {
        let opened = OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(self.state_dir.join(paths::LOG));
        if let Ok(mut file) = opened {
            let now = jiff::Timestamp::now();
            let _ = file.write_all(format!("{now:.6} {level:>5} watchdog: {text}\n").as_bytes());
        }
    }
}

impl GateProcess {
    /// Reads the lines that the gate has written so far.
    fn read_lines(&mut self) {
        let mut chunk = [0; MAX_LINE];
        while let Some(lines) = &mut self.lines {
            match lines.read(&mut chunk) {
                Ok(0) => self.lines = None,
                Ok(count) => self.partial.extend(chunk.iter().take(count)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => self.lines = None,
            }
            while let Some(end) = self.partial.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.partial.drain(..=end).collect();
                self.ready |= line.trim_ascii_end() == READY.as_bytes();
                self.stopping |= line.trim_ascii_end() == STOPPING.as_bytes();
            }
            if self.partial.len() > MAX_LINE {
                self.partial.clear();
            }
        }
    }

    fn classify(&self, status: WaitStatus) -> End {
        let (cause, code) = match status {
            WaitStatus::Exited(_, code) => (
                format!("exit status {code}"),
                u8::try_from(code).unwrap_or(CliExit::Failed.code()),
            ),
            WaitStatus::Signaled(_, signal, _) => {
                let code = u8::try_from(128 + signal as i32).unwrap_or(CliExit::Failed.code());
                (format!("killed by {signal}"), code)
            }
            other => (format!("{other:?}"), CliExit::Failed.code()),
        };
        if self.stop_sent || self.stopping {
            return End::Stopped(CliExit::Ok.code());
        }
        if self.overdue {
            let cause = format!("not ready within {} s", START_LIMIT.as_secs());
            let code = CliExit::TimedOut.code();
            return End::Died { cause, code };
        }
        let requested = [Signal::SIGTERM, Signal::SIGINT].map(|signal| 128 + signal as i32);
        let is_graceful = code == CliExit::Ok.code()
            || code == CliExit::Exists.code()
            || requested.contains(&i32::from(code));
        if is_graceful {
            End::Stopped(code)
        } else {
            End::Died { cause, code }
        }
    }
}

fn spawn_failed(error: &Errno) -> End {
    End::Died {
        cause: format!("cannot be started: {}", error.desc()),
        code: CliExit::Failed.code(),
    }
}

/// The recent deaths of a gate.
#[derive(Debug, Default)]
struct Deaths(VecDeque<Instant>);

impl Deaths {
    /// Records a death. Returns the wait before the restart, or `None` for no restart.
    fn record(&mut self, now: Instant) -> Option<Duration> {
        self.0
            .retain(|at| now.saturating_duration_since(*at) < WINDOW);
        let before = self.0.len();
        self.0.push_back(now);
        (self.0.len() < MAX_DEATHS).then(|| FIRST_BACKOFF * (1 << before))
    }
}

/// The gate's end of the pipe to its watchdog.
#[derive(Debug)]
pub struct WatchdogPipe(File);

impl WatchdogPipe {
    /// Takes stdout over, so that no process which the gate starts inherits it.
    pub fn take_stdout() -> io::Result<Self> {
        let pipe: OwnedFd = io::stdout().as_fd().try_clone_to_owned()?;
        dup2_stdout(&open_null()?)?;
        Ok(Self(File::from(pipe)))
    }

    /// Reports that all listeners are open.
    pub fn report_ready(&mut self) -> io::Result<()> {
        self.report(READY)
    }

    /// Reports a graceful shutdown. Errors are ignored: the watchdog may have ended.
    pub fn report_stopping(&mut self) {
        let _ = self.report(STOPPING);
    }

    fn report(&mut self, line: &str) -> io::Result<()> {
        self.0.write_all(format!("{line}\n").as_bytes())
    }
}

/// The process id in a line by which a watchdog reports a gate that is ready.
pub fn read_announcement(line: &str) -> Option<u32> {
    line.strip_prefix(READY)?.trim().parse().ok()
}

/// Why the gate of a state directory is down, if its watchdog has given up.
pub fn failure(state_dir: &Path) -> Option<String> {
    let mut text = String::new();
    let file = File::open(state_dir.join(paths::FAILURE)).ok()?;
    file.take(4096).read_to_string(&mut text).ok()?;
    Some(crate::output::safe(text.trim_end())).filter(|text| !text.is_empty())
}

/// Removes the failure record of an earlier gate.
pub fn clear_failure(state_dir: &Path) {
    let _ = std::fs::remove_file(state_dir.join(paths::FAILURE));
}

fn write_failure(state_dir: &Path, why: &str) -> io::Result<()> {
    let path = state_dir.join(paths::FAILURE);
    let draft = path.with_extension("new");
    std::fs::write(&draft, format!("{why}\n"))?;
    std::fs::rename(draft, path)
}

/// The path of this program, or /proc/self/exe if the path now names another file.
fn own_program() -> PathBuf {
    let link = PathBuf::from("/proc/self/exe");
    let identity = |path: &Path| {
        let found = path.metadata().ok()?;
        Some((found.dev(), found.ino()))
    };
    let path = std::env::current_exe().ok();
    path.filter(|path| identity(path).is_some() && identity(path) == identity(&link))
        .unwrap_or(link)
}

fn open_null() -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open("/dev/null")
}

/// A timeout for `poll`, rounded up so that a wait below one millisecond does not become zero.
fn poll_timeout(wait: Duration) -> PollTimeout {
    let wait = wait + Duration::from_millis(1);
    PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX)
}

#[cfg(test)]
mod tests;
