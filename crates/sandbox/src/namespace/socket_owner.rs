//! Which program a connection belongs to: the one executable of all processes inside that
//! hold its socket.
//!
//! ```text
//!   two ends ─▶ inode ─▶ every process that has `socket:[inode]` ─▶ its executable
//! ```
//!
//! Processes come and go, pass sockets on and become other programs while we look, and are
//! free to. Whatever is not certain is nobody's: several programs, an executable that has no
//! name inside any more or another name than it says, a process that we may not look into,
//! more to look at than there is time for. A socket on its way through another one is held by
//! nobody. It is a convenience, and no wall: an agent can do what it likes in the name of a
//! program that it may run.

use std::ffi::{CStr, CString, OsStr};
use std::io::Read;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat, openat2, readlinkat};
use nix::poll::{PollTimeout, poll};
use nix::sys::stat::{Mode, fstat};
use nix::unistd::Pid;

use super::cpu_budget::CpuBudget;
use super::{process_tree, tcp_sockets};

/// How long a look may take of a processor's time. Init does nothing else meanwhile.
const MAX_SEARCH_TIME: Duration = Duration::from_millis(100);

/// The most that is looked at: processes, threads and descriptors.
const MAX_EXAMINED: usize = 1 << 14;

/// How often everybody is looked at where somebody could not be looked into: that may have been
/// at its very beginning.
const MAX_TRIES: u32 = 20;

/// Milliseconds between two of these looks.
const PAUSE_MS: u8 = 1;

/// `PF_FORKNOEXEC`: it was forked and has executed nothing since.
const NEVER_EXECUTED: u32 = 0x40;

/// Everybody inside, and who of them is ours.
pub(crate) struct ProcessView<'a> {
    /// A `/proc` that shows everybody.
    pub(crate) proc: &'a OwnedFd,
    pub(crate) subreapers: &'a [Pid],
    /// What keepers have started: ours as long as it has executed nothing.
    pub(crate) started: &'a [Pid],
    /// Keepers that have not yet told what they started.
    pub(crate) unreported: &'a [Pid],
}

/// Why nobody can be named.
#[derive(Debug, PartialEq, Eq)]
enum OwnerUnknown {
    /// Nobody has it, or several programs have, or what has it has no name.
    Nobody,
    /// Somebody may not be looked into.
    HiddenPath,
    /// There is too much to look at.
    TooMuch,
}

/// A process that has the socket.
struct SocketHolder {
    process: OwnedFd,
    /// The descriptor, below the process.
    descriptor: CString,
    executable: CString,
}

/// The path, inside, of the program whose socket has these ends.
pub(crate) fn find(inside: &ProcessView<'_>, from: SocketAddr, to: SocketAddr) -> Option<String> {
    let budget = CpuBudget::of(MAX_SEARCH_TIME);
    for _ in 0..MAX_TRIES {
        match OwnerSearch::new(inside, budget).find(from, to) {
            Ok(program) => return Some(program),
            Err(OwnerUnknown::HiddenPath) => {
                let _ = poll(&mut [], PollTimeout::from(PAUSE_MS));
            }
            Err(OwnerUnknown::Nobody | OwnerUnknown::TooMuch) => return None,
        }
    }
    None
}

/// One look at everybody.
struct OwnerSearch<'a> {
    inside: &'a ProcessView<'a>,
    budget: CpuBudget,
    left: usize,
}

impl<'a> OwnerSearch<'a> {
    fn new(inside: &'a ProcessView<'a>, budget: CpuBudget) -> Self {
        Self {
            inside,
            budget,
            left: MAX_EXAMINED,
        }
    }

    fn find(&mut self, from: SocketAddr, to: SocketAddr) -> Result<String, OwnerUnknown> {
        let inode = tcp_sockets::find(self.inside.proc, from, to, self.budget)
            .ok_or(OwnerUnknown::Nobody)?;
        let socket = format!("socket:[{inode}]");
        let mut holders: Vec<SocketHolder> = Vec::new();
        for pid in self.numbers(self.inside.proc, c".")? {
            let number = Pid::from_raw(pid);
            // Neither init nor a keeper has anything of the agent's.
            if pid != 1
                && !self.inside.subreapers.contains(&number)
                && let Some(holder) = self.examine(number, &socket)?
            {
                if holders
                    .first()
                    .is_some_and(|first| first.executable != holder.executable)
                {
                    return Err(OwnerUnknown::Nobody);
                }
                holders.push(holder);
            }
        }
        let first = holders.first().ok_or(OwnerUnknown::Nobody)?;
        let program = name(&first.executable).ok_or(OwnerUnknown::Nobody)?;
        let file = identity(openat2(AT_FDCWD, program.as_str(), exact()))?;
        for holder in &holders {
            // The very file of that name, still run by it, and still with the socket.
            let runs = openat(
                &holder.process,
                c"exe",
                OFlag::O_PATH | OFlag::O_CLOEXEC,
                Mode::empty(),
            );
            if identity(runs)? != file
                || executable(&holder.process)?.as_ref() != Some(&holder.executable)
                || !points_to(&holder.process, &holder.descriptor, &socket)?
            {
                return Err(OwnerUnknown::Nobody);
            }
        }
        Ok(program)
    }

