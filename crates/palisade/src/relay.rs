//! Moves bytes and signals between the operator's terminal and a command in a sandbox.
//!
//! Nothing of the operator's is handed inside: bytes are copied. One thread, one loop; a
//! reader that does not read holds back only what it should.

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

/// How much is read at a time, and the most that waits for a command to read it.
const PIECE: usize = 64 << 10;

/// How long a sandbox may take to show that it takes signals.
const PATIENCE: Duration = Duration::from_secs(5);

/// Signals that are the command's, not ours.
const PASSED_ON: [Signal; 4] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
];

/// The size of the terminal we are on, where both ends of the conversation are one.
pub fn own_terminal() -> Option<TerminalSize> {
    let (stdin, stdout) = (std::io::stdin(), std::io::stdout());
    (stdin.is_terminal() && stdout.is_terminal())
        .then(|| terminal::size(&stdin))
        .flatten()
}

/// How a command is accompanied.
pub struct RelayOptions {
    /// It was started on a terminal of its own; ours is raw meanwhile.
    pub on_terminal: bool,
    /// Where its output goes.
    pub stdout: Sink,
    /// Whether its sandbox answers, found out without haste.
    pub answers: Arc<dyn Fn() -> bool + Send + Sync>,
}

/// How it was with the command in the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// It ended with this code.
    Code(i32),
    /// It was killed with everything in its sandbox, and why.
    Stopped(i32, String),
    /// We were told to end, and its sandbox did not answer: we went without it.
    Left(i32),
}

impl End {
    /// The code to end with.
    pub fn code(&self) -> i32 {
        match self {
            End::Code(code) | End::Stopped(code, _) | End::Left(code) => *code,
        }
    }
}

/// Accompanies a command to its end.
pub fn relay_session(mut running: RunningCommand, options: RelayOptions) -> Result<End> {
    let on_terminal = options.on_terminal;
    let mut mask: SigSet = PASSED_ON.into_iter().collect();
    mask.add(Signal::SIGWINCH);
    mask.thread_block().context("cannot take signals")?;
    let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)
        .context("cannot take signals")?;
    let stdin = std::io::stdin();
    let raw = on_terminal.then(|| RawTerminal::new(&stdin)).transpose()?;
    let mut relay = Relay::new(running.take_ends(), options)?;
    let end = relay
        .run(&running, &signals, &stdin)
        .or_else(as_if_by_a_signal);
    // The terminal first: whatever is said next, is said on a sane one.
    drop(raw);
    let _ = mask.thread_unblock();
    end
}

/// Nobody reads the output any more (`| head`): a program of this machine would have died of
/// it without a word. The command ends with us.
fn as_if_by_a_signal(error: anyhow::Error) -> Result<End> {
    let is_broken = |error: &Error| error.kind() == std::io::ErrorKind::BrokenPipe;
    if error.downcast_ref::<Error>().is_some_and(is_broken) {
        return Ok(End::Code(128 + Signal::SIGPIPE as i32));
    }
    Err(error)
}

struct Relay {
    /// The command's input; gone once it is closed.
    feed: Option<OwnedFd>,
    /// Where its output comes from, and goes.
    outputs: Vec<(OwnedFd, Sink)>,
    /// Read from us and not yet taken by the command.
    pending: Vec<u8>,
    stdin_open: bool,
    on_terminal: bool,
    interrupts: u32,
    buffer: Vec<u8>,
    answers: Arc<dyn Fn() -> bool + Send + Sync>,
    doubt: Option<Doubt>,
}

/// A signal was forwarded, and whether the sandbox handles it is not known yet.
struct Doubt {
    /// A byte means that the sandbox answers; end of file means that it does not.
    verdict: PipeReader,
    until: Instant,
    number: i32,
}

/// Where output goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sink {
    Stdout,
    Stderr,
}

