//! The bridge with real MCP clients: the built binary, a stdio server behind it, and common
//! clients.
//!
//! `./test` runs `tests/mcp/install`, which installs the packages from npm and PyPI.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking"
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
