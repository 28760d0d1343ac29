//! Client of `init.sock`.

mod transfer;

use std::io::{Error, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl, open};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket, sockopt,
};
use nix::sys::stat::Mode;

use super::protocol::{Answer, Commands, Exec, Hello, PROTOCOL, Request, TerminalSize};
use super::{packet, stdio};
use crate::contract::{ExecutionResult, SandboxCommand, SandboxError, SandboxListener, Trust};

/// Timeout of a request that init can answer without waiting.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Timeout of finding the owner of a connection, which usually takes milliseconds. A proxied
/// request waits for the result.
const OWNER_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum bytes of each output of a command.
const MAX_OUTPUT_BYTES: usize = 64 << 20;

/// A connection to a sandbox's init.
pub struct InitConnection {
    socket: OwnedFd,
}

impl InitConnection {
    /// Connects, and checks the protocol version.
    pub(crate) fn open(directory: &Path) -> Result<Self, SandboxError> {
        let not_responding = |error: Error| SandboxError::NotResponding(error.to_string());
        let socket = dial(directory, SockFlag::empty()).map_err(not_responding)?;
        let connection = Self { socket };
        connection.read_hello(Instant::now() + ANSWER_TIMEOUT)?;
        packet::enlarge_buffers(&connection.socket).map_err(not_responding)?;
        Ok(connection)
    }

    /// Reads init's hello.
    fn read_hello(&self, deadline: Instant) -> Result<(), SandboxError> {
        let (hello, _) = self.receive_until::<Hello>(deadline)?;
        if hello.protocol != PROTOCOL {
            return Err(SandboxError::Protocol {
                found: hello.protocol,
                known: PROTOCOL,
            });
        }
        Ok(())
    }

    /// Requests the sandbox's sockets.
    pub(crate) fn listeners(&self) -> Result<Vec<SandboxListener>, SandboxError> {
        self.send(&Request::Listeners)?;
        match self.receive()? {
            (Answer::Listeners(list), sockets) if list.len() == sockets.len() => Ok(list
                .into_iter()
                .zip(sockets)
                .map(|((transport, address), socket)| SandboxListener {
                    transport,
                    address,
                    socket,
                })
                .collect()),
            (answer, _) => Err(unexpected_answer(&answer)),
        }
    }

    /// Stops or continues every process, without a cgroup.
    pub(crate) fn freeze(&self, frozen: bool) -> Result<(), SandboxError> {
        self.send(&Request::Freeze { frozen })?;
        match self.receive()? {
            (Answer::Done, _) => Ok(()),
            (Answer::Failed { step, reason }, _) => {
                Err(SandboxError::NotResponding(format!("{step}: {reason}")))
            }
            (answer, _) => Err(unexpected_answer(&answer)),
        }
    }

    /// Adds a trusted root certificate.
    pub(crate) fn add_trust(&self, trust: &Trust) -> Result<(), SandboxError> {
        self.send(&Request::Trust(trust.clone()))?;
        match self.receive()? {
            (Answer::Done, _) => Ok(()),
            (Answer::Failed { step, reason }, _) => {
                Err(SandboxError::NotResponding(format!("{step}: {reason}")))
            }
            (answer, _) => Err(unexpected_answer(&answer)),
        }
    }

    /// Connects to a port in the sandbox.
    pub(crate) fn connect(&self, port: u16) -> Result<OwnedFd, SandboxError> {
        let failed = |reason: String| SandboxError::Connect { port, reason };
        self.send(&Request::Connect { port })?;
        match self.receive()? {
            (Answer::Connected, mut sockets) => sockets
                .pop()
                .filter(|_| sockets.is_empty())
                .ok_or_else(|| failed("init sent no socket".to_owned())),
            (Answer::Failed { step, reason }, _) => Err(failed(format!("{step}: {reason}"))),
            (answer, _) => Err(unexpected_answer(&answer)),
        }
    }

    /// Connects to the workbench.
    pub(crate) fn workbench(&self, arguments: &[&str]) -> Result<OwnedFd, SandboxError> {
        let failed = |step: String, reason: String| SandboxError::Start {
            program: "workbench".to_owned(),
            step,
            reason,
        };
        let arguments = arguments
            .iter()
            .map(|word| word.as_bytes().to_vec())
            .collect();
        self.send(&Request::Workbench { arguments })?;
        match self.receive()? {
            (Answer::Connected, mut sockets) => sockets
                .pop()
                .filter(|_| sockets.is_empty())
                .ok_or_else(|| failed("connecting".to_owned(), "init sent no socket".to_owned())),
            (Answer::Failed { step, reason }, _) => Err(failed(step, reason)),
            (answer, _) => Err(unexpected_answer(&answer)),
        }
    }

