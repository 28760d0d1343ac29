//! The launcher: creates the namespaces, maps the ids and supervises init until it runs on its own.
//!
//! ```text
//!   creator (threaded)        launcher (one thread)          init (PID 1 inside)
//!      │ ── spec ────────────────▶ │
//!      │                           │ ── clone3 ─────────────────▶ │
//!      │ ◀─ Cloned {pid} ───────── │    maps                      │ waits
//!      │                           │ ── Go ─────────────────────▶ │ joins its cgroups, builds
//!      │ records the process       │                              │
//!      │                           │ ◀───────────── Ready/Failed  │
//!      │ ◀── Running ───────────── │                              │
//!      │ ── Detach ──────────────▶ │ ── Detach ─────────────────▶ │ serves
//!      │ records `active`  ◀────── ╵ exits                        │
//! ```
//!
//! Until `Detach`, init dies with the launcher (parent-death signal) and the launcher exits with
//! the creator (its channel closes); after `Detach`, the record names init. If the creator is
//! killed at any moment, at most a directory remains, and never an unrecorded process.

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

/// Runs the launcher. Standard input is the channel to the creator. Call this function before any
/// thread is started.
pub fn init_main() -> ExitCode {
    let stdin = std::io::stdin();
    let channel = stdin.as_fd();
    match launch(channel) {
        Ok(()) => ExitCode::SUCCESS,
        Err(StepError { step, source }) => {
            let reason = source.to_string();
            // The creator may have exited, and there is no other receiver.
            let _ = packet::send(channel, &LaunchMessage::Failed { step, reason }, &[]);
            ExitCode::FAILURE
        }
    }
}

fn launch(channel: BorrowedFd<'_>) -> Result<(), StepError> {
    hardening::close_from(3).step("closing inherited descriptors")?;
    let (request, _) = packet::receive::<LauncherRequest>(channel)
        .step("reading the request")?
        .ok_or_else(|| Error::from(ErrorKind::UnexpectedEof))
        .step("reading the request")?;
    umask(Mode::from_bits_truncate(0o077));
    let spec = match request {
        LauncherRequest::Create(spec) => *spec,
        LauncherRequest::RunFileOp {
            subid_map,
            lock,
            op,
        } => {
            return file_op::run_in_child(channel, &subid_map, lock.as_deref(), &op);
        }
        LauncherRequest::Survey { directory } => {
            return survey::run_trials(channel, &directory)
                .step("checking the features of this machine");
        }
    };
    if let Some(subid_map) = &spec.subid_map {
        subid_map.enter()?;
    }
    chdir(&spec.directory).step("entering the sandbox's directory")?;
    let lock = lock_for_launch(Path::new("launcher.lock"))?;
    // If the creator has exited, clean-up may have removed the sandbox while this process waited
    // for the lock. Then nothing must be created.
    check_requester_alive(channel)?;
    let listener = listen_at("init.sock").step("opening init.sock")?;
    let stop_file = File::create("stopped").step("creating the file `stopped`")?;
    enter_fs(spec.identity, spec.has_tree).step("creating the sandbox's own directory")?;
    // The directory is opened before the sandbox's mounts exist, so that measurements do not
    // include them.
    let fs_directory = File::open(".").step("opening the sandbox's own directory")?;
    let watch = DiskWatch::new(fs_directory.into(), stop_file, spec.config.limits.disk);
    if let Identity::Range { .. } = spec.identity {
        setgroups(&[]).step("dropping groups")?;
    }
    let layers = layer::collect_layers(&spec)?;
    if spec.subid_map.is_some() && !spec.cgroup_limits.pids {
        // The kernel counts processes for each id, and this agent can switch ids. A limit that is
        // set before the namespace is created applies to all ids together (Linux 5.14).
        let pids = u64::from(spec.config.limits.pids);
        setrlimit(Resource::RLIMIT_NPROC, pids, pids).step("limiting processes")?;
    }
    let (launcher_end, init_end) = packet::socket_pair().step("creating a channel to init")?;
    let task_files = cgroup_task_files(&spec.cgroups).step("opening cgroups")?;

    let (init, initial_cgroup) = clone_into_namespaces(&spec.cgroups).step(
        "creating namespaces (run `palisade doctor` to check whether user namespaces are allowed)",
    )?;
    let Some(init) = init else {
        drop((launcher_end, lock));
        let resources = InitResources {
            layers,
            listener,
            watch,
            cgroups: task_files,
        };
        init::run_init(spec, resources, init_end);
    };
    drop((init_end, listener, layers, watch, task_files));
    let child = InitChild(init);
    supervise_init_start(
        channel,
        launcher_end.as_fd(),
        &child,
        &spec,
        initial_cgroup.as_deref(),
    )?;
    std::mem::forget(child);
    Ok(())
}

