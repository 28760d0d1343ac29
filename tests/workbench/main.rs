//! The coding tools as their clients meet them, and the leash that commands run on.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot go on has failed"
)]

mod changes;
mod client;
mod commands;
mod escapes;
mod leash;
mod processes;
mod searches;
mod server;
mod starting;
mod wire;

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");
