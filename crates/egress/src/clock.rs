//! Monotonic clock and wall clock of the gate.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use policy::clock::{Tick, UnixMillis};

/// Reads both clocks. Decisions receive the time as a value.
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

    /// The monotonic time, plus one second: a new rate limit bucket has the time zero, which must
    /// lie in the past.
    pub fn tick(&self) -> Tick {
        Tick::default() + Duration::from_secs(1) + self.origin.elapsed()
    }

    /// The wall-clock time.
    pub fn wall(&self) -> UnixMillis {
        let since = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        UnixMillis::new(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
    }
}
