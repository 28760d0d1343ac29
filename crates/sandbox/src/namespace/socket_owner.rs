//! Finds the program that owns a connection: the executable of all processes in the sandbox that
//! hold its socket.
//!
//! ```text
//!   two ends ─▶ inode ─▶ every process that has `socket:[inode]` ─▶ its executable
//! ```
//!
//! Processes may start, exit, pass sockets on and execute other programs during the search. The
//! result is unknown if several programs hold the socket, if an executable has no path in the
//! sandbox any more or another path than the kernel reports, if a process cannot be examined, or if
//! the search exceeds its budget. A socket in flight through another socket has no holder. The
//! result is a hint and no security boundary, because an agent can act through any program that it
//! may run.

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

/// Maximum processor time of a search. Init serves no request during a search.
const MAX_SEARCH_TIME: Duration = Duration::from_millis(100);

/// Maximum number of examined processes, threads and descriptors.
const MAX_EXAMINED: usize = 1 << 14;

/// Maximum number of searches if a process could not be examined, because it may have been
/// starting.
const MAX_SEARCHES: u32 = 20;

/// Milliseconds between two searches.
const PAUSE_MS: u8 = 1;

/// `PF_FORKNOEXEC`: the process was forked and has executed nothing since.
const NEVER_EXECUTED: u32 = 0x40;

/// The processes of the sandbox, and which of them are init's own.
pub(crate) struct ProcessView<'a> {
    /// A `/proc` that shows all processes.
    pub(crate) proc: &'a OwnedFd,
    pub(crate) subreapers: &'a [Pid],
    /// Processes started by subreapers: init's own until they execute a program.
    pub(crate) started: &'a [Pid],
    /// Subreapers that have not reported their process yet.
    pub(crate) unreported: &'a [Pid],
}

/// Why the owner is unknown.
#[derive(Debug, PartialEq, Eq)]
enum OwnerUnknown {
    /// No process holds the socket, several programs do, or the program has no path.
    NoSingleProgram,
    /// A process cannot be examined.
    Unreadable,
    /// The search exceeded its budget.
    TooMuch,
}

/// A process that holds the socket.
struct SocketHolder {
    process: OwnedFd,
    /// The descriptor's path below the process.
    descriptor: CString,
    executable: CString,
}

/// Returns the path of the program whose socket has these ends.
pub(crate) fn find_program(
    view: &ProcessView<'_>,
    from: SocketAddr,
    to: SocketAddr,
) -> Option<String> {
    let budget = CpuBudget::new(MAX_SEARCH_TIME);
    for _ in 0..MAX_SEARCHES {
        match OwnerSearch::new(view, budget).find_program(from, to) {
            Ok(program) => return Some(program),
            Err(OwnerUnknown::Unreadable) => {
                let _ = poll(&mut [], PollTimeout::from(PAUSE_MS));
            }
            Err(OwnerUnknown::NoSingleProgram | OwnerUnknown::TooMuch) => return None,
        }
    }
    None
}

/// One search over all processes.
struct OwnerSearch<'a> {
    view: &'a ProcessView<'a>,
    budget: CpuBudget,
    remaining: usize,
}

impl<'a> OwnerSearch<'a> {
    fn new(view: &'a ProcessView<'a>, budget: CpuBudget) -> Self {
        Self {
            view,
            budget,
            remaining: MAX_EXAMINED,
        }
    }

    fn find_program(&mut self, from: SocketAddr, to: SocketAddr) -> Result<String, OwnerUnknown> {
        let inode = tcp_sockets::find(self.view.proc, from, to, self.budget)
            .ok_or(OwnerUnknown::NoSingleProgram)?;
        let socket = format!("socket:[{inode}]");
        let mut holders: Vec<SocketHolder> = Vec::new();
        for pid in self.list_numbers(self.view.proc, c".")? {
            let number = Pid::from_raw(pid);
            // Init and the subreapers hold no socket of the agent.
            if pid != 1
                && !self.view.subreapers.contains(&number)
                && let Some(holder) = self.examine(number, &socket)?
            {
                if holders
                    .first()
                    .is_some_and(|first| first.executable != holder.executable)
                {
                    return Err(OwnerUnknown::NoSingleProgram);
                }
                holders.push(holder);
            }
        }
        let first = holders.first().ok_or(OwnerUnknown::NoSingleProgram)?;
        let program = printable_path(&first.executable).ok_or(OwnerUnknown::NoSingleProgram)?;
        let file = file_id(openat2(AT_FDCWD, program.as_str(), no_links()))?;
        for holder in &holders {
            // The file at that path must be the process's executable, and the process must still
            // hold the socket.
            let runs = openat(
                &holder.process,
                c"exe",
                OFlag::O_PATH | OFlag::O_CLOEXEC,
                Mode::empty(),
            );
            if file_id(runs)? != file
                || executable(&holder.process)?.as_ref() != Some(&holder.executable)
                || !points_to(&holder.process, &holder.descriptor, &socket)?
            {
                return Err(OwnerUnknown::NoSingleProgram);
            }
        }
        Ok(program)
    }

    /// Examines a process; returns it if it holds the socket.
    fn examine(&mut self, pid: Pid, socket: &str) -> Result<Option<SocketHolder>, OwnerUnknown> {
        let directory = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let path = c_path(&pid.to_string())?;
        // An open directory stays with this process, even if its number is reused.
        let Some(process) = ignore_gone(openat(
            self.view.proc,
            path.as_c_str(),
            directory,
            Mode::empty(),
        ))?
        else {
            return Ok(None);
        };
        let mut seen = None;
        for thread in self.list_numbers(&process, c"task")? {
            // Threads usually share a descriptor table. A table that was searched already is
            // skipped.
            if seen.is_some_and(|seen| shares_table(seen, thread)) {
                continue;
            }
            seen = Some(thread);
            let table = format!("task/{thread}/fd");
            let held = match self.search(&process, &table, socket) {
                Err(OwnerUnknown::Unreadable) if self.is_not_of_agent(pid, &process, thread) => {
                    continue;
                }
                other => other?,
            };
            if let Some(descriptor) = held {
                let executable = executable(&process)?.ok_or(OwnerUnknown::NoSingleProgram)?;
                return Ok(Some(SocketHolder {
                    process,
                    descriptor,
                    executable,
                }));
            }
        }
        Ok(None)
    }

