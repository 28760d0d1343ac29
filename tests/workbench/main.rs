//! The coding tools as their clients use them, and the process guard of commands.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot continue has failed"
)]

mod client;
mod commands;
mod containers;
mod escapes;
mod file_changes;
mod http_api;
mod measure;
mod needs_docker;
mod process_guard;
mod processes;
mod remote;
mod searches;
mod server;
mod startup;

#[allow(
    dead_code,
    unused_imports,
    unused_macros,
    reason = "creating and stopping do not apply to a remote container"
)]
#[path = "../../crates/sandbox/tests/contract/suite.rs"]
mod suite;

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");
