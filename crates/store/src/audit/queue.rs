//! The bounded queue of each sandbox.
//!
//! There is one channel to the writer; what is bounded is how many of its entries may
//! belong to one sandbox. Each entry holds a permit of its sandbox until it is committed,
//! so a sandbox that floods waits for itself and for nobody else.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use policy::audit::AuditEvent;
use policy::clock::UnixMillis;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::chain::ChainName;

/// How many records of one sandbox may wait to be written.
pub const QUEUE: usize = 1024;

/// An event on its way to the writer.
#[derive(Debug)]
pub(crate) struct Entry {
    /// In a box, because it moves from hand to hand.
    pub(crate) event: Box<AuditEvent>,
    pub(crate) ts: UnixMillis,
    /// The place in its sandbox's queue; given back when the entry is dropped, which is
    /// after its commit.
    pub(crate) place: Option<Place>,
}

/// A place in a sandbox's queue.
#[derive(Debug)]
pub(crate) struct Place {
    _permit: OwnedSemaphorePermit,
    queue: Arc<Queue>,
}

impl Place {
    /// Takes over what had to be dropped since the last time, to be written down.
    pub(crate) fn take_dropped(&self) -> u32 {
        self.queue.dropped.swap(0, Relaxed)
    }
}

#[derive(Debug)]
struct Queue {
    places: Arc<Semaphore>,
    dropped: AtomicU32,
}

/// The queues that are in use. One that nobody waits in is forgotten.
#[derive(Debug, Default)]
pub(crate) struct Queues {
    by_chain: Mutex<HashMap<ChainName, Arc<Queue>, foldhash::fast::RandomState>>,
}

impl Queues {
    /// A place in the queue of `name`, waiting for one as long as it takes.
    pub(crate) async fn wait(&self, name: &ChainName) -> Option<Place> {
        let queue = self.of(name);
        let permit = Arc::clone(&queue.places).acquire_owned().await.ok()?;
        Some(Place {
            _permit: permit,
            queue,
        })
    }

    /// A place if there is one right now.
    pub(crate) fn try_take(&self, name: &ChainName) -> Option<Place> {
        let queue = self.of(name);
        let permit = Arc::clone(&queue.places).try_acquire_owned().ok()?;
        Some(Place {
            _permit: permit,
            queue,
        })
    }

    /// Notes that an event of `name` was dropped; its chain will say so.
    pub(crate) fn dropped(&self, name: &ChainName) {
        self.of(name).dropped.fetch_add(1, Relaxed);
    }

    /// Forgets the queues among `names` that nobody holds a place in or waits for.
    pub(crate) fn forget_idle<'a>(&self, names: impl Iterator<Item = &'a ChainName>) {
        let mut queues = self.by_chain.lock().unwrap_or_else(PoisonError::into_inner);
        for name in names {
            // Places and waiters hold the queue too; new ones come only under this lock.
            if let Some(queue) = queues.get(name)
                && Arc::strong_count(queue) == 1
                && queue.dropped.load(Relaxed) == 0
            {
                queues.remove(name);
            }
        }
    }

    /// How many sandboxes have a queue.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.by_chain.lock().unwrap().len()
    }

    fn of(&self, name: &ChainName) -> Arc<Queue> {
        let mut queues = self.by_chain.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(queue) = queues.get(name) {
            return Arc::clone(queue);
        }
        let queue = Arc::new(Queue {
            places: Arc::new(Semaphore::new(QUEUE)),
            dropped: AtomicU32::new(0),
        });
        queues.insert(name.clone(), Arc::clone(&queue));
        queue
    }
}
