//! The namespace backend, with real sandboxes.
//!
//! `anybody` holds for whoever runs it. `needs_root` runs all of it once more as an
//! unprivileged user, and what only root can see.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests fail like tests"
)]

mod anybody;
mod bench;
mod needs_root;
#[path = "../contract/suite.rs"]
mod suite;
