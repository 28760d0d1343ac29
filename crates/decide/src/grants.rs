//! Answers that hold for a sandbox for a while.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use policy::clock::Tick;
use policy::verdict::Digest;

/// What the operator allowed one sandbox for a while, by the digest of the question.
#[derive(Debug, Default)]
pub struct Grants(Mutex<HashMap<Digest, Tick>>);

impl Grants {
    /// Allows what the question of `digest` was about, until then. Grants that have ended by
    /// `now` are removed.
    pub fn add(&self, digest: Digest, until: Tick, now: Tick) {
        let mut grants = self.lock();
        grants.retain(|_, until| now < *until);
        grants.insert(digest, until);
    }

    /// Until when the question of `digest` is answered with yes.
    pub fn find(&self, digest: &Digest, now: Tick) -> Option<Tick> {
        let until = self.lock().get(digest).copied()?;
        (now < until).then_some(until)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Digest, Tick>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
