//! DNS off real sockets on loopback: the gate's own answers, and a resolver's.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test that cannot go on should stop"
)]

mod fixture;
mod forward;
mod sockets;
