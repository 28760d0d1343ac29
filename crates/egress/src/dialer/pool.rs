//! Connections that are kept for the next request of the same sandbox to the same route.
//!
//! ```text
//!            ┌── an idle HTTP/1 connection ──────────────┐
//!   check ───┼── a stream on an HTTP/2 connection ───────┼──▶ Place ──▶ both bodies ended
//!   out      ├── dial (alone, where HTTP/2 is likely) ───┘                 │
//!            └── wait until something changes ◀────────────────────────────┘
//! ```
//! A [`Place`] is held by the request's body and by the response's. The last of them to go
//! gives the connection back.

mod shelf;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use policy::id::SandboxId;

use crate::outgoing::Route;

pub(super) use self::shelf::{Checkout, Dial, HostPool, Place};

/// How long an unused connection is kept.
const KEEP: Duration = Duration::from_secs(60);

/// Connections that are kept for one sandbox: one with a host of its own for every request
/// must not fill the gate.
const MOST_OF_SANDBOX: usize = 256;

/// Connections that are kept for all sandboxes.
const MOST_OF_ALL: usize = 2048;

/// Whose connections, and whereto.
pub(super) type Key = (SandboxId, Route);

/// Every shelf.
pub(super) struct Pool {
    shelves: Mutex<HashMap<Key, Arc<HostPool>, foldhash::fast::RandomState>>,
    kept: AtomicUsize,
    sweeping: AtomicBool,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            shelves: Mutex::default(),
            kept: AtomicUsize::new(0),
            sweeping: AtomicBool::new(false),
        })
    }

    /// The shelf for `key`.
    pub(super) fn shelf(self: &Arc<Self>, key: &Key) -> Arc<HostPool> {
        let mut shelves = locked(&self.shelves);
        if let Some(shelf) = shelves.get(key) {
            return Arc::clone(shelf);
        }
        let mut others = shelves.values();
        let of_sandbox = others.find(|shelf| shelf.key.0 == key.0);
        let kept = of_sandbox.map_or_else(Arc::default, |shelf| Arc::clone(&shelf.kept));
        let shelf = Arc::new(HostPool::new(key.clone(), Arc::downgrade(self), kept));
        shelves.insert(key.clone(), Arc::clone(&shelf));
        self.sweep_later();
        shelf
    }

    /// Takes down the shelves that `chosen` picks: what is unused closes now, what is in use
    /// when its request ends.
    pub(super) fn close(&self, mut chosen: impl FnMut(&Key) -> bool) {
        let mut closed = Vec::new();
        locked(&self.shelves).retain(|key, shelf| {
            let chosen = chosen(key);
            if chosen {
                closed.push(Arc::clone(shelf));
            }
            !chosen
        });
        for shelf in closed {
            shelf.close();
        }
    }

    /// Unused connections.
    pub(super) fn idle(&self) -> usize {
        let shelves = locked(&self.shelves);
        shelves.values().map(|shelf| shelf.idle()).sum()
    }

    /// Drops the connection that was unused for longest: of one sandbox, or of all.
    fn trim(&self, sandbox: Option<&SandboxId>) {
        let shelves = locked(&self.shelves);
        let oldest = shelves
            .values()
            .filter(|shelf| sandbox.is_none_or(|sandbox| shelf.key.0 == *sandbox))
            .filter_map(|shelf| Some((shelf.oldest()?, shelf)))
            .min_by_key(|(since, _)| *since);
        if let Some((_, shelf)) = oldest {
            shelf.drop_oldest();
        }
    }

    /// One task at a time looks for what is too old; it ends when nothing is left. Called
    /// under the lock on the shelves, as is its end: a new shelf always has a sweeper.
    fn sweep_later(self: &Arc<Self>) {
        if self.sweeping.swap(true, Ordering::AcqRel) {
            return;
        }
        let pool = Arc::downgrade(self);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(KEEP / 4).await;
                let Some(pool) = Weak::upgrade(&pool) else {
                    return;
                };
                if pool.sweep() {
                    return;
                }
            }
        });
    }

    /// Whether nothing is left.
    fn sweep(&self) -> bool {
        let mut shelves = locked(&self.shelves);
        shelves.retain(|_, shelf| !shelf.sweep() || Arc::strong_count(shelf) > 1);
        let empty = shelves.is_empty();
        if empty {
            self.sweeping.store(false, Ordering::Release);
        }
        empty
    }
}
