//! One decision for everything that leaves a sandbox or reaches a tool.
//!
//! [`snapshot`] holds the rules of one configuration; [`decision::decide`] applies them to a
//! [`subject`]; [`bundles`] evaluates the operator's own policies; [`checks`] is the table of
//! which subject passes which check; [`hold`] repeats a decision until all of its questions to
//! the operator are answered. The `egress` and `mcp` crates both decide with this crate, and do not
//! depend on each other.
//!
//! **Never here:** sockets, body streams, SQL, or tokens of rate limits: a decision has no side
//! effects.

pub mod bundles;
pub mod checks;
pub mod decision;
mod github;
pub mod grants;
pub mod hold;
pub mod input;
pub mod question;
pub mod snapshot;
pub mod subject;
