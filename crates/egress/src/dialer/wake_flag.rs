//! Waker for a connection that its request polls.
//!
//! hyper holds the waker. While the task polls the connection, a wake-up only sets a flag, which
//! the task checks before it returns: waking a running task would run it once more for nothing.
//! Between polls, a wake-up wakes the task that polled last, or none for an idle connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

use atomic_waker::AtomicWaker;

/// The wake-up state of one connection.
#[derive(Debug, Default)]
pub(super) struct WakeFlag {
    task: AtomicWaker,
    polling: AtomicBool,
    woken: AtomicBool,
}

impl WakeFlag {
    /// The task begins to poll the connection.
    pub(super) fn begin_poll(&self, task: &Waker) {
        self.task.register(task);
        self.polling.store(true, Ordering::SeqCst);
    }

    /// Takes the flag: whether there was a wake-up since the last call.
    pub(super) fn take(&self) -> bool {
        self.woken.swap(false, Ordering::SeqCst)
    }

    /// The task stops polling; later wake-ups wake the task. Returns whether there was one at
    /// the last moment.
    pub(super) fn end_poll(&self) -> bool {
        self.polling.store(false, Ordering::SeqCst);
        self.take()
    }

    /// Removes the task: the connection is idle.
    pub(super) fn clear_task(&self) {
        drop(self.task.take());
    }
}

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // `end_poll` uses the opposite order, so that one of the two sees the other's store.
        self.woken.store(true, Ordering::SeqCst);
        if !self.polling.load(Ordering::SeqCst) {
            self.task.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[derive(Default)]
    struct WakeCounter(AtomicUsize);

    impl Wake for WakeCounter {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn wake_during_a_poll_sets_the_flag_otherwise_wakes_the_task() {
        let wakes = Arc::new(WakeCounter::default());
        let task = Waker::from(Arc::clone(&wakes));
        let wake_flag = Arc::new(WakeFlag::default());
        let waker = Waker::from(Arc::clone(&wake_flag));
        let times = || wakes.0.load(Ordering::SeqCst);

        wake_flag.begin_poll(&task);
        assert!(!wake_flag.take());
        waker.wake_by_ref();
        assert_eq!(
            (wake_flag.take(), wake_flag.take(), times()),
            (true, false, 0)
        );
        waker.wake_by_ref();
        assert!(
            wake_flag.end_poll(),
            "the wake-up came before the poll ended"
        );
        assert_eq!(times(), 0);

        waker.wake_by_ref();
        assert_eq!(times(), 1);
        wake_flag.begin_poll(&task);
        assert!(wake_flag.take(), "a wake-up between polls is kept");
        assert!(!wake_flag.end_poll());

        wake_flag.clear_task();
        waker.wake_by_ref();
        assert_eq!(times(), 1);
    }

    #[test]
    fn no_wake_is_lost_when_a_poll_ends() {
        for _ in 0..2000 {
            let wakes = Arc::new(WakeCounter::default());
            let task = Waker::from(Arc::clone(&wakes));
            let wake_flag = Arc::new(WakeFlag::default());
            let waker = Waker::from(Arc::clone(&wake_flag));
            wake_flag.begin_poll(&task);
            let other_thread = std::thread::spawn(move || waker.wake());
            let flagged = wake_flag.take() | wake_flag.end_poll();
            other_thread.join().unwrap();
            let woke_task = wakes.0.load(Ordering::SeqCst) > 0;
            assert!(flagged || woke_task, "the wake-up was lost");
        }
    }
}
