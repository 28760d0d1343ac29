//! Standard streams of processes in the sandbox: pipes and terminals, created by init with the
//! agent's ids.

use std::io::Error;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use nix::unistd::{Gid, Uid, pipe2, setfsgid, setfsuid};

use super::hardening;
use super::identity::Account;
use super::protocol::TerminalSize;
use super::step::{Step, StepError};

/// The ends of a command's standard streams: `child_ends` for the command, `caller_ends` for the
/// client.
pub(crate) struct StdioEnds {
    pub(crate) child_ends: Vec<OwnedFd>,
    pub(crate) caller_ends: Vec<OwnedFd>,
}

/// Creates a terminal of this size, or three pipes.
pub(crate) fn create_stdio(
    terminal: Option<TerminalSize>,
    agent: Account,
) -> Result<StdioEnds, StepError> {
    with_agent_ids(agent, || open_stdio(terminal))
}

/// Calls `work` with the agent's file system ids, so that the agent owns new pipes and terminals:
/// `/dev/stdout` must be openable by the process that has it.
fn with_agent_ids<T>(
    agent: Account,
    work: impl FnOnce() -> Result<T, StepError>,
) -> Result<T, StepError> {
    if !agent.has_range {
        return work();
    }
    setfsgid(Gid::from_raw(agent.gid));
    setfsuid(Uid::from_raw(agent.uid));
    let result = work();
    setfsuid(Uid::from_raw(0));
    setfsgid(Gid::from_raw(0));
    // Changing ids resets the dumpable flag to the host's fs.suid_dumpable.
    hardening::set_undumpable_and_no_new_privs().step("making init undumpable")?;
    result
}

fn open_stdio(terminal: Option<TerminalSize>) -> Result<StdioEnds, StepError> {
    let Some(size) = terminal else {
        let pipe = || pipe2(OFlag::O_CLOEXEC).step("creating a pipe");
        let ((stdin, stdin_writer), (stdout_reader, stdout), (stderr_reader, stderr)) =
            (pipe()?, pipe()?, pipe()?);
        return Ok(StdioEnds {
            child_ends: vec![stdin, stdout, stderr],
            caller_ends: vec![stdin_writer, stdout_reader, stderr_reader],
        });
    };
    let flags = OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let master = open("/dev/pts/ptmx", flags, Mode::empty()).step("opening a terminal")?;
    let unlocked: libc::c_int = 0;
    // SAFETY: the call reads one int.
    let result = unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlocked) };
    if result != 0 {
        return Err(Error::last_os_error()).step("unlocking the terminal");
    }
    // The other end is opened by descriptor and not by name, so that no file in the agent's /dev
    // can replace it. SAFETY: the call takes numbers; the result is checked before it becomes an
    // `OwnedFd`.
    let slave = unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags.bits()) };
    if slave < 0 {
        return Err(Error::last_os_error()).step("opening the terminal's other end");
    }
    // SAFETY: the kernel returned a new descriptor, which has no other owner.
    let slave = unsafe { OwnedFd::from_raw_fd(slave) };
    set_size(&master, size).step("resizing the terminal")?;
    let duplicate = |fd: &OwnedFd| fd.as_fd().try_clone_to_owned().step("copying a descriptor");
    Ok(StdioEnds {
        child_ends: vec![duplicate(&slave)?, duplicate(&slave)?, slave],
        caller_ends: vec![master],
    })
}

/// Sets a terminal's size through its master.
pub(crate) fn set_size(terminal: &OwnedFd, size: TerminalSize) -> std::io::Result<()> {
    let size = libc::winsize {
        ws_row: size.rows,
        ws_col: size.columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: the call reads one `winsize`, which outlives it.
    match unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) } {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

/// Points these descriptors at `/dev/null`.
pub(crate) fn redirect_to_null(descriptors: &[RawFd]) -> std::io::Result<()> {
    let null = open("/dev/null", OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())?;
    for &fd in descriptors {
        replace(&null, fd)?;
    }
    Ok(())
}

/// `dup2`, onto one of the standard descriptors.
pub(crate) fn replace(from: &impl AsRawFd, onto: RawFd) -> std::io::Result<()> {
    // SAFETY: only the descriptors 0 to 2 are replaced, which no `OwnedFd` of this process holds.
    match unsafe { libc::dup2(from.as_raw_fd(), onto) } {
        -1 => Err(Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Closes all descriptors above the standard ones except `kept`.
pub(crate) fn close_others(kept: &OwnedFd) -> std::io::Result<()> {
    let kept = kept.as_raw_fd().cast_unsigned();
    for (first, last) in [(3, kept - 1), (kept + 1, u32::MAX)] {
        if first <= last {
            // SAFETY: this process executes or exits next; it uses none of these any more.
            let result = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
            if result != 0 {
                return Err(Error::last_os_error());
            }
        }
    }
    Ok(())
}
