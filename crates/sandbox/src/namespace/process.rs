//! Starts processes in the sandbox: each below its own subreaper, each with the agent's rights.

use std::ffi::CStr;
use std::io::{Error, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::prctl;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, sigaction};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{
    ForkResult, Gid, Pid, Uid, chdir, execve, fork, pipe2, setgroups, setresgid, setresuid, setsid,
};

use super::agent_task::AgentTask;
use super::exec_args::ExecArgs;
use super::identity::Account;
use super::seccomp::Filters;
use super::stdio::{StdioEnds, close_others, redirect_to_null, replace};
use super::step::{Step, StepError};
use super::{hardening, process_tree, scheduling};

/// The work of a process.
pub(crate) enum Work {
    /// Execute a command.
    Command(ExecArgs),
    /// Run an agent task.
    AgentTask(AgentTask),
}

/// A started command.
///
/// The command's parent is a subreaper, a child of init that adopts the orphans of the command: its
/// descendants are the command's process tree, also those that left their session and lost their
/// parents. The subreaper reports the command's process and, when the command exits, its exit code.
/// The subreaper exits after the last process of the tree.
pub(crate) struct Job {
    subreaper: Pid,
    status_pipe: std::fs::File,
    received: Vec<u8>,
    /// Signals that arrived before the subreaper reported the command's process.
    pending_signals: Vec<Signal>,
    /// The read end of the child's error report.
    error_pipe: std::fs::File,
}

/// The default working directory.
const WORKSPACE: &CStr = c"/workspace";

/// How a command ended.
pub(crate) enum JobEnd {
    /// The command could not be executed.
    Failed { step: String, reason: String },
    /// The command exited with this code.
    Exited(i32),
}

impl Job {
    /// The subreaper's status pipe, to poll.
    pub(crate) fn status_pipe(&self) -> BorrowedFd<'_> {
        self.status_pipe.as_fd()
    }

    /// Reads the subreaper's status; returns the end of the command, if it has ended.
    pub(crate) fn read_status(&mut self) -> Option<JobEnd> {
        let mut bytes = [0; 8];
        match self.status_pipe.read(&mut bytes) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
            // The subreaper was killed, so the command's exit is unknown.
            Ok(0) | Err(_) => return Some(JobEnd::Exited(128 + libc::SIGKILL)),
            Ok(length) => self.received.extend_from_slice(bytes.get(..length)?),
        }
        self.send_pending_signals();
        let code = read_i32(&self.received, 4)?;
        let mut text = String::new();
        // The command has exited, so the write end is closed.
        let read = self.error_pipe.read_to_string(&mut text);
        Some(match text.split_once('\0') {
            Some((step, errno)) if read.is_ok() => JobEnd::Failed {
                step: step.to_owned(),
                reason: Error::from_raw_os_error(errno.parse().unwrap_or(libc::EIO)).to_string(),
            },
            _ => JobEnd::Exited(code),
        })
    }

    /// Signals the command's process group.
    pub(crate) fn signal(&mut self, signal: i32) {
        let Ok(signal) = Signal::try_from(signal) else {
            return;
        };
        match read_i32(&self.received, 0) {
            Some(command) => signal_group(command, signal),
            None => self.pending_signals.push(signal),
        }
    }

    /// Returns the command's process; `None` before the subreaper has reported it. A reported exit
    /// is not consumed.
    pub(crate) fn command(&mut self) -> Option<Pid> {
        let mut number = [0; 4];
        let missing = number.len().saturating_sub(self.received.len());
        if let Some(rest) = number.get_mut(..missing)
            && let Ok(length) = self.status_pipe.read(rest)
        {
            self.received.extend_from_slice(rest.get(..length)?);
            self.send_pending_signals();
        }
        read_i32(&self.received, 0).map(Pid::from_raw)
    }

    /// Sends the pending signals, once the command's process is known.
    fn send_pending_signals(&mut self) {
        if let Some(command) = read_i32(&self.received, 0) {
            for signal in self.pending_signals.drain(..) {
                signal_group(command, signal);
            }
        }
    }

    /// The subreaper, the root of the command's process tree.
    pub(crate) fn subreaper(&self) -> Pid {
        self.subreaper
    }
}

