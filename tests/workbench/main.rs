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
mod containers;
mod escapes;
mod leash;
mod measure;
mod needs_docker;
mod processes;
mod remote;
mod searches;
mod server;
mod starting;
mod wire;

#[allow(
    dead_code,
    unused_imports,
    unused_macros,
    reason = "sentences about making and stopping are not for a container of somebody else's"
)]
#[path = "../../crates/sandbox/tests/contract/suite.rs"]
mod suite;

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");
