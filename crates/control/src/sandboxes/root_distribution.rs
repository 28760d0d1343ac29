//! Distributes root certificates to running sandboxes: each trusts the root it was created
//! with, and receives every later root.

use std::sync::Arc;

use policy::id::SandboxId;
use sandbox::contract::{SandboxError, Trust};
use sandbox::manager::Manager;
use tokio::sync::MutexGuard;
use tokio::task::JoinSet;

use super::Sandboxes;

/// Maximum number of sandboxes that are updated concurrently. A sandbox that does not answer
/// takes seconds.
const MAX_CONCURRENT: usize = 8;

impl Sandboxes {
    /// Acquires the lock for replacing the root.
    pub(crate) async fn lock_root(&self) -> MutexGuard<'_, ()> {
        self.root_lock.lock().await
    }

    /// Adds a root to the trusted roots of every running sandbox. A paused sandbox receives it
    /// when it is resumed, and a stopped one when it starts.
    pub(crate) async fn add_trust_to_all(&self, trust: &Trust) {
        let rows = match self.run_blocking(Manager::rows).await {
            Ok(rows) => rows,
            Err(error) => {
                tracing::warn!(%error, "adding a root certificate to all sandboxes failed");
                return;
            }
        };
        let ids: Vec<SandboxId> = rows.into_iter().map(|row| row.id).collect();
        for chunk in ids.chunks(MAX_CONCURRENT) {
            let mut tasks = JoinSet::new();
            for id in chunk {
                let (manager, id, trust) = (Arc::clone(&self.manager), id.clone(), trust.clone());
                tasks.spawn_blocking(move || add_trust(&manager, &id, &trust));
            }
            tasks.join_all().await;
        }
    }

    /// Adds the current root to a sandbox that may trust only an older root.
    pub(super) async fn refresh_trust(&self, id: &SandboxId) {
        if !self.traffic.has_older_roots() {
            return;
        }
        let (id, trust) = (id.clone(), self.traffic.trust());
        let added = self.run_blocking(move |manager| {
            add_trust(manager, &id, &trust);
            Ok(())
        });
        if let Err(error) = added.await {
            tracing::warn!(%error, "adding a root certificate to a sandbox failed");
        }
    }
}

/// Adds a root to one sandbox. A failure is only logged: the older root, which cross-signed the
/// new one, is valid until it expires.
fn add_trust(manager: &Manager, id: &SandboxId, trust: &Trust) {
    match manager.backend().add_trust(id, trust) {
        Ok(()) | Err(SandboxError::Paused(_) | SandboxError::NotFound(_)) => {}
        Err(error) => {
            tracing::warn!(sandbox = %id, %error, "adding a root certificate to a sandbox failed");
        }
    }
}
