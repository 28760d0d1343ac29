//! Sockets that the program listens on itself: for operators, for tools, for editors.
//!
//! ```text
//!   PrivateSocket ─┐
//!   a TCP port ────┴─▶ accept_all: so many at a time ──▶ http1: until the stop
//! ```
//!
//! A sandbox's traffic does not come this way: nothing of it may be taken for granted, and it is
//! read below the HTTP library (`egress`).
//!
//! **Never here:** what is answered, and to whom.

mod connections;
mod private;

pub use self::connections::{Accept, accept_all, http1};
pub use self::private::{MAX_SOCKET_PATH, PrivateSocket, PrivateSocketError};
