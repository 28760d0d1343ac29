//! `palisade mcp` as people have it: the official Python client starts it and works on a fresh
//! repository, and what the operator finds afterwards.
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
