//! The gate's DNS server with a fake upstream resolver, called directly and over loopback sockets.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failed expectation fails the test"
)]

mod fixture;
mod forward;
mod sockets;
