//! The gate's traffic, tested from inside sandboxes: the built binary, a real sandbox, real
//! clients,
//! and a small internet on loopback that records its requests.
//!
//! Tests that need bytes that no client would send open a socket in the sandbox's
//! network namespace, which needs root.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot go on has failed"
)]

mod agreement;
mod alerts;
mod bodies;
mod clients;
mod corpus;
mod early;
mod failures;
mod framing;
mod github;
mod hostile;
mod internal;
mod lessons;
mod neighbours;
mod overrides;
mod passthrough;
mod plain;
mod reloading;
mod seed;
mod shared;
mod silent;
mod streaming;
mod traffic_fixture;
