//! Token bucket, implemented as GCRA with one number of state.
//!
//! The number is the time at which the bucket is full again. Taking a token moves it one interval
//! into the future, at most as far as the whole burst takes. This is exact (no background refill,
//! no rounding) and costs a few instructions.

use std::num::{NonZeroU32, NonZeroU64};
use std::time::Duration;

use crate::clock::{Tick, round_up_to_seconds};

/// The rate at which tokens are refilled, and the capacity of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Nanoseconds between two tokens.
    interval: u64,
    burst: u32,
}

/// An invalid rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRate {
    /// Zero, negative, infinite or not a number.
    #[error("a rate must be a number above zero")]
    NotPositive,
    /// Less than one token in thirty days.
    #[error("a rate must be at least one in thirty days")]
    TooSlow,
    /// A capacity of zero.
    #[error("a burst must be at least 1")]
    NoBurst,
}

const THIRTY_DAYS: f64 = 30.0 * 86_400.0;

impl Rate {
    /// `per_second` tokens a second, at most `burst` at once. The rate is capped at 10^9 a second.
    pub fn new(per_second: f64, burst: u32) -> Result<Self, BadRate> {
        if !per_second.is_finite() || per_second <= 0.0 {
            return Err(BadRate::NotPositive);
        }
        if per_second * THIRTY_DAYS < 1.0 {
            return Err(BadRate::TooSlow);
        }
        if burst == 0 {
            return Err(BadRate::NoBurst);
        }
        // Rounded up, so that the rate is never exceeded.
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "between 1 and thirty days of nanoseconds, checked above"
        )]
        let interval = (1e9 / per_second).ceil().max(1.0) as u64;
        Ok(Self { interval, burst })
    }

    /// One token every `nanos` nanoseconds, at most `burst` at once.
    pub const fn every(nanos: NonZeroU64, burst: NonZeroU32) -> Self {
        Self {
            interval: nanos.get(),
            burst: burst.get(),
        }
    }

    /// Time between two tokens.
    pub const fn interval(&self) -> Duration {
        Duration::from_nanos(self.interval)
    }

    /// The capacity of a bucket.
    pub const fn burst(&self) -> u32 {
        self.burst
    }

    /// Nanoseconds until an empty bucket is full: up to 2^84, so the value may saturate.
    const fn span(&self) -> u64 {
        self.interval.saturating_mul(self.burst as u64)
    }
}

/// Proof that a token was taken. Only [`TokenBucket::take`] creates one.
///
/// ```compile_fail,E0603
/// let pass = policy::bucket::RateLimitPass(());
/// ```
#[must_use = "a token was taken for this pass"]
#[derive(Debug, PartialEq, Eq)]
pub struct RateLimitPass(());

/// No token is available; the time until the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimitWait(Duration);

impl RateLimitWait {
    /// Exact time until the next token.
    pub const fn duration(self) -> Duration {
        self.0
    }

    /// The time until the next token in whole seconds, for `Retry-After`.
    pub const fn seconds(self) -> u64 {
        round_up_to_seconds(self.0)
    }
}

/// A token bucket, full at first. The rate is passed to each call, so that a reload takes effect
/// for every bucket at once.
#[derive(Clone, Copy, Debug, Default)]
pub struct TokenBucket {
    /// The time at which the bucket is full again, in nanoseconds.
    full_at: u64,
}

/// How far `full_at` may exceed the latest time that the rate allows, in nanoseconds. Threads read
/// the clock before they lock the bucket, so `now` can be slightly earlier than in the previous
/// call; resetting the state then would grant extra tokens. A larger excess is due to a reload with
/// a faster rate or to a clock jump, and is reset, because callers would otherwise be locked out.
const MAX_CLOCK_SKEW: u64 = 1_000_000_000;

impl TokenBucket {
    /// A full bucket.
    pub const fn new() -> Self {
        Self { full_at: 0 }
    }

