//! Reaps orphans where this process is PID 1 of a container: an orphan becomes its child, and
//! stays a zombie until this process waits for it.

use std::collections::HashSet;
use std::time::Duration;

use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

use crate::process_guard::descendants::state_and_parent;

/// Interval between two scans. Other code waits for this process's own children as they end, so
/// a zombie that two scans find has no other waiter.
const SCAN_INTERVAL: Duration = Duration::from_secs(1);

/// Reaps orphans until the future is dropped; if this process is not PID 1, it never completes.
pub async fn reap_orphans() {
    if std::process::id() != 1 {
        return std::future::pending().await;
    }
    let mut seen = HashSet::new();
    loop {
        tokio::time::sleep(SCAN_INTERVAL).await;
        let Ok(dead) = tokio::task::spawn_blocking(zombie_children).await else {
            continue;
        };
        for pid in dead.intersection(&seen) {
            let _ = waitpid(Pid::from_raw(*pid), Some(WaitPidFlag::WNOHANG));
        }
        seen = dead;
    }
}

/// Children of this process that are zombies.
fn zombie_children() -> HashSet<i32> {
    let own = std::process::id().cast_signed();
    std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| {
            let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
            state_and_parent(&stat) == Some(("Z", own))
        })
        .collect()
}
