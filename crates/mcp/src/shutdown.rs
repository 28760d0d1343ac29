//! Shutdown of all tool processes when the gate stops: SIGTERM to all at once, SIGKILL at one
//! common deadline.

use std::sync::OnceLock;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

/// Shutdown signal and tracker, shared by the bridge and every process that it starts.
#[derive(Debug, Default)]
pub struct Shutdown {
    begin_signal: CancellationToken,
    kill_at: OnceLock<Instant>,
    processes: TaskTracker,
}

impl Shutdown {
    /// Terminates every process, also one whose start completes later. Processes that still run at
    /// `kill_at` are killed.
    pub fn begin(&self, kill_at: Instant) {
        // The first deadline counts.
        let _ = self.kill_at.set(kill_at);
        self.begin_signal.cancel();
    }

    /// Waits for the shutdown to begin; returns the time at which processes are killed.
    pub async fn wait_for_begin(&self) -> Instant {
        self.begin_signal.cancelled().await;
        // `begin` sets `kill_at` before it cancels the token.
        self.kill_at.get().copied().unwrap_or_else(Instant::now)
    }

    /// Waits until every process has ended. To be called after [`Shutdown::begin`].
    pub async fn wait_for_end(&self) {
        self.processes.close();
        self.processes.wait().await;
    }

    /// Registers a process: [`Shutdown::wait_for_end`] waits until the returned token is dropped.
    pub(crate) fn register_process(&self) -> TaskTrackerToken {
        self.processes.token()
    }
}