    /// Finds the socket's descriptor in a descriptor table.
    fn search(
        &mut self,
        process: &OwnedFd,
        table: &str,
        socket: &str,
    ) -> Result<Option<CString>, OwnerUnknown> {
        let path = c_path(table)?;
        for number in self.list_numbers(process, &path)? {
            self.check_time()?;
            let descriptor = c_path(&format!("{table}/{number}"))?;
            if points_to(process, &descriptor, socket)? {
                return Ok(Some(descriptor));
            }
        }
        Ok(None)
    }

    /// Whether a thread that cannot be examined belongs to no program of the agent: it has exited,
    /// or a subreaper started it and it has executed no program.
    fn is_not_of_agent(&self, pid: Pid, process: &OwnedFd, thread: i32) -> bool {
        let state = || {
            let stat = c_path(&format!("task/{thread}/stat")).ok()?;
            let file = openat(process, stat.as_c_str(), OFlag::O_CLOEXEC, Mode::empty()).ok()?;
            let mut bytes = Vec::new();
            std::fs::File::from(file).read_to_end(&mut bytes).ok()?;
            let fields = process_tree::stat_fields(&bytes).ok()?;
            let parent = Pid::from_raw(fields.get(1)?.parse().ok()?);
            Some((parent, fields.get(6)?.parse::<u32>().ok()?))
        };
        state().is_some_and(|(parent, flags)| {
            let by_a_subreaper =
                self.view.started.contains(&pid) || self.view.unreported.contains(&parent);
            flags & process_tree::EXITING != 0 || by_a_subreaper && flags & NEVER_EXECUTED != 0
        })
    }

    /// The numeric entries of a directory; none if it does not exist any more.
    fn list_numbers(&mut self, at: &OwnedFd, path: &CStr) -> Result<Vec<i32>, OwnerUnknown> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let Some(mut listing) = ignore_gone(Dir::openat(at, path, flags, Mode::empty()))? else {
            return Ok(Vec::new());
        };
        let mut found = Vec::new();
        for entry in listing.iter() {
            let Some(entry) = ignore_gone(entry)? else {
                break;
            };
            let name = entry.file_name().to_str().ok();
            let Some(number) = name.and_then(|name| name.parse().ok()) else {
                continue;
            };
            self.remaining = self.remaining.checked_sub(1).ok_or(OwnerUnknown::TooMuch)?;
            found.push(number);
        }
        self.check_time()?;
        Ok(found)
    }

    fn check_time(&self) -> Result<(), OwnerUnknown> {
        if self.budget.is_exhausted() {
            return Err(OwnerUnknown::TooMuch);
        }
        Ok(())
    }
}

/// Converts 'no such file or process' to `None`.
fn ignore_gone<T>(found: nix::Result<T>) -> Result<Option<T>, OwnerUnknown> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(Errno::ENOENT | Errno::ESRCH) => Ok(None),
        Err(_) => Err(OwnerUnknown::Unreadable),
    }
}

fn c_path(text: &str) -> Result<CString, OwnerUnknown> {
    CString::new(text).map_err(|_| OwnerUnknown::NoSingleProgram)
}

fn points_to(process: &OwnedFd, descriptor: &CStr, socket: &str) -> Result<bool, OwnerUnknown> {
    let target = ignore_gone(readlinkat(process, descriptor))?;
    Ok(target.is_some_and(|target| target == socket))
}

/// The executable of a process, by its path when it was started.
fn executable(process: &OwnedFd) -> Result<Option<CString>, OwnerUnknown> {
    let Some(target) = ignore_gone(readlinkat(process, c"exe"))? else {
        return Ok(None);
    };
    executable_path(&target).map(Some)
}

fn executable_path(target: &OsStr) -> Result<CString, OwnerUnknown> {
    CString::new(target.as_bytes()).map_err(|_| OwnerUnknown::NoSingleProgram)
}

/// Returns a path that can be reported: absolute, and one line of UTF-8.
fn printable_path(executable: &CStr) -> Option<String> {
    let name = executable.to_str().ok()?;
    let is_printable = Path::new(name).is_absolute() && !name.chars().any(char::is_control);
    is_printable.then(|| name.to_owned())
}

/// Options for opening an executable without following links: the path that the kernel reports
/// contains no link.
fn no_links() -> OpenHow {
    OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_NO_SYMLINKS)
}

/// Identifies a file by device and inode. A file that cannot be opened by its path was deleted, or
/// is in no visible directory.
fn file_id(file: nix::Result<OwnedFd>) -> Result<(u64, u64), OwnerUnknown> {
    let found = file.and_then(|file| fstat(file.as_fd()));
    let found = found.map_err(|_| OwnerUnknown::NoSingleProgram)?;
    Ok((found.st_dev, found.st_ino))
}

/// Whether two threads share a descriptor table. If the kernel does not support the comparison,
/// both tables are examined.
fn shares_table(one: i32, other: i32) -> bool {
    const KCMP_FILES: libc::c_int = 2;
    // SAFETY: the call takes numbers and accesses no memory.
    unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_FILES, 0, 0) == 0 }
}
