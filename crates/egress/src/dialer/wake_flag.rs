//! Who is woken when something happens on a connection that its user drives.
//!
//! The library is told to ring the bell. While the user is at the connection it is noted that
//! it rang, and the user looks again before it goes: to wake a task that is awake would run
//! it once more for nothing. In between, whoever was there last is woken; nobody, once it has
//! left for good.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

use atomic_waker::AtomicWaker;

/// The bell of one connection.
#[derive(Debug, Default)]
pub(super) struct WakeFlag {
    user: AtomicWaker,
    attended: AtomicBool,
    rung: AtomicBool,
}

impl WakeFlag {
    /// The user is there.
    pub(super) fn attend(&self, user: &Waker) {
        self.user.register(user);
        self.attended.store(true, Ordering::SeqCst);
    }

    /// Whether it rang since this was asked last.
    pub(super) fn answer(&self) -> bool {
        self.rung.swap(false, Ordering::SeqCst)
    }

    /// The user waits elsewhere. Whether it rang in the last moment: whoever rings from now
    /// on wakes the user.
    pub(super) fn leave(&self) -> bool {
        self.attended.store(false, Ordering::SeqCst);
        self.answer()
    }

    /// There is no user any more.
    pub(super) fn forget(&self) {
        drop(self.user.take());
    }
}

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // In this order, and `leave` in the other: one of the two sees what the other did.
        self.rung.store(true, Ordering::SeqCst);
        if !self.attended.load(Ordering::SeqCst) {
            self.user.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_user_who_is_there_is_told_and_one_who_left_is_woken_once() {
        let woken = Arc::new(Woken::default());
        let user = Waker::from(Arc::clone(&woken));
        let bell = Arc::new(WakeFlag::default());
        let waker = Waker::from(Arc::clone(&bell));
        let times = || woken.0.load(Ordering::SeqCst);

        bell.attend(&user);
        assert!(!bell.answer());
        waker.wake_by_ref();
        assert_eq!((bell.answer(), bell.answer(), times()), (true, false, 0));
        waker.wake_by_ref();
        assert!(bell.leave(), "it rang before it was left");
        assert_eq!(times(), 0);

        waker.wake_by_ref();
        assert_eq!(times(), 1);
        bell.attend(&user);
        assert!(bell.answer(), "what rang in between is not lost");
        assert!(!bell.leave());

        bell.forget();
        waker.wake_by_ref();
        assert_eq!(times(), 1);
    }

    #[test]
    fn no_ring_is_lost_between_looking_and_leaving() {
        for _ in 0..2000 {
            let woken = Arc::new(Woken::default());
            let user = Waker::from(Arc::clone(&woken));
            let bell = Arc::new(WakeFlag::default());
            let waker = Waker::from(Arc::clone(&bell));
            bell.attend(&user);
            let ringer = std::thread::spawn(move || waker.wake());
            let heard = bell.answer() | bell.leave();
            ringer.join().unwrap();
            let woke = woken.0.load(Ordering::SeqCst) > 0;
            assert!(heard || woke, "it rang and nobody knows");
        }
    }
}
