//! Failures of upstreams, counted by the label of their host.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::rate_limits::OTHER;

/// Labels with a failure count of their own: more than a configuration names, in all its
/// versions.
const MAX_LABELS: usize = 16 * 1024;

/// Failures of upstreams, of all sandboxes together: they outlive a sandbox.
#[derive(Clone, Debug, Default)]
pub struct UpstreamFailures(Arc<Mutex<BTreeMap<String, u64>>>);

impl UpstreamFailures {
    /// Counts a failure of the upstream with that label.
    pub fn count(&self, label: String) {
        let mut failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_room = failures.len() < MAX_LABELS || failures.contains_key(&label);
        let label = if is_room { label } else { OTHER.to_owned() };
        *failures.entry(label).or_default() += 1;
    }

    /// Every label with its count.
    pub fn read(&self) -> BTreeMap<String, u64> {
        let failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        failures.clone()
    }
}
