//! Errors with the name of the failed step.

use std::io::Error;

/// A failed step and its error.
#[derive(Debug)]
pub(crate) struct StepError {
    /// The name of the step.
    pub(crate) step: String,
    /// The error of the system.
    pub(crate) source: Error,
}

impl std::fmt::Display for StepError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.step, self.source)
    }
}

/// Adds the name of a step to a result's error.
pub(crate) trait Step<T> {
    /// Converts the error to a [`StepError`].
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
