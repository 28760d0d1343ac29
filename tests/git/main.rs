//! Git through the gate with the machine's git: the built binary, a real
//! `git http-backend` on loopback, and a container of a shared network that loopback stands for.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot go on has failed"
)]

mod corpus;
mod daemon;
mod fetching;
mod git_fixture;
mod hostile;
mod judged;
mod large_files;
mod mirror;
mod mirror_fixture;
mod much;
mod pushing;
mod refusing;
mod seed;
mod sizes;
mod ssh_remotes;
