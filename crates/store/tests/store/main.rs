//! Integration tests of the store: what an operator or a gate observes.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "the lints spare test functions, not what they share"
)]

mod durability;
mod fixture;
mod jsonl;
mod log;
mod recovery;
mod registry;
mod tampering;
