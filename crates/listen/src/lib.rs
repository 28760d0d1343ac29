//! Listening sockets of the gate's own services, for operators, tools and editors.
//!
//! ```text
//!   PrivateSocket ─┐
//!   TCP port ──────┴─▶ accept_all: limited number ──▶ http1: until shutdown
//! ```
//!
//! Traffic of sandboxes does not use this crate: it is untrusted and is parsed below the HTTP
//! library (`egress`).
//!
//! **Never here:** the handling of requests, and authorisation.

mod connections;
mod private;

pub use self::connections::{Accept, accept_all, http1};
pub use self::private::{MAX_SOCKET_PATH, PrivateSocket, PrivateSocketError};
