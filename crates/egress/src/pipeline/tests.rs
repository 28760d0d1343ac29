//! The size of what is moved with every request. It is measured in the profile of tests; what is
//! seldom belongs into a box.

use super::*;

/// The size of the future that `answer` returns.
fn future_size<F: Future>(
    _: impl FnOnce(
        &'static Arc<Services>,
        &'static Source,
        &'static ConnectionInfo,
        Box<Parts>,
        Incoming,
    ) -> F,
) -> usize {
    size_of::<F>()
}

#[test]
fn future_of_a_request_does_not_grow() {
    let size = future_size(answer);
    assert!(size <= 5440, "{size} bytes");
}

#[test]
fn message_does_not_grow() {
    let size = size_of::<Message>();
    assert!(size <= 256, "{size} bytes");
}
