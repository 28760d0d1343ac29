//! The end of every tool process when the gate stops: all of them receive SIGTERM at once, and
//! those that still run at one deadline are killed.

use std::sync::OnceLock;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

/// Shared by the bridge and every process that it starts.
#[derive(Debug, Default)]
pub struct Shutdown {
    begun: CancellationToken,
    kill_at: OnceLock<Instant>,
    processes: TaskTracker,
}

impl Shutdown {
    /// Terminates every process, also one whose start completes later. What still runs at
    /// `kill_at` is killed.
    pub fn begin(&self, kill_at: Instant) {
        // The first deadline counts.
        let _ = self.kill_at.set(kill_at);
        self.begun.cancel();
    }

    /// Waits for the beginning; returns when processes are killed.
    pub async fn begun(&self) -> Instant {
        self.begun.cancelled().await;
        // It is set before the token is cancelled.
        self.kill_at.get().copied().unwrap_or_else(Instant::now)
    }

    /// Waits until every process has ended. Call it after [`Shutdown::begin`].
    pub async fn ended(&self) {
        self.processes.close();
        self.processes.wait().await;
    }

    /// [`Shutdown::ended`] waits for this to be dropped.
    pub(crate) fn hold(&self) -> TaskTrackerToken {
        self.processes.token()
    }
}
