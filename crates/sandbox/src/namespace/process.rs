//! Processes inside: starting one as the agent, finding and ending a tree of them.

use std::collections::HashSet;
use std::ffi::CString;
use std::io::{Error, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl, open, openat};
use nix::sys::prctl;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, sigaction};
use nix::sys::stat::Mode;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{
    ForkResult, Gid, Pid, Uid, chdir, execve, fork, pipe2, setfsgid, setfsuid, setgroups,
    setresgid, setresuid, setsid,
};

use super::hardening;
use super::identity::{AGENT_GID, AGENT_UID};
use super::protocol::{Exec, Identity, Size};
use super::seccomp::Filters;
use super::step::{Step, Stumble};

/// A command that was started.
///
/// Between init and the command stands its keeper, a child of init that takes in the
/// orphans of the command (a subreaper): the keeper's descendants are the command's tree,
/// also those that left their session and lost their parents. It tells the command's process
/// and, at its end, the code; it goes when the last of the tree has gone.
pub(crate) struct Job {
    keeper: Pid,
    tells: std::fs::File,
    heard: Vec<u8>,
    /// Signals that came before the keeper had told whom they are for.
    early: Vec<Signal>,
    /// What the child says if it cannot become the command.
    trouble: std::fs::File,
}

/// Rounds without news after which a process that does not come to rest is killed as it is.
const MOST_QUIET_ROUNDS: u32 = 100;

/// How a command ended.
pub(crate) enum End {
    /// It never became the command.
    Failed { step: String, reason: String },
    /// It ran, and ended with this code.
    Exited(i32),
}

