//! Waiting for a condition, never for a time.

use std::time::{Duration, Instant};

/// Long enough for a busy machine; a test that gets here has failed.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Looks until `condition` gives something; panics with `what` after [`LIMIT`].
pub fn until<T>(what: &str, condition: impl FnMut() -> Option<T>) -> T {
    until_or(condition, || what.to_owned())
}

/// The same, with words that are only found when it was in vain.
#[expect(clippy::panic, reason = "a test that waits in vain has failed")]
#[expect(
    clippy::disallowed_methods,
    reason = "the one place where tests pause between looks"
)]
pub fn until_or<T>(mut condition: impl FnMut() -> Option<T>, what: impl FnOnce() -> String) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = condition() {
            return found;
        }
        if started.elapsed() > LIMIT {
            panic!("waited {LIMIT:?} in vain for: {}", what());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The same where blocking would keep the condition from coming true.
#[expect(clippy::panic, reason = "a test that waits in vain has failed")]
pub async fn eventually<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = condition() {
            return found;
        }
        if started.elapsed() > LIMIT {
            panic!("waited {LIMIT:?} in vain for: {what}");
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
