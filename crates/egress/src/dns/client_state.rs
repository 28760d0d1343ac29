//! State of one DNS client: query slots, rate limit, synthetic addresses and cached answers.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use policy::bucket::{Rate, TokenBucket};
use policy::clock::Tick;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::DnsLimits;
use super::forward::Cache;
use super::synthetic::SyntheticAddresses;

/// The state of one sandbox, or of all unregistered clients together.
#[derive(Debug)]
pub(super) struct ClientState {
    slots: Arc<Semaphore>,
    /// The bucket's time origin.
    began: Instant,
    bucket: Mutex<TokenBucket>,
    addresses: Mutex<SyntheticAddresses>,
    cache: Mutex<Cache>,
}

impl ClientState {
    pub(super) fn new(limits: &DnsLimits) -> Self {
        Self {
            slots: Arc::new(Semaphore::new(limits.in_flight)),
            began: Instant::now(),
            bucket: Mutex::default(),
            addresses: Mutex::new(SyntheticAddresses::new(limits.names)),
            cache: Mutex::new(Cache::new(limits.cached)),
        }
    }

    /// The client's synthetic addresses.
    pub(super) fn addresses(&self) -> MutexGuard<'_, SyntheticAddresses> {
        self.addresses
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The client's cached upstream answers. The cache is not shared, because the time of an
    /// answer would disclose what other sandboxes resolved.
    pub(super) fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Acquires a query slot, if one is free and the rate allows it now.
    pub(super) fn try_acquire(&self, rate: &Rate) -> Option<OwnedSemaphorePermit> {
        let slot = Arc::clone(&self.slots).try_acquire_owned().ok()?;
        self.take_token(rate).is_ok().then_some(slot)
    }

    /// Acquires a query slot; `None` if none is available before `deadline`.
    pub(super) async fn acquire_by(
        &self,
        rate: &Rate,
        deadline: Instant,
    ) -> Option<OwnedSemaphorePermit> {
        let slot = timeout_at(deadline, Arc::clone(&self.slots).acquire_owned()).await;
        let slot = slot.ok()?.ok()?;
        while let Err(next) = self.take_token(rate) {
            if next >= deadline {
                return None;
            }
            sleep_until(next).await;
        }
        Some(slot)
    }

    /// Takes a token of the rate limit, or returns when the next one is available.
    fn take_token(&self, rate: &Rate) -> Result<(), Instant> {
        let now = Instant::now();
        let nanos = now.saturating_duration_since(self.began).as_nanos();
        let tick = Tick::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        match bucket.take(rate, tick) {
            Ok(_) => Ok(()),
            Err(wait) => Err(now + wait.duration()),
        }
    }
}
