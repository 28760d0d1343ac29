//! Reaps orphans in a container whose first process is ours: a process without a parent becomes our
//! child, and stays in the table of processes until we take their end in.

use std::collections::HashSet;
use std::time::Duration;

use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

use crate::process_guard::descendants::state_and_parent;

/// Between two looks. Children of our own are waited for as they end, so one that is dead at
/// two looks has no other waiter.
const LOOK: Duration = Duration::from_secs(1);

/// Reaps orphans until it is dropped; where this is not the first process, it only waits.
pub async fn reap_orphans() {
    if std::process::id() != 1 {
        return std::future::pending().await;
    }
    let mut seen = HashSet::new();
    loop {
        tokio::time::sleep(LOOK).await;
        let Ok(dead) = tokio::task::spawn_blocking(dead_children).await else {
            continue;
        };
        for pid in dead.intersection(&seen) {
            let _ = waitpid(Pid::from_raw(*pid), Some(WaitPidFlag::WNOHANG));
        }
        seen = dead;
    }
}

/// Our children that have ended and were not waited for.
fn dead_children() -> HashSet<i32> {
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