    /// Requests the listening ports in the sandbox.
    pub(crate) fn open_ports(&self) -> Result<Vec<u16>, SandboxError> {
        self.send(&Request::Ports)?;
        match self.receive()? {
            (Answer::Ports(ports), _) => Ok(ports),
            (Answer::Failed { step, reason }, _) => {
                Err(SandboxError::NotResponding(format!("{step}: {reason}")))
            }
            (answer, _) => Err(unexpected_answer(&answer)),
        }
    }

    /// Requests the running commands.
    pub(crate) fn running_commands(&self) -> Result<Commands, SandboxError> {
        self.send(&Request::Running)?;
        match self.receive()? {
            (Answer::Running(commands), _) => Ok(commands),
            (answer, _) => Err(unexpected_answer(&answer)),
        }
    }

    /// Starts a command, on a terminal or on three pipes.
    pub(crate) fn start(
        self,
        command: &SandboxCommand,
        terminal: Option<TerminalSize>,
    ) -> Result<RunningCommand, SandboxError> {
        let program = command
            .argv
            .first()
            .map(|word| word.to_string_lossy().into_owned())
            .unwrap_or_default();
        let exec = Exec {
            argv: command
                .argv
                .iter()
                .map(|word| word.clone().into_vec())
                .collect(),
            environment: command
                .environment
                .iter()
                .map(|(name, value)| (name.clone().into_vec(), value.clone().into_vec()))
                .collect(),
            directory: command
                .directory
                .as_ref()
                .map(|path| path.as_os_str().as_bytes().to_vec()),
            terminal,
        };
        packet::send(self.socket.as_fd(), &Request::Exec(exec), &[]).map_err(|error| {
            SandboxError::Start {
                program: program.clone(),
                step: "sending the request".to_owned(),
                reason: error.to_string(),
            }
        })?;
        let wanted = if terminal.is_some() { 1 } else { 3 };
        match self.receive()? {
            (Answer::Started, ends) if ends.len() == wanted => Ok(RunningCommand {
                connection: self,
                program,
                ends,
            }),
            (Answer::Failed { step, reason }, _) => Err(SandboxError::Start {
                program,
                step,
                reason,
            }),
            (answer, _) => Err(unexpected_answer(&answer)),
        }
    }

    fn send(&self, request: &Request) -> Result<(), SandboxError> {
        packet::send(self.socket.as_fd(), request, &[])
            .map_err(|error| SandboxError::NotResponding(error.to_string()))
    }

    fn receive<T: serde::de::DeserializeOwned>(&self) -> Result<(T, Vec<OwnedFd>), SandboxError> {
        self.receive_until(Instant::now() + ANSWER_TIMEOUT)
    }

    fn receive_until<T: serde::de::DeserializeOwned>(
        &self,
        deadline: Instant,
    ) -> Result<(T, Vec<OwnedFd>), SandboxError> {
        let mut end = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
        poll_until(&mut end, Some(deadline))
            .and_then(|ready| match ready {
                0 => Err(Error::from(ErrorKind::TimedOut)),
                _ => packet::receive(self.socket.as_fd()),
            })
            .and_then(|word| word.ok_or_else(|| Error::from(ErrorKind::UnexpectedEof)))
            .map_err(|error| SandboxError::NotResponding(error.to_string()))
    }
}

/// Finds the program that owns the socket with these ends, if that is certain.
pub(crate) fn find_socket_owner(
    directory: &Path,
    from: SocketAddr,
    to: SocketAddr,
) -> Result<Option<String>, SandboxError> {
    let deadline = Instant::now() + OWNER_TIMEOUT;
    // Non-blocking, because a frozen init does not accept connections.
    let socket = dial(directory, SockFlag::SOCK_NONBLOCK)
        .map_err(|error| SandboxError::NotResponding(error.to_string()))?;
    let connection = InitConnection { socket };
    connection.read_hello(deadline)?;
    connection.send(&Request::Owner { from, to })?;
    match connection.receive_until(deadline)? {
        (Answer::Owner(program), _) => Ok(program),
        (answer, _) => Err(unexpected_answer(&answer)),
    }
}

/// How a command exited.
#[derive(Debug)]
pub struct CommandExit {
    /// The exit code.
    pub code: i32,
    /// Why all processes of the sandbox were killed, if that killed the command.
    pub stopped: Option<String>,
}

