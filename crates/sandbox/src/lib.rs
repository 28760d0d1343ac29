//! Isolated places for agents: the `Sandbox` trait, its backends, and the git branch each
//! works on.
//!
//! **Never here:** a decision about traffic, the gate's keys, SQL, a git command run on
//! the host inside a workspace, or a path from a workspace followed through a link.

pub mod git;
pub mod name;
