//! The gate's traffic: what a sandbox says to the world passes here and nowhere else.
//!
//! For now it passes nowhere: every connection and every query is refused, in words that
//! name the sandbox.
//!
//! **Never here:** a way round the listeners, a credential on a request that nobody
//! cleared, SQL, or the sandboxes themselves.

pub mod datagram;
pub mod doors;
pub mod publish;
pub mod refusal;