/// A running command. Dropping it kills the command with its descendants.
pub struct RunningCommand {
    connection: InitConnection,
    program: String,
    ends: Vec<OwnedFd>,
}

impl RunningCommand {
    /// Returns the caller's ends of the standard streams: input, output and error output, or only
    /// the terminal's master.
    pub fn stdio(&self) -> &[OwnedFd] {
        &self.ends
    }

    /// Takes the ends of [`RunningCommand::stdio`], so that each can be closed separately.
    pub fn take_stdio(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.ends)
    }

    /// Returns a descriptor that becomes readable when the command has exited.
    pub fn exit_descriptor(&self) -> BorrowedFd<'_> {
        self.connection.socket.as_fd()
    }

    /// Signals the command's process group.
    pub fn signal(&self, number: i32) -> Result<(), SandboxError> {
        self.connection.send(&Request::Signal { number })
    }

    /// Resizes the command's terminal, if it has one.
    pub fn resize(&self, size: TerminalSize) -> Result<(), SandboxError> {
        match self.ends.as_slice() {
            // The size is set through the master, so that it applies before the next input.
            [master] => {
                stdio::set_size(master, size).map_err(SandboxError::system("resizing the terminal"))
            }
            _ => Ok(()),
        }
    }

    /// Kills the command with its descendants.
    pub fn kill(&self) -> Result<(), SandboxError> {
        self.connection.send(&Request::Kill)
    }

    /// Waits for the exit.
    pub fn wait(&self) -> Result<CommandExit, SandboxError> {
        match packet::receive(self.connection.socket.as_fd()) {
            Ok(Some((Answer::Exited { code, stopped }, _))) => Ok(CommandExit { code, stopped }),
            Ok(Some((Answer::Failed { step, reason }, _))) => Err(SandboxError::Start {
                program: self.program.clone(),
                step,
                reason,
            }),
            Ok(Some((answer, _))) => Err(unexpected_answer(&answer)),
            Ok(None) => Err(SandboxError::NotResponding(
                "init closed the connection".to_owned(),
            )),
            Err(error) => Err(SandboxError::NotResponding(error.to_string())),
        }
    }

    /// Writes the input, collects the output and waits for the exit. Also returns why the command
    /// was killed if its sandbox exceeded a limit.
    ///
    /// A process that the command left in the background does not delay the caller.
    pub(crate) fn finish(
        mut self,
        stdin: &[u8],
        timeout: Option<Duration>,
    ) -> Result<(ExecutionResult, Option<String>), SandboxError> {
        let system = |error: Error| {
            SandboxError::system("transferring the command's input and output")(error)
        };
        for end in &self.ends {
            fcntl(end, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))
                .map_err(|errno| system(errno.into()))?;
        }
        let mut ends = std::mem::take(&mut self.ends).into_iter();
        let mut input = ends.next().filter(|_| !stdin.is_empty());
        let mut rest = stdin;
        let mut outputs = [ends.next(), ends.next()];
        let mut outputs_read = [Vec::new(), Vec::new()];
        // The size of a pipe's buffer.
        let mut buffer = vec![0; 64 << 10];
        let mut deadline = timeout.map(|time| Instant::now() + time);
        let mut kill_reason = None;
        loop {
            let mut all = vec![PollFd::new(
                self.connection.socket.as_fd(),
                PollFlags::POLLIN,
            )];
            all.extend(
                outputs
                    .iter()
                    .flatten()
                    .map(|end| PollFd::new(end.as_fd(), PollFlags::POLLIN)),
            );
            if let Some(input) = &input {
                all.push(PollFd::new(input.as_fd(), PollFlags::POLLOUT));
            }
            let ready = poll_until(&mut all, deadline).map_err(system)?;
            let has_exited = all.first().and_then(PollFd::any).unwrap_or(false);
            if ready == 0 {
                match (kill_reason, timeout) {
                    (None, Some(time)) => {
                        kill_reason = Some(KillReason::TimedOut(time));
                        self.kill()?;
                        deadline = Some(Instant::now() + ANSWER_TIMEOUT);
                        continue;
                    }
                    (Some(reason), _) => return Err(reason.error(outputs_read)),
                    (None, None) => {}
                }
                return Err(SandboxError::NotResponding(
                    "no event before the deadline".to_owned(),
                ));
            }
            for (output, outputs_read) in outputs.iter_mut().zip(&mut outputs_read) {
                if let Some(end) = output
                    && drain(end, &mut buffer, outputs_read).map_err(system)?
                {
                    *output = None;
                }
            }
            if kill_reason.is_none()
                && outputs_read
                    .iter()
                    .any(|outputs_read| outputs_read.len() > MAX_OUTPUT_BYTES)
            {
                kill_reason = Some(KillReason::TooMuchOutput);
                outputs = [None, None];
                self.kill()?;
                deadline = Some(Instant::now() + ANSWER_TIMEOUT);
            }
            if let Some(end) = &input {
                match nix::unistd::write(end, rest) {
                    Ok(written) => rest = rest.get(written..).unwrap_or_default(),
                    Err(Errno::EAGAIN | Errno::EINTR) => {}
                    // The command closed its input.
                    Err(_) => rest = &[],
                }
                if rest.is_empty() {
                    input = None;
                }
            }
            if has_exited {
                // Output that was written before the exit may still be in the pipes.
                for (output, outputs_read) in outputs.iter_mut().zip(&mut outputs_read) {
                    if let Some(end) = output {
                        drain(end, &mut buffer, outputs_read).map_err(system)?;
                    }
                }
                let CommandExit { code, stopped } = self.wait()?;
                if let Some(reason) = kill_reason {
                    return Err(reason.error(outputs_read));
                }
                let [stdout, stderr] = outputs_read;
                let result = ExecutionResult {
                    exit_code: code,
                    stdout,
                    stderr,
                };
                return Ok((result, stopped));
            }
        }
    }
}

