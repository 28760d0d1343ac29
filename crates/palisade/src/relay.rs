//! Relays bytes and signals between the operator's terminal and a command in a sandbox.
//!
//! No descriptor of the operator is passed into the sandbox: bytes are copied, by one thread in
//! one loop.

use std::io::{Error, IsTerminal, PipeReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use sandbox::namespace::client::{CommandExit, RunningCommand};
use sandbox::namespace::protocol::TerminalSize;
use sandbox::terminal::{self, RawTerminal};

/// Size of one read, and the maximum of pending input.
const CHUNK_SIZE: usize = 64 << 10;

/// How long a sandbox may take to respond after a signal.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Signals that are forwarded to the command.
const FORWARDED_SIGNALS: [Signal; 4] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
];

/// The size of the terminal, if both stdin and stdout are terminals.
pub fn terminal_size() -> Option<TerminalSize> {
    let (stdin, stdout) = (std::io::stdin(), std::io::stdout());
    (stdin.is_terminal() && stdout.is_terminal())
        .then(|| terminal::size(&stdin))
        .flatten()
}

/// Options of a relay session.
pub struct RelayOptions {
    /// Whether the command has its own terminal; this process's terminal is then in raw mode.
    pub on_terminal: bool,
    /// Where the command's stdout goes.
    pub stdout: OutputTarget,
    /// Checks whether the sandbox responds; may block.
    pub is_responding: Arc<dyn Fn() -> bool + Send + Sync>,
}

/// How a session ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionEnd {
    /// The command ended with this code.
    Code(i32),
    /// The command was killed with its sandbox, for this reason.
    Stopped(i32, String),
    /// This process ends before the command, because it received a signal and the sandbox did not
    /// respond.
    Abandoned(i32),
}

impl SessionEnd {
    /// The exit code of this process.
    pub fn code(&self) -> i32 {
        match self {
            SessionEnd::Code(code) | SessionEnd::Stopped(code, _) | SessionEnd::Abandoned(code) => {
                *code
            }
        }
    }
}

/// Relays a command's session until it ends.
pub fn relay_session(mut running: RunningCommand, options: RelayOptions) -> Result<SessionEnd> {
    let on_terminal = options.on_terminal;
    let mut mask: SigSet = FORWARDED_SIGNALS.into_iter().collect();
    mask.add(Signal::SIGWINCH);
    mask.thread_block().context("cannot receive signals")?;
    let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)
        .context("cannot receive signals")?;
    let stdin = std::io::stdin();
    let raw = on_terminal.then(|| RawTerminal::new(&stdin)).transpose()?;
    let mut relay = Relay::new(running.take_stdio(), options)?;
    let end = relay
        .run(&running, &signals, &stdin)
        .or_else(broken_pipe_as_sigpipe);
    // The terminal is restored first, so that later messages are printed in normal mode.
    drop(raw);
    let _ = mask.thread_unblock();
    end
}

/// If the reader has closed the pipe (`| head`), ends as a local program would by SIGPIPE. The
/// command ends with this process.
fn broken_pipe_as_sigpipe(error: anyhow::Error) -> Result<SessionEnd> {
    let is_broken = |error: &Error| error.kind() == std::io::ErrorKind::BrokenPipe;
    if error.downcast_ref::<Error>().is_some_and(is_broken) {
        return Ok(SessionEnd::Code(128 + Signal::SIGPIPE as i32));
    }
    Err(error)
}

struct Relay {
    /// The command's stdin, until it is closed.
    command_stdin: Option<OwnedFd>,
    /// The command's output descriptors, with their targets.
    outputs: Vec<(OwnedFd, OutputTarget)>,
    /// Input that was read and not yet written to the command.
    pending: Vec<u8>,
    stdin_open: bool,
    on_terminal: bool,
    interrupts: u32,
    buffer: Vec<u8>,
    is_responding: Arc<dyn Fn() -> bool + Send + Sync>,
    probe: Option<SignalProbe>,
}

/// A pending check whether the sandbox responds after a signal was forwarded.
struct SignalProbe {
    /// Receives a byte if the sandbox responds; end of file if it does not.
    response: PipeReader,
    until: Instant,
    number: i32,
}

