//! `palisade mcp` with the official Python client, which starts the server and works on a new
//! repository.
//!
//! The client is installed by `tests/mcp/install`.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking"
)]

mod agent_fixture;
mod agent_session;
mod install;
mod remote_container;
mod transfers;
