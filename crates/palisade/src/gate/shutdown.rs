//! The one deadline of a gate's stop.
//!
//! ```text
//!   signal ───────────────────────────── 4/5 ─────────────── server.shutdown_timeout
//!     │ listeners close, tool processes   │ requests are cut   │
//!     │ receive SIGTERM, requests finish  │ off, SIGKILL       │
//!     └───────────────────────────────────┴─ audit log, traces ┘
//! ```
//!
//! What comes after the cut-off takes milliseconds. Where it does not, as with a disk that hangs,
//! the audit log may take longer than the deadline: evidence is worth more than punctuality.

use std::time::Duration;

use tokio::time::Instant;

/// How long the audit log may take after the cut-off, whatever the deadline: a log that is stuck
/// must not keep a gate from ending.
const LAST_RECORDS: Duration = Duration::from_secs(10);

/// The longest limit: beyond it, adding it to the time of day could overflow.
const MAX_LIMIT: Duration = Duration::from_secs(24 * 60 * 60);

/// When a stop that has begun has to be over.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    begun: Instant,
    limit: Duration,
}

impl Deadline {
    /// The most that the last traces may take.
    pub const MAX_TRACES: Duration = Duration::from_secs(5);

    /// The least that they may take: a deadline that has passed still lets a batch be sent.
    const MIN_TRACES: Duration = Duration::from_secs(1);

    /// The deadline of a stop that begins now.
    pub fn after(limit: Duration) -> Self {
        Self {
            begun: Instant::now(),
            limit: limit.min(MAX_LIMIT),
        }
    }

    /// When requests in flight are cut off and tool processes are killed.
    pub fn cut_off(&self) -> Instant {
        self.begun + self.limit / 5 * 4
    }

    /// When the audit log has to be closed.
    pub fn end(&self) -> Instant {
        (self.begun + self.limit).max(self.cut_off() + LAST_RECORDS)
    }

    /// How long the last traces may take, from now on.
    pub fn for_traces(&self) -> Duration {
        let left = (self.begun + self.limit).saturating_duration_since(Instant::now());
        left.clamp(Self::MIN_TRACES, Self::MAX_TRACES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_usual_stop_is_cut_off_at_four_fifths_of_its_time() {
        let begun = Instant::now();
        let deadline = Deadline::after(Duration::from_secs(100));
        assert_eq!(deadline.cut_off() - begun, Duration::from_secs(80));
        assert_eq!(deadline.end() - begun, Duration::from_secs(100));
        assert_eq!(deadline.for_traces(), Deadline::MAX_TRACES);
        tokio::time::advance(Duration::from_secs(98)).await;
        assert_eq!(deadline.for_traces(), Duration::from_secs(2));
        tokio::time::advance(Duration::from_secs(98)).await;
        assert_eq!(deadline.for_traces(), Deadline::MIN_TRACES);
    }

    #[test]
    fn a_short_stop_leaves_the_audit_log_its_time() {
        let begun = Instant::now();
        let deadline = Deadline::after(Duration::ZERO);
        assert!(deadline.end() - begun >= LAST_RECORDS);
    }
}
