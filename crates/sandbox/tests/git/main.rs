//! Host-side git operations on repositories made by the real `git`. The tests run git; the library
//! never does.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test that fails may panic"
)]

mod branch_checkout;
mod checkout_cache;
mod host_repository;
mod hostile;
mod import;
mod kinds;
mod measure;
mod merge;
mod needs_root;
mod recovery;
mod repo;
mod snapshot;
mod uncommitted;
mod worker;
