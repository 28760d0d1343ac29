//! The sections of palisade.yaml, one module each, as types.
//!
//! A field's comment is also its description in the schema and in docs/config.md, so it is
//! written for the operator. Every key but `version` has a default.

pub mod approvals;
pub mod audit;
pub mod credentials;
pub mod egress;
pub mod git;
pub mod logging;
pub mod metrics;
pub mod policies;
pub mod sandbox;
pub mod scan;
pub mod server;
pub mod tools;
