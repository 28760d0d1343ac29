//! Serves mirrors to sandboxes, over smart HTTP and over the git protocol.

pub mod daemon;
mod held_push;
pub mod smart_http;
mod upstream_push;
