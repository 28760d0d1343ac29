//! The vocabulary of Palisade, and every decision that needs nothing but its inputs.
//!
//! Identifiers, verdicts, reasons, registrations, audit events; host and path
//! normalisation; allowlist, endpoint and ref rules; rate and breaker arithmetic.
//! Higher crates gather facts, ask here, and act on the answer.
//!
//! **Never here:** I/O, an async runtime, a lock, a clock or randomness. Time is a
//! parameter ([`clock`]), so every decision can be replayed in a test.

pub mod audit;
pub mod clock;
pub mod id;
pub mod reason;
pub mod registration;
pub mod verdict;
