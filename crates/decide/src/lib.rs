//! One decision for everything that leaves a sandbox or reaches a tool.
//!
//! [`snapshot`] holds the rules of one configuration; [`decision::decide`] applies them to a
//! [`subject`]; [`bundles`] evaluates the operator's own policies; [`checks`] is the table of
//! which subject passes which check; [`hold`] repeats a decision until no question of it is
//! open. Traffic and tool calls both decide here, and never import each other.
//!
//! **Never here:** a socket, a body of a request, SQL, or a token of a rate limit: to decide
//! spends nothing.

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
