//! Integration tests of the store: what an operator or a gate observes.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "clippy allows unwrap only in test functions, not in their helpers"
)]

mod durability;
mod fixture;
mod jsonl;
mod log;
mod recovery;
mod registry;
mod tampering;
