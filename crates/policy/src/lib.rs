//! The vocabulary of Palisade, and every decision that needs nothing but its inputs.
//!
//! Higher crates gather facts, ask here, and act on the answer. What is here:
//!
//! - **words**: [`id`], [`verdict`], [`reason`], [`registration`], [`audit`], [`clock`];
//! - **spellings**, each normalised once, where it enters: [`host`], [`path`];
//! - **changes**: [`redaction`], what a policy wants changed, by [`splice`], which touches nothing else;
//! - **rules**: [`allowlist`] over [`endpoint`], [`override_header`] for what would get around them, [`github`] for its API, [`git_address`] and [`repository`] for git over HTTP, [`refs`] and [`push`] for pushes, [`toolbox`] for tools, [`rego`] for the operator's own policies;
//! - **ports**: [`ports`], what the planes need of the rest of the gate, as traits;
//! - **arithmetic**: [`bucket`], [`window`], [`breaker`];
//! - **proofs**, which the next stage demands: [`identity`], [`answer`], [`proof`].
//!
//! A rule that opens something must hold in every way the other side could read a request;
//! a rule that closes something bites in any (`covers` and `touches`). What cannot be read
//! in one way by everybody is refused.
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
