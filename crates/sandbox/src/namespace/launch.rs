//! The launcher: makes the namespaces, maps the ids, sees init off.
//!
//! ```text
//!   creator (threaded)        launcher (one thread)          init (PID 1 inside)
//!      │ ── spec ────────────────▶ │
//!      │                           │ ── clone3 ─────────────────▶ │
//!      │ ◀── Born {pid} ────────── │    maps                      │ waits
//!      │                           │ ── Go ─────────────────────▶ │ joins its cgroups, builds
//!      │ records the process       │                              │
//!      │                           │ ◀───────────── Ready/Failed  │
//!      │ ◀── Running ───────────── │                              │
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
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use nix::fcntl::{Flock, FlockArg};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket,
};
use nix::sys::stat::{Mode, umask};
use nix::sys::wait::waitpid;
use nix::unistd::{Gid, Pid, Uid, chdir, chown, mkdir, setgroups};

use super::disk::DiskWatch;
use super::init::InitResources;
use super::protocol::{Identity, LaunchMessage, LaunchSpec, LauncherRequest};
use super::step::{Step, StepError};
use super::{file_op, hardening, identity, init, layer, lock, packet, process, survey};

/// The hidden subcommand. The creator's line is standard input. Call it before anything
/// starts a thread.
pub fn init_main() -> ExitCode {
    let stdin = std::io::stdin();
    let line = stdin.as_fd();
    match launch(line) {
        Ok(()) => ExitCode::SUCCESS,
        Err(StepError { step, source }) => {
            let reason = source.to_string();
            // Nobody may be listening any more; there is nobody else to tell.
            let _ = packet::send(line, &LaunchMessage::Failed { step, reason }, &[]);
            ExitCode::FAILURE
        }
    }
}

fn launch(line: BorrowedFd<'_>) -> Result<(), StepError> {
    hardening::close_from(3).step("closing inherited descriptors")?;
    let (request, _) = packet::receive::<LauncherRequest>(line)
        .step("reading the order")?
        .ok_or_else(|| Error::from(ErrorKind::UnexpectedEof))
        .step("reading the order")?;
    umask(Mode::from_bits_truncate(0o077));
    let spec = match request {
        LauncherRequest::Create(spec) => *spec,
        LauncherRequest::RunFileOp {
            subid_map,
            lock,
            op,
        } => {
            return file_op::serve(line, &subid_map, lock.as_deref(), &op);
        }
        LauncherRequest::Survey { directory } => {
            return survey::run_trials(line, &directory).step("trying what this machine allows");
        }
    };
    if let Some(subid_map) = &spec.subid_map {
        subid_map.enter()?;
    }
    chdir(&spec.directory).step("entering the sandbox's directory")?;
    let lock = lock_for_launch(Path::new("launcher.lock"))?;
    // Whoever removes what a dead creator left may have had the lock before us: it is not to be
    // built anew.
    check_requester_alive(line)?;
    let listener = listen_at("init.sock").step("opening init.sock")?;
    let verdict = File::create("stopped").step("making a place for a verdict")?;
    enter_fs(spec.identity, spec.has_tree).step("making the sandbox's own directory")?;
    // As the host sees it: the sandbox's mounts will not be in it.
    let top = File::open(".").step("opening the sandbox's own directory")?;
    let watch = DiskWatch::new(top.into(), verdict, spec.config.limits.disk);
    if let Identity::Range { .. } = spec.identity {
        setgroups(&[]).step("dropping groups")?;
    }
    let layers = layer::gather(&spec)?;
    if spec.subid_map.is_some() && !spec.counted.pids {
        // An agent that may become others has a count for each of them. What holds here when
        // the namespace is made holds for all of them together (Linux 5.14).
        let pids = u64::from(spec.config.limits.pids);
        setrlimit(Resource::RLIMIT_NPROC, pids, pids).step("limiting processes")?;
    }
    let (ours, its) = packet::line().step("making a line to init")?;
    let gate_sockets = cgroup_task_files(&spec.cgroups).step("opening cgroups")?;

    let (init, born_into) = clone_into_namespaces(&spec.cgroups)
        .step("making namespaces (are user namespaces allowed? see `palisade doctor`)")?;
    let Some(init) = init else {
        drop((ours, lock));
        let resources = InitResources {
            layers,
            listener,
            watch,
            cgroups: gate_sockets,
        };
        init::begin(spec, resources, its);
    };
    drop((its, listener, layers, watch, gate_sockets));
    let child = InitChild(init);
    supervise_init_start(line, ours.as_fd(), &child, &spec, born_into.as_deref())?;
    std::mem::forget(child);
    Ok(())
}

