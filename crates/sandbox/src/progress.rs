//! How far the making of a sandbox has come: written by whoever works, read by whoever
//! waits. A count that nobody reads costs an addition for each file.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

/// What is being done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Step {
    /// A commit's files are written for the first time.
    Checkout,
    /// Its history is packed.
    History,
    /// Its files are copied into the workspace.
    Copy,
    /// `sandbox.setup_command` runs.
    Setup,
}

/// A moment of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reached {
    /// What is being done.
    pub step: Step,
    /// Files that are done.
    pub done: u64,
    /// Files there are; none where nothing is counted.
    pub total: Option<u64>,
}

/// How far it has come.
#[derive(Debug, Default)]
pub struct Progress {
    step: Mutex<Option<(Step, Option<u64>)>>,
    done: AtomicU64,
}

impl Progress {
    /// The next step begins.
    pub fn begin(&self, step: Step, total: Option<usize>) {
        let mut current = self.step.lock().unwrap_or_else(PoisonError::into_inner);
        self.done.store(0, Ordering::Relaxed);
        *current = Some((step, total.map(|total| total as u64)));
    }

    /// One more file is done.
    pub(crate) fn advance(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    /// How far it is; nothing before the first step.
    pub fn now(&self) -> Option<Reached> {
        let current = self.step.lock().unwrap_or_else(PoisonError::into_inner);
        current.map(|(step, total)| Reached {
            step,
            done: self.done.load(Ordering::Relaxed),
            total,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_counts_from_nothing() {
        let progress = Progress::default();
        assert_eq!(progress.now(), None);
        progress.begin(Step::Checkout, Some(3));
        progress.advance();
        progress.advance();
        let reached = |step, done, total| Some(Reached { step, done, total });
        assert_eq!(progress.now(), reached(Step::Checkout, 2, Some(3)));
        progress.begin(Step::History, None);
        assert_eq!(progress.now(), reached(Step::History, 0, None));
    }
}
