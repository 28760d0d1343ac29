//! The launcher: makes the namespaces, maps the ids, sees init off.
//!
//! ```text
//!   creator (threaded)        launcher (one thread)          init (PID 1 inside)
//!      │ ── spec ────────────────▶ │
//!      │                           │ ── clone3 ─────────────────▶ │
//!      │                           │    maps, cgroups             │ waits
//!      │                           │ ── Go ─────────────────────▶ │ builds
//!      │                           │ ◀───────────── Ready/Failed  │
//!      │ ◀── Running {pid} ─────── │                              │
//!      │ records the process       │                              │
//!      │ ── Live ────────────────▶ │ ── Live ───────────────────▶ │ serves
//!      │ records `active`  ◀────── ╵ exits                        │
//! ```
//!
//! Until `Live`, init dies with the launcher (parent-death signal) and the launcher ends with
//! the creator (its line closes); after it, the record names init. A creator killed at any
//! moment leaves a directory, and never a process nobody knows of.

use std::fs::File;
use std::io::{Error, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;

use nix::fcntl::{Flock, FlockArg};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket,
};
use nix::sys::stat::{Mode, umask};
use nix::sys::wait::waitpid;
use nix::unistd::{Gid, Pid, Uid, chdir, chown, mkdir, setgroups};

use super::protocol::{Identity, Report, Spec};
use super::step::{Step, Stumble};
use super::{hardening, identity, init, packet, process};

/// The hidden subcommand. The creator's line is standard input. Call it before anything
/// starts a thread.
pub fn init_main() -> ExitCode {
    let stdin = std::io::stdin();
    let line = stdin.as_fd();
    match launch(line) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Stumble { step, source }) => {
            let reason = source.to_string();
            // Nobody may be listening any more; there is nobody else to tell.
            let _ = packet::send(line, &Report::Failed { step, reason }, &[]);
            ExitCode::FAILURE
        }
    }
}

fn launch(line: BorrowedFd<'_>) -> Result<(), Stumble> {
    hardening::close_from(3).step("closing inherited descriptors")?;
    let (spec, _) = packet::receive::<Spec>(line)
        .step("reading the order")?
        .ok_or_else(|| Error::from(ErrorKind::UnexpectedEof))
        .step("reading the order")?;
    umask(Mode::from_bits_truncate(0o077));
    chdir(&spec.directory).step("entering the sandbox's directory")?;
    let lock = File::open("launcher.lock").step("opening the launcher's lock")?;
    let lock = Flock::lock(lock, FlockArg::LockExclusive)
        .map_err(|(_, errno)| errno)
        .step("taking the launcher's lock")?;
    let listener = listen_at("init.sock").step("opening init.sock")?;
    enter_fs(spec.identity).step("making the sandbox's own directory")?;
    if let Identity::Range { .. } = spec.identity {
        setgroups(&[]).step("dropping groups")?;
    }
    let (ours, its) = packet::line().step("making a line to init")?;

    let Some(init) = clone_into_namespaces()
        .step("making namespaces (are user namespaces allowed? see `palisade doctor`)")?
    else {
        drop((ours, lock));
        init::begin(spec, its, listener);
    };
    drop((its, listener));
    let child = Child(init);
    see_off(line, ours.as_fd(), &child, &spec)?;
    std::mem::forget(child);
    Ok(())
}

/// Init, until it is on its own: dropped, it is killed and waited for.
struct Child(Pid);

impl Drop for Child {
    fn drop(&mut self) {
        let _ = kill(self.0, Signal::SIGKILL);
        let _ = waitpid(self.0, None);
    }
}