    /// The process as a holder of the socket, if it is one.
    fn examine(&mut self, pid: Pid, socket: &str) -> Result<Option<SocketHolder>, OwnerUnknown> {
        let directory = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let path = path(&pid.to_string())?;
        // From here on it is this process, or none: its number may be somebody else's later.
        let Some(process) = ignore_gone(openat(
            self.inside.proc,
            path.as_c_str(),
            directory,
            Mode::empty(),
        ))?
        else {
            return Ok(None);
        };
        let mut seen = None;
        for thread in self.numbers(&process, c"task")? {
            // Threads may have tables of their own, and seldom do.
            if seen.is_some_and(|seen| shares_table(seen, thread)) {
                continue;
            }
            seen = Some(thread);
            let table = format!("task/{thread}/fd");
            let held = match self.search(&process, &table, socket) {
                Err(OwnerUnknown::HiddenPath) if self.is_not_agents(pid, &process, thread) => {
                    continue;
                }
                other => other?,
            };
            if let Some(descriptor) = held {
                let executable = executable(&process)?.ok_or(OwnerUnknown::Nobody)?;
                return Ok(Some(SocketHolder {
                    process,
                    descriptor,
                    executable,
                }));
            }
        }
        Ok(None)
    }

    /// The descriptor that is the socket, in a table of a process.
    fn search(
        &mut self,
        process: &OwnedFd,
        table: &str,
        socket: &str,
    ) -> Result<Option<CString>, OwnerUnknown> {
        let place = path(table)?;
        for number in self.numbers(process, &place)? {
            self.check_time()?;
            let descriptor = path(&format!("{table}/{number}"))?;
            if points_to(process, &descriptor, socket)? {
                return Ok(Some(descriptor));
            }
        }
        Ok(None)
    }

    /// Whether a thread that may not be looked into is none of the agent's: it has ended, or
    /// runs code of ours, being started by a keeper and having executed nothing since.
    fn is_not_agents(&self, pid: Pid, process: &OwnedFd, thread: i32) -> bool {
        let state = || {
            let stat = path(&format!("task/{thread}/stat")).ok()?;
            let file = openat(process, stat.as_c_str(), OFlag::O_CLOEXEC, Mode::empty()).ok()?;
            let mut bytes = Vec::new();
            std::fs::File::from(file).read_to_end(&mut bytes).ok()?;
            let fields = process_tree::stat_fields(&bytes).ok()?;
            let parent = Pid::from_raw(fields.get(1)?.parse().ok()?);
            Some((parent, fields.get(6)?.parse::<u32>().ok()?))
        };
        state().is_some_and(|(parent, flags)| {
            let by_a_subreaper =
                self.inside.started.contains(&pid) || self.inside.unreported.contains(&parent);
            flags & process_tree::EXITING != 0 || by_a_subreaper && flags & NEVER_EXECUTED != 0
        })
    }

    /// The entries of a directory that are numbers; none where it is gone.
    fn numbers(&mut self, at: &OwnedFd, place: &CStr) -> Result<Vec<i32>, OwnerUnknown> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let Some(mut listing) = ignore_gone(Dir::openat(at, place, flags, Mode::empty()))? else {
            return Ok(Vec::new());
        };
        let mut numbers = Vec::new();
        for entry in listing.iter() {
            let Some(entry) = ignore_gone(entry)? else {
                break;
            };
            let name = entry.file_name().to_str().ok();
            let Some(number) = name.and_then(|name| name.parse().ok()) else {
                continue;
            };
            self.left = self.left.checked_sub(1).ok_or(OwnerUnknown::TooMuch)?;
            numbers.push(number);
        }
        self.check_time()?;
        Ok(numbers)
    }

    fn check_time(&self) -> Result<(), OwnerUnknown> {
        if self.budget.is_over() {
            return Err(OwnerUnknown::TooMuch);
        }
        Ok(())
    }
}

/// What was asked for, or that it is gone.
fn ignore_gone<T>(found: nix::Result<T>) -> Result<Option<T>, OwnerUnknown> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(Errno::ENOENT | Errno::ESRCH) => Ok(None),
        Err(_) => Err(OwnerUnknown::HiddenPath),
    }
}

fn path(text: &str) -> Result<CString, OwnerUnknown> {
    CString::new(text).map_err(|_| OwnerUnknown::Nobody)
}

fn points_to(process: &OwnedFd, descriptor: &CStr, socket: &str) -> Result<bool, OwnerUnknown> {
    let target = ignore_gone(readlinkat(process, descriptor))?;
    Ok(target.is_some_and(|target| target == socket))
}

/// What a process runs, by the name it had when it was started.
fn executable(process: &OwnedFd) -> Result<Option<CString>, OwnerUnknown> {
    let Some(target) = ignore_gone(readlinkat(process, c"exe"))? else {
        return Ok(None);
    };
    path_of(&target).map(Some)
}

fn path_of(target: &OsStr) -> Result<CString, OwnerUnknown> {
    CString::new(target.as_bytes()).map_err(|_| OwnerUnknown::Nobody)
}

/// A path that can be told: text of one line, from the root.
fn name(executable: &CStr) -> Option<String> {
    let name = executable.to_str().ok()?;
    let clear = Path::new(name).is_absolute() && !name.chars().any(char::is_control);
    clear.then(|| name.to_owned())
}

/// The file and nothing that leads to it: the kernel's name for a file has no links in it.
fn exact() -> OpenHow {
    OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_NO_SYMLINKS)
}

/// Which file it is. One that is not there has no name: it was deleted, or is in no directory
/// that can be seen from here.
fn identity(file: nix::Result<OwnedFd>) -> Result<(u64, u64), OwnerUnknown> {
    let found = file.and_then(|file| fstat(file.as_fd()));
    let found = found.map_err(|_| OwnerUnknown::Nobody)?;
    Ok((found.st_dev, found.st_ino))
}

/// Whether two threads have one table of descriptors. Where the kernel cannot say they have
/// two, and both are looked at.
fn shares_table(one: i32, other: i32) -> bool {
    const KCMP_FILES: libc::c_int = 2;
    // SAFETY: plain numbers; the call touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_FILES, 0, 0) == 0 }
}