/// Why a command was killed before its exit.
#[derive(Clone, Copy)]
enum KillReason {
    TimedOut(Duration),
    TooMuchOutput,
}

impl KillReason {
    fn error(self, output: [Vec<u8>; 2]) -> SandboxError {
        match self {
            KillReason::TimedOut(after) => SandboxError::TimedOut {
                after,
                output: output.concat(),
            },
            KillReason::TooMuchOutput => SandboxError::TooMuchOutput(MAX_OUTPUT_BYTES),
        }
    }
}

/// Appends the available bytes to `into`; returns whether the end was reached.
fn drain(end: &OwnedFd, buffer: &mut [u8], into: &mut Vec<u8>) -> std::io::Result<bool> {
    // The loop is bounded, so that endless output does not block the caller.
    for _ in 0..64 {
        match nix::unistd::read(end, buffer) {
            Ok(0) => return Ok(true),
            Ok(length) => into.extend_from_slice(buffer.get(..length).unwrap_or_default()),
            Err(Errno::EAGAIN) => return Ok(false),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(false)
}

/// Polls until a descriptor is ready (returns their number) or the deadline has passed (returns 0).
/// Continues after a signal, because the gate receives SIGCHLD of its children.
pub(super) fn poll_until(
    ends: &mut [PollFd<'_>],
    deadline: Option<Instant>,
) -> std::io::Result<i32> {
    loop {
        let timeout = match deadline {
            None => PollTimeout::NONE,
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                // Rounded up, because the last millisecond would be a busy loop.
                let left = left + Duration::from_micros(999);
                PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
            }
        };
        match poll(ends, timeout) {
            Ok(0) if deadline.is_some_and(|deadline| Instant::now() < deadline) => {}
            Err(Errno::EINTR) => {}
            Ok(ready) => return Ok(ready),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Connects through an open directory, because a socket's path is limited to 107 bytes.
fn dial(directory: &Path, how: SockFlag) -> std::io::Result<OwnedFd> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let directory = open(directory, flags, Mode::empty())?;
    let socket = socket(
        AddressFamily::Unix,
        SockType::SeqPacket,
        SockFlag::SOCK_CLOEXEC | how,
        None,
    )?;
    let path = format!("/proc/self/fd/{}/init.sock", directory.as_raw_fd());
    connect(socket.as_raw_fd(), &UnixAddr::new(path.as_str())?)?;
    Ok(socket)
}

/// Returns the process that listens at a sandbox's `init.sock`, frozen or not.
pub(crate) fn listener_pid(directory: &Path) -> std::io::Result<i32> {
    let peer = getsockopt(
        &dial(directory, SockFlag::empty())?,
        sockopt::PeerCredentials,
    )?;
    // The number is 0 if the process is in another PID namespace that is not below this one.
    match peer.pid() {
        0 => Err(Error::from(ErrorKind::NotFound)),
        pid => Ok(pid),
    }
}

fn unexpected_answer(answer: &Answer) -> SandboxError {
    SandboxError::NotResponding(format!("unexpected answer: {answer:?}"))
}
