//! What holds for whoever runs it.

mod confinement;
mod life;
mod network;
mod running;
