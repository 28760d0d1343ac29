//! Checkpoints of a sandbox's files: save, list, restore and fork.

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
use crate::reply::{ControlError, ControlReply};
use crate::wall_now;

impl Sandboxes {
    /// The checkpoints of a sandbox.
    pub async fn checkpoints(&self, id: SandboxId) -> Result<ControlReply, ControlError> {
        let all = self.run_blocking(move |manager| manager.checkpoints(&id));
        Ok(ControlReply::ok(json!(all.await?)))
    }

    /// Saves the files of a sandbox under a label.
    pub async fn checkpoint(
        &self,
        store: &Store,
        id: SandboxId,
        body: LabelBody,
    ) -> Result<ControlReply, ControlError> {
        let _lock = self.locks.acquire(&id).await;
        let (sandbox, label) = (id.clone(), body.label.clone());
        let copied = self
            .run_blocking(move |manager| manager.checkpoint(&sandbox, &label))
            .await?;
        let event = AuditEvent::lifecycle("sandbox_checkpoint", Some(id));
        store.audit().record_durable(event, wall_now()).await?;
        Ok(ControlReply::Json(
            StatusCode::CREATED,
            json!({ "label": body.label, "copied": copied }),
        ))
    }

    /// Restores the files of a checkpoint. The replaced files are committed to the branch
    /// first.
    pub async fn restore(
        &self,
        store: &Store,
        settings: &Settings,
        id: SandboxId,
        body: RestoreBody,
    ) -> Result<ControlReply, ControlError> {
        let _lock = self.locks.acquire(&id).await;
        let (sandbox, bounds, trust) = (id.clone(), bounds(settings), self.traffic.trust());
        let (mut shown, report) = self
            .run_blocking(move |manager| {
                let row = manager.row(&sandbox)?;
                manager.find_checkpoint(&sandbox, &body.label)?;
                let report = if row.repository.is_none() || body.no_snapshot {
                    None
                } else {
                    let message = format!("before restoring {}", body.label);
                    let report = manager.snapshot(&sandbox, &message, &bounds)?;
                    manager.refuse_losing_unsaved(&row, &report, Some("--no-snapshot"))?;
                    Some(report)
                };
                manager.restore(&sandbox, &body.label, &trust)?;
                Ok((describe(manager, &row), report))
            })
            .await?;
        let event = AuditEvent::lifecycle("sandbox_restored", Some(id.clone()));
        store.audit().record_durable(event, wall_now()).await?;
        // The restarted sandbox has new sockets.
        self.traffic.detach(&id);
        self.serve(&id).await?;
        if let Some(fields) = shown.as_object_mut() {
            fields.insert("snapshot".to_owned(), json!(report));
        }
        Ok(ControlReply::ok(shown))
    }

    /// Creates a sandbox with the files and the branch of another.
    pub async fn fork(
        &self,
        store: &Store,
        settings: &Settings,
        id: SandboxId,
        body: ForkBody,
    ) -> Result<ControlReply, ControlError> {
        remote_backend::refuse_remote_name(&body.name, settings)?;
        let lock = self.locks.acquire(&id).await;
        let (sandbox, bounds, trust) = (id.clone(), bounds(settings), self.traffic.trust());
        let row = self
            .run_blocking(move |manager| {
                // The new branch starts with the uncommitted work, too.
                if manager.row(&sandbox)?.repository.is_some() {
                    let message = format!("before the fork {}", body.name);
                    manager.snapshot(&sandbox, &message, &bounds)?;
                }
                manager.fork(&sandbox, &body.name, &trust)
            })
            .await?;
        drop(lock);
        let (repos, auth_mode, credentials) = match store.registry().by_id(&id) {
            RegistryLookup::Found(source) => (
                source.repos.clone(),
                source.auth_mode,
                source.credentials.clone(),
            ),
            RegistryLookup::Unknown | RegistryLookup::Unavailable => {
                (Vec::new(), AuthMode::User, Vec::new())
            }
        };
        // The published ports stay with the original sandbox.
        let grants = CreateGrants {
            repos,
            auth_mode,
            credentials,
            publish: Vec::new(),
            file_ports: Vec::new(),
        };
        // The copied files contain the result of the set-up command.
        let shown = self.complete(store, row, grants, None).await?;
        Ok(ControlReply::Json(StatusCode::CREATED, shown))
    }
}