/// Where the output of a command goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputTarget {
    Stdout,
    Stderr,
}

impl Relay {
    fn new(ends: Vec<OwnedFd>, options: RelayOptions) -> Result<Self> {
        let RelayOptions {
            on_terminal,
            stdout,
            is_responding,
        } = options;
        for end in &ends {
            fcntl(end, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))
                .context("cannot set up the pipes of the command")?;
        }
        let mut ends = ends.into_iter();
        let command_stdin = ends.next().context("the command has no input")?;
        let outputs = if on_terminal {
            vec![(command_stdin.try_clone()?, stdout)]
        } else {
            ends.zip([stdout, OutputTarget::Stderr]).collect()
        };
        Ok(Self {
            command_stdin: Some(command_stdin),
            outputs,
            pending: Vec::new(),
            stdin_open: true,
            on_terminal,
            interrupts: 0,
            buffer: vec![0; CHUNK_SIZE],
            is_responding,
            probe: None,
        })
    }

    fn run(
        &mut self,
        running: &RunningCommand,
        signals: &SignalFd,
        stdin: &std::io::Stdin,
    ) -> Result<SessionEnd> {
        loop {
            let ready = self.wait(running.exit_descriptor(), signals, stdin)?;
            if ready.signal {
                self.forward_signals(running, signals, stdin)?;
            }
            if ready.input {
                self.read_input(stdin)?;
            }
            self.write_pending();
            // All available output is copied before the end is handled: the command wrote the
            // output before.
            self.copy_output()?;
            if ready.command_ended {
                self.copy_output()?;
                let CommandExit { code, stopped } = running.wait()?;
                return Ok(match stopped {
                    Some(why) => SessionEnd::Stopped(code, why),
                    None => SessionEnd::Code(code),
                });
            }
            if let Some(number) = self.unanswered_signal() {
                return Ok(SessionEnd::Abandoned(128 + number));
            }
        }
    }

    fn wait(
        &self,
        command_end: BorrowedFd<'_>,
        signals: &SignalFd,
        stdin: &std::io::Stdin,
    ) -> Result<ReadyEvents> {
        let poll_fd = |fd, flags| PollFd::new(fd, flags);
        let wants_input =
            self.stdin_open && self.pending.is_empty() && self.command_stdin.is_some();
        let mut all = vec![
            poll_fd(command_end, PollFlags::POLLIN),
            poll_fd(signals.as_fd(), PollFlags::POLLIN),
        ];
        // Stdin is polled only if input is wanted: a closed descriptor is always ready.
        if wants_input {
            all.push(poll_fd(stdin.as_fd(), PollFlags::POLLIN));
        }
        let outputs = self.outputs.iter();
        all.extend(outputs.map(|(end, _)| poll_fd(end.as_fd(), PollFlags::POLLIN)));
        if let (Some(command_stdin), false) = (&self.command_stdin, self.pending.is_empty()) {
            all.push(poll_fd(command_stdin.as_fd(), PollFlags::POLLOUT));
        }
        if let Some(probe) = &self.probe {
            all.push(poll_fd(probe.response.as_fd(), PollFlags::POLLIN));
        }
        let limit = self.probe.as_ref().map(|probe| {
            // Rounded up, so that the last part of a millisecond is not a busy loop.
            let left = probe.until.saturating_duration_since(Instant::now());
            PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
        });
        match poll(&mut all, limit.unwrap_or(PollTimeout::NONE)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno).context("cannot wait for the command"),
        }
        let is_ready = |index: usize| all.get(index).and_then(PollFd::any).unwrap_or(false);
        Ok(ReadyEvents {
            command_ended: is_ready(0),
            signal: is_ready(1),
            input: wants_input && is_ready(2),
        })
    }

    fn forward_signals(
        &mut self,
        running: &RunningCommand,
        signals: &SignalFd,
        stdin: &std::io::Stdin,
    ) -> Result<()> {
        while let Ok(Some(signal)) = signals.read_signal() {
            let number = i32::try_from(signal.ssi_signo).unwrap_or_default();
            if number == Signal::SIGWINCH as i32 {
                if let (true, Some(size)) = (self.on_terminal, terminal::size(stdin))
                    && let Some(master) = &self.command_stdin
                {
                    terminal::set_size(master, size)?;
                }
                continue;
            }
            self.interrupts += 1;
            // The third signal kills the command.
            if self.interrupts >= 3 {
                running.kill()?;
            } else {
                running.signal(number)?;
            }
            self.probe_sandbox(number)?;
        }
        Ok(())
    }

    /// Starts a check whether the sandbox responds: a paused init handles no signal, and this
    /// process must not wait for it.
    fn probe_sandbox(&mut self, number: i32) -> Result<()> {
        if self.probe.is_some() {
            return Ok(());
        }
        let (response, mut result) = std::io::pipe().context("cannot make a pipe")?;
        let is_responding = Arc::clone(&self.is_responding);
        // The check may block. The thread ends with this process, if not before.
        std::thread::spawn(move || {
            if is_responding() {
                let _ = result.write_all(b"!");
            }
        });
        self.probe = Some(SignalProbe {
            response,
            until: Instant::now() + RESPONSE_TIMEOUT,
            number,
        });
        Ok(())
    }

    /// The signal that the sandbox does not handle, once the check has failed.
    fn unanswered_signal(&mut self) -> Option<i32> {
        let probe = self.probe.as_mut()?;
        let mut ready = [PollFd::new(probe.response.as_fd(), PollFlags::POLLIN)];
        if poll(&mut ready, PollTimeout::ZERO) == Ok(1) {
            if let Ok(1) = probe.response.read(&mut [0]) {
                self.probe = None;
                return None;
            }
            return Some(probe.number);
        }
        (Instant::now() >= probe.until).then_some(probe.number)
    }

    fn read_input(&mut self, stdin: &std::io::Stdin) -> Result<()> {
        match nix::unistd::read(stdin, &mut self.buffer) {
            Ok(0) => self.stdin_open = false,
            Ok(length) => {
                let piece = self.buffer.get(..length).unwrap_or_default();
                self.pending.extend_from_slice(piece);
            }
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            // The terminal was closed; the command receives a signal for that.
            Err(Errno::EIO) => self.stdin_open = false,
            Err(errno) => return Err(errno).context("cannot read the input"),
        }
        Ok(())
    }

    /// Writes pending input to the command, and closes its stdin after the end of the input.
    fn write_pending(&mut self) {
        if let Some(command_stdin) = &self.command_stdin
            && !self.pending.is_empty()
        {
            match nix::unistd::write(command_stdin, &self.pending) {
                Ok(written) => drop(self.pending.drain(..written)),
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                // The command has closed its stdin.
                Err(_) => {
                    self.pending.clear();
                    self.stdin_open = false;
                }
            }
        }
        // On a terminal, end of input is a key; on a pipe, it is the close.
        if !self.stdin_open && self.pending.is_empty() && !self.on_terminal {
            self.command_stdin = None;
        }
    }

    /// Copies the available output of the command.
    fn copy_output(&mut self) -> Result<()> {
        let mut ended = Vec::new();
        for (index, (end, target)) in self.outputs.iter().enumerate() {
            // A bounded number of chunks, so that much output does not delay signals.
            for _ in 0..16 {
                match nix::unistd::read(end, &mut self.buffer) {
                    Ok(0) | Err(Errno::EIO) => {
                        ended.push(index);
                        break;
                    }
                    Ok(length) => {
                        target.write(self.buffer.get(..length).unwrap_or_default())?;
                    }
                    Err(Errno::EAGAIN) => break,
                    Err(Errno::EINTR) => {}
                    Err(errno) => return Err(errno).context("cannot read the command's output"),
                }
            }
        }
        for index in ended.into_iter().rev() {
            self.outputs.remove(index);
        }
        Ok(())
    }
}

/// The events that are ready.
struct ReadyEvents {
    command_ended: bool,
    signal: bool,
    input: bool,
}

impl OutputTarget {
    fn write(self, bytes: &[u8]) -> Result<()> {
        let written: Result<(), Error> = match self {
            OutputTarget::Stdout => {
                let mut out = std::io::stdout().lock();
                out.write_all(bytes).and_then(|()| out.flush())
            }
            OutputTarget::Stderr => std::io::stderr().lock().write_all(bytes),
        };
        written.context("cannot write the output: the reader has closed it")
    }
}
