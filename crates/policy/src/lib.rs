//! Shared types of Palisade, and all decisions that depend on their inputs alone.
//!
//! Other crates collect the inputs, call these decisions, and act on the results. Modules:
//!
//! - **types**: [`id`], [`verdict`], [`reason`], [`registration`], [`audit`], [`clock`];
//! - **normalisation** of input, done once, on entry: [`host`], [`path`];
//! - **content changes**: [`redaction`] applies the changes that a policy requires, [`splice`] edits JSON text in place;
//! - **rules**: [`allowlist`] with [`endpoint`], [`override_header`] for headers that bypass them, [`github`] for GitHub's API, [`git_address`] and [`repository`] for git over HTTP, [`refs`] and [`push`] for pushes, [`toolbox`] for tools, [`rego`] for the operator's own policies;
//! - **ports**: [`ports`], the traits by which listeners reach the rest of the gate;
//! - **rate limits and breakers**: [`bucket`], [`window`], [`breaker`];
//! - **proofs** that the next stage requires: [`identity`], [`answer`], [`proof`].
//!
//! Different servers can interpret the same request differently: each interpretation is a
//! *reading*. An allow rule must match every reading (`covers`), a deny rule takes effect if it
//! matches any reading (`touches`), and a request with readings that rules cannot be compared with
//! is refused.
//!
//! **Never here:** I/O, an async runtime, a lock, a clock or randomness. Time is a
//! parameter ([`clock`]), so every decision can be replayed in a test.

pub mod allowlist;
pub mod answer;
pub mod audit;
pub mod breaker;
pub mod bucket;
pub mod clock;
pub mod endpoint;
pub mod git_address;
pub mod github;
mod glob;
pub mod host;
pub mod id;
pub mod identity;
pub mod override_header;
pub mod path;
pub mod ports;
pub mod proof;
pub mod push;
pub mod reason;
pub mod redaction;
pub mod refs;
pub mod registration;
pub mod rego;
pub mod repository;
pub mod splice;
pub mod toolbox;
pub mod verdict;
pub mod window;
