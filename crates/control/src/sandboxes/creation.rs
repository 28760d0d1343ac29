//! Creates a sandbox: plan, files, registration, listeners, set-up command, kept row.

use std::sync::Arc;
use std::time::Duration;

use config::Settings;
use config::leaf::PortMapping;
use http::StatusCode;
use policy::audit::AuditEvent;
use policy::id::SandboxId;
use policy::registration::Registration;
use sandbox::contract::SandboxError;
use sandbox::create_progress::{CreateProgress, CreateStep};
use sandbox::manager::ManagerError;
use sandbox::manager::row::{PublishedPort, SandboxRow};
use serde_json::Value;
use store::Store;

use super::create_plan::{CreateGrants, CreatePlan, Setup};
use super::repository::RepositoryInfo;
use super::repository_file::FileAdditions;
use super::{Sandboxes, describe, ports, with_notes};
use crate::body::{CreateBody, PortBody};
use crate::reply::{ControlError, ControlReply};
use crate::wall_now;

/// Lifetime of a sandbox's registration. A sandbox lives until it is deleted, and its
/// registration must not expire before.
const REGISTRATION_LIFETIME: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

impl Sandboxes {
    /// Creates a sandbox. `progress` receives each step.
    pub async fn create(
        &self,
        store: &Store,
        settings: &Settings,
        body: CreateBody,
        progress: Arc<CreateProgress>,
    ) -> Result<ControlReply, ControlError> {
        let repository = body.repository.clone();
        let trusted = self.trusted.clone();
        let repository_info = self
            .run_blocking(move |_| {
                Ok(RepositoryInfo::read_optional(
                    repository.as_deref(),
                    &trusted,
                ))
            })
            .await?;
        let create_plan = CreatePlan::read(body, &repository_info, settings, &self.credentials)?;
        let CreatePlan {
            mut new_sandbox,
            grants,
            setup,
        } = create_plan;
        new_sandbox.progress = Arc::clone(&progress);
        new_sandbox.trust = Some(self.traffic.trust());
        let depth = new_sandbox.depth;
        let row = self
            .run_blocking(move |manager| manager.begin(&new_sandbox))
            .await?;
        if setup.is_some() {
            progress.begin(CreateStep::Setup, None);
        }
        let additions = FileAdditions::from_row(&row);
        let notes = repository_info.file.notes(additions.as_ref());
        let shown = self.complete(store, row.clone(), grants, setup).await?;
        self.prepare_spare(row, depth);
        Ok(ControlReply::Json(
            StatusCode::CREATED,
            with_notes(shown, notes),
        ))
    }

    /// Registers and serves a new sandbox and marks it as kept; removes it if a step fails.
    pub(super) async fn complete(
        &self,
        store: &Store,
        row: SandboxRow,
        grants: CreateGrants,
        setup: Option<Setup>,
    ) -> Result<Value, ControlError> {
        // The row is on disk: after a crash the next start removes the sandbox, and after a
        // failure the code below does.
        if let Err(error) = self.register_and_serve(store, &row, grants, setup).await {
            return Err(match (self.finish(store, &row).await, error) {
                (
                    Ok(_),
                    ControlError::SetUp {
                        origin, failure, ..
                    },
                ) => ControlError::SetUp {
                    origin,
                    failure,
                    is_removed: true,
                },
                (Ok(_), error) => error,
                (Err(removal_error), error) => ControlError::Failed(format!(
                    "{error}\nremoving the unfinished sandbox failed, too: {removal_error}; the next start \
                     of the gate removes it"
                )),
            });
        }
        tracing::info!(sandbox = %row.id, "sandbox created");
        let id = row.id.clone();
        self.run_blocking(move |manager| Ok(describe(manager, &manager.row(&id)?)))
            .await
    }

    /// Binds the published ports, registers and serves the sandbox, runs its set-up command and
    /// marks it as kept.
    async fn register_and_serve(
        &self,
        store: &Store,
        row: &SandboxRow,
        grants: CreateGrants,
        setup: Option<Setup>,
    ) -> Result<(), ControlError> {
        // Ports are bound first, because a port that is in use is the most likely failure.
        let mut listeners = Vec::new();
        for PortBody { host, port } in grants.publish {
            listeners.push((ports::listen(host).await?, port));
        }
        for PortMapping { host, inside } in grants.file_ports {
            listeners.push((ports::listen_or_choose(host)?, inside));
        }
        let now = wall_now();
        let registration = Registration {
            id: row.id.clone(),
            ip: None,
            repos: grants.repos,
            auth_mode: grants.auth_mode,
            credentials: grants.credentials,
            created: now,
            expires: now.plus(REGISTRATION_LIFETIME),
            metadata: serde_json::Map::new(),
        };
        let event = AuditEvent::lifecycle("sandbox_created", Some(row.id.clone()));
        store.register(registration, event, now).await?;
        self.serve(&row.id).await?;
        if let Some(setup) = setup {
            self.set_up(&row.id, setup).await?;
        }
        let mut row = row.clone();
        row.published = listeners
            .iter()
            .map(|((_, host), port)| PublishedPort {
                host: *host,
                port: *port,
            })
            .collect();
        let row = self
            .run_blocking(move |manager| manager.mark_complete(row))
            .await?;
        for ((listener, _), port) in listeners {
            self.forward_port(&row.id, listener, port);
        }
        Ok(())
    }

    /// Runs the set-up command.
    async fn set_up(&self, id: &SandboxId, setup: Setup) -> Result<(), ControlError> {
        let (id, Setup { origin, timeout }) = (id.clone(), setup);
        let done = self
            .run_blocking(move |manager| manager.set_up(&id, timeout))
            .await;
        match done {
            Err(ControlError::Sandbox(ManagerError::Sandbox(SandboxError::SetUp(failure)))) => {
                Err(ControlError::SetUp {
                    origin,
                    failure,
                    is_removed: false,
                })
            }
            other => other,
        }
    }

    /// Prepares a spare workspace in the background, so that the next create from the same
    /// commit only renames it.
    fn prepare_spare(&self, row: SandboxRow, depth: Option<u32>) {
        let manager = Arc::clone(&self.manager);
        tokio::task::spawn_blocking(move || {
            if let Err(error) = manager.prepare_spare(&row, depth) {
                tracing::debug!(%error, "preparing a spare workspace failed");
            }
        });
    }
}