fn see_off(
    line: BorrowedFd<'_>,
    init: BorrowedFd<'_>,
    child: &Child,
    spec: &Spec,
) -> Result<(), Stumble> {
    let pid = child.0.as_raw();
    identity::write_maps(pid, spec.identity)?;
    for cgroup in &spec.cgroups {
        std::fs::write(cgroup.join("cgroup.procs"), pid.to_string()).step("joining a cgroup")?;
    }
    packet::send(init, &Report::Go, &[]).step("starting init")?;
    let mut warnings = Vec::new();
    loop {
        match hear(line, init)? {
            Report::Weaker(what) => warnings.push(what),
            Report::Ready => break,
            Report::Failed { step, reason } => {
                return Err(Error::other(reason)).step(&step);
            }
            Report::Go | Report::Running { .. } | Report::Live => {
                return Err(Error::from(ErrorKind::InvalidData)).step("listening to init");
            }
        }
    }
    let started = process::start_time(pid).step("looking at init")?;
    let running = Report::Running {
        pid,
        started,
        warnings,
    };
    packet::send(line, &running, &[]).step("reporting")?;
    match packet::receive::<Report>(line).step("waiting for the creator")? {
        Some((Report::Live, _)) => {}
        _ => return Err(Error::from(ErrorKind::BrokenPipe)).step("waiting for the creator"),
    }
    packet::send(init, &Report::Live, &[]).step("letting init go")?;
    // It answers when it no longer depends on us.
    match packet::receive::<Report>(init).step("letting init go")? {
        Some((Report::Live, _)) => Ok(()),
        _ => Err(Error::from(ErrorKind::BrokenPipe)).step("letting init go"),
    }
}

/// Init's next word, unless the creator goes away first.
fn hear(line: BorrowedFd<'_>, init: BorrowedFd<'_>) -> Result<Report, Stumble> {
    let mut both = [
        PollFd::new(init, PollFlags::POLLIN),
        PollFd::new(line, PollFlags::POLLIN),
    ];
    poll(&mut both, PollTimeout::NONE).step("waiting for init")?;
    let [init_said, creator_left] = both.map(|end| end.any().unwrap_or(false));
    if creator_left && !init_said {
        return Err(Error::from(ErrorKind::BrokenPipe)).step("waiting for the creator");
    }
    packet::receive::<Report>(init)
        .and_then(|word| word.ok_or_else(|| Error::other("init ended early")))
        .map(|(report, _)| report)
        .step("listening to init")
}

fn listen_at(path: &str) -> std::io::Result<OwnedFd> {
    let listener = socket(
        AddressFamily::Unix,
        SockType::SeqPacket,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        None,
    )?;
    bind(listener.as_raw_fd(), &UnixAddr::new(path)?)?;
    listen(&listener, Backlog::new(64)?)?;
    Ok(listener)
}

/// Makes the directory that belongs to the sandbox's own ids and goes there: init need not be
/// able to walk to it. The working directory moves along into the new mount namespace; an
/// open descriptor would stay in the old one, where init may mount nothing.
fn enter_fs(identity: Identity) -> std::io::Result<()> {
    mkdir("fs", Mode::from_bits_truncate(0o700))?;
    if let Identity::Range { first } = identity {
        chown(
            Path::new("fs"),
            Some(Uid::from_raw(first)),
            Some(Gid::from_raw(first)),
        )?;
    }
    chdir("fs")?;
    Ok(())
}

/// `None` in the child.
fn clone_into_namespaces() -> std::io::Result<Option<Pid>> {
    let flags = libc::CLONE_NEWUSER
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS;
    // SAFETY: all-zero is a valid `clone_args`.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.flags = u64::from(flags.cast_unsigned());
    arguments.exit_signal = u64::from(libc::SIGCHLD.cast_unsigned());
    // SAFETY: no CLONE_VM and no stack, so this is a fork: the child has a copy of our memory,
    // and we have one thread, so no lock in it is held by anybody else.
    let result = unsafe {
        libc::syscall(
            libc::SYS_clone3,
            &raw mut arguments,
            size_of::<libc::clone_args>(),
        )
    };
    match result {
        -1 => Err(Error::last_os_error()),
        0 => Ok(None),
        pid => Ok(Some(Pid::from_raw(
            i32::try_from(pid).map_err(Error::other)?,
        ))),
    }
}

/// A process, by descriptor: never another one that got its number.
pub(crate) fn open_process(pid: i32) -> std::io::Result<OwnedFd> {
    // SAFETY: plain numbers; the result is checked before it is owned.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(Error::last_os_error());
    }
    let fd = i32::try_from(fd).map_err(Error::other)?;
    // SAFETY: the kernel has just made it, for us alone; it is close-on-exec.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Ends a process held by descriptor.
pub(crate) fn kill_process(process: BorrowedFd<'_>) -> std::io::Result<()> {
    // SAFETY: no siginfo is passed; the descriptor outlives the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            process.as_raw_fd(),
            libc::SIGKILL,
            std::ptr::null::<libc::siginfo_t>(),
            0,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}