impl Job {
    /// What the keeper tells, to wait on.
    pub(crate) fn tells(&self) -> BorrowedFd<'_> {
        self.tells.as_fd()
    }

    /// Listens to the keeper; the end, when that has come.
    pub(crate) fn hear(&mut self) -> Option<End> {
        let mut words = [0; 8];
        match self.tells.read(&mut words) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
            // Somebody has killed the keeper: the command is nobody's any more.
            Ok(0) | Err(_) => return Some(End::Exited(128 + libc::SIGKILL)),
            Ok(length) => self.heard.extend_from_slice(words.get(..length)?),
        }
        if let Some(command) = number(&self.heard, 0) {
            for signal in self.early.drain(..) {
                signal_group(command, signal);
            }
        }
        let code = number(&self.heard, 4)?;
        let mut text = String::new();
        // The command is dead, and with it the writing end.
        let told = self.trouble.read_to_string(&mut text);
        Some(match text.split_once('\0') {
            Some((step, errno)) if told.is_ok() => End::Failed {
                step: step.to_owned(),
                reason: Error::from_raw_os_error(errno.parse().unwrap_or(libc::EIO)).to_string(),
            },
            _ => End::Exited(code),
        })
    }

    /// Signals the command's process group.
    pub(crate) fn signal(&mut self, signal: i32) {
        let Ok(signal) = Signal::try_from(signal) else {
            return;
        };
        match number(&self.heard, 0) {
            Some(command) => signal_group(command, signal),
            None => self.early.push(signal),
        }
    }

    /// Kills the keeper, the command and everything it started.
    pub(crate) fn kill_tree(&self, proc: &OwnedFd) {
        let mut found = HashSet::new();
        let mut quiet = 0;
        let mut rested = false;
        // Stopped first. Being told to stop is not enough, because a fork that has got past
        // its look at the signals still makes its child; and a listing holds names that are
        // older than the states read for them. So everybody must be at rest in one round,
        // and the next one must find nobody new. Somebody who cannot be stopped (a shell
        // whose vfork child was) is not waited for for ever.
        while quiet < MOST_QUIET_ROUNDS {
            let all = processes(proc);
            let before = found.len();
            let mut grown = true;
            while grown {
                grown = false;
                for one in &all {
                    let belongs = one.pid == self.keeper.as_raw() || found.contains(&one.parent);
                    if belongs && found.insert(one.pid) {
                        grown = true;
                        let _ = kill(Pid::from_raw(one.pid), Signal::SIGSTOP);
                    }
                }
            }
            let at_rest = |one: &Process| matches!(one.state, 'T' | 't' | 'Z' | 'X');
            let moving = all
                .iter()
                .any(|one| found.contains(&one.pid) && !at_rest(one));
            let grew = found.len() > before;
            if grew {
                quiet = 0;
            } else if moving {
                quiet += 1;
                std::thread::yield_now();
            } else if rested {
                break;
            }
            rested = !grew && !moving;
        }
        for pid in found {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// Signals a command's group; one that has not yet made its group, alone.
fn signal_group(command: i32, signal: Signal) {
    if kill(Pid::from_raw(-command), signal) == Err(Errno::ESRCH) {
        let _ = kill(Pid::from_raw(command), signal);
    }
}

fn number(words: &[u8], at: usize) -> Option<i32> {
    let word = words.get(at..at + 4)?.try_into().ok()?;
    Some(i32::from_ne_bytes(word))
}

/// One line of `/proc/*/stat`.
struct Process {
    pid: i32,
    state: char,
    parent: i32,
}

fn processes(proc: &OwnedFd) -> Vec<Process> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let Ok(mut listing) = Dir::openat(proc, ".", flags, Mode::empty()) else {
        return Vec::new();
    };
    listing
        .iter()
        .flatten()
        .filter_map(|entry| {
            let pid: i32 = entry.file_name().to_str().ok()?.parse().ok()?;
            let path = format!("{pid}/stat");
            let file = openat(proc, path.as_str(), OFlag::O_CLOEXEC, Mode::empty()).ok()?;
            let mut bytes = Vec::new();
            std::fs::File::from(file).read_to_end(&mut bytes).ok()?;
            let fields = stat_fields(&bytes).ok()?;
            Some(Process {
                pid,
                state: fields.first()?.chars().next()?,
                parent: fields.get(1)?.parse().ok()?,
            })
        })
        .collect()
}

/// The fields of `/proc/PID/stat` from the state on. The name before them is the process's
/// own and may hold anything, parentheses and newlines too.
fn stat_fields(stat: &[u8]) -> std::io::Result<Vec<String>> {
    let text = String::from_utf8_lossy(stat);
    let (_, fields) = text
        .rsplit_once(')')
        .ok_or_else(|| Error::from(ErrorKind::InvalidData))?;
    Ok(fields.split_whitespace().map(str::to_owned).collect())
}

/// When a process started, in ticks since boot: with its number, its name for all time.
/// A zombie counts as gone.
pub(crate) fn start_time(pid: i32) -> std::io::Result<u64> {
    let fields = stat_fields(&std::fs::read(format!("/proc/{pid}/stat"))?)?;
    if matches!(fields.first().map(String::as_str), Some("Z" | "X")) {
        return Err(Error::from(ErrorKind::NotFound));
    }
    fields
        .get(19)
        .and_then(|field| field.parse().ok())
        .ok_or_else(|| Error::from(ErrorKind::InvalidData))
}

/// Stops every process but init, or lets them go on; whether all obeyed.
pub(crate) fn freeze_all(proc: &OwnedFd, frozen: bool) -> bool {
    let everybody = Pid::from_raw(-1);
    if !frozen {
        let _ = kill(everybody, Signal::SIGCONT);
        return true;
    }
    // What was forked between two rounds is caught by the next.
    (0..1000).any(|_| {
        let _ = kill(everybody, Signal::SIGSTOP);
        processes(proc)
            .iter()
            .all(|one| one.pid == 1 || matches!(one.state, 'T' | 't' | 'Z' | 'X'))
    })
}

/// Points these descriptors at `/dev/null`.
pub(crate) fn silence(descriptors: &[RawFd]) -> std::io::Result<()> {
    let null = open("/dev/null", OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())?;
    for &fd in descriptors {
        replace(&null, fd)?;
    }
    Ok(())
}

/// `dup2`, onto one of the standard descriptors.
fn replace(from: &impl AsRawFd, onto: RawFd) -> std::io::Result<()> {
    // SAFETY: only the numbers 0 to 2 are replaced, which no `OwnedFd` of ours holds.
    match unsafe { libc::dup2(from.as_raw_fd(), onto) } {
        -1 => Err(Error::last_os_error()),
        _ => Ok(()),
    }
}

/// The ends of a command's input and output: `inside` for it, `outside` to hand out.
struct Ends {
    inside: Vec<OwnedFd>,
    outside: Vec<OwnedFd>,
}

/// Starts a command as the agent. Returns what is handed out: three pipe ends or a master.
pub(crate) fn spawn(
    exec: &Exec,
    environment: &[(String, String)],
    identity: Identity,
    filters: &Filters,
) -> Result<(Job, Vec<OwnedFd>), Stumble> {
    let order = Order::read(exec, environment)?;
    let ends = as_agent(identity, || make_ends(exec.terminal))?;
    let (trouble, says) = pipe2(OFlag::O_CLOEXEC).step("making a pipe")?;
    let (tells, tell) = pipe2(OFlag::O_CLOEXEC).step("making a pipe")?;
    fcntl(&tells, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).step("making a pipe")?;
    // SAFETY: init has one thread, so the child may do whatever the parent may.
    match unsafe { fork() }.step("making a process (is the sandbox at its limit?)")? {
        ForkResult::Parent { child } => {
            let job = Job {
                keeper: child,
                tells: tells.into(),
                heard: Vec::new(),
                early: Vec::new(),
                trouble: trouble.into(),
            };
            Ok((job, ends.outside))
        }
        ForkResult::Child => {
            let _ = prctl::set_child_subreaper(true);
            // SAFETY: as above.
            match unsafe { fork() } {
                Ok(ForkResult::Child) => {
                    let Err(stumble) =
                        become_command(&order, &ends.inside, &says, identity, filters);
                    complain(says, &stumble);
                    leave(127)
                }
                Ok(ForkResult::Parent { child }) => keep(child, tell),
                Err(errno) => {
                    let source = errno.into();
                    let step = "making a process (is the sandbox at its limit?)".to_owned();
                    complain(says, &Stumble { step, source });
                    let words = [0_i32.to_ne_bytes(), 127_i32.to_ne_bytes()].concat();
                    let _ = std::fs::File::from(tell).write_all(&words);
                    leave(127)
                }
            }
        }
    }
}

/// The pipe holds it, whoever reads.
fn complain(says: OwnedFd, stumble: &Stumble) {
    let errno = stumble.source.raw_os_error().unwrap_or(libc::EIO);
    let words = format!("{}\0{errno}", stumble.step);
    let _ = std::fs::File::from(says).write_all(words.as_bytes());
}

/// Ends a forked process without running what its parent registered for the exit.
fn leave(code: i32) -> ! {
    // SAFETY: ends the process; nothing is used afterwards.
    unsafe { libc::_exit(code) }
}

/// The keeper's life: tells of the command, takes in its orphans, goes last.
fn keep(command: Pid, tell: OwnedFd) -> ! {
    // Nothing that init holds: the ends of other commands' pipes would never close.
    if close_others(&tell).is_err() || silence(&[0, 1, 2]).is_err() {
        leave(1);
    }
    let mut tell = Some(std::fs::File::from(tell));
    if let Some(tell) = &mut tell {
        let _ = tell.write_all(&command.as_raw().to_ne_bytes());
    }
    loop {
        let (pid, code) = match waitpid(None, None) {
            Ok(WaitStatus::Exited(pid, code)) => (pid, code),
            Ok(WaitStatus::Signaled(pid, signal, _)) => (pid, 128 + signal as i32),
            Ok(_) | Err(Errno::EINTR) => continue,
            Err(_) => leave(0),
        };
        if pid == command
            && let Some(mut tell) = tell.take()
        {
            let _ = tell.write_all(&code.to_ne_bytes());
        }
    }
}

/// A command as the kernel wants it, read before the fork.
struct Order {
    argv: Vec<CString>,
    environment: Vec<CString>,
    candidates: Vec<CString>,
    directory: CString,
    terminal: bool,
}

impl Order {
    fn read(exec: &Exec, own: &[(String, String)]) -> Result<Self, Stumble> {
        let text = |bytes: &[u8]| CString::new(bytes).step("reading the command");
        let argv = exec
            .argv
            .iter()
            .map(|word| text(word))
            .collect::<Result<Vec<_>, _>>()?;
        let program = exec
            .argv
            .first()
            .filter(|program| !program.is_empty())
            .ok_or_else(|| Error::from(ErrorKind::NotFound))
            .step("reading the command")?;
        let mut variables: Vec<(&[u8], &[u8])> = Vec::new();
        let asked = exec.environment.iter().map(|(k, v)| (&k[..], &v[..]));
        for (name, value) in own
            .iter()
            .map(|(k, v)| (k.as_bytes(), v.as_bytes()))
            .chain(asked)
        {
            variables.retain(|(known, _)| *known != name);
            variables.push((name, value));
        }
        let candidates = if program.contains(&b'/') {
            vec![text(program)?]
        } else {
            let path = variables.iter().find(|(name, _)| *name == b"PATH");
            path.map_or(&b""[..], |(_, path)| path)
                .split(|&byte| byte == b':')
                .filter(|directory| !directory.is_empty())
                .map(|directory| text(&[directory, b"/", program].concat()))
                .collect::<Result<Vec<_>, _>>()?
        };
        Ok(Self {
            argv,
            environment: variables
                .into_iter()
                .map(|(name, value)| text(&[name, b"=", value].concat()))
                .collect::<Result<Vec<_>, _>>()?,
            candidates,
            directory: text(exec.directory.as_deref().unwrap_or(b"/workspace"))?,
            terminal: exec.terminal.is_some(),
        })
    }
}

/// In the child: gives everything up and becomes the command.
fn become_command(
    order: &Order,
    inside: &[OwnedFd],
    says: &OwnedFd,
    identity: Identity,
    filters: &Filters,
) -> Result<std::convert::Infallible, Stumble> {
    setsid().step("making a session")?;
    for (place, end) in (0..).zip(inside) {
        replace(end, place).step("connecting input and output")?;
    }
    if order.terminal {
        // SAFETY: the terminal at 0 becomes this new session's own; no memory is involved.
        let result = unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) };
        (result == 0)
            .then_some(())
            .ok_or_else(Error::last_os_error)
            .step("taking the terminal")?;
    }
    close_others(says).step("closing descriptors")?;
    reset_signals().step("resetting signals")?;
    if let Identity::Range { .. } = identity {
        let (uid, gid) = (Uid::from_raw(AGENT_UID), Gid::from_raw(AGENT_GID));
        setgroups(&[]).step("dropping groups")?;
        setresgid(gid, gid, gid).step("taking the group id")?;
        setresuid(uid, uid, uid).step("taking the user id")?;
    }
    hardening::keep_capabilities(&[]).step("dropping capabilities")?;
    hardening::close_up().step("closing the process up")?;
    chdir(order.directory.as_c_str()).step("entering the directory")?;
    filters
        .install()
        .map_err(Error::other)
        .step("installing the system call filters")?;
    let mut refusal = Errno::ENOENT;
    for program in &order.candidates {
        let Err(errno) = execve(program, &order.argv, &order.environment);
        // As execvp: a name that is there and may not be run is remembered, and the search
        // goes on.
        if !matches!(errno, Errno::ENOENT | Errno::ENOTDIR) {
            refusal = errno;
        }
    }
    Err(refusal).step("running it")
}

