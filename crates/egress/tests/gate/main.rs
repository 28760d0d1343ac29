//! A gate with stand-ins for what it is given, and real clients and upstreams on loopback.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot go on has failed"
)]

mod daemon;
mod holding;
mod pruning;
mod push;
mod rego;
mod stand_ins;
