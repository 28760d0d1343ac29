//! Generator of request ids.

use std::sync::{Mutex, PoisonError};

use policy::clock::UnixMillis;
use policy::id::RequestId;
use rustls::crypto::SecureRandom;

/// Random bytes that are generated at once: generating a few at a time would cost as much as a
/// stage of the pipeline.
const POOL_SIZE: usize = 1024;

/// Random bytes per id.
const BYTES_PER_ID: usize = 10;

/// Generates unpredictable request ids.
#[derive(Debug)]
pub struct RequestIds {
    random: &'static dyn SecureRandom,
    pool: Mutex<RandomPool>,
}

#[derive(Debug)]
struct RandomPool {
    bytes: [u8; POOL_SIZE],
    /// Bytes before this offset are used up.
    used: usize,
}

impl RequestIds {
    /// Creates a generator with this source of randomness.
    pub fn new(random: &'static dyn SecureRandom) -> Self {
        let pool = RandomPool {
            bytes: [0; POOL_SIZE],
            used: POOL_SIZE,
        };
        Self {
            random,
            pool: Mutex::new(pool),
        }
    }

    /// The id of a request that starts at `now`.
    pub fn next(&self, now: UnixMillis) -> RequestId {
        let mut random = [0; 16];
        if let (Some(taken), Some(low)) = (self.take(), random.first_chunk_mut::<BYTES_PER_ID>()) {
            *low = taken;
        }
        let millis = u64::try_from(now.get()).unwrap_or_default();
        RequestId::new(millis, u128::from_le_bytes(random))
    }

    /// Takes random bytes for one id. If the source fails, ids are not unique any more, but
    /// requests are still served: nothing else depends on the ids.
    fn take(&self) -> Option<[u8; BYTES_PER_ID]> {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        if pool.used + BYTES_PER_ID > POOL_SIZE {
            self.random.fill(&mut pool.bytes).ok()?;
            pool.used = 0;
        }
        let used = pool.used;
        pool.used += BYTES_PER_ID;
        pool.bytes.get(used..)?.first_chunk().copied()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use rustls::crypto::GetRandomFailed;

    use super::*;

    #[test]
    fn ids_of_the_same_millisecond_are_unique() {
        let ids = RequestIds::new(rustls::crypto::aws_lc_rs::default_provider().secure_random);
        let now = UnixMillis::new(1_700_000_000_000);
        let made: HashSet<_> = (0..2000).map(|_| ids.next(now)).collect();
        assert_eq!(made.len(), 2000);
        let first = RequestId::new(1_700_000_000_000, 0).to_string();
        let has_time = |id: &RequestId| id.to_string().starts_with(&first[..10]);
        assert!(made.iter().all(has_time));
    }

    #[derive(Debug)]
    struct FailingRandom;

    impl SecureRandom for FailingRandom {
        fn fill(&self, _: &mut [u8]) -> Result<(), GetRandomFailed> {
            Err(GetRandomFailed)
        }
    }

    #[test]
    fn failing_random_source_still_gives_ids() {
        let ids = RequestIds::new(&FailingRandom);
        assert_eq!(ids.next(UnixMillis::new(7)), RequestId::new(7, 0));
    }
}
