//! The sandbox's workbench: this program, run as the agent, with a listening socket.
//!
//! Init creates and keeps the socket, so that an exited workbench is restarted for the next client,
//! and no queued connection is lost. The agent can kill or replace the workbench, which has the
//! agent's rights. A client must therefore treat the answers of the workbench as data from the
//! agent.

use std::ffi::CString;
use std::io::{Error, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::fcntl::{OFlag, open};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, getsockname, listen,
    socket,
};
use nix::sys::stat::Mode;
use nix::unistd::Pid;

use super::exec_args::ExecArgs;
use super::identity::Account;
use super::process::{self, Job, Work};
use super::protocol::Exec;
use super::seccomp::Filters;
use super::stdio::StdioEnds;
use super::step::{Step, StepError};

/// The backlog of the socket.
const BACKLOG: i32 = 64;

/// Init's own executable, which the child executes.
const PROGRAM: &str = "/proc/self/exe";

/// The workbench of a sandbox, started at the first request.
#[derive(Default)]
pub(crate) struct Workbench {
    listener: Option<OwnedFd>,
    job: Option<Job>,
}

/// The parameters of a start.
pub(crate) struct WorkbenchStart<'a> {
    pub(crate) environment: &'a [(String, String)],
    pub(crate) agent: Account,
    pub(crate) filters: &'a Filters,
}

impl Workbench {
    /// The running process.
    pub(crate) fn job_mut(&mut self) -> Option<&mut Job> {
        self.job.as_mut()
    }

    /// The subreaper and, once it has reported it, the process.
    pub(crate) fn server(&mut self) -> Option<(Pid, Option<Pid>)> {
        let job = self.job.as_mut()?;
        Some((job.subreaper(), job.command()))
    }

    /// Connects to the workbench; also returns its subreaper if it was started.
    pub(crate) fn connect(
        &mut self,
        arguments: Vec<Vec<u8>>,
        start: &WorkbenchStart<'_>,
    ) -> Result<(OwnedFd, Option<Pid>), StepError> {
        let listener = match &self.listener {
            Some(listener) => listener,
            None => self
                .listener
                .insert(make_listener().step("creating the workbench's socket")?),
        };
        if self
            .job
            .as_mut()
            .is_some_and(|job| job.read_status().is_some())
        {
            self.job = None;
        }
        let mut subreaper = None;
        if self.job.is_none() {
            let job = start_workbench(listener, arguments, start)?;
            subreaper = Some(job.subreaper());
            self.job = Some(job);
        }
        let connected = connect_to_listener(listener).step("connecting to the workbench")?;
        Ok((connected, subreaper))
    }
}

fn start_workbench(
    listener: &OwnedFd,
    arguments: Vec<Vec<u8>>,
    start: &WorkbenchStart<'_>,
) -> Result<Job, StepError> {
    let exec = Exec {
        argv: arguments,
        environment: Vec::new(),
        directory: None,
        terminal: None,
    };
    let mut args = ExecArgs::read(&exec, start.environment)?;
    let program = CString::new(PROGRAM).map_err(Error::from);
    args.candidates = vec![program.step("naming the program")?];
    let open_null = || {
        let flags = OFlag::O_RDWR | OFlag::O_CLOEXEC;
        open("/dev/null", flags, Mode::empty()).step("opening /dev/null")
    };
    let ends = StdioEnds {
        child_ends: vec![
            listener.try_clone().step("copying a descriptor")?,
            open_null()?,
            open_null()?,
        ],
        caller_ends: Vec::new(),
    };
    let (job, _) = process::spawn(&Work::Command(args), ends, start.agent, start.filters)?;
    Ok(job)
}

/// Creates a listening socket in the sandbox's network namespace. The kernel chooses its abstract
/// name (autobind).
fn make_listener() -> std::io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let listener = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    bind(listener.as_raw_fd(), &UnixAddr::new_unnamed())?;
    listen(&listener, Backlog::new(BACKLOG)?)?;
    Ok(listener)
}

fn connect_to_listener(listener: &OwnedFd) -> std::io::Result<OwnedFd> {
    let address = getsockname::<UnixAddr>(listener.as_raw_fd())?;
    if address.as_abstract().is_none() {
        return Err(Error::from(ErrorKind::AddrNotAvailable));
    }
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(socket.as_raw_fd(), &address)?;
    Ok(socket)
}
