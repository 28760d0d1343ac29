//! Names for requests.

use std::sync::{Mutex, PoisonError};

use policy::clock::UnixMillis;
use policy::id::RequestId;
use rustls::crypto::SecureRandom;

/// So many bytes of randomness are fetched at once: to ask the processor for a few costs as
/// much as a stage of the pipeline.
const STOCK: usize = 1024;

/// What an id takes of them.
const EACH: usize = 10;

/// Makes ids that nobody can foresee.
#[derive(Debug)]
pub struct Ids {
    random: &'static dyn SecureRandom,
    stock: Mutex<Stock>,
}

#[derive(Debug)]
struct Stock {
    bytes: [u8; STOCK],
    /// Those before this are used up.
    used: usize,
}

impl Ids {
    /// Ids made of `random`.
    pub fn new(random: &'static dyn SecureRandom) -> Self {
        let stock = Stock {
            bytes: [0; STOCK],
            used: STOCK,
        };
        Self {
            random,
            stock: Mutex::new(stock),
        }
    }

    /// A name for what begins at `now`.
    pub fn next(&self, now: UnixMillis) -> RequestId {
        let mut random = [0; 16];
        if let (Some(taken), Some(low)) = (self.take(), random.first_chunk_mut::<EACH>()) {
            *low = taken;
        }
        let millis = u64::try_from(now.get()).unwrap_or_default();
        RequestId::new(millis, u128::from_le_bytes(random))
    }

    /// Without randomness ids are no longer told apart by it, and nothing else depends on
    /// them: requests go on.
    fn take(&self) -> Option<[u8; EACH]> {
        let mut stock = self.stock.lock().unwrap_or_else(PoisonError::into_inner);
        if stock.used + EACH > STOCK {
            self.random.fill(&mut stock.bytes).ok()?;
            stock.used = 0;
        }
        let used = stock.used;
        stock.used += EACH;
        stock.bytes.get(used..)?.first_chunk().copied()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use rustls::crypto::GetRandomFailed;

    use super::*;

    #[test]
    fn no_two_requests_of_a_moment_have_one_name() {
        let ids = Ids::new(rustls::crypto::aws_lc_rs::default_provider().secure_random);
        let now = UnixMillis::new(1_700_000_000_000);
        let made: HashSet<_> = (0..2000).map(|_| ids.next(now)).collect();
        assert_eq!(made.len(), 2000);
        let first = RequestId::new(1_700_000_000_000, 0).to_string();
        let in_time = |id: &RequestId| id.to_string().starts_with(&first[..10]);
        assert!(made.iter().all(in_time));
    }

    #[derive(Debug)]
    struct Dry;

    impl SecureRandom for Dry {
        fn fill(&self, _: &mut [u8]) -> Result<(), GetRandomFailed> {
            Err(GetRandomFailed)
        }
    }

    #[test]
    fn without_randomness_there_are_still_names() {
        let ids = Ids::new(&Dry);
        assert_eq!(ids.next(UnixMillis::new(7)), RequestId::new(7, 0));
    }
}
