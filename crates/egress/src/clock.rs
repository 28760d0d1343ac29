//! The time, for those who decide by it.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use policy::clock::{Tick, UnixMillis};

/// Reads both clocks. Decisions are given what it read.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: Instant,
}

impl Clock {
    /// A clock whose ticks count from now.
    pub fn start() -> Self {
        Self {
            origin: Instant::now(),
        }
    }

    /// The moment on the monotonic clock. One second ahead, so that a bucket that was
    /// never asked is in the past.
    pub fn tick(&self) -> Tick {
        Tick::default() + Duration::from_secs(1) + self.origin.elapsed()
    }

    /// The moment on the wall clock.
    pub fn wall(&self) -> UnixMillis {
        let since = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        UnixMillis::new(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
    }
}
