//! Kills every descendant of this process.

use std::collections::HashSet;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// Maximum number of scans for new descendants; descendants that fork faster are killed anyway.
const MAX_ROUNDS: usize = 64;

/// Kills every descendant of this process.
///
/// The descendants are first stopped with SIGSTOP until a scan finds no new one: if they were
/// killed one by one, the others could fork faster.
pub(super) fn kill_all() {
    let mut stopped = HashSet::new();
    for _ in 0..MAX_ROUNDS {
        let mut new = false;
        for process in descendants() {
            if stopped.insert(process) {
                new = true;
                process.signal(Signal::STOP);
            }
        }
        if !new {
            break;
        }
    }
    for process in stopped {
        process.signal(Signal::KILL);
    }
}

/// A process, and its parent at the time of the scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ProcessInfo {
    pid: i32,
    parent: i32,
}

impl ProcessInfo {
    /// Signals the process if it is still the same one: a reused pid has another parent.
    fn signal(self, signal: Signal) {
        let Some(pid) = Pid::from_raw(self.pid) else {
            return;
        };
        if let Ok(process) = pidfd_open(pid, PidfdFlags::empty())
            && read_process(self.pid).is_some_and(|seen| seen == self)
        {
            let _ = pidfd_send_signal(process, signal);
        }
    }
}

/// Every living descendant of this process, by one scan of `/proc`.
fn descendants() -> Vec<ProcessInfo> {
    let processes: Vec<ProcessInfo> = std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(read_process)
        .collect();
    descendants_of(std::process::id().cast_signed(), &processes)
}

/// The descendants of `root` among `processes`.
fn descendants_of(root: i32, processes: &[ProcessInfo]) -> Vec<ProcessInfo> {
    let mut found = Vec::new();
    let mut known = HashSet::from([root]);
    loop {
        let before = found.len();
        for process in processes {
            if known.contains(&process.parent) && known.insert(process.pid) {
                found.push(*process);
            }
        }
        if found.len() == before {
            return found;
        }
    }
}

/// Reads a process from `/proc`; none for a zombie.
fn read_process(pid: i32) -> Option<ProcessInfo> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    let (state, parent) = state_and_parent(&stat)?;
    (!matches!(state, "Z" | "X")).then_some(ProcessInfo { pid, parent })
}

/// State and parent from the content of `/proc/PID/stat`. The process name before them is in
/// parentheses and may contain any byte.
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
    fn process_name_cannot_fake_a_parent() {
        assert_eq!(state_and_parent(b"12 (a) R 1 (b) S 7 12 0"), Some(("S", 7)));
        assert_eq!(state_and_parent(b"12 (\xff\n)) Z 1 0"), Some(("Z", 1)));
        assert_eq!(state_and_parent(b"12 (a"), None);
        assert_eq!(state_and_parent(b"12 (a) S"), None);
    }

    #[test]
    fn only_descendants_are_found() {
        let all = [(9, 5), (5, 2), (2, 1), (3, 1), (4, 3)]
            .map(|(pid, parent)| ProcessInfo { pid, parent });
        let pids = |root| {
            let mut pids: Vec<i32> = descendants_of(root, &all)
                .iter()
                .map(|process| process.pid)
                .collect();
            pids.sort_unstable();
            pids
        };
        assert_eq!(pids(2), [5, 9]);
        assert_eq!(pids(3), [4]);
        assert_eq!(pids(9), [0_i32; 0]);
    }
}
