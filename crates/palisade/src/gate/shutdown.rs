//! The deadline of a gate's shutdown.
//!
//! ```text
//!   signal ───────────────────────────── 4/5 ─────────────── server.shutdown_timeout
//!     │ listeners close, tool processes   │ requests are cut   │
//!     │ receive SIGTERM, requests finish  │ off, SIGKILL       │
//!     └───────────────────────────────────┴─ audit log, traces ┘
//! ```
//!
//! The steps after the cut-off usually take milliseconds. If the disk hangs, writing the audit
//! log may exceed the deadline: complete records are more important than the deadline.

use std::time::Duration;

use tokio::time::Instant;

/// How long the audit log may take after the cut-off, whatever the deadline: a stuck log must
/// not keep a gate from ending.
const AUDIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum shutdown time: adding a longer time to the clock could overflow.
const MAX_LIMIT: Duration = Duration::from_secs(24 * 60 * 60);

/// The deadline of a shutdown that has begun.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    started: Instant,
    limit: Duration,
}

impl Deadline {
    /// Maximum time for exporting the last traces.
    pub const MAX_TRACES: Duration = Duration::from_secs(5);

    /// Minimum time for exporting the last traces, even after the deadline.
    const MIN_TRACES: Duration = Duration::from_secs(1);

    /// The deadline of a shutdown that begins now and may take `limit`.
    pub fn starting_now(limit: Duration) -> Self {
        Self {
            started: Instant::now(),
            limit: limit.min(MAX_LIMIT),
        }
    }

    /// When requests in flight are cut off and tool processes are killed.
    pub fn cut_off(&self) -> Instant {
        self.started + self.limit / 5 * 4
    }

    /// When the audit log must be closed.
    pub fn end(&self) -> Instant {
        (self.started + self.limit).max(self.cut_off() + AUDIT_TIMEOUT)
    }

    /// How long exporting the last traces may take, from now on.
    pub fn for_traces(&self) -> Duration {
        let left = (self.started + self.limit).saturating_duration_since(Instant::now());
        left.clamp(Self::MIN_TRACES, Self::MAX_TRACES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn shutdown_cuts_off_at_four_fifths_of_its_limit() {
        let begun = Instant::now();
        let deadline = Deadline::starting_now(Duration::from_secs(100));
        assert_eq!(deadline.cut_off() - begun, Duration::from_secs(80));
        assert_eq!(deadline.end() - begun, Duration::from_secs(100));
        assert_eq!(deadline.for_traces(), Deadline::MAX_TRACES);
        tokio::time::advance(Duration::from_secs(98)).await;
        assert_eq!(deadline.for_traces(), Duration::from_secs(2));
        tokio::time::advance(Duration::from_secs(98)).await;
        assert_eq!(deadline.for_traces(), Deadline::MIN_TRACES);
    }

    #[test]
    fn short_shutdown_still_gives_the_audit_log_time() {
        let begun = Instant::now();
        let deadline = Deadline::starting_now(Duration::ZERO);
        assert!(deadline.end() - begun >= AUDIT_TIMEOUT);
    }
}
