//! The gate's traffic, tested from inside sandboxes: the built binary, a real sandbox, real
//! clients, and fake origins on loopback that record their requests.
//!
//! Tests that need bytes that no client would send open a socket in the sandbox's
//! network namespace, which needs root.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed expectation fails the test"
)]

mod alerts;
mod clients;
mod connections_without_request;
mod corpus;
mod credentials;
mod early_responses;
mod failures;
mod framing;
mod github;
mod host_consistency;
mod hostile;
mod internal_host;
mod overrides;
mod passthrough;
mod regressions;
mod reloading;
mod request_bodies;
mod sandbox_separation;
mod seed;
mod shared_network;
mod streaming;
mod traffic_fixture;
mod without_proxy;
