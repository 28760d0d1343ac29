//! Scanner for secrets in bytes: rules, and overlapping windows over long streams.
//!
//! ```text
//!   bytes ──▶ StreamScanner (windows) ──▶ Detector ──▶ ScanFinding: a rule's name and a span
//! ```
//!
//! **Never here:** I/O, a clock, a decision about what to do with a finding, or a secret's
//! text in a result.

pub mod detector;
pub mod formats;

pub mod stream;
