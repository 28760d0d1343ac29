//! A container of `sandbox.remote`, for agents: its tools work, and its lifecycle is managed
//! externally. It has no branch, so nothing is committed.

use anyhow::Result;
use config::section::sandbox::RemoteContainer;
use control::remote;
use policy::id::SandboxId;
use sandbox::contract::SandboxBackend;
use workbench::client::WorkbenchClient;

use crate::cli::{Global, remote as command};

/// A connect-only container.
#[derive(Clone, Debug)]
pub struct Elsewhere(RemoteContainer);

impl Elsewhere {
    /// The container of that name, as the operator's file has it.
    pub async fn read(id: &SandboxId, global: &Global) -> Result<Self> {
        let (id, global) = (id.clone(), global.clone());
        let read = move || command::settings(&id, &global);
        Ok(Self(tokio::task::spawn_blocking(read).await??))
    }

    /// The client of its workbench.
    pub fn client(&self) -> Result<WorkbenchClient> {
        Ok(WorkbenchClient::of(&self.0)?)
    }

    /// Does something with it as with any sandbox, where that may block.
    pub fn with<T>(
        &self,
        work: impl FnOnce(&(dyn SandboxBackend + Sync), &SandboxId) -> Result<T>,
    ) -> Result<T> {
        let backend = remote::open(&self.0)?;
        let id = backend.id().clone();
        work(&backend, &id)
    }

    /// The same from a thread that may not.
    pub async fn apart<T: Send + 'static>(
        self,
        work: impl FnOnce(&(dyn SandboxBackend + Sync), &SandboxId) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        tokio::task::spawn_blocking(move || self.with(work)).await?
    }
}