/// Signals a command's process group, or the process alone if the group does not exist yet.
fn signal_group(command: i32, signal: Signal) {
    if kill(Pid::from_raw(-command), signal) == Err(Errno::ESRCH) {
        let _ = kill(Pid::from_raw(command), signal);
    }
}

fn read_i32(bytes: &[u8], at: usize) -> Option<i32> {
    let number = bytes.get(at..at + 4)?.try_into().ok()?;
    Some(i32::from_ne_bytes(number))
}

/// Starts a process as the agent with these standard streams. Returns the client's ends.
pub(crate) fn spawn(
    work: &Work,
    stdio: StdioEnds,
    agent: Account,
    filters: &Filters,
) -> Result<(Job, Vec<OwnedFd>), StepError> {
    let (error_pipe, error_writer) = pipe2(OFlag::O_CLOEXEC).step("creating a pipe")?;
    let (status_pipe, status_writer) = pipe2(OFlag::O_CLOEXEC).step("creating a pipe")?;
    fcntl(&status_pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).step("creating a pipe")?;
    // SAFETY: init has one thread, so the child may do whatever the parent may.
    match unsafe { fork() }.step("creating a process (the sandbox may be at its process limit)")? {
        ForkResult::Parent { child } => {
            let job = Job {
                subreaper: child,
                status_pipe: status_pipe.into(),
                received: Vec::new(),
                pending_signals: Vec::new(),
                error_pipe: error_pipe.into(),
            };
            Ok((job, stdio.caller_ends))
        }
        ForkResult::Child => {
            let _ = prctl::set_child_subreaper(true);
            // SAFETY: this process has one thread, so the child may do whatever the parent may.
            match unsafe { fork() } {
                Ok(ForkResult::Child) => {
                    let error = match drop_privileges(
                        work,
                        &stdio.child_ends,
                        &error_writer,
                        agent,
                        filters,
                    ) {
                        Ok(()) => match work {
                            Work::AgentTask(task) => exit_now(task.run()),
                            Work::Command(args) => exec_command(args),
                        },
                        Err(error) => error,
                    };
                    write_error(error_writer, &error);
                    exit_now(127)
                }
                Ok(ForkResult::Parent { child }) => run_subreaper(child, status_writer),
                Err(errno) => {
                    let source = errno.into();
                    let step =
                        "creating a process (the sandbox may be at its process limit)".to_owned();
                    write_error(error_writer, &StepError { step, source });
                    let bytes = [0_i32.to_ne_bytes(), 127_i32.to_ne_bytes()].concat();
                    let _ = std::fs::File::from(status_writer).write_all(&bytes);
                    exit_now(127)
                }
            }
        }
    }
}

/// Writes an error report, which fits the pipe's buffer.
fn write_error(error_writer: OwnedFd, error: &StepError) {
    let errno = error.source.raw_os_error().unwrap_or(libc::EIO);
    let bytes = format!("{}\0{errno}", error.step);
    let _ = std::fs::File::from(error_writer).write_all(bytes.as_bytes());
}

/// Exits a forked process without running the parent's exit handlers.
fn exit_now(code: i32) -> ! {
    // SAFETY: the call ends the process.
    unsafe { libc::_exit(code) }
}

