//! Mirrors as sandboxes reach them: over smart HTTP and in git's own protocol.

pub mod daemon;
mod held_push;
mod push;
pub mod serve;
