//! The host's side of git, on repositories made by the real `git`. The tests run git; the
//! library never does.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test that fails may panic"
)]

mod checkout;
mod home;
mod hostile;
mod import;
mod kinds;
mod measure;
mod merge;
mod needs_root;
mod recovery;
mod repo;
mod snapshot;
mod switch;
mod uncommitted;
mod worker;
