//! What is kept for one asker: its room, its pace and its addresses.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use policy::bucket::{Rate, TokenBucket};
use policy::clock::Tick;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::Limits;
use super::synthetic::Addresses;

/// One sandbox, or all strangers together.
#[derive(Debug)]
pub(super) struct Guest {
    places: Arc<Semaphore>,
    rate: Option<Rate>,
    /// When time began for the bucket.
    began: Instant,
    bucket: Mutex<TokenBucket>,
    addresses: Mutex<Addresses>,
}

impl Guest {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            places: Arc::new(Semaphore::new(limits.in_flight)),
            rate: limits.rate,
            began: Instant::now(),
            bucket: Mutex::default(),
            addresses: Mutex::new(Addresses::new(limits.names)),
        }
    }

    /// Its synthetic addresses.
    pub(super) fn addresses(&self) -> MutexGuard<'_, Addresses> {
        self.addresses
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for one more query, if there is one at this moment.
    pub(super) fn enter(&self) -> Option<OwnedSemaphorePermit> {
        let place = Arc::clone(&self.places).try_acquire_owned().ok()?;
        self.pace().is_ok().then_some(place)
    }

    /// A place as soon as there is one, if that is before `deadline`.
    pub(super) async fn enter_by(&self, deadline: Instant) -> Option<OwnedSemaphorePermit> {
        let place = timeout_at(deadline, Arc::clone(&self.places).acquire_owned()).await;
        let place = place.ok()?.ok()?;
        while let Err(next) = self.pace() {
            if next >= deadline {
                return None;
            }
            sleep_until(next).await;
        }
        Some(place)
    }

    /// Takes a token, or says when there will be one.
    fn pace(&self) -> Result<(), Instant> {
        let Some(rate) = &self.rate else {
            return Ok(());
        };
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
