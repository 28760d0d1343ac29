//! The gate's root in sandboxes that run: each trusts the one it was made with, and gets every
//! later one.

use std::sync::Arc;

use policy::id::SandboxId;
use sandbox::contract::{SandboxError, Trust};
use sandbox::manager::Manager;
use tokio::sync::MutexGuard;
use tokio::task::JoinSet;

use super::Sandboxes;

/// Sandboxes that are updated at the same time: one that does not answer takes seconds.
const MAX_AT_ONCE: usize = 8;

impl Sandboxes {
    /// Waits for its turn to replace the root.
    pub(crate) async fn take_root_turn(&self) -> MutexGuard<'_, ()> {
        self.root_turn.lock().await
    }

    /// Adds a root to what programs in every running sandbox trust. Those that are paused get it
    /// when they are resumed, and those that have ended when they start.
    pub(crate) async fn add_trust_to_all(&self, trust: &Trust) {
        let rows = match self.ask(Manager::rows).await {
            Ok(rows) => rows,
            Err(error) => {
                tracing::warn!(%error, "root certificate not added to any sandbox");
                return;
            }
        };
        let ids: Vec<SandboxId> = rows.into_iter().map(|row| row.id).collect();
        for some in ids.chunks(MAX_AT_ONCE) {
            let mut tasks = JoinSet::new();
            for id in some {
                let (manager, id, trust) = (Arc::clone(&self.manager), id.clone(), trust.clone());
                tasks.spawn_blocking(move || add(&manager, &id, &trust));
            }
            tasks.join_all().await;
        }
    }

    /// Adds the root that signs now to a sandbox that may know an older one only.
    pub(super) async fn refresh_trust(&self, id: &SandboxId) {
        if !self.traffic.has_older_roots() {
            return;
        }
        let (id, trust) = (id.clone(), self.traffic.trust());
        let added = self.ask(move |manager| {
            add(manager, &id, &trust);
            Ok(())
        });
        if let Err(error) = added.await {
            tracing::warn!(%error, "root certificate not added to a sandbox");
        }
    }
}

/// Adds a root to one sandbox. A failure is no more than a line in the log: the older root, which
/// signed the new one, counts until its end.
fn add(manager: &Manager, id: &SandboxId, trust: &Trust) {
    match manager.backend().add_trust(id, trust) {
        Ok(()) | Err(SandboxError::Paused(_) | SandboxError::NotFound(_)) => {}
        Err(error) => {
            tracing::warn!(sandbox = %id, %error, "root certificate not added to a sandbox");
        }
    }
}
