//! Messages that wait for an operator's answer, in every way in which they come. The operator is
//! a test's; the tool is a task of this process, so that it is certain what it received.

#![expect(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot go on should stop"
)]

mod fixture;
mod hooks;
mod operator;
mod sessionless;
mod sessions;
mod tool;
