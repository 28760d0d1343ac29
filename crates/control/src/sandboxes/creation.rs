//! Creates a sandbox, from its plan to the row that is kept.

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
use super::repository_file::Additions;
use super::{Sandboxes, describe, ports, with_notes};
use crate::body::{CreateBody, PortBody};
use crate::reply::{ControlError, Reply};
use crate::wall_now;

/// A sandbox lives until it is deleted; its row in the registry must not end before.
const LIFE: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

impl Sandboxes {
    /// Creates a sandbox. `progress` receives each step.
    pub async fn create(
        &self,
        store: &Store,
        settings: &Settings,
        body: CreateBody,
        progress: Arc<CreateProgress>,
    ) -> Result<Reply, ControlError> {
        let repository = body.repository.clone();
        let trusted = self.trusted.clone();
        let host = self
            .ask(move |_| Ok(RepositoryInfo::of(repository.as_deref(), &trusted)))
            .await?;
        let create_plan = CreatePlan::read(body, &host, settings)?;
        let CreatePlan {
            mut wanted,
            who,
            setup,
        } = create_plan;
        wanted.progress = Arc::clone(&progress);
        wanted.trust = Some(self.traffic.trust());
        let depth = wanted.depth;
        let row = self.ask(move |manager| manager.begin(&wanted)).await?;
        if setup.is_some() {
            progress.begin(CreateStep::Setup, None);
        }
        let notes = host.file.notes(Additions::of(&row).as_ref());
        let shown = self.complete(store, row.clone(), who, setup).await?;
        self.prepare_spare(row, depth);
        Ok(Reply::Json(StatusCode::CREATED, with_notes(shown, notes)))
    }

    /// Registers, serves and keeps a sandbox that was begun, or removes it.
    pub(super) async fn complete(
        &self,
        store: &Store,
        row: SandboxRow,
        who: CreateGrants,
        setup: Option<Setup>,
    ) -> Result<Value, ControlError> {
        // The row is on disk: a crash is cleared up at the next start, and a failure below.
        if let Err(error) = self.settle(store, &row, who, setup).await {
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
                (Err(left), error) => ControlError::Failed(format!(
                    "{error}\nremoving what was made of the sandbox failed, too: {left}; the next \
                     start of the gate removes it"
                )),
            });
        }
        tracing::info!(sandbox = %row.id, "a sandbox was created");
        let id = row.id.clone();
        self.ask(move |manager| Ok(describe(manager, &manager.row(&id)?)))
            .await
    }

    /// Everything between the sandbox and its being kept.
    async fn settle(
        &self,
        store: &Store,
        row: &SandboxRow,
        who: CreateGrants,
        setup: Option<Setup>,
    ) -> Result<(), ControlError> {
        // First: it is what fails most easily.
        let mut doors = Vec::new();
        for PortBody { host, port } in who.publish {
            doors.push((ports::listen(host).await?, port));
        }
        for PortMapping { host, inside } in who.file_ports {
            doors.push((ports::listen_near(host)?, inside));
        }
        let now = wall_now();
        let registration = Registration {
            id: row.id.clone(),
            ip: None,
            repos: who.repos,
            auth_mode: who.auth_mode,
            created: now,
            expires: now.plus(LIFE),
            metadata: serde_json::Map::new(),
        };
        let event = AuditEvent::lifecycle("sandbox_created", Some(row.id.clone()));
        store.register(registration, event, now).await?;
        self.serve(&row.id).await?;
        if let Some(setup) = setup {
            self.set_up(&row.id, setup).await?;
        }
        let mut row = row.clone();
        row.published = doors
            .iter()
            .map(|((_, host), port)| PublishedPort {
                host: *host,
                port: *port,
            })
            .collect();
        let row = self.ask(move |manager| manager.mark_kept(row)).await?;
        for ((listener, _), port) in doors {
            self.forward_port(&row.id, listener, port);
        }
        Ok(())
    }

    /// Runs the set-up command.
    async fn set_up(&self, id: &SandboxId, setup: Setup) -> Result<(), ControlError> {
        let (id, Setup { origin, timeout }) = (id.clone(), setup);
        let done = self.ask(move |manager| manager.set_up(&id, timeout)).await;
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

    /// In the background: the next create from the same commit only renames.
    fn prepare_spare(&self, row: SandboxRow, depth: Option<u32>) {
        let manager = Arc::clone(&self.manager);
        tokio::task::spawn_blocking(move || {
            if let Err(error) = manager.prepare_spare(&row, depth) {
                tracing::debug!(%error, "no spare workspace was prepared");
            }
        });
    }
}