/// The subreaper: reports the command's process and exit, reaps its orphans and exits last.
fn run_subreaper(command: Pid, status_writer: OwnedFd) -> ! {
    // Init's descriptors are closed; otherwise the pipes of other commands would stay open.
    if close_others(&status_writer).is_err()
        || redirect_to_null(&[0, 1, 2]).is_err()
        || hardening::keep_capabilities(&[]).is_err()
    {
        exit_now(1);
    }
    let mut status_writer = Some(std::fs::File::from(status_writer));
    if let Some(status_writer) = &mut status_writer {
        let _ = status_writer.write_all(&command.as_raw().to_ne_bytes());
    }
    loop {
        let (pid, code) = match waitpid(None, None) {
            Ok(WaitStatus::Exited(pid, code)) => (pid, code),
            Ok(WaitStatus::Signaled(pid, signal, _)) => (pid, 128 + signal as i32),
            Ok(_) | Err(Errno::EINTR) => continue,
            Err(_) => exit_now(0),
        };
        if pid == command
            && let Some(mut status_writer) = status_writer.take()
        {
            let _ = status_writer.write_all(&code.to_ne_bytes());
        }
    }
}

/// Runs in the child: drops all rights that the agent must not have.
fn drop_privileges(
    work: &Work,
    child_ends: &[OwnedFd],
    error_writer: &OwnedFd,
    agent: Account,
    filters: &Filters,
) -> Result<(), StepError> {
    let (directory, terminal) = match work {
        Work::Command(args) => (args.directory.as_c_str(), args.terminal),
        Work::AgentTask(_) => (WORKSPACE, false),
    };
    setsid().step("creating a session")?;
    for (descriptor, end) in (0..).zip(child_ends) {
        replace(end, descriptor).step("connecting input and output")?;
    }
    if terminal {
        // SAFETY: the terminal at descriptor 0 becomes the controlling terminal of the new session;
        // the call accesses no memory.
        let result = unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) };
        (result == 0)
            .then_some(())
            .ok_or_else(Error::last_os_error)
            .step("setting the controlling terminal")?;
    }
    close_others(error_writer).step("closing descriptors")?;
    reset_signals().step("resetting signals")?;
    if agent.has_range {
        let (uid, gid) = (Uid::from_raw(agent.uid), Gid::from_raw(agent.gid));
        setgroups(&[]).step("dropping groups")?;
        setresgid(gid, gid, gid).step("taking the group id")?;
        setresuid(uid, uid, uid).step("taking the user id")?;
    }
    scheduling::apply(agent.idle).step("setting the priority")?;
    hardening::keep_capabilities(agent.capabilities).step("dropping capabilities")?;
    hardening::set_undumpable_and_no_new_privs().step("making the process undumpable")?;
    chdir(directory).step("entering the directory")?;
    filters
        .install()
        .map_err(Error::other)
        .step("installing the system call filters")
}

/// Runs in the child as the agent: executes the command, or returns the error.
fn exec_command(args: &ExecArgs) -> StepError {
    let mut last_error = Errno::ENOENT;
    for program in &args.candidates {
        let Err(errno) = execve(program, &args.argv, &args.environment);
        // As in execvp(3), the error of a file that cannot be executed is kept, and the search
        // continues.
        if !matches!(errno, Errno::ENOENT | Errno::ENOTDIR) {
            last_error = errno;
        }
    }
    StepError {
        step: "running it".to_owned(),
        source: last_error.into(),
    }
}

/// Resets signals: the Rust runtime ignores SIGPIPE and init blocks SIGCHLD; a command expects
/// neither.
fn reset_signals() -> nix::Result<()> {
    let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
    // SAFETY: the default action calls no function of this program.
    unsafe { sigaction(Signal::SIGPIPE, &default) }?;
    SigSet::all().thread_unblock()
}

/// Returns the start time of a process in ticks since boot, which identifies it together with its
/// number. A zombie counts as exited.
pub(crate) fn start_time(pid: i32) -> std::io::Result<u64> {
    let fields = process_tree::stat_fields(&std::fs::read(format!("/proc/{pid}/stat"))?)?;
    if matches!(fields.first().map(String::as_str), Some("Z" | "X")) {
        return Err(Error::from(ErrorKind::NotFound));
    }
    fields
        .get(19)
        .and_then(|field| field.parse().ok())
        .ok_or_else(|| Error::from(ErrorKind::InvalidData))
}
