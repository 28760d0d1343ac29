//! Tests of the gate with fake dependencies, and real clients and upstreams on loopback.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed expectation fails the test"
)]

mod daemon;
mod fakes;
mod holding;
mod pruning;
mod push;
mod rego;