/// The lock that whoever removes the sandbox waits for.
pub(crate) fn lock_for_launch(path: &Path) -> Result<Flock<File>, StepError> {
    let lock = File::open(path).step("opening the launcher's lock")?;
    let lock = Flock::lock(lock, FlockArg::LockExclusive)
        .map_err(|(_, errno)| errno)
        .step("taking the launcher's lock")?;
    // Whoever had it before us may have removed it, and the sandbox with it.
    match lock::is_at(&lock, path).step("looking at the launcher's lock")? {
        true => Ok(lock),
        false => Err(Error::from(ErrorKind::NotFound)).step("taking the launcher's lock"),
    }
}

/// Fails if whoever ordered has gone. It says nothing before it was told something, so a line
/// with news is a closed one.
pub(crate) fn check_requester_alive(line: BorrowedFd<'_>) -> Result<(), StepError> {
    let mut end = [PollFd::new(line, PollFlags::POLLIN)];
    match poll(&mut end, PollTimeout::ZERO).step("looking for the creator")? {
        0 => Ok(()),
        _ => Err(Error::from(ErrorKind::BrokenPipe)).step("looking for the creator"),
    }
}

/// Init, until it is on its own: dropped, it is killed and waited for.
struct InitChild(Pid);

impl Drop for InitChild {
    fn drop(&mut self) {
        let _ = kill(self.0, Signal::SIGKILL);
        let _ = waitpid(self.0, None);
    }
}

fn supervise_init_start(
    line: BorrowedFd<'_>,
    init: BorrowedFd<'_>,
    child: &InitChild,
    spec: &LaunchSpec,
    born_into: Option<&Path>,
) -> Result<(), StepError> {
    let pid = child.0.as_raw();
    let started = process::start_time(pid).step("looking at init")?;
    packet::send(line, &LaunchMessage::Born { pid, started }, &[]).step("reporting")?;
    identity::write_maps(pid, spec.identity)?;
    join(pid, &spec.cgroups, born_into)?;
    packet::send(init, &LaunchMessage::Go, &[]).step("starting init")?;
    let mut warnings = Vec::new();
    loop {
        match receive_from_init(line, init)? {
            LaunchMessage::Weaker(what) => warnings.push(what),
            LaunchMessage::Ready => break,
            LaunchMessage::Failed { step, reason } => {
                return Err(Error::other(reason)).step(&step);
            }
            LaunchMessage::Go
            | LaunchMessage::Born { .. }
            | LaunchMessage::Running { .. }
            | LaunchMessage::Live => {
                return Err(Error::from(ErrorKind::InvalidData)).step("listening to init");
            }
        }
    }
    packet::send(line, &LaunchMessage::Running { warnings }, &[]).step("reporting")?;
    match packet::receive::<LaunchMessage>(line).step("waiting for the creator")? {
        Some((LaunchMessage::Live, _)) => {}
        _ => return Err(Error::from(ErrorKind::BrokenPipe)).step("waiting for the creator"),
    }
    packet::send(init, &LaunchMessage::Live, &[]).step("letting init go")?;
    // It answers when it no longer depends on us.
    match packet::receive::<LaunchMessage>(init).step("letting init go")? {
        Some((LaunchMessage::Live, _)) => Ok(()),
        _ => Err(Error::from(ErrorKind::BrokenPipe)).step("letting init go"),
    }
}

/// Makes init a member of a cgroup of version 2 that it was not born into. It joins those of
/// version 1 itself.
fn join(pid: i32, cgroups: &[PathBuf], born_into: Option<&Path>) -> Result<(), StepError> {
    let others = cgroups
        .iter()
        .filter(|one| Some(one.as_path()) != born_into && !one.join("tasks").exists());
    for cgroup in others {
        std::fs::write(cgroup.join("cgroup.procs"), pid.to_string()).step("joining a cgroup")?;
    }
    Ok(())
}

