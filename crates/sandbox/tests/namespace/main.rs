//! The namespace backend, with real sandboxes.
//!
//! `any_user` has the tests that any user can run. `needs_root` runs them again as an unprivileged
//! user, and has the tests that need root.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests fail like tests"
)]

mod any_user;
mod fixture;
mod needs_root;
#[path = "../contract/suite.rs"]
mod suite;
