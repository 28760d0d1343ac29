//! A timer that is reset often and rarely expires.
//!
//! Resetting a timer of the runtime takes a lock that all threads share. A timer that is only
//! postponed can keep its old deadline: when it expires too early, it is set to the new one.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use hyper::rt::Timer;
use tokio::time::{Instant, Sleep, sleep_until};

/// A timer that can be reset cheaply.
#[derive(Debug, Default)]
pub struct Alarm {
    /// The time of expiry, if it was set.
    at: Option<Instant>,
    /// The runtime's timer, which expires at `at` or earlier.
    sleep: Option<Pin<Box<Sleep>>>,
}

impl Alarm {
    /// Sets the time of expiry, and replaces an earlier one.
    pub fn set(&mut self, at: Instant) {
        self.at = Some(at);
    }

    /// Is ready once the timer has expired. A timer that was never set does not expire.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(at) = self.at else {
            return Poll::Pending;
        };
        let sleep = self.sleep.get_or_insert_with(|| Box::pin(sleep_until(at)));
        if sleep.deadline() > at {
            sleep.as_mut().reset(at);
        }
        loop {
            ready!(sleep.as_mut().poll(cx));
            if sleep.deadline() >= at {
                return Poll::Ready(());
            }
            sleep.as_mut().reset(at);
        }
    }
}

/// The timer of one client connection. hyper creates a new sleep for every head that it waits for,
/// one after the other: they share one alarm.
#[derive(Debug, Default)]
pub struct HeadTimer(Arc<Mutex<Alarm>>);

/// One sleep of a [`HeadTimer`].
#[derive(Debug)]
struct HeadSleep {
    alarm: Arc<Mutex<Alarm>>,
    at: Instant,
}

impl HeadSleep {
    fn alarm(&self) -> MutexGuard<'_, Alarm> {
        self.alarm.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Future for HeadSleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut alarm = self.alarm();
        alarm.set(self.at);
        alarm.poll(cx)
    }
}

impl hyper::rt::Sleep for HeadSleep {}

impl Timer for HeadTimer {
    fn sleep(&self, duration: std::time::Duration) -> Pin<Box<dyn hyper::rt::Sleep>> {
        self.sleep_until(self.now() + duration)
    }

    fn sleep_until(&self, deadline: std::time::Instant) -> Pin<Box<dyn hyper::rt::Sleep>> {
        Box::pin(HeadSleep {
            alarm: Arc::clone(&self.0),
            at: deadline.into(),
        })
    }

    fn now(&self) -> std::time::Instant {
        Instant::now().into()
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn alarm_expires_at_the_time_set_last() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut alarm = Alarm::default();
        assert!(poll_fn(|cx| Poll::Ready(alarm.poll(cx))).await.is_pending());
        for (first, then) in [(10, 30), (60, 40)] {
            alarm.set(after(first));
            assert!(poll_fn(|cx| Poll::Ready(alarm.poll(cx))).await.is_pending());
            alarm.set(after(then));
            poll_fn(|cx| alarm.poll(cx)).await;
            assert_eq!(start.elapsed(), Duration::from_secs(then));
        }
        // An expired alarm can be set again.
        alarm.set(after(50));
        poll_fn(|cx| alarm.poll(cx)).await;
        assert_eq!(start.elapsed(), Duration::from_secs(50));
    }

    #[tokio::test(start_paused = true)]
    async fn each_sleep_of_a_connection_ends_at_its_deadline() {
        let timer = HeadTimer::default();
        let start = Instant::now();
        for _ in 0..3 {
            let head = timer.sleep(Duration::from_secs(7));
            // A head that arrived in time.
            tokio::time::advance(Duration::from_secs(1)).await;
            drop(head);
        }
        timer.sleep(Duration::from_secs(7)).await;
        assert_eq!(start.elapsed(), Duration::from_secs(10));
    }
}
