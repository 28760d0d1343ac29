//! Counter of upstream failures by host label.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::rate_limits::OTHER;

/// Maximum number of labels: more than all versions of a configuration contain.
const MAX_LABELS: usize = 16 * 1024;

/// Upstream failures of all sandboxes; the counts outlive a sandbox.
#[derive(Clone, Debug, Default)]
pub struct UpstreamFailures(Arc<Mutex<BTreeMap<String, u64>>>);

impl UpstreamFailures {
    /// Counts a failure of the upstream with this label.
    pub fn count(&self, label: String) {
        let mut failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let has_room = failures.len() < MAX_LABELS || failures.contains_key(&label);
        let label = if has_room { label } else { OTHER.to_owned() };
        *failures.entry(label).or_default() += 1;
    }

    /// Every label with its count.
    pub fn read(&self) -> BTreeMap<String, u64> {
        let failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        failures.clone()
    }
}
