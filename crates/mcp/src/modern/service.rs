//! What requests of 2026-07-28 share: the relay, the pools of processes, and the calls that wait
//! for a client's answers.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::drive::Held;
use crate::metrics::Status;
use crate::pool::Pools;
use crate::relay::Relay;

/// See the module.
#[derive(Debug)]
pub struct SessionlessService {
    relay: Relay,
    pools: Pools,
    held: Mutex<HashMap<String, Held>>,
}

impl SessionlessService {
    /// A service without processes.
    pub fn new(relay: Relay) -> Self {
        Self {
            relay,
            pools: Pools::default(),
            held: Mutex::default(),
        }
    }

    /// Sees calls through.
    pub(super) fn relay(&self) -> &Relay {
        &self.relay
    }

    /// Processes for requests without sessions.
    pub(super) fn pools(&self) -> &Pools {
        &self.pools
    }

    /// Calls that wait for a person.
    pub(super) fn held(&self) -> MutexGuard<'_, HashMap<String, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends processes that nobody has used for `most`, and calls that waited too long.
    pub fn sweep(&self, most: Duration) {
        let expired: Vec<_> = {
            let mut held = self.held();
            let now = Instant::now();
            let names: Vec<_> = held
                .iter()
                .filter(|(_, call)| call.expires() <= now)
                .map(|(name, _)| name.clone())
                .collect();
            names
                .into_iter()
                .filter_map(|name| held.remove(&name))
                .collect()
        };
        for call in expired {
            call.abandon(Status::Timeout);
        }
        self.pools.sweep(most);
    }

    /// Begins to end every process.
    pub fn end(&self) {
        self.held().clear();
        self.pools.end();
    }
}