    /// Takes a token, or returns the time until the next one.
    #[inline]
    pub fn take(&mut self, rate: &Rate, now: Tick) -> Result<RateLimitPass, RateLimitWait> {
        let now = now.as_nanos();
        let span = rate.span();
        // Stored even if there is no token; otherwise each attempt would restart the wait.
        self.full_at = self.corrected_full_at(span, now);
        // Near u64::MAX no token is handed out, so that the state does not overflow.
        let next = self
            .full_at
            .max(now)
            .checked_add(rate.interval)
            .ok_or(RateLimitWait(rate.interval()))?;
        match (next - now).checked_sub(span) {
            None | Some(0) => {
                self.full_at = next;
                Ok(RateLimitPass(()))
            }
            Some(early) => Err(RateLimitWait(Duration::from_nanos(early))),
        }
    }

    /// Tokens in the bucket, for metrics.
    pub fn tokens(&self, rate: &Rate, now: Tick) -> u32 {
        let span = rate.span();
        let missing = self
            .corrected_full_at(span, now.as_nanos())
            .saturating_sub(now.as_nanos());
        u32::try_from(span.saturating_sub(missing) / rate.interval).unwrap_or(u32::MAX)
    }

    /// Whether the bucket is full, so that it can be dropped: a new one has the same state.
    pub fn is_full(&self, rate: &Rate, now: Tick) -> bool {
        self.corrected_full_at(rate.span(), now.as_nanos()) <= now.as_nanos()
    }

