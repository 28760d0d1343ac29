//! Connection pool: idle and shared connections by sandbox and route.
//!
//! ```text
//!            ┌── an idle HTTP/1 connection ──────────────┐
//!   check ───┼── a stream on an HTTP/2 connection ───────┼──▶ slot ──▶ both bodies ended
//!   out      ├── dial (once, where HTTP/2 is likely) ────┘                 │
//!            └── wait until something changes ◀────────────────────────────┘
//! ```
//! Request body and response body share a [`PoolSlot`]; dropping the last one frees it.

mod host_pool;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use policy::id::SandboxId;

use crate::outgoing::Route;

pub(super) use self::host_pool::{Checkout, DialPermit, HostPool, PoolSlot};

/// How long an idle connection is kept.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// Pooled connections per sandbox, so that a sandbox with a new host for every request cannot
/// fill the pool.
const MAX_POOLED_PER_SANDBOX: usize = 256;

/// Pooled connections of all sandboxes.
const MAX_POOLED_TOTAL: usize = 2048;

/// The sandbox that owns the connections, and their route.
pub(super) type Key = (SandboxId, Route);

/// All host pools.
pub(super) struct Pool {
    host_pools: Mutex<HashMap<Key, Arc<HostPool>, foldhash::fast::RandomState>>,
    /// Pooled connections of all sandboxes.
    pooled: AtomicUsize,
    /// Whether the task that removes expired connections runs.
    sweeping: AtomicBool,
}

fn lock_mutex<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            host_pools: Mutex::default(),
            pooled: AtomicUsize::new(0),
            sweeping: AtomicBool::new(false),
        })
    }

    /// The host pool for `key`, created if needed.
    pub(super) fn host_pool(self: &Arc<Self>, key: &Key) -> Arc<HostPool> {
        let mut host_pools = lock_mutex(&self.host_pools);
        if let Some(host_pool) = host_pools.get(key) {
            return Arc::clone(host_pool);
        }
        let mut others = host_pools.values();
        let of_sandbox = others.find(|host_pool| host_pool.key.0 == key.0);
        let pooled =
            of_sandbox.map_or_else(Arc::default, |host_pool| Arc::clone(&host_pool.pooled));
        let host_pool = Arc::new(HostPool::new(key.clone(), Arc::downgrade(self), pooled));
        host_pools.insert(key.clone(), Arc::clone(&host_pool));
        self.start_sweeper();
        host_pool
    }

    /// Closes the host pools for which `is_selected` is true. Idle connections close now, busy
    /// connections when their request ends.
    pub(super) fn close(&self, mut is_selected: impl FnMut(&Key) -> bool) {
        let mut closed = Vec::new();
        lock_mutex(&self.host_pools).retain(|key, host_pool| {
            let is_selected = is_selected(key);
            if is_selected {
                closed.push(Arc::clone(host_pool));
            }
            !is_selected
        });
        for host_pool in closed {
            host_pool.close();
        }
    }

    /// Number of idle connections.
    pub(super) fn idle(&self) -> usize {
        let host_pools = lock_mutex(&self.host_pools);
        host_pools.values().map(|host_pool| host_pool.idle()).sum()
    }

    /// Drops the connection that was idle longest, of one sandbox or of all.
    fn trim(&self, sandbox: Option<&SandboxId>) {
        let host_pools = lock_mutex(&self.host_pools);
        let oldest = host_pools
            .values()
            .filter(|host_pool| sandbox.is_none_or(|sandbox| host_pool.key.0 == *sandbox))
            .filter_map(|host_pool| Some((host_pool.oldest()?, host_pool)))
            .min_by_key(|(since, _)| *since);
        if let Some((_, host_pool)) = oldest {
            host_pool.drop_oldest();
        }
    }

    /// Starts the task that removes expired connections, if none runs; it ends when the pool is
    /// empty. The task starts and ends under the lock on `host_pools`, so it runs as long as a host
    /// pool exists.
    fn start_sweeper(self: &Arc<Self>) {
        if self.sweeping.swap(true, Ordering::AcqRel) {
            return;
        }
        let pool = Arc::downgrade(self);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(IDLE_TIMEOUT / 4).await;
                let Some(pool) = Weak::upgrade(&pool) else {
                    return;
                };
                if pool.sweep() {
                    return;
                }
            }
        });
    }

    /// Removes expired connections; returns whether the pool is empty.
    fn sweep(&self) -> bool {
        let mut host_pools = lock_mutex(&self.host_pools);
        host_pools.retain(|_, host_pool| !host_pool.sweep() || Arc::strong_count(host_pool) > 1);
        let empty = host_pools.is_empty();
        if empty {
            self.sweeping.store(false, Ordering::Release);
        }
        empty
    }
}
