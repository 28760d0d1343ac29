//! State shared by all requests of revision 2026-07-28: the relay, the process pools, and the held
//! calls that wait for a client's answers.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::call_driver::HeldCall;
use crate::metrics::CallStatus;
use crate::pool::ProcessPools;
use crate::relay::Relay;

/// Serves requests of revision 2026-07-28.
#[derive(Debug)]
pub struct SessionlessService {
    relay: Relay,
    pools: ProcessPools,
    held_calls: Mutex<HashMap<String, HeldCall>>,
}

impl SessionlessService {
    /// A service without processes.
    pub fn new(relay: Relay) -> Self {
        Self {
            relay,
            pools: ProcessPools::default(),
            held_calls: Mutex::default(),
        }
    }

    /// Decides calls and delivers answers.
    pub(super) fn relay(&self) -> &Relay {
        &self.relay
    }

    /// Processes for requests without sessions.
    pub(super) fn pools(&self) -> &ProcessPools {
        &self.pools
    }

    /// Calls that wait for a client's answers, by `requestState`.
    pub(super) fn held_calls(&self) -> MutexGuard<'_, HashMap<String, HeldCall>> {
        self.held_calls
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends processes that were unused for longer than `max_idle`, and expired held calls.
    pub fn sweep(&self, max_idle: Duration) {
        let expired: Vec<_> = {
            let mut held = self.held_calls();
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
            call.abandon(CallStatus::Timeout);
        }
        self.pools.sweep(max_idle);
    }

    /// Starts to end every process; does not wait.
    pub fn end(&self) {
        self.held_calls().clear();
        self.pools.end();
    }
}
