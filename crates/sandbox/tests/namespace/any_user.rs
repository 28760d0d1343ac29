//! Tests that any user can run.

mod commands;
mod confinement;
mod contract;
pub(crate) mod disk;
mod isolation;
mod lifecycle;
mod measure;
mod network;
mod socket_owner;
mod system;
mod transfer;
