//! Files of a sandbox: kept, put back, given to another.

use config::Settings;
use http::StatusCode;
use policy::audit::AuditEvent;
use policy::id::SandboxId;
use policy::registration::AuthMode;
use serde_json::json;
use store::Store;
use store::registry::RegistryLookup;

use super::create_plan::CreateGrants;
use super::{Sandboxes, bounds, describe};
use crate::body::{ForkBody, LabelBody, RestoreBody};
use crate::remote_backend;
use crate::reply::{ControlError, Reply};
use crate::wall_now;

impl Sandboxes {
    /// The checkpoints of one.
    pub async fn checkpoints(&self, id: SandboxId) -> Result<Reply, ControlError> {
        let all = self.ask(move |manager| manager.checkpoints(&id));
        Ok(Reply::ok(json!(all.await?)))
    }

    /// Keeps the files of one under a label.
    pub async fn checkpoint(
        &self,
        store: &Store,
        id: SandboxId,
        body: LabelBody,
    ) -> Result<Reply, ControlError> {
        let _turn = self.turns.take(&id).await;
        let (of, label) = (id.clone(), body.label.clone());
        let copied = self
            .ask(move |manager| manager.checkpoint(&of, &label))
            .await?;
        let event = AuditEvent::lifecycle("sandbox_checkpoint", Some(id));
        store.audit().record_durable(event, wall_now()).await?;
        Ok(Reply::Json(
            StatusCode::CREATED,
            json!({ "label": body.label, "copied": copied }),
        ))
    }

    /// Puts the files of a checkpoint back. What they take the place of is committed to the
    /// branch first.
    pub async fn restore(
        &self,
        store: &Store,
        settings: &Settings,
        id: SandboxId,
        body: RestoreBody,
    ) -> Result<Reply, ControlError> {
        let _turn = self.turns.take(&id).await;
        let (of, bounds, trust) = (id.clone(), bounds(settings), self.traffic.trust());
        let (mut shown, report) = self
            .ask(move |manager| {
                let row = manager.row(&of)?;
                manager.find_checkpoint(&of, &body.label)?;
                let report = if row.repository.is_none() || body.no_snapshot {
                    None
                } else {
                    let message = format!("before restoring {}", body.label);
                    let report = manager.snapshot(&of, &message, &bounds)?;
                    manager.refuse_losing_unsaved(&row, &report, Some("--no-snapshot"))?;
                    Some(report)
                };
                manager.restore(&of, &body.label, &trust)?;
                Ok((describe(manager, &row), report))
            })
            .await?;
        let event = AuditEvent::lifecycle("sandbox_restored", Some(id.clone()));
        store.audit().record_durable(event, wall_now()).await?;
        // It was started again, and has new sockets.
        self.traffic.detach(&id);
        self.serve(&id).await?;
        if let Some(fields) = shown.as_object_mut() {
            fields.insert("snapshot".to_owned(), json!(report));
        }
        Ok(Reply::ok(shown))
    }

    /// Makes a sandbox with the files and the branch of another.
    pub async fn fork(
        &self,
        store: &Store,
        settings: &Settings,
        id: SandboxId,
        body: ForkBody,
    ) -> Result<Reply, ControlError> {
        remote_backend::refuse_its_name(&body.name, settings)?;
        let turn = self.turns.take(&id).await;
        let (of, bounds, trust) = (id.clone(), bounds(settings), self.traffic.trust());
        let row = self
            .ask(move |manager| {
                // The new branch begins with everything there is.
                if manager.row(&of)?.repository.is_some() {
                    let message = format!("before the fork {}", body.name);
                    manager.snapshot(&of, &message, &bounds)?;
                }
                manager.fork(&of, &body.name, &trust)
            })
            .await?;
        drop(turn);
        let (repos, auth_mode) = match store.registry().by_id(&id) {
            RegistryLookup::Found(source) => (source.repos.clone(), source.auth_mode),
            RegistryLookup::Unknown | RegistryLookup::Unavailable => (Vec::new(), AuthMode::User),
        };
        // The ports of the host lead to the original.
        let who = CreateGrants {
            repos,
            auth_mode,
            publish: Vec::new(),
            file_ports: Vec::new(),
        };
        // The setup has left its traces in the files.
        let shown = self.complete(store, row, who, None).await?;
        Ok(Reply::Json(StatusCode::CREATED, shown))
    }
}