/// Closes everything above the standard descriptors but the pipe for trouble.
fn close_others(kept: &OwnedFd) -> std::io::Result<()> {
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

/// The Rust runtime ignores SIGPIPE and init blocks SIGCHLD; a command expects neither.
fn reset_signals() -> nix::Result<()> {
    let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
    // SAFETY: the default action is no function of ours.
    unsafe { sigaction(Signal::SIGPIPE, &default) }?;
    SigSet::all().thread_unblock()
}

/// Does something while the kernel takes us for the agent where owners of new pipes and
/// terminals are concerned: `/dev/stdout` must be openable by whoever has it.
fn as_agent<T>(
    identity: Identity,
    work: impl FnOnce() -> Result<T, Stumble>,
) -> Result<T, Stumble> {
    if identity == Identity::Single {
        return work();
    }
    setfsgid(Gid::from_raw(AGENT_GID));
    setfsuid(Uid::from_raw(AGENT_UID));
    let result = work();
    setfsuid(Uid::from_raw(0));
    setfsgid(Gid::from_raw(0));
    // Changing ids sets this to whatever the host's fs.suid_dumpable says.
    hardening::close_up().step("closing init up")?;
    result
}

fn make_ends(terminal: Option<Size>) -> Result<Ends, Stumble> {
    let Some(size) = terminal else {
        let pipe = || pipe2(OFlag::O_CLOEXEC).step("making a pipe");
        let ((stdin, feed), (out, stdout), (err, stderr)) = (pipe()?, pipe()?, pipe()?);
        return Ok(Ends {
            inside: vec![stdin, stdout, stderr],
            outside: vec![feed, out, err],
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
    // By descriptor and not by name: nothing in the agent's /dev can stand in for it.
    // SAFETY: plain numbers; the result is checked before it is owned.
    let slave = unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags.bits()) };
    if slave < 0 {
        return Err(Error::last_os_error()).step("opening the terminal's other end");
    }
    // SAFETY: the kernel has just made it, for us alone.
    let slave = unsafe { OwnedFd::from_raw_fd(slave) };
    set_size(&master, size).step("sizing the terminal")?;
    let copy = |fd: &OwnedFd| fd.as_fd().try_clone_to_owned().step("copying a descriptor");
    Ok(Ends {
        inside: vec![copy(&slave)?, copy(&slave)?, slave],
        outside: vec![master],
    })
}

/// Gives a terminal a size, by its master.
pub(crate) fn set_size(terminal: &OwnedFd, size: Size) -> std::io::Result<()> {
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
