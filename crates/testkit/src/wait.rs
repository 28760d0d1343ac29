//! Waits for a condition instead of a fixed time.

use std::time::{Duration, Instant};

/// Timeout of every wait, long enough for a busy machine.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Polls `condition` until it returns a value; panics with `what` after [`LIMIT`].
pub fn until<T>(what: &str, condition: impl FnMut() -> Option<T>) -> T {
    until_or(condition, || what.to_owned())
}

/// Like [`until`], with a message that is built only on failure.
#[expect(clippy::panic, reason = "a test whose wait times out has failed")]
#[expect(
    clippy::disallowed_methods,
    reason = "the only place where tests sleep between polls"
)]
pub fn until_or<T>(mut condition: impl FnMut() -> Option<T>, what: impl FnOnce() -> String) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = condition() {
            return found;
        }
        if started.elapsed() > LIMIT {
            panic!("timed out after {LIMIT:?} waiting for: {}", what());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Like [`until`], for asynchronous tests, where blocking would stop the runtime.
#[expect(clippy::panic, reason = "a test whose wait times out has failed")]
pub async fn eventually<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = condition() {
            return found;
        }
        if started.elapsed() > LIMIT {
            panic!("timed out after {LIMIT:?} waiting for: {what}");
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