    /// `full_at`, or its value for a bucket that is empty now, if `full_at` is further in the
    /// future than this rate can explain.
    fn corrected_full_at(&self, span: u64, now: u64) -> u64 {
        let latest = now.saturating_add(span);
        if self.full_at > latest.saturating_add(MAX_CLOCK_SKEW) {
            latest
        } else {
            self.full_at
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn rate(per_second: f64, burst: u32) -> Rate {
        Rate::new(per_second, burst).unwrap()
    }

    fn at(nanos: u64) -> Tick {
        Tick::from_nanos(nanos)
    }

    fn drain(bucket: &mut TokenBucket, rate: &Rate, now: Tick) -> u32 {
        let mut taken = 0;
        while taken < 100_000 && bucket.take(rate, now).is_ok() {
            taken += 1;
        }
        taken
    }

    #[test]
    fn full_bucket_gives_burst_and_then_one_token_each_interval() {
        let rate = rate(1.0, 10);
        let mut bucket = TokenBucket::new();
        assert_eq!(bucket.tokens(&rate, at(SECOND)), 10);
        assert_eq!(drain(&mut bucket, &rate, at(SECOND)), 10);
        assert_eq!(bucket.tokens(&rate, at(SECOND)), 0);
        let wait = bucket.take(&rate, at(SECOND + 1)).unwrap_err();
        assert_eq!(wait.duration(), Duration::from_nanos(SECOND - 1));
        assert_eq!(wait.seconds(), 1);
        assert!(bucket.take(&rate, at(2 * SECOND - 1)).is_err());
        assert!(bucket.take(&rate, at(2 * SECOND)).is_ok());
        assert!(bucket.take(&rate, at(2 * SECOND)).is_err());
        assert!(!bucket.is_full(&rate, at(11 * SECOND)));
        assert!(bucket.is_full(&rate, at(12 * SECOND)));
        assert_eq!(bucket.tokens(&rate, at(1_000 * SECOND)), 10);
    }

    #[test]
    fn invalid_rate_is_rejected_when_created() {
        for (per_second, burst, why) in [
            (0.0, 1, BadRate::NotPositive),
            (-1.0, 1, BadRate::NotPositive),
            (f64::NAN, 1, BadRate::NotPositive),
            (f64::INFINITY, 1, BadRate::NotPositive),
            (f64::MIN_POSITIVE, 1, BadRate::TooSlow),
            (1e-9, 1, BadRate::TooSlow),
            (1.0, 0, BadRate::NoBurst),
        ] {
            assert_eq!(Rate::new(per_second, burst), Err(why), "{per_second}");
        }
        assert_eq!(rate(3.0, 1).interval(), Duration::from_nanos(333_333_334));
        assert_eq!(rate(1e300, 1).interval(), Duration::from_nanos(1));
        assert_eq!(rate(0.5, 7).burst(), 7);
    }

    #[test]
    fn reload_to_faster_rate_does_not_lock_out() {
        let (slow, fast) = (rate(0.001, 100), rate(100.0, 5));
        let mut bucket = TokenBucket::new();
        drain(&mut bucket, &slow, at(0));
        let wait = bucket.take(&fast, at(0)).unwrap_err();
        assert_eq!(wait.duration(), fast.interval());
        assert_eq!(bucket.tokens(&fast, at(0)), 0);
        assert!(bucket.take(&fast, at(0) + wait.duration()).is_ok());
    }

    #[test]
    fn reload_to_slower_rate_keeps_taken_tokens() {
        let (fast, slow) = (rate(100.0, 10), rate(1.0, 10));
        let mut bucket = TokenBucket::new();
        drain(&mut bucket, &fast, at(0));
        assert_eq!(drain(&mut bucket, &slow, at(0)), 9);
    }

    #[test]
    fn bucket_at_maximum_time_gives_no_extra_tokens() {
        let rate = rate(1.0, 10);
        let mut bucket = TokenBucket::new();
        assert_eq!(drain(&mut bucket, &rate, at(u64::MAX)), 0);
        assert!(drain(&mut bucket, &rate, at(u64::MAX - 3 * SECOND)) <= 10);
        let huge = Rate::new(1e-6, u32::MAX).unwrap();
        assert!(bucket.take(&huge, at(0)).is_err());
        assert!(TokenBucket::new().take(&huge, at(0)).is_ok());
    }

    #[test]
    fn jittering_clock_gives_no_extra_tokens() {
        let rate = rate(10.0, 5);
        let mut bucket = TokenBucket::new();
        assert_eq!(drain(&mut bucket, &rate, at(SECOND)), 5);
        for step in 0..10_000 {
            let now = if step % 2 == 0 {
                SECOND - 1_000
            } else {
                SECOND
            };
            assert!(bucket.take(&rate, at(now)).is_err());
        }
    }

    proptest! {
        #[test]
        fn no_interval_exceeds_burst_and_rate(
            per_second in 1u32..2_000,
            burst in 1u32..20,
            steps in proptest::collection::vec(0u64..SECOND / 4, 1..200),
        ) {
            let rate = rate(per_second.into(), burst);
            let mut bucket = TokenBucket::new();
            let (mut now, mut passes) = (0, Vec::new());
            for step in steps {
                now += step;
                let before = bucket.tokens(&rate, at(now));
                match bucket.take(&rate, at(now)) {
                    Ok(_) => {
                        prop_assert!(before >= 1);
                        passes.push(now);
                    }
                    Err(wait) => {
                        prop_assert_eq!(before, 0);
                        let then = at(now) + wait.duration();
                        let early = Tick::from_nanos(then.as_nanos() - 1);
                        prop_assert!(bucket.clone().take(&rate, early).is_err());
                        prop_assert!(bucket.clone().take(&rate, then).is_ok());
                    }
                }
            }
            for (i, from) in passes.iter().enumerate() {
                for (j, to) in passes.iter().enumerate().skip(i) {
                    let allowed = u64::from(burst) + (to - from) / rate.interval;
                    prop_assert!((j - i + 1) as u64 <= allowed);
                }
            }
        }

        #[test]
        fn bucket_agrees_with_counting_model(
            burst in 1u64..10,
            interval in 1u64..50,
            steps in proptest::collection::vec(0u64..100, 1..200),
        ) {
            let rate = Rate { interval, burst: u32::try_from(burst).unwrap() };
            let mut bucket = TokenBucket::new();
            // The model counts nanoseconds, so that it is exact too.
            let (mut now, mut level) = (0, burst * interval);
            for step in steps {
                now += step;
                level = (level + step).min(burst * interval);
                let model = level >= interval;
                if model {
                    level -= interval;
                }
                prop_assert_eq!(bucket.take(&rate, at(now)).is_ok(), model);
                prop_assert_eq!(u64::from(bucket.tokens(&rate, at(now))), level / interval);
            }
        }

        #[test]
        fn no_moment_exceeds_the_burst(
            moments in proptest::collection::vec(any::<u64>(), 1..20),
            burst in 1u32..20,
        ) {
            let rate = rate(5.0, burst);
            let mut bucket = TokenBucket::new();
            for now in moments {
                prop_assert!(drain(&mut bucket, &rate, at(now)) <= burst);
            }
        }
    }
}
