//! A push, read in a process of its own: packs made by the system's git, and packs that no git
//! would make.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    reason = "a test that fails may panic, and one that makes packs cuts numbers into bytes"
)]

mod hostile;
mod life;
mod measure;
mod paths;
mod place;
mod pushes;
mod secrets;
