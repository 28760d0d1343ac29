//! `palisade mcp` with the official Python client, which starts it and works on a new
//! repository, and the results for the operator.
//!
//! The client is installed by `tests/mcp/install`.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot go on has failed"
)]

mod agent_fixture;
mod elsewhere;
mod install;
mod journey;
mod transfers;
