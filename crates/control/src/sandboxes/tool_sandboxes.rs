//! Sandboxes that the gate itself creates, for MCP servers.

use std::sync::Arc;

use config::Settings;
use config::section::sandbox::Tier;
use policy::id::SandboxId;
use sandbox::contract::{SandboxCommand, SandboxStatus};
use sandbox::create_progress::CreateProgress;
use sandbox::manager::Manager;
use sandbox::manager::row::RowStage;
use sandbox::name::Slug;
use sandbox::namespace::client::RunningCommand;
use store::Store;

use super::Sandboxes;
use crate::body::CreateBody;
use crate::reply::ControlError;

impl Sandboxes {
    /// The sandbox called `name`, which has no repository; resumes or creates it if necessary.
    pub async fn ensure_tool_sandbox(
        &self,
        store: &Store,
        settings: &Settings,
        name: &str,
    ) -> Result<SandboxId, ControlError> {
        if let Some((id, status)) = self.find_tool_sandbox(name).await? {
            if status != SandboxStatus::Active {
                self.resume(store, id.clone()).await?;
            }
            return Ok(id);
        }
        let body = CreateBody {
            name: name.to_owned(),
            repository: None,
            depth: None,
            dirty: false,
            repos: Some(Vec::new()),
            auth_mode: None,
            backend: None,
            root: false,
            nested: false,
            setup_command: None,
            publish: Vec::new(),
            credentials: Some(Vec::new()),
            // A tool reaches only what the configuration allows.
            tier: Some(Tier::Locked),
            presets: Vec::new(),
        };
        let progress = Arc::new(CreateProgress::default());
        self.create(store, settings, body, progress).await?;
        let made = self.find_tool_sandbox(name).await?;
        made.map(|(id, _)| id).ok_or_else(|| {
            ControlError::Failed(format!("the new sandbox '{name}' was deleted meanwhile"))
        })
    }

    async fn find_tool_sandbox(
        &self,
        name: &str,
    ) -> Result<Option<(SandboxId, SandboxStatus)>, ControlError> {
        let wanted = name.to_owned();
        let found = self
            .run_blocking(move |manager: &Manager| {
                let slug = Slug::from_name(&wanted).ok();
                let rows = manager.rows()?;
                let mut kept = rows
                    .into_iter()
                    .filter(|row| row.stage == RowStage::Complete);
                let row = kept.find(|row| Some(&row.name) == slug.as_ref());
                Ok(row.map(|row| {
                    let status = manager.status(&row.id);
                    (row, status)
                }))
            })
            .await?;
        match found {
            // The sandbox is the operator's; the gate starts no tool in such a sandbox.
            Some((row, _)) if row.repository.is_some() => Err(ControlError::Failed(format!(
                "the sandbox '{name}' has a repository, and a tool needs its own sandbox; rename the \
                 tool, or delete it: palisade delete {name}"
            ))),
            Some((row, status)) => Ok(Some((row.id, status))),
            None => Ok(None),
        }
    }

    /// Starts a command in a sandbox, with pipes for its stdio.
    pub async fn start(
        &self,
        id: &SandboxId,
        command: SandboxCommand,
    ) -> Result<RunningCommand, ControlError> {
        let id = id.clone();
        self.run_blocking(move |manager| Ok(manager.backend().start(&id, &command, None)?))
            .await
    }
}
