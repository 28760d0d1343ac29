//! Isolated environments for agents: the `SandboxBackend` trait, its implementations, and the git
//! branch of each sandbox.
//!
//! **Never here:** a decision about traffic, a key of the gate, SQL, a git command that runs on the
//! host in a workspace, or following a link in a workspace.

#![allow(
    unsafe_code,
    reason = "the kernel's sandboxing calls have no safe form; each block has a SAFETY comment"
)]

mod beneath;
pub mod checkpoint;
pub mod contract;
pub mod create_progress;
pub mod git;
pub mod manager;
pub mod name;
pub mod namespace;
pub mod pack_reader;
mod parallel;
pub mod remote;
pub mod startup_memory;
pub mod terminal;
pub mod transfer;
pub mod worker;
