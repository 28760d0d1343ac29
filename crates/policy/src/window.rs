//! Sliding window limit: at most N events in any period of a given length.
//!
//! A token bucket allows a burst and the refill within the same second. Where a limit must be exact
//! ('ten writes a second'), the times of the events are stored.

use std::time::Duration;

use crate::clock::Tick;

/// Admits at most `N` events in any window of a given length. An event leaves the window when its
/// age reaches the length of the window.
#[derive(Clone, Debug)]
pub struct SlidingWindow<const N: usize> {
    length: Duration,
    /// A ring of the last events.
    events: [Tick; N],
    /// Index of the next event; once the ring is full, also of the oldest one.
    next: usize,
    /// The number of events in the ring.
    count: usize,
    newest: Tick,
}

impl<const N: usize> SlidingWindow<N> {
    /// An empty window of `length`.
    pub const fn new(length: Duration) -> Self {
        const { assert!(N > 0, "a window needs room for one event") };
        Self {
            length,
            events: [Tick::from_nanos(0); N],
            next: 0,
            count: 0,
            newest: Tick::from_nanos(0),
        }
    }

    /// Admits an event at `now`, or returns the time until one would be admitted.
    ///
    /// If the clock goes back, time counts as unchanged, so no extra events are admitted.
    pub fn take(&mut self, now: Tick) -> Result<(), Duration> {
        let moment = now.max(self.newest);
        let Some(slot) = self.events.get_mut(self.next) else {
            // Unreachable, because `next` is always modulo N.
            return Err(self.length);
        };
        if self.count == N {
            let leaves = *slot + self.length;
            // `Tick` saturates: near its maximum an event never leaves the window.
            if leaves > moment || moment.since(*slot) < self.length {
                return Err(leaves.since(now));
            }
        } else {
            self.count += 1;
        }
        *slot = moment;
        self.newest = moment;
        self.next = (self.next + 1) % N;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn at(millis: u64) -> Tick {
        Tick::from_nanos(millis * 1_000_000)
    }

    #[test]
    fn eleventh_event_within_window_of_ten_is_refused() {
        let mut window = SlidingWindow::<10>::new(SECOND);
        for index in 0..10 {
            assert_eq!(window.take(at(index * 50)), Ok(()));
        }
        assert_eq!(window.take(at(990)), Err(Duration::from_millis(10)));
        assert_eq!(window.take(at(1_000)), Ok(()));
        assert_eq!(window.take(at(1_000)), Err(Duration::from_millis(50)));
        assert_eq!(window.take(at(1_050)), Ok(()));
    }

    #[test]
    fn clock_going_back_admits_no_extra_events() {
        let mut window = SlidingWindow::<2>::new(SECOND);
        assert_eq!(window.take(at(5_000)), Ok(()));
        assert_eq!(window.take(at(0)), Ok(()));
        assert_eq!(window.take(at(0)), Err(Duration::from_secs(6)));
        assert_eq!(window.take(at(6_000)), Ok(()));
    }

    #[test]
    fn maximum_time_admits_no_more_than_window_size() {
        let mut window = SlidingWindow::<3>::new(SECOND);
        let end = Tick::from_nanos(u64::MAX);
        let admitted = (0..100).filter(|_| window.take(end).is_ok()).count();
        assert_eq!(admitted, 3);
    }

    proptest! {
        #[test]
        fn window_agrees_with_list_of_all_events(
            steps in proptest::collection::vec(0u64..400, 1..200),
        ) {
            let mut window = SlidingWindow::<4>::new(SECOND);
            let (mut now, mut events) = (0, Vec::new());
            for step in steps {
                now += step;
                let inside: Vec<u64> =
                    events.iter().copied().filter(|event| event + 1_000 > now).collect();
                match window.take(at(now)) {
                    Ok(()) => {
                        prop_assert!(inside.len() < 4);
                        events.push(now);
                    }
                    Err(wait) => {
                        prop_assert_eq!(inside.len(), 4);
                        let exact = Duration::from_millis(inside[0] + 1_000 - now);
                        prop_assert_eq!(wait, exact);
                    }
                }
            }
        }

        #[test]
        fn clock_jumps_never_panic_or_exceed_limit(
            moments in proptest::collection::vec(any::<u64>(), 1..40),
        ) {
            let mut window = SlidingWindow::<3>::new(SECOND);
            for nanos in moments {
                let now = Tick::from_nanos(nanos);
                let admitted = (0..10).filter(|_| window.take(now).is_ok()).count();
                prop_assert!(admitted <= 3);
            }
        }
    }
}
