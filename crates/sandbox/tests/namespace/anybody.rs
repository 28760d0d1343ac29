//! What holds for whoever runs it.

mod confinement;
mod contract;
pub(crate) mod disk;
mod isolation;
mod life;
mod measure;
mod network;
mod programs;
mod running;
mod system;
mod transfer;
