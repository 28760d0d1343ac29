//! What is kept for one asker: its room, its pace, its addresses and the answers it had.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use policy::bucket::{Rate, TokenBucket};
use policy::clock::Tick;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::Limits;
use super::forward::Cache;
use super::synthetic::Addresses;

/// One sandbox, or all strangers together.
#[derive(Debug)]
pub(super) struct Guest {
    places: Arc<Semaphore>,
    /// When time began for the bucket.
    began: Instant,
    bucket: Mutex<TokenBucket>,
    addresses: Mutex<Addresses>,
    cache: Mutex<Cache>,
}

impl Guest {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            places: Arc::new(Semaphore::new(limits.in_flight)),
            began: Instant::now(),
            bucket: Mutex::default(),
            addresses: Mutex::new(Addresses::new(limits.names)),
            cache: Mutex::new(Cache::new(limits.cached)),
        }
    }

    /// Its synthetic addresses.
    pub(super) fn addresses(&self) -> MutexGuard<'_, Addresses> {
        self.addresses
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// What upstreams answered it. Its own, because how fast an answer comes would tell it
    /// what another asked for.
    pub(super) fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for one more query, if there is one at this moment.
    pub(super) fn enter(&self, rate: &Rate) -> Option<OwnedSemaphorePermit> {
        let place = Arc::clone(&self.places).try_acquire_owned().ok()?;
        self.pace(rate).is_ok().then_some(place)
    }

    /// A place as soon as there is one, if that is before `deadline`.
    pub(super) async fn enter_by(
        &self,
        rate: &Rate,
        deadline: Instant,
    ) -> Option<OwnedSemaphorePermit> {
        let place = timeout_at(deadline, Arc::clone(&self.places).acquire_owned()).await;
        let place = place.ok()?.ok()?;
        while let Err(next) = self.pace(rate) {
            if next >= deadline {
                return None;
            }
            sleep_until(next).await;
        }
        Some(place)
    }

    /// Takes a token, or says when there will be one.
    fn pace(&self, rate: &Rate) -> Result<(), Instant> {
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
