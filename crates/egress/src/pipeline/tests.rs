//! Size limits of the values that every request moves, as measured in the test profile. Rare
//! parts belong into a box.

use super::*;

/// The size of the future that `answer` returns.
fn future_size<F: Future>(
    _: impl FnOnce(
        &'static Arc<Services>,
        &'static ConnectionSource,
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
    let size = size_of::<PipelineRequest>();
    assert!(size <= 256, "{size} bytes");
}