/// The ways into cgroups of version 1, for init: whoever moves another process there waits
/// some milliseconds for every processor, and who moves its only thread does not
/// (`cgroup_procs_write_start`).
fn cgroup_task_files(cgroups: &[PathBuf]) -> std::io::Result<Vec<File>> {
    let tasks = cgroups.iter().map(|cgroup| cgroup.join("tasks"));
    tasks
        .filter(|tasks| tasks.exists())
        .map(|tasks| File::options().write(true).open(tasks))
        .collect()
}

/// Init's next word, unless the creator goes away first.
fn receive_from_init(
    line: BorrowedFd<'_>,
    init: BorrowedFd<'_>,
) -> Result<LaunchMessage, StepError> {
    let mut both = [
        PollFd::new(init, PollFlags::POLLIN),
        PollFd::new(line, PollFlags::POLLIN),
    ];
    poll(&mut both, PollTimeout::NONE).step("waiting for init")?;
    let [init_said, creator_left] = both.map(|end| end.any().unwrap_or(false));
    if creator_left && !init_said {
        return Err(Error::from(ErrorKind::BrokenPipe)).step("waiting for the creator");
    }
    packet::receive::<LaunchMessage>(init)
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
fn enter_fs(identity: Identity, has_tree: bool) -> std::io::Result<()> {
    // One that is new must be new: nobody has put anything into it.
    if !has_tree {
        mkdir("fs", Mode::from_bits_truncate(0o700))?;
    }
    if let Identity::Range { first, .. } = identity {
        chown(
            Path::new("fs"),
            Some(Uid::from_raw(first)),
            Some(Gid::from_raw(first)),
        )?;
    }
    chdir("fs")?;
    Ok(())
}

/// Makes init in namespaces of its own; `None` in the child. Where the kernel can, it is born
/// into its cgroup of version 2, which is told, and into a time namespace.
fn clone_into_namespaces(cgroups: &[PathBuf]) -> std::io::Result<(Option<Pid>, Option<PathBuf>)> {
    let flags = libc::CLONE_NEWUSER
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS;
    let unified = cgroups
        .iter()
        .find(|cgroup| cgroup.join("cgroup.freeze").exists());
    // What a kernel does not know or does not allow is left out, and what is left is tried.
    if let Some(cgroup) = unified
        && let Ok(directory) = File::open(cgroup)
        && let Ok(made) = clone_into(flags | libc::CLONE_NEWTIME, Some(directory.as_fd()))
    {
        return Ok((made, Some(cgroup.clone())));
    }
    let made = clone_into(flags | libc::CLONE_NEWTIME, None).or_else(|_| clone_into(flags, None));
    Ok((made?, None))
}

/// A fork into new namespaces; `None` in the child. Only for a process with one thread.
pub(crate) fn clone_into(
    flags: libc::c_int,
    cgroup: Option<BorrowedFd<'_>>,
) -> std::io::Result<Option<Pid>> {
    // SAFETY: all-zero is a valid `clone_args`.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.flags = u64::from(flags.cast_unsigned());
    arguments.exit_signal = u64::from(libc::SIGCHLD.cast_unsigned());
    if let Some(cgroup) = cgroup {
        arguments.flags |= CLONE_INTO_CGROUP;
        arguments.cgroup = u64::from(cgroup.as_raw_fd().cast_unsigned());
    }
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

const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_went_with_its_sandbox_is_not_taken() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("launcher.lock");
        let held = File::create(&path).unwrap();
        held.lock().unwrap();
        std::thread::scope(|scope| {
            let late = scope.spawn(|| {
                lock_for_launch(&path)
                    .map(drop)
                    .map_err(|late| late.to_string())
            });
            let us = std::process::id();
            // It has the file open and waits.
            while !std::fs::read_to_string("/proc/locks")
                .unwrap()
                .lines()
                .any(|line| line.contains("->") && line.contains(&format!(" {us} ")))
            {
                std::thread::yield_now();
            }
            std::fs::remove_file(&path).unwrap();
            drop(held);
            let said = late.join().unwrap().unwrap_err();
            assert!(said.contains("taking the launcher's lock"), "{said}");
        });
        assert!(lock_for_launch(&path).is_err());
        File::create(&path).unwrap();
        assert!(lock_for_launch(&path).is_ok());
    }

    #[test]
    fn an_order_of_somebody_who_left_is_not_carried_out() {
        let (ours, its) = packet::line().unwrap();
        check_requester_alive(its.as_fd()).unwrap();
        drop(ours);
        assert!(check_requester_alive(its.as_fd()).is_err());
    }
}
