//! The bounded queue of each sandbox.
//!
//! There is one channel to the writer; the number of its entries is bounded per sandbox. Each entry
//! holds a permit of its sandbox until it is committed, so a sandbox that floods the log delays
//! only itself.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use policy::audit::AuditEvent;
use policy::clock::UnixMillis;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::chain::ChainName;

/// Maximum number of records of one sandbox that wait to be written.
pub const QUEUE_CAPACITY: usize = 1024;

/// An event in the channel to the writer.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Boxed, because the entry is moved several times.
    pub(crate) event: Box<AuditEvent>,
    pub(crate) ts: UnixMillis,
    /// The slot in its sandbox's queue; released when the entry is dropped, after its commit.
    pub(crate) slot: Option<QueueSlot>,
}

/// A slot in a sandbox's queue.
#[derive(Debug)]
pub(crate) struct QueueSlot {
    _permit: OwnedSemaphorePermit,
    queue: Arc<Queue>,
}

impl QueueSlot {
    /// Takes the count of dropped events since the last call, to be recorded.
    pub(crate) fn take_dropped(&self) -> u32 {
        self.queue.dropped.swap(0, Relaxed)
    }
}

#[derive(Debug)]
struct Queue {
    slots: Arc<Semaphore>,
    dropped: AtomicU32,
}

/// The queues that are in use. A queue without slots and waiters is removed.
#[derive(Debug, Default)]
pub(crate) struct Queues {
    by_chain: Mutex<HashMap<ChainName, Arc<Queue>, foldhash::fast::RandomState>>,
}

impl Queues {
    /// A slot in the queue of `name`; waits until one is free.
    pub(crate) async fn wait_for_slot(&self, name: &ChainName) -> Option<QueueSlot> {
        let queue = self.queue(name);
        let permit = Arc::clone(&queue.slots).acquire_owned().await.ok()?;
        Some(QueueSlot {
            _permit: permit,
            queue,
        })
    }

    /// A slot, if one is free.
    pub(crate) fn try_take_slot(&self, name: &ChainName) -> Option<QueueSlot> {
        let queue = self.queue(name);
        let permit = Arc::clone(&queue.slots).try_acquire_owned().ok()?;
        Some(QueueSlot {
            _permit: permit,
            queue,
        })
    }

    /// Counts a dropped event of `name`, which will be recorded in its chain.
    pub(crate) fn count_dropped(&self, name: &ChainName) {
        self.queue(name).dropped.fetch_add(1, Relaxed);
    }

    /// Removes the queues among `names` without slots and waiters.
    pub(crate) fn remove_idle<'a>(&self, names: impl Iterator<Item = &'a ChainName>) {
        let mut queues = self.by_chain.lock().unwrap_or_else(PoisonError::into_inner);
        for name in names {
            // Slots and waiters hold a reference to the queue; new ones are created only under this
            // lock.
            if let Some(queue) = queues.get(name)
                && Arc::strong_count(queue) == 1
                && queue.dropped.load(Relaxed) == 0
            {
                queues.remove(name);
            }
        }
    }

    /// The number of queues.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.by_chain.lock().unwrap().len()
    }

    /// The queue of `name`, which is created if there is none.
    fn queue(&self, name: &ChainName) -> Arc<Queue> {
        let mut queues = self.by_chain.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(queue) = queues.get(name) {
            return Arc::clone(queue);
        }
        let queue = Arc::new(Queue {
            slots: Arc::new(Semaphore::new(QUEUE_CAPACITY)),
            dropped: AtomicU32::new(0),
        });
        queues.insert(name.clone(), Arc::clone(&queue));
        queue
    }
}
