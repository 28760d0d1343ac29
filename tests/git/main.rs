//! Git through the gate with the machine's git: the built binary, a real
//! `git http-backend` on loopback, and a client on loopback in the place of a container on a shared
//! network.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot continue has failed"
)]

mod corpus;
mod credentials;
mod daemon;
mod fetching;
mod git_fixture;
mod hostile;
mod large_files;
mod large_repository;
mod mirror;
mod mirror_fixture;
mod pushed_objects;
mod pushing;
mod refused_pushes;
mod seed;
mod sizes;
mod ssh_remotes;
