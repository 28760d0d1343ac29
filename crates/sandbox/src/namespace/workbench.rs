//! The workbench inside: this program again, as the agent, with a socket to listen on.
//!
//! Init makes the socket and keeps it, so that a workbench that has ended is started again for
//! the next who asks, and nobody loses their place in the queue. The agent may end it, or take
//! it over: it has the same rights, and whoever connects from outside takes what is said there
//! for the agent's words.

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

/// How many may wait to be served.
const BACKLOG: i32 = 64;

/// Init itself, until the child becomes something else.
const PROGRAM: &str = "/proc/self/exe";

/// The workbench of a sandbox, once somebody has asked for it.
#[derive(Default)]
pub(crate) struct Workbench {
    listener: Option<OwnedFd>,
    job: Option<Job>,
}

/// What it is started with.
pub(crate) struct WorkbenchStart<'a> {
    pub(crate) environment: &'a [(String, String)],
    pub(crate) agent: Account,
    pub(crate) filters: &'a Filters,
}

impl Workbench {
    /// Its process, while it runs.
    pub(crate) fn job_mut(&mut self) -> Option<&mut Job> {
        self.job.as_mut()
    }

    /// Its keeper and, once the keeper has reported it, its process.
    pub(crate) fn server(&mut self) -> Option<(Pid, Option<Pid>)> {
        let job = self.job.as_mut()?;
        Some((job.subreaper(), job.command()))
    }

    /// A connection to it, and its keeper if it had to be started.
    pub(crate) fn connect(
        &mut self,
        words: Vec<Vec<u8>>,
        start: &WorkbenchStart<'_>,
    ) -> Result<(OwnedFd, Option<Pid>), StepError> {
        let listener = match &self.listener {
            Some(listener) => listener,
            None => self
                .listener
                .insert(make_listener().step("making the workbench's socket")?),
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
            let job = begin(listener, words, start)?;
            subreaper = Some(job.subreaper());
            self.job = Some(job);
        }
        let connected = dial(listener).step("connecting to the workbench")?;
        Ok((connected, subreaper))
    }
}

fn begin(
    listener: &OwnedFd,
    words: Vec<Vec<u8>>,
    start: &WorkbenchStart<'_>,
) -> Result<Job, StepError> {
    let exec = Exec {
        argv: words,
        environment: Vec::new(),
        directory: None,
        terminal: None,
    };
    let mut order = ExecArgs::read(&exec, start.environment)?;
    let program = CString::new(PROGRAM).map_err(Error::from);
    order.candidates = vec![program.step("naming the program")?];
    let nothing = || {
        let flags = OFlag::O_RDWR | OFlag::O_CLOEXEC;
        open("/dev/null", flags, Mode::empty()).step("opening /dev/null")
    };
    let ends = StdioEnds {
        inside: vec![
            listener.try_clone().step("copying a descriptor")?,
            nothing()?,
            nothing()?,
        ],
        outside: Vec::new(),
    };
    let (job, _) = process::spawn(&Work::Command(order), ends, start.agent, start.filters)?;
    Ok(job)
}

/// A socket with a name that the kernel chooses, in the sandbox's own network namespace.
fn make_listener() -> std::io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let listener = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    bind(listener.as_raw_fd(), &UnixAddr::new_unnamed())?;
    listen(&listener, Backlog::new(BACKLOG)?)?;
    Ok(listener)
}

fn dial(listener: &OwnedFd) -> std::io::Result<OwnedFd> {
    let address = getsockname::<UnixAddr>(listener.as_raw_fd())?;
    if address.as_abstract().is_none() {
        return Err(Error::from(ErrorKind::AddrNotAvailable));
    }
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(socket.as_raw_fd(), &address)?;
    Ok(socket)
}