/// Takes the lock that the removal of the sandbox waits for.
pub(crate) fn lock_for_launch(path: &Path) -> Result<Flock<File>, StepError> {
    let lock = File::open(path).step("opening the launcher's lock")?;
    let lock = Flock::lock(lock, FlockArg::LockExclusive)
        .map_err(|(_, errno)| errno)
        .step("taking the launcher's lock")?;
    // The previous holder may have removed the lock file, and the sandbox with it.
    match lock::is_file_at(&lock, path).step("checking the launcher's lock")? {
        true => Ok(lock),
        false => Err(Error::from(ErrorKind::NotFound)).step("taking the launcher's lock"),
    }
}

/// Fails if the requester has exited. The requester sends nothing before it receives a message, so
/// a readable channel means that it is closed.
pub(crate) fn check_requester_alive(channel: BorrowedFd<'_>) -> Result<(), StepError> {
    let mut end = [PollFd::new(channel, PollFlags::POLLIN)];
    match poll(&mut end, PollTimeout::ZERO).step("checking the creator")? {
        0 => Ok(()),
        _ => Err(Error::from(ErrorKind::BrokenPipe)).step("checking the creator"),
    }
}

/// Init until it is detached; killed and reaped on drop.
struct InitChild(Pid);

impl Drop for InitChild {
    fn drop(&mut self) {
        let _ = kill(self.0, Signal::SIGKILL);
        let _ = waitpid(self.0, None);
    }
}

/// Supervises init from its clone until it is detached.
fn supervise_init_start(
    channel: BorrowedFd<'_>,
    init: BorrowedFd<'_>,
    child: &InitChild,
    spec: &LaunchSpec,
    initial_cgroup: Option<&Path>,
) -> Result<(), StepError> {
    let pid = child.0.as_raw();
    let started = process::start_time(pid).step("reading init's start time")?;
    packet::send(channel, &LaunchMessage::Cloned { pid, started }, &[]).step("reporting")?;
    identity::write_maps(pid, spec.identity)?;
    join_cgroups(pid, &spec.cgroups, initial_cgroup)?;
    packet::send(init, &LaunchMessage::Go, &[]).step("starting init")?;
    let mut warnings = Vec::new();
    loop {
        match receive_from_init(channel, init)? {
            LaunchMessage::Warning(what) => warnings.push(what),
            LaunchMessage::Ready => break,
            LaunchMessage::Failed { step, reason } => {
                return Err(Error::other(reason)).step(&step);
            }
            LaunchMessage::Go
            | LaunchMessage::Cloned { .. }
            | LaunchMessage::Running { .. }
            | LaunchMessage::Detach => {
                return Err(Error::from(ErrorKind::InvalidData)).step("receiving from init");
            }
        }
    }
    packet::send(channel, &LaunchMessage::Running { warnings }, &[]).step("reporting")?;
    match packet::receive::<LaunchMessage>(channel).step("waiting for the creator")? {
        Some((LaunchMessage::Detach, _)) => {}
        _ => return Err(Error::from(ErrorKind::BrokenPipe)).step("waiting for the creator"),
    }
    packet::send(init, &LaunchMessage::Detach, &[]).step("releasing init")?;
    // Init replies when it no longer depends on the launcher.
    match packet::receive::<LaunchMessage>(init).step("releasing init")? {
        Some((LaunchMessage::Detach, _)) => Ok(()),
        _ => Err(Error::from(ErrorKind::BrokenPipe)).step("releasing init"),
    }
}

/// Adds init to the cgroups of version 2, except the one into which init was cloned. Init itself
/// joins those of version 1.
fn join_cgroups(
    pid: i32,
    cgroups: &[PathBuf],
    initial_cgroup: Option<&Path>,
) -> Result<(), StepError> {
    let others = cgroups
        .iter()
        .filter(|one| Some(one.as_path()) != initial_cgroup && !one.join("tasks").exists());
    for cgroup in others {
        std::fs::write(cgroup.join("cgroup.procs"), pid.to_string()).step("joining a cgroup")?;
    }
    Ok(())
}

