//! What holds for whoever runs it.

mod confinement;
mod contract;
mod disk;
mod isolation;
mod life;
mod measure;
mod network;
mod running;
mod system;
mod transfer;
