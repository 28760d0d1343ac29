//! Files of a sandbox: kept, put back, given to another.

use http::StatusCode;
use policy::audit::AuditEvent;
use policy::id::SandboxId;
use policy::registration::AuthMode;
use serde_json::json;
use store::Store;
use store::registry::Lookup;

use super::Sandboxes;
use super::body::{ForkBody, LabelBody};
use super::wish::Standing;
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

    /// Puts the files of a checkpoint back.
    pub async fn restore(
        &self,
        store: &Store,
        id: SandboxId,
        body: LabelBody,
    ) -> Result<Reply, ControlError> {
        let reply = self
            .change(store, id.clone(), "sandbox_restored", move |manager, id| {
                manager.restore(id, &body.label)
            })
            .await?;
        // It was started again, and has new sockets.
        self.traffic.detach(&id);
        self.serve(&id).await?;
        Ok(reply)
    }

    /// Makes a sandbox with the files and the branch of another.
    pub async fn fork(
        &self,
        store: &Store,
        id: SandboxId,
        body: ForkBody,
    ) -> Result<Reply, ControlError> {
        let turn = self.turns.take(&id).await;
        let of = id.clone();
        let row = self
            .ask(move |manager| {
                // The new branch begins with everything there is.
                if manager.row(&of)?.repository.is_some() {
                    manager.snapshot(&of, &format!("before the fork {}", body.name))?;
                }
                manager.fork(&of, &body.name)
            })
            .await?;
        drop(turn);
        let (repos, auth_mode) = match store.registry().by_id(&id) {
            Lookup::Found(source) => (source.repos.clone(), source.auth_mode),
            Lookup::Unknown | Lookup::Unavailable => (Vec::new(), AuthMode::User),
        };
        let who = Standing { repos, auth_mode };
        // The setup has left its traces in the files.
        self.complete(store, row, who, None).await
    }
}
