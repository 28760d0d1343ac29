//! The pack reader's child process, with packs made by the system's git and packs that no git would
//! make.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    reason = "a test that fails may panic, and one that makes packs cuts numbers into bytes"
)]

mod fixture;
mod hostile;
mod measure;
mod process;
mod pushes;
mod restricted_paths;
mod secrets;
