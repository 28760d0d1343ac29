//! A failure that knows what was being done.

use std::io::Error;

/// What was being done, and what the system said.
#[derive(Debug)]
pub(crate) struct StepError {
    /// What was being done.
    pub(crate) step: String,
    /// What the system said.
    pub(crate) source: Error,
}

impl std::fmt::Display for StepError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.step, self.source)
    }
}

/// Names the step a result belongs to.
pub(crate) trait Step<T> {
    /// On failure, says what was being done.
    fn step(self, step: &str) -> Result<T, StepError>;
}

impl<T, E: Into<Error>> Step<T> for Result<T, E> {
    fn step(self, step: &str) -> Result<T, StepError> {
        self.map_err(|source| StepError {
            step: step.to_owned(),
            source: source.into(),
        })
    }
}
