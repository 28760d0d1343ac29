//! A timer that is set again and again and hardly ever goes off.
//!
//! To move a timer of the runtime takes a lock that every thread shares. One that is only ever
//! moved on can stay where it is: when it goes off too early it is set to where it should be.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use hyper::rt::Timer;
use tokio::time::{Instant, Sleep, sleep_until};

/// A timer.
#[derive(Debug, Default)]
pub struct Alarm {
    at: Option<Instant>,
    /// Goes off at that moment or before it.
    sleep: Option<Pin<Box<Sleep>>>,
}

impl Alarm {
    /// Shall go off at `at`, and not when it was to before.
    pub fn set(&mut self, at: Instant) {
        self.at = Some(at);
    }

    /// Whether it went off. One that was never set does not.
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

/// The timer of one client's connection. The library asks for a new sleep for every head that
/// it waits for, one after the other: they share one alarm.
#[derive(Debug, Default)]
pub struct HeadTimer(Arc<Mutex<Alarm>>);

/// One of its sleeps.
#[derive(Debug)]
struct Turn {
    alarm: Arc<Mutex<Alarm>>,
    at: Instant,
}

impl Turn {
    fn alarm(&self) -> MutexGuard<'_, Alarm> {
        self.alarm.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Future for Turn {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut alarm = self.alarm();
        alarm.set(self.at);
        alarm.poll(cx)
    }
}

impl hyper::rt::Sleep for Turn {}

impl Timer for HeadTimer {
    fn sleep(&self, duration: std::time::Duration) -> Pin<Box<dyn hyper::rt::Sleep>> {
        self.sleep_until(self.now() + duration)
    }

    fn sleep_until(&self, deadline: std::time::Instant) -> Pin<Box<dyn hyper::rt::Sleep>> {
        Box::pin(Turn {
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
    async fn an_alarm_goes_off_when_it_was_set_to_last() {
        let begun = Instant::now();
        let after = |seconds| begun + Duration::from_secs(seconds);
        let mut alarm = Alarm::default();
        assert!(poll_fn(|cx| Poll::Ready(alarm.poll(cx))).await.is_pending());
        for (first, then) in [(10, 30), (60, 40)] {
            alarm.set(after(first));
            assert!(poll_fn(|cx| Poll::Ready(alarm.poll(cx))).await.is_pending());
            alarm.set(after(then));
            poll_fn(|cx| alarm.poll(cx)).await;
            assert_eq!(begun.elapsed(), Duration::from_secs(then));
        }
        // One that went off can be set again.
        alarm.set(after(50));
        poll_fn(|cx| alarm.poll(cx)).await;
        assert_eq!(begun.elapsed(), Duration::from_secs(50));
    }

    #[tokio::test(start_paused = true)]
    async fn each_sleep_of_a_connection_ends_at_its_own_time() {
        let timer = HeadTimer::default();
        let begun = Instant::now();
        for _ in 0..3 {
            let head = timer.sleep(Duration::from_secs(7));
            // A head that came in time.
            tokio::time::advance(Duration::from_secs(1)).await;
            drop(head);
        }
        timer.sleep(Duration::from_secs(7)).await;
        assert_eq!(begun.elapsed(), Duration::from_secs(10));
    }
}
