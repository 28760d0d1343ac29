//! Points in time, passed as values: decisions do not read a clock.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A point in time on the monotonic clock: nanoseconds since an origin that the caller chooses.
///
/// Rate limits and breakers use it, because wall clocks jump. 64 bits of nanoseconds are 584
/// years.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tick(u64);

impl Tick {
    /// The time `nanos` nanoseconds after the origin.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the origin.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Time from `earlier` to `self`; zero when `earlier` is later.
    pub const fn since(self, earlier: Tick) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl std::ops::Add<Duration> for Tick {
    type Output = Tick;

    fn add(self, by: Duration) -> Tick {
        Tick(
            self.0
                .saturating_add(u64::try_from(by.as_nanos()).unwrap_or(u64::MAX)),
        )
    }
}

/// Rounds up to whole seconds, at least one, for `Retry-After`.
pub const fn round_up_to_seconds(wait: Duration) -> u64 {
    let whole = wait.as_secs();
    if wait.subsec_nanos() > 0 || whole == 0 {
        whole.saturating_add(1)
    } else {
        whole
    }
}

/// A point in time on the wall clock: milliseconds since 1970 in UTC. Expiry and audit use it.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct UnixMillis(i64);

impl UnixMillis {
    /// The time `millis` milliseconds after 1970.
    pub const fn new(millis: i64) -> Self {
        Self(millis)
    }

    /// Milliseconds since 1970.
    pub const fn get(self) -> i64 {
        self.0
    }

    /// The time `by` later; saturates.
    pub fn plus(self, by: Duration) -> Self {
        Self(
            self.0
                .saturating_add(i64::try_from(by.as_millis()).unwrap_or(i64::MAX)),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duration_is_rounded_up_to_at_least_one_second() {
        for (nanos, seconds) in [
            (0, 1),
            (1, 1),
            (1_000_000_000, 1),
            (1_000_000_001, 2),
            (u64::MAX, 18_446_744_074),
        ] {
            assert_eq!(round_up_to_seconds(Duration::from_nanos(nanos)), seconds);
        }
        assert_eq!(round_up_to_seconds(Duration::MAX), u64::MAX);
    }

    #[test]
    fn ticks_saturate_instead_of_wrapping() {
        let end = Tick::from_nanos(u64::MAX);
        assert_eq!(end + Duration::from_secs(1), end);
        assert_eq!(
            Tick::from_nanos(5).since(Tick::from_nanos(9)),
            Duration::ZERO
        );
        assert_eq!(
            UnixMillis::new(i64::MAX).plus(Duration::from_secs(1)).get(),
            i64::MAX
        );
    }
}
