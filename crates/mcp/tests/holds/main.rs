//! Messages held for the operator, over all transports. The operator and the tool server are fakes
//! in this process, so that tests can check every message.

#![expect(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking"
)]

mod fixture;
mod hooks;
mod operator;
mod sessionless;
mod sessions;
mod tool;
