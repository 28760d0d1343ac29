//! Finds secrets in bytes: rules, and windows over what is too long to hold.
//!
//! ```text
//!   bytes ──▶ Stream (windows) ──▶ Detector ──▶ Finding: a rule's name and a span
//! ```
//!
//! **Never here:** I/O, a clock, a decision about what to do with a finding, or a secret's
//! text in anything that leaves.

pub mod detector;
pub mod shapes;
pub mod stream;
