//! The bridge as MCP clients meet it: the built binary, a stdio server behind it, and the
//! clients that people have.
//!
//! What comes from npm and PyPI is installed by `tests/mcp/install`, which `./test` runs.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot go on has failed"
)]

mod bridge;
mod clients;
mod conformance;
mod contexts;
mod corpus;
mod disconnects;
mod gateway;
mod governed;
mod health;
mod hooks;
mod hostile;
mod listeners;
mod metrics;
mod polis_config;
mod properties;
mod refusals;
mod relay;
mod shutdown;
mod standalone;
