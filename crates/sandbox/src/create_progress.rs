//! Progress of creating a sandbox, shared between the creating thread and its observers. Counting
//! costs one atomic addition for each file.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

/// A step of creating a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CreateStep {
    /// A commit's files are written to the checkout cache.
    Checkout,
    /// The commit's history is packed.
    History,
    /// The files are copied into the workspace.
    Copy,
    /// `sandbox.setup_command` runs.
    Setup,
}

/// A snapshot of the progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgressReport {
    /// The current step.
    pub step: CreateStep,
    /// The number of completed files.
    pub done: u64,
    /// The total number of files; `None` if the step counts none.
    pub total: Option<u64>,
}

/// The shared progress of a creation.
#[derive(Debug, Default)]
pub struct CreateProgress {
    step: Mutex<Option<(CreateStep, Option<u64>)>>,
    done: AtomicU64,
}

impl CreateProgress {
    /// Starts the next step.
    pub fn begin(&self, step: CreateStep, total: Option<usize>) {
        let mut current = self.step.lock().unwrap_or_else(PoisonError::into_inner);
        self.done.store(0, Ordering::Relaxed);
        *current = Some((step, total.map(|total| total as u64)));
    }

    /// Counts a completed file.
    pub(crate) fn advance(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the current progress; `None` before the first step.
    pub fn current(&self) -> Option<ProgressReport> {
        let current = self.step.lock().unwrap_or_else(PoisonError::into_inner);
        current.map(|(step, total)| ProgressReport {
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
    fn new_step_resets_the_count() {
        let progress = CreateProgress::default();
        assert_eq!(progress.current(), None);
        progress.begin(CreateStep::Checkout, Some(3));
        progress.advance();
        progress.advance();
        let report = |step, done, total| Some(ProgressReport { step, done, total });
        assert_eq!(progress.current(), report(CreateStep::Checkout, 2, Some(3)));
        progress.begin(CreateStep::History, None);
        assert_eq!(progress.current(), report(CreateStep::History, 0, None));
    }
}
