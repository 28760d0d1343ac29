//! Shared types of Palisade, and all decisions that depend on their inputs alone.
//!
//! Higher crates gather facts, call the decisions here, and act on the results. Modules:
//!
//! - **types**: [`id`], [`verdict`], [`reason`], [`registration`], [`audit`], [`clock`];
//! - **normalisation** of input, done once, on entry: [`host`], [`path`];
//! - **content changes**: [`redaction`] is what a policy wants changed, [`splice`] edits JSON text in place;
//! - **rules**: [`allowlist`] with [`endpoint`], [`override_header`] for headers that bypass them, [`github`] for GitHub's API, [`git_address`] and [`repository`] for git over HTTP, [`refs`] and [`push`] for pushes, [`toolbox`] for tools, [`rego`] for the operator's own policies;
//! - **ports**: [`ports`], the traits by which listeners reach the rest of the gate;
//! - **rate limits and breakers**: [`bucket`], [`window`], [`breaker`];
//! - **proofs** that the next stage requires: [`identity`], [`answer`], [`proof`].
//!
//! Servers can read the same request in different ways. An allow rule must match in all of these
//! readings (`covers`), a deny rule takes effect if it matches in any of them (`touches`), and
//! input with readings that rules cannot compare is refused.
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
