//! A container of `sandbox.remote` for agents: its tools work, but its lifecycle is managed
//! externally. It has no branch, so nothing is committed.

use anyhow::Result;
use config::section::sandbox::RemoteContainer;
use control::remote;
use policy::id::SandboxId;
use sandbox::contract::SandboxBackend;
use workbench::client::WorkbenchClient;

use crate::cli::{Global, remote as remote_commands};

/// A remote container.
#[derive(Clone, Debug)]
pub struct RemoteSandbox(RemoteContainer);

impl RemoteSandbox {
    /// Reads the container's settings from the operator's configuration.
    pub async fn read(id: &SandboxId, global: &Global) -> Result<Self> {
        let (id, global) = (id.clone(), global.clone());
        let read = move || remote_commands::settings(&id, &global);
        Ok(Self(tokio::task::spawn_blocking(read).await??))
    }

    /// A client of the container's workbench.
    pub fn client(&self) -> Result<WorkbenchClient> {
        Ok(WorkbenchClient::for_container(&self.0)?)
    }

    /// Runs blocking work with the container's backend.
    pub fn run_with_backend<T>(
        &self,
        work: impl FnOnce(&(dyn SandboxBackend + Sync), &SandboxId) -> Result<T>,
    ) -> Result<T> {
        let backend = remote::open(&self.0)?;
        let id = backend.id().clone();
        work(&backend, &id)
    }

    /// Runs blocking work with the container's backend on a blocking thread.
    pub async fn run_blocking<T: Send + 'static>(
        self,
        work: impl FnOnce(&(dyn SandboxBackend + Sync), &SandboxId) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        tokio::task::spawn_blocking(move || self.run_with_backend(work)).await?
    }
}
