//! Everybody inside: who is whose child, and ending whole families.

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

/// How long a family may take to come to rest. Init does nothing else meanwhile, and a family
/// that goes on forking and waking its members would never.
const MAX_STOP_TIME: Duration = Duration::from_millis(250);

/// How long everybody may take to stand still. Whoever asked waits for longer.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(3);

/// Milliseconds between two looks whether they do.
const POLL_INTERVAL_MS: u8 = 1;

/// Sweeps over what such a family still has after it was killed as it was found.
const MAX_SWEEPS: u32 = 5;

/// Rounds without news after which a process that does not come to rest is killed as it is.
const MAX_QUIET_ROUNDS: u32 = 100;

/// Kills a process and everything it started.
pub(crate) fn end_tree(proc: &OwnedFd, root: Pid) {
    end(proc, &|one| one.pid == root.as_raw());
}

/// Kills everybody who is under nobody's care: whoever has init for a parent and is no
/// keeper had a keeper that was killed.
pub(crate) fn end_orphans(proc: &OwnedFd, subreapers: &[Pid]) {
    let is_kept = |one: &Process| {
        subreapers
            .iter()
            .any(|subreaper| subreaper.as_raw() == one.pid)
    };
    end(proc, &|one| one.parent == 1 && !is_kept(one));
}

/// Kills all those, with everything they started.
fn end(proc: &OwnedFd, is_root: &dyn Fn(&Process) -> bool) {
    let mut found = HashSet::new();
    let mut quiet = 0;
    let mut rested = false;
    // Stopped first. Being told to stop is not enough, because a fork that has got past
    // its look at the signals still makes its child; and a listing holds names that are
    // older than the states read for them. So everybody must be at rest in one round,
    // and the next one must find nobody new. Somebody who cannot be stopped (a shell
    // whose vfork child was, or whom others wake) is not waited for for ever.
    let until = Instant::now() + MAX_STOP_TIME;
    while quiet < MAX_QUIET_ROUNDS && Instant::now() < until {
        let all = processes(proc);
        let before = found.len();
        gather(&all, is_root, &mut found);
        let at_rest = |one: &&Process| matches!(one.state, 'T' | 't' | 'Z' | 'X');
        let mut moving = false;
        for one in all.iter().filter(|one| found.contains(&one.pid)) {
            if !at_rest(&one) {
                moving = true;
                // Again in each round: somebody may wake it.
                let _ = kill(Pid::from_raw(one.pid), Signal::SIGSTOP);
            }
        }
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
    let at_rest = rested;
    for _ in 0..MAX_SWEEPS {
        for pid in &found {
            let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
        if at_rest {
            return;
        }
        // Children that were made meanwhile.
        let all = processes(proc);
        let before = found.len();
        gather(&all, is_root, &mut found);
        if found.len() == before {
            return;
        }
    }
}

/// Adds whoever belongs to those found, directly or not.
fn gather(all: &[Process], is_root: &dyn Fn(&Process) -> bool, found: &mut HashSet<i32>) {
    let mut grown = true;
    while grown {
        grown = false;
        for one in all {
            let belongs = is_root(one) || found.contains(&one.parent);
            grown |= belongs && found.insert(one.pid);
        }
    }
}

/// Names of commands that are reported.
const MAX_NAMES: usize = 3;

/// `PF_EXITING`: the process executes no more of any program.
pub(crate) const EXITING: u32 = 0x4;

/// The commands that run inside. `server` is the workbench's keeper and its process: what the
/// workbench started for a call is a command, the workbench itself is not.
pub(crate) fn commands(
    proc: &OwnedFd,
    subreapers: &[Pid],
    server: Option<(Pid, Option<Pid>)>,
) -> Commands {
    let is_server = |one: &Process| {
        server.is_some_and(|(subreaper, process)| {
            // Before the keeper has reported its process, that is its only child.
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

/// The name of a process, which is its own to choose: 15 bytes of anything.
fn name_of(proc: &OwnedFd, pid: i32) -> Option<String> {
    let bytes = read(proc, &format!("{pid}/comm")).ok()?;
    let name = String::from_utf8_lossy(bytes.trim_ascii_end());
    Some(name.escape_debug().to_string())
}

/// Whether a process runs no more of its program: it has ended, is on its way out, or was killed
/// and has not had its turn on the processor since.
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
    /// `PF_` of the kernel's `sched.h`.
    flags: u32,
}

/// Everybody inside, init included.
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

/// The fields of `/proc/PID/stat` from the state on. The name before them is the process's
/// own and may hold anything, parentheses and newlines too.
pub(crate) fn stat_fields(stat: &[u8]) -> std::io::Result<Vec<String>> {
    let text = String::from_utf8_lossy(stat);
    let (_, fields) = text
        .rsplit_once(')')
        .ok_or_else(|| Error::from(ErrorKind::InvalidData))?;
    Ok(fields.split_whitespace().map(str::to_owned).collect())
}

/// Stops every process but init, or lets them go on; whether all obeyed.
pub(crate) fn freeze_all(proc: &OwnedFd, frozen: bool) -> bool {
    let everybody = Pid::from_raw(-1);
    if !frozen {
        let _ = kill(everybody, Signal::SIGCONT);
        return true;
    }
    let until = Instant::now() + FREEZE_TIMEOUT;
    loop {
        // What was forked between two rounds is caught by the next. One that was told stops
        // when it is its turn to run.
        let _ = kill(everybody, Signal::SIGSTOP);
        let rests = |one: &Process| one.pid == 1 || matches!(one.state, 'T' | 't' | 'Z' | 'X');
        if processes(proc).iter().all(rests) {
            return true;
        }
        if Instant::now() > until {
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