/// Opens the `tasks` files of cgroups of version 1 for init: moving another process into a cgroup
/// takes some milliseconds, because the kernel waits for every processor. A process with one thread
/// that moves itself does not wait (`cgroup_procs_write_start`).
fn cgroup_task_files(cgroups: &[PathBuf]) -> std::io::Result<Vec<File>> {
    let tasks = cgroups.iter().map(|cgroup| cgroup.join("tasks"));
    tasks
        .filter(|tasks| tasks.exists())
        .map(|tasks| File::options().write(true).open(tasks))
        .collect()
}

/// Receives init's next message, unless the creator exits first.
fn receive_from_init(
    channel: BorrowedFd<'_>,
    init: BorrowedFd<'_>,
) -> Result<LaunchMessage, StepError> {
    let mut ends = [
        PollFd::new(init, PollFlags::POLLIN),
        PollFd::new(channel, PollFlags::POLLIN),
    ];
    poll(&mut ends, PollTimeout::NONE).step("waiting for init")?;
    let [init_is_readable, creator_exited] = ends.map(|end| end.any().unwrap_or(false));
    if creator_exited && !init_is_readable {
        return Err(Error::from(ErrorKind::BrokenPipe)).step("waiting for the creator");
    }
    packet::receive::<LaunchMessage>(init)
        .and_then(|message| message.ok_or_else(|| Error::other("init exited early")))
        .map(|(report, _)| report)
        .step("receiving from init")
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

/// Creates the directory `fs` for the sandbox's ids and makes it the working directory, so that
/// init needs no permission for the path to it. The working directory follows into the new mount
/// namespace; an open descriptor would refer to the old namespace, in which init cannot mount.
fn enter_fs(identity: Identity, has_tree: bool) -> std::io::Result<()> {
    // If there is no tree yet, the directory must not exist, so that it has no content of an agent.
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

/// Clones init into new namespaces; `None` in the child. If the kernel supports it, init is cloned
/// into its cgroup of version 2, which is returned, and into a time namespace.
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
    // If the kernel does not support a flag, the clone is tried again without it.
    if let Some(cgroup) = unified
        && let Ok(directory) = File::open(cgroup)
        && let Ok(made) = clone_into(flags | libc::CLONE_NEWTIME, Some(directory.as_fd()))
    {
        return Ok((made, Some(cgroup.clone())));
    }
    let made = clone_into(flags | libc::CLONE_NEWTIME, None).or_else(|_| clone_into(flags, None));
    Ok((made?, None))
}

/// Forks into new namespaces; `None` in the child. Only for a process with one thread.
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
    // SAFETY: without CLONE_VM and a stack the call is a fork. The child has a copy of this
    // process's memory, in which no other thread holds a lock, because this process has one thread.
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

/// The flag of clone3(2), which is missing in `libc`.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Opens a descriptor of a process. It never refers to a later process with the same number.
pub(crate) fn open_process(pid: i32) -> std::io::Result<OwnedFd> {
    // SAFETY: the call takes numbers; the result is checked before it becomes an `OwnedFd`.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(Error::last_os_error());
    }
    let fd = i32::try_from(fd).map_err(Error::other)?;
    // SAFETY: the kernel returned a new descriptor, which has no other owner; it is close-on-exec.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Kills a process by descriptor.
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
    fn lock_of_a_removed_sandbox_is_not_taken() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("launcher.lock");
        let held = File::create(&path).unwrap();
        held.lock().unwrap();
        std::thread::scope(|scope| {
            let locker = scope.spawn(|| {
                lock_for_launch(&path)
                    .map(drop)
                    .map_err(|error| error.to_string())
            });
            let own_pid = std::process::id();
            // Wait until the thread has opened the file and waits for the lock.
            while !std::fs::read_to_string("/proc/locks")
                .unwrap()
                .lines()
                .any(|line| line.contains("->") && line.contains(&format!(" {own_pid} ")))
            {
                std::thread::yield_now();
            }
            std::fs::remove_file(&path).unwrap();
            drop(held);
            let message = locker.join().unwrap().unwrap_err();
            assert!(message.contains("taking the launcher's lock"), "{message}");
        });
        assert!(lock_for_launch(&path).is_err());
        File::create(&path).unwrap();
        assert!(lock_for_launch(&path).is_ok());
    }

    #[test]
    fn request_of_an_exited_requester_is_rejected() {
        let (launcher_end, init_end) = packet::socket_pair().unwrap();
        check_requester_alive(init_end.as_fd()).unwrap();
        drop(launcher_end);
        assert!(check_requester_alive(init_end.as_fd()).is_err());
    }
}
