//! Every process below this one, stopped and killed.

use std::collections::HashSet;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// Looks for new ones while they are being stopped; a crowd that grows faster is killed anyway.
const MOST_ROUNDS: usize = 64;

/// Kills everybody below this process.
///
/// They are stopped first, until no look finds a new one: killed one after the other, those
/// still alive could fork faster than we count.
pub(super) fn kill_all() {
    let mut stopped = HashSet::new();
    for _ in 0..MOST_ROUNDS {
        let mut new = false;
        for member in family() {
            if stopped.insert(member) {
                new = true;
                member.signal(Signal::STOP);
            }
        }
        if !new {
            break;
        }
    }
    for member in stopped {
        member.signal(Signal::KILL);
    }
}

/// A process, and whose child it was when it was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Member {
    pid: i32,
    parent: i32,
}

impl Member {
    /// Signals the process if it is still the same one: the pid may belong to another process, whose
    /// parent is then another one.
    fn signal(self, signal: Signal) {
        let Some(pid) = Pid::from_raw(self.pid) else {
            return;
        };
        if let Ok(process) = pidfd_open(pid, PidfdFlags::empty())
            && look(self.pid).is_some_and(|seen| seen == self)
        {
            let _ = pidfd_send_signal(process, signal);
        }
    }
}

/// Everybody alive below this process, as of one look through `/proc`.
fn family() -> Vec<Member> {
    let everybody: Vec<Member> = std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(look)
        .collect();
    below(std::process::id().cast_signed(), &everybody)
}

/// Those of `everybody` that descend from `root`.
fn below(root: i32, everybody: &[Member]) -> Vec<Member> {
    let mut found = Vec::new();
    let mut known = HashSet::from([root]);
    loop {
        let before = found.len();
        for member in everybody {
            if known.contains(&member.parent) && known.insert(member.pid) {
                found.push(*member);
            }
        }
        if found.len() == before {
            return found;
        }
    }
}

/// What the kernel says of a process; one that has ended and waits to be reaped is gone.
fn look(pid: i32) -> Option<Member> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    let (state, parent) = state_and_parent(&stat)?;
    (!matches!(state, "Z" | "X")).then_some(Member { pid, parent })
}

/// State and parent, from a process's `stat`. The name before them is in parentheses, and may
/// hold any byte.
pub fn state_and_parent(stat: &[u8]) -> Option<(&str, i32)> {
    let after = stat.iter().rposition(|byte| *byte == b')')? + 1;
    let rest = std::str::from_utf8(stat.get(after..)?).ok()?;
    let mut fields = rest.split_ascii_whitespace();
    Some((fields.next()?, fields.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_pass_for_a_parent() {
        assert_eq!(state_and_parent(b"12 (a) R 1 (b) S 7 12 0"), Some(("S", 7)));
        assert_eq!(state_and_parent(b"12 (\xff\n)) Z 1 0"), Some(("Z", 1)));
        assert_eq!(state_and_parent(b"12 (a"), None);
        assert_eq!(state_and_parent(b"12 (a) S"), None);
    }

    #[test]
    fn only_descendants_are_family() {
        let all =
            [(9, 5), (5, 2), (2, 1), (3, 1), (4, 3)].map(|(pid, parent)| Member { pid, parent });
        let pids = |root| {
            let mut pids: Vec<i32> = below(root, &all).iter().map(|one| one.pid).collect();
            pids.sort_unstable();
            pids
        };
        assert_eq!(pids(2), [5, 9]);
        assert_eq!(pids(3), [4]);
        assert_eq!(pids(9), [0_i32; 0]);
    }
}
