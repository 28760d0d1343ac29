//! Isolated environments for agents: the `Sandbox` trait, its backends, and the git branch of each
//! sandbox.
//!
//! **Never here:** a decision about traffic, the gate's keys, SQL, a git command run on
//! the host inside a workspace, or a path from a workspace followed through a link.

#![allow(
    unsafe_code,
    reason = "the kernel's sandboxing calls have no safe form; each block says why it is sound"
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
