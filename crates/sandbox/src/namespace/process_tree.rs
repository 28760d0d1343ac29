//! Lists the processes of a sandbox, and kills process trees.

use std::collections::HashSet;
use std::io::{Error, ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use nix::dir::Dir;
use nix::fcntl::{OFlag, openat};
use nix::poll::{PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::Pid;

use super::protocol::Commands;

/// Maximum time for stopping a process tree. Init serves no request during this time, and a tree
/// that keeps forking would never stop.
const MAX_STOP_TIME: Duration = Duration::from_millis(250);

/// Timeout of stopping all processes. The requester waits longer.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(3);

/// Polling interval in milliseconds.
const POLL_INTERVAL_MS: u8 = 1;

/// Maximum number of passes that kill the remaining processes of a tree that could not be stopped.
const MAX_KILL_PASSES: u32 = 5;

/// Number of rounds without a new process after which the tree is killed, even if a process has not
/// stopped.
const MAX_UNCHANGED_ROUNDS: u32 = 100;

/// Kills a process with its descendants.
pub(crate) fn kill_tree(proc: &OwnedFd, root: Pid) {
    kill_matching(proc, &|one| one.pid == root.as_raw());
}

/// Kills the orphans of killed subreapers: children of init that are no subreapers.
pub(crate) fn kill_orphans(proc: &OwnedFd, subreapers: &[Pid]) {
    let is_kept = |one: &Process| {
        subreapers
            .iter()
            .any(|subreaper| subreaper.as_raw() == one.pid)
    };
    kill_matching(proc, &|one| one.parent == 1 && !is_kept(one));
}

/// Kills the matching processes with their descendants.
fn kill_matching(proc: &OwnedFd, is_root: &dyn Fn(&Process) -> bool) {
    let mut found = HashSet::new();
    let mut unchanged_rounds = 0;
    let mut all_stopped = false;
    // The processes are stopped first. Sending SIGSTOP is not sufficient, because a fork that has
    // passed its signal check still creates its child, and the process states are read after the
    // directory was listed. So all processes must be stopped in one round, and the next one must
    // find no new process. A process that cannot be stopped (a shell whose vfork child was stopped,
    // or one that others continue) has a time limit.
    let deadline = Instant::now() + MAX_STOP_TIME;
    while unchanged_rounds < MAX_UNCHANGED_ROUNDS && Instant::now() < deadline {
        let all = processes(proc);
        let before = found.len();
        add_descendants(&all, is_root, &mut found);
        let is_stopped = |one: &&Process| matches!(one.state, 'T' | 't' | 'Z' | 'X');
        let mut is_running = false;
        for one in all.iter().filter(|one| found.contains(&one.pid)) {
            if !is_stopped(&one) {
                is_running = true;
                // The signal is sent in each round, because another process may continue this one.
                let _ = kill(Pid::from_raw(one.pid), Signal::SIGSTOP);
            }
        }
        let grew = found.len() > before;
        if grew {
            unchanged_rounds = 0;
        } else if is_running {
            unchanged_rounds += 1;
            std::thread::yield_now();
        } else if all_stopped {
            break;
        }
        all_stopped = !grew && !is_running;
    }
    let tree_is_stopped = all_stopped;
    for _ in 0..MAX_KILL_PASSES {
        for pid in &found {
            let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
        if tree_is_stopped {
            return;
        }
        // Processes may have forked children since the last pass.
        let all = processes(proc);
        let before = found.len();
        add_descendants(&all, is_root, &mut found);
        if found.len() == before {
            return;
        }
    }
}

/// Adds the descendants of the found processes.
fn add_descendants(all: &[Process], is_root: &dyn Fn(&Process) -> bool, found: &mut HashSet<i32>) {
    let mut was_added = true;
    while was_added {
        was_added = false;
        for one in all {
            let is_in_tree = is_root(one) || found.contains(&one.parent);
            was_added |= is_in_tree && found.insert(one.pid);
        }
    }
}

/// Maximum number of reported command names.
const MAX_NAMES: usize = 3;

/// The kernel's flag `PF_EXITING` of a process that is exiting.
pub(crate) const EXITING: u32 = 0x4;

/// The running commands. `server` is the workbench's subreaper and its process: processes that the
/// workbench started are commands, the workbench itself is not.
pub(crate) fn commands(
    proc: &OwnedFd,
    subreapers: &[Pid],
    server: Option<(Pid, Option<Pid>)>,
) -> Commands {
    let is_server = |one: &Process| {
        server.is_some_and(|(subreaper, process)| {
            // Before the subreaper has reported its process, its only child is that process.
            one.parent == subreaper.as_raw() && process.is_none_or(|pid| one.pid == pid.as_raw())
        })
    };
    let is_command = |one: &&Process| {
        one.pid != 1
            && subreapers
                .iter()
                .all(|subreaper| subreaper.as_raw() != one.pid)
            && !is_server(one)
            && !is_ending(proc, one)
    };
    let all = processes(proc);
    let running: Vec<&Process> = all.iter().filter(is_command).collect();
    let names = running.iter().filter_map(|one| name_of(proc, one.pid));
    Commands {
        total: running.len(),
        names: names.take(MAX_NAMES).collect(),
    }
}

/// Returns the name of a process. The process can set it to 15 arbitrary bytes.
fn name_of(proc: &OwnedFd, pid: i32) -> Option<String> {
    let bytes = read(proc, &format!("{pid}/comm")).ok()?;
    let name = String::from_utf8_lossy(bytes.trim_ascii_end());
    Some(name.escape_debug().to_string())
}

/// Whether a process will run no more code of its program: it has exited, is exiting, or was killed
/// and has not been scheduled since.
fn is_ending(proc: &OwnedFd, one: &Process) -> bool {
    let was_killed = || {
        let status = read(proc, &format!("{}/status", one.pid)).unwrap_or_default();
        has_pending_kill(&String::from_utf8_lossy(&status))
    };
    matches!(one.state, 'Z' | 'X') || one.flags & EXITING != 0 || was_killed()
}

/// Whether SIGKILL is among the pending signals of `/proc/PID/status`.
fn has_pending_kill(status: &str) -> bool {
    let kill = 1_u64 << (Signal::SIGKILL as u32 - 1);
    let masks = status.lines().filter_map(|line| {
        let mask = ["SigPnd:", "ShdPnd:"]
            .iter()
            .find_map(|name| line.strip_prefix(name))?;
        u64::from_str_radix(mask.trim(), 16).ok()
    });
    masks.into_iter().any(|mask| mask & kill != 0)
}

fn read(proc: &OwnedFd, path: &str) -> std::io::Result<Vec<u8>> {
    let file = openat(proc, path, OFlag::O_CLOEXEC, Mode::empty())?;
    let mut bytes = Vec::new();
    std::fs::File::from(file).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// One line of `/proc/*/stat`.
pub(crate) struct Process {
    pub(crate) pid: i32,
    state: char,
    parent: i32,
    pub(crate) session: i32,
    /// Flags named `PF_…` in the kernel's `sched.h`.
    flags: u32,
}

/// Lists all processes, init included.
pub(crate) fn processes(proc: &OwnedFd) -> Vec<Process> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let Ok(mut listing) = Dir::openat(proc, ".", flags, Mode::empty()) else {
        return Vec::new();
    };
    listing
        .iter()
        .flatten()
        .filter_map(|entry| {
            let pid: i32 = entry.file_name().to_str().ok()?.parse().ok()?;
            let fields = stat_fields(&read(proc, &format!("{pid}/stat")).ok()?).ok()?;
            Some(Process {
                pid,
                state: fields.first()?.chars().next()?,
                parent: fields.get(1)?.parse().ok()?,
                session: fields.get(3)?.parse().ok()?,
                flags: fields.get(6)?.parse().ok()?,
            })
        })
        .collect()
}

/// Splits `/proc/PID/stat` into fields, beginning with the state. The process name before the state
/// may contain any characters, also parentheses and newlines.
pub(crate) fn stat_fields(stat: &[u8]) -> std::io::Result<Vec<String>> {
    let text = String::from_utf8_lossy(stat);
    let (_, fields) = text
        .rsplit_once(')')
        .ok_or_else(|| Error::from(ErrorKind::InvalidData))?;
    Ok(fields.split_whitespace().map(str::to_owned).collect())
}

/// Stops or continues every process except init; returns `false` if a process did not stop in time.
pub(crate) fn freeze_all(proc: &OwnedFd, frozen: bool) -> bool {
    let all_processes = Pid::from_raw(-1);
    if !frozen {
        let _ = kill(all_processes, Signal::SIGCONT);
        return true;
    }
    let deadline = Instant::now() + FREEZE_TIMEOUT;
    loop {
        // Processes that were forked between two rounds are stopped by the next. A signalled
        // process stops when it is scheduled.
        let _ = kill(all_processes, Signal::SIGSTOP);
        let is_stopped = |one: &Process| one.pid == 1 || matches!(one.state, 'T' | 't' | 'Z' | 'X');
        if processes(proc).iter().all(is_stopped) {
            return true;
        }
        if Instant::now() > deadline {
            return false;
        }
        let _ = poll(&mut [], PollTimeout::from(POLL_INTERVAL_MS));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pending_kill_is_read_from_either_mask() {
        let status = |own: &str, shared: &str| {
            format!("Name:\tsleep\nSigPnd:\t{own}\nShdPnd:\t{shared}\nSigBlk:\t0000000000000100\n")
        };
        let (none, kill) = ("0000000000000000", "0000000000000100");
        assert!(!has_pending_kill(&status(none, none)));
        assert!(has_pending_kill(&status(kill, none)));
        assert!(has_pending_kill(&status(none, kill)));
        assert!(!has_pending_kill(&status("0000000000000200", none)));
        assert!(!has_pending_kill(""));
    }
}