impl Relay {
    fn new(ends: Vec<OwnedFd>, options: RelayOptions) -> Result<Self> {
        let RelayOptions {
            on_terminal,
            stdout,
            answers,
        } = options;
        for end in &ends {
            fcntl(end, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))
                .context("cannot talk to the command")?;
        }
        let mut ends = ends.into_iter();
        let feed = ends.next().context("the command has no input")?;
        let outputs = if on_terminal {
            vec![(feed.try_clone()?, stdout)]
        } else {
            ends.zip([stdout, Sink::Stderr]).collect()
        };
        Ok(Self {
            feed: Some(feed),
            outputs,
            pending: Vec::new(),
            stdin_open: true,
            on_terminal,
            interrupts: 0,
            buffer: vec![0; PIECE],
            answers,
            doubt: None,
        })
    }

    fn run(
        &mut self,
        running: &RunningCommand,
        signals: &SignalFd,
        stdin: &std::io::Stdin,
    ) -> Result<End> {
        loop {
            let ready = self.wait(running.end(), signals, stdin)?;
            if ready.signal {
                self.pass_on_signals(running, signals, stdin)?;
            }
            if ready.input {
                self.read_input(stdin)?;
            }
            self.feed();
            // All there is now, before the end is believed: it was written before.
            self.pump()?;
            if ready.over {
                self.pump()?;
                let CommandExit { code, stopped } = running.wait()?;
                return Ok(match stopped {
                    Some(why) => End::Stopped(code, why),
                    None => End::Code(code),
                });
            }
            if let Some(number) = self.unanswered_signal() {
                return Ok(End::Left(128 + number));
            }
        }
    }

    fn wait(
        &self,
        over: BorrowedFd<'_>,
        signals: &SignalFd,
        stdin: &std::io::Stdin,
    ) -> Result<Ready> {
        let on = |fd, flags| PollFd::new(fd, flags);
        let wants_input = self.stdin_open && self.pending.is_empty() && self.feed.is_some();
        let mut all = vec![
            on(over, PollFlags::POLLIN),
            on(signals.as_fd(), PollFlags::POLLIN),
        ];
        // Only where it is wanted: a descriptor that has hung up is always ready.
        if wants_input {
            all.push(on(stdin.as_fd(), PollFlags::POLLIN));
        }
        let outputs = self.outputs.iter();
        all.extend(outputs.map(|(end, _)| on(end.as_fd(), PollFlags::POLLIN)));
        if let (Some(feed), false) = (&self.feed, self.pending.is_empty()) {
            all.push(on(feed.as_fd(), PollFlags::POLLOUT));
        }
        if let Some(doubt) = &self.doubt {
            all.push(on(doubt.verdict.as_fd(), PollFlags::POLLIN));
        }
        let limit = self.doubt.as_ref().map(|doubt| {
            // Rounded up, or the last part of a millisecond is waited for in a loop.
            let left = doubt.until.saturating_duration_since(Instant::now());
            PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
        });
        match poll(&mut all, limit.unwrap_or(PollTimeout::NONE)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno).context("cannot wait for the command"),
        }
        let is_ready = |place: usize| all.get(place).and_then(PollFd::any).unwrap_or(false);
        Ok(Ready {
            over: is_ready(0),
            signal: is_ready(1),
            input: wants_input && is_ready(2),
        })
    }

    fn pass_on_signals(
        &mut self,
        running: &RunningCommand,
        signals: &SignalFd,
        stdin: &std::io::Stdin,
    ) -> Result<()> {
        while let Ok(Some(told)) = signals.read_signal() {
            let number = i32::try_from(told.ssi_signo).unwrap_or_default();
            if number == Signal::SIGWINCH as i32 {
                if let (true, Some(size)) = (self.on_terminal, terminal::size(stdin))
                    && let Some(master) = &self.feed
                {
                    terminal::set_size(master, size)?;
                }
                continue;
            }
            self.interrupts += 1;
            // The third interrupt ends us.
            if self.interrupts >= 3 {
                running.kill()?;
            } else {
                running.signal(number)?;
            }
            self.doubt(number)?;
        }
        Ok(())
    }

    /// An init that stands still takes no signal, and we must not stand still with it.
    fn doubt(&mut self, number: i32) -> Result<()> {
        if self.doubt.is_some() {
            return Ok(());
        }
        let (verdict, mut says) = std::io::pipe().context("cannot make a pipe")?;
        let answers = Arc::clone(&self.answers);
        // Asking may take its time. The thread ends with us, if not before.
        std::thread::spawn(move || {
            if answers() {
                let _ = says.write_all(b"!");
            }
        });
        self.doubt = Some(Doubt {
            verdict,
            until: Instant::now() + PATIENCE,
            number,
        });
        Ok(())
    }

    /// The signal that the sandbox does not handle, once that is clear.
    fn unanswered_signal(&mut self) -> Option<i32> {
        let doubt = self.doubt.as_mut()?;
        let mut ready = [PollFd::new(doubt.verdict.as_fd(), PollFlags::POLLIN)];
        if poll(&mut ready, PollTimeout::ZERO) == Ok(1) {
            if let Ok(1) = doubt.verdict.read(&mut [0]) {
                self.doubt = None;
                return None;
            }
            return Some(doubt.number);
        }
        (Instant::now() >= doubt.until).then_some(doubt.number)
    }

    fn read_input(&mut self, stdin: &std::io::Stdin) -> Result<()> {
        match nix::unistd::read(stdin, &mut self.buffer) {
            Ok(0) => self.stdin_open = false,
            Ok(length) => {
                let piece = self.buffer.get(..length).unwrap_or_default();
                self.pending.extend_from_slice(piece);
            }
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            // Our terminal is gone; the command receives a signal for that.
            Err(Errno::EIO) => self.stdin_open = false,
            Err(errno) => return Err(errno).context("cannot read the input"),
        }
        Ok(())
    }

    fn feed(&mut self) {
        if let Some(feed) = &self.feed
            && !self.pending.is_empty()
        {
            match nix::unistd::write(feed, &self.pending) {
                Ok(written) => drop(self.pending.drain(..written)),
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                // It does not want to read.
                Err(_) => {
                    self.pending.clear();
                    self.stdin_open = false;
                }
            }
        }
        // The end of a terminal's input is a key; a pipe's is its closing.
        if !self.stdin_open && self.pending.is_empty() && !self.on_terminal {
            self.feed = None;
        }
    }

    /// Copies what the command has said so far.
    fn pump(&mut self) -> Result<()> {
        let mut ended = Vec::new();
        for (place, (end, sink)) in self.outputs.iter().enumerate() {
            // A few pieces at a time, so that a torrent does not keep signals waiting.
            for _ in 0..16 {
                match nix::unistd::read(end, &mut self.buffer) {
                    Ok(0) | Err(Errno::EIO) => {
                        ended.push(place);
                        break;
                    }
                    Ok(length) => {
                        sink.write(self.buffer.get(..length).unwrap_or_default())?;
                    }
                    Err(Errno::EAGAIN) => break,
                    Err(Errno::EINTR) => {}
                    Err(errno) => return Err(errno).context("cannot read the command's output"),
                }
            }
        }
        for place in ended.into_iter().rev() {
            self.outputs.remove(place);
        }
        Ok(())
    }
}

/// What is ready.
struct Ready {
    over: bool,
    signal: bool,
    input: bool,
}

impl Sink {
    fn write(self, bytes: &[u8]) -> Result<()> {
        let written: Result<(), Error> = match self {
            Sink::Stdout => {
                let mut out = std::io::stdout().lock();
                out.write_all(bytes).and_then(|()| out.flush())
            }
            Sink::Stderr => std::io::stderr().lock().write_all(bytes),
        };
        written.context("cannot write the output: the reader is gone")
    }
}
