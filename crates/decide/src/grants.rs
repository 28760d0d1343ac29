//! Temporary approvals of sandboxes.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use policy::clock::Tick;
use policy::verdict::Digest;

/// The temporary approvals of one sandbox, by the digest of the question.
#[derive(Debug, Default)]
pub struct Grants(Mutex<HashMap<Digest, Tick>>);

impl Grants {
    /// Adds an approval of the question with `digest` that ends at `until`. Removes approvals that
    /// have ended by `now`.
    pub fn add(&self, digest: Digest, until: Tick, now: Tick) {
        let mut grants = self.lock();
        grants.retain(|_, until| now < *until);
        grants.insert(digest, until);
    }

    /// Returns the end of the approval of the question with `digest`, if it is valid at `now`.
    pub fn find(&self, digest: &Digest, now: Tick) -> Option<Tick> {
        let until = self.lock().get(digest).copied()?;
        (now < until).then_some(until)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Digest, Tick>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
