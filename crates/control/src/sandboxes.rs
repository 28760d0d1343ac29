//! Sandbox actions of the control API.
//!
//! The manager creates and removes sandboxes; this module calls it on blocking threads and adds
//! the registration, the audit records and the listeners. The order matters: a sandbox is
//! registered and served before its row is marked as kept, and a deletion unregisters the
//! sandbox before it removes the sandbox.

mod checkpoints;
mod create_plan;
mod creation;
mod egress_additions;
mod git_redirects;
mod ports;
mod repository;
mod repository_file;
mod root_distribution;
mod tool_sandboxes;

use std::collections::{BTreeMap, HashMap};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use config::Settings;
use config::section::egress::DomainRule;
use credentials::service::CredentialService;
use credentials::table::CredentialTable;
use jiff::Timestamp;
use policy::audit::AuditEvent;
use policy::id::SandboxId;
use sandbox::contract::{
    Force, SandboxBackend, SandboxError, SandboxListener, SandboxStatus, Trust,
};
use sandbox::git::snapshot::SnapshotBounds;
use sandbox::manager::row::{PublishedPort, RowStage, SandboxRow};
use sandbox::manager::{BranchRemoval, Manager, ManagerError};
use sandbox::name::Slug;
use serde_json::{Value, json};
use store::Store;
use store::error::StoreError;
use store::registry::RegistryLookup;
use tokio::sync::OwnedMutexGuard;

use crate::body::{Purpose, SessionBody, SnapshotBody};
use crate::reply::{ControlError, ControlReply};
use crate::wall_now;
use egress_additions::EgressAdditions;
use repository::RepositoryInfo;
use repository_file::FileAdditions;

/// Serves the listening sockets of sandboxes. The trait is here and not in `policy::ports`
/// because it uses types of `sandbox` and `config`.
pub trait ListenerHost: Send + Sync + std::fmt::Debug {
    /// Serves these listeners instead of earlier ones of the sandbox. `added` are hosts that
    /// the sandbox may reach beside those of the operator's settings.
    fn attach(
        &self,
        sandbox: &SandboxId,
        listeners: Vec<SandboxListener>,
        added: Vec<DomainRule>,
    ) -> std::io::Result<()>;

    /// Forwards connections of a listener on the host to a port in the sandbox.
    fn publish(&self, sandbox: &SandboxId, listener: TcpListener, target: SandboxPort);

    /// Stops forwarding from one address of the host.
    fn unpublish(&self, sandbox: &SandboxId, host: SocketAddr);

    /// Stops serving the sandbox, including its published ports.
    fn detach(&self, sandbox: &SandboxId);

    /// Whether the sandbox is served.
    fn serves(&self, sandbox: &SandboxId) -> bool;

    /// The current root certificate, which a new sandbox must trust.
    fn trust(&self) -> Trust;

    /// Whether a running sandbox may trust only an older root.
    fn has_older_roots(&self) -> bool;
}

/// A port in a sandbox, to connect to.
#[derive(Clone, Debug)]
pub struct SandboxPort {
    manager: Arc<Manager>,
    sandbox: SandboxId,
    port: u16,
}

impl SandboxPort {
    /// Connects to the port. Blocks briefly.
    pub fn connect(&self) -> std::io::Result<TcpStream> {
        let socket = self.manager.backend().connect(&self.sandbox, self.port);
        socket.map(TcpStream::from).map_err(std::io::Error::other)
    }
}

/// Every sandbox of this gate.
#[derive(Debug)]
pub struct Sandboxes {
    manager: Arc<Manager>,
    traffic: Arc<dyn ListenerHost>,
    locks: SandboxLocks,
    /// Held while the root certificate is replaced.
    root_lock: tokio::sync::Mutex<()>,
    /// The list of repository files that the operator trusts.
    trusted: PathBuf,
    credentials: Arc<CredentialService>,
}

/// One lock for each sandbox, so that a sandbox has at most one change at a time.
#[derive(Debug, Default)]
struct SandboxLocks(Mutex<HashMap<SandboxId, Arc<tokio::sync::Mutex<()>>>>);

impl SandboxLocks {
    async fn acquire(&self, id: &SandboxId) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            // A lock that only this map refers to is neither held nor waited for.
            locks.retain(|_, lock| Arc::strong_count(lock) > 1);
            Arc::clone(locks.entry(id.clone()).or_default())
        };
        lock.lock_owned().await
    }
}

impl Sandboxes {
    /// The sandboxes of `manager`, served by `traffic`. `trusted` is the path of the list of
    /// repository files that the operator trusts.
    pub fn new(
        manager: Manager,
        traffic: Arc<dyn ListenerHost>,
        trusted: PathBuf,
        credentials: Arc<CredentialService>,
    ) -> Self {
        Self {
            trusted,
            credentials,
            manager: Arc::new(manager),
            traffic,
            locks: SandboxLocks::default(),
            root_lock: tokio::sync::Mutex::default(),
        }
    }

    /// Waits for the turn to change a sandbox or its registration.
    pub(crate) async fn lock(&self, id: &SandboxId) -> OwnedMutexGuard<()> {
        self.locks.acquire(id).await
    }

    /// The variables with the placeholders that a registered sandbox holds.
    fn placeholders(
        &self,
        store: &Store,
        settings: &Settings,
        id: &SandboxId,
    ) -> BTreeMap<String, String> {
        match store.registry().by_id(id) {
            RegistryLookup::Found(row) => {
                let table = CredentialTable::new(&settings.credentials);
                self.credentials.variables(id, &table, &row.credentials)
            }
            RegistryLookup::Unknown | RegistryLookup::Unavailable => BTreeMap::new(),
        }
    }

    /// After a start: removes sandboxes that a crash left unfinished, and serves the others.
    pub async fn recover_after_restart(&self, store: &Store) -> Result<(), ControlError> {
        for row in self.run_blocking(|manager| manager.unfinished()).await? {
            match self.finish(store, &row).await {
                Ok(_) => {
                    tracing::info!(sandbox = %row.id, "unfinished sandbox removed after a crash");
                }
                // The row stays, and the next start tries again; the gate must start anyway.
                Err(error) => {
                    tracing::warn!(sandbox = %row.id, %error, "removing an unfinished sandbox failed");
                }
            }
        }
        let rows = self.run_blocking(Manager::rows).await?;
        for row in rows.iter().filter(|row| row.stage == RowStage::Complete) {
            if let Err(error) = self.serve(&row.id).await {
                // The list shows the sandbox with its error; the other sandboxes are served.
                tracing::warn!(sandbox = %row.id, %error, "serving a sandbox failed");
            }
        }
        Ok(())
    }

    fn forward_port(&self, id: &SandboxId, listener: TcpListener, port: u16) {
        let port = SandboxPort {
            manager: Arc::clone(&self.manager),
            sandbox: id.clone(),
            port,
        };
        self.traffic.publish(id, listener, port);
    }

    /// Serves a sandbox: its traffic and its published ports.
    async fn serve(&self, id: &SandboxId) -> Result<(), ControlError> {
        let sandbox = id.clone();
        let (listeners, row) = self
            .run_blocking(move |manager| {
                let listeners = manager.backend().listeners(&sandbox)?;
                Ok((listeners, manager.any_row(&sandbox)?))
            })
            .await?;
        // The sandbox must trust the current root before that signs anything for the sandbox.
        self.refresh_trust(id).await;
        let file = FileAdditions::from_row(&row).map(|additions| additions.egress);
        let mut added = EgressAdditions::of(&row).rules();
        added.extend(file.unwrap_or_default());
        self.traffic
            .attach(id, listeners, added)
            .map_err(|error| ControlError::Unavailable(error.to_string()))?;
        for PublishedPort { host, port } in row.published {
            match TcpListener::bind(host) {
                Ok(listener) => self.forward_port(id, listener, port),
                // Another program listens there now; the sandbox works without the port.
                Err(error) => {
                    tracing::warn!(sandbox = %id, %host, %error, "publishing a port failed");
                }
            }
        }
        Ok(())
    }

    /// Every sandbox, or the sandboxes with a name or id; only the listed sandboxes are queried.
    pub async fn list(&self, name: Option<String>) -> Result<ControlReply, ControlError> {
        let shown = self.run_blocking(move |manager| {
            let mut rows = manager.rows()?;
            if let Some(name) = name {
                let slug = Slug::from_name(&name).ok();
                rows.retain(|row| row.id.as_str() == name || Some(&row.name) == slug.as_ref());
            }
            let statuses = manager.statuses(&rows);
            let pairs = rows.iter().zip(&statuses);
            Ok(pairs
                .map(|(row, status)| describe_with_status(manager, row, status))
                .collect())
        });
        Ok(ControlReply::ok(Value::Array(shown.await?)))
    }

    /// One sandbox.
    pub async fn show(&self, id: SandboxId) -> Result<ControlReply, ControlError> {
        let trusted = self.trusted.clone();
        let shown = self.run_blocking(move |manager| {
            let row = manager.row(&id)?;
            let repository = RepositoryInfo::read_optional(row.repository.as_deref(), &trusted);
            let shown = describe(manager, &row);
            Ok(with_notes(
                shown,
                repository
                    .file
                    .notes(FileAdditions::from_row(&row).as_ref()),
            ))
        });
        Ok(ControlReply::ok(shown.await?))
    }

    /// Suspends every process of a sandbox.
    pub async fn pause(&self, store: &Store, id: SandboxId) -> Result<ControlReply, ControlError> {
        self.change(store, id, "sandbox_paused", |manager, id| {
            Ok(manager.backend().pause(id)?)
        })
        .await
    }

    /// Resumes all processes of a sandbox.
    pub async fn resume(&self, store: &Store, id: SandboxId) -> Result<ControlReply, ControlError> {
        let sandbox = id.clone();
        let status = self
            .run_blocking(move |manager| Ok(manager.status(&sandbox)))
            .await?;
        if !matches!(status, SandboxStatus::Active | SandboxStatus::Paused) {
            // A restarted sandbox has new sockets.
            self.traffic.detach(&id);
        }
        let trust = self.traffic.trust();
        let reply = self
            .change(store, id.clone(), "sandbox_resumed", move |manager, id| {
                manager.resume(id, &trust)
            })
            .await?;
        // A sandbox that was paused when this gate started could not hand over its sockets.
        let _lock = self.locks.acquire(&id).await;
        if self.traffic.serves(&id) {
            self.refresh_trust(&id).await;
        } else {
            self.serve(&id).await?;
        }
        Ok(reply)
    }

    /// Changes a sandbox under its lock, and records `event`.
    async fn change(
        &self,
        store: &Store,
        id: SandboxId,
        event: &'static str,
        work: impl FnOnce(&Manager, &SandboxId) -> Result<(), ManagerError> + Send + 'static,
    ) -> Result<ControlReply, ControlError> {
        let _lock = self.locks.acquire(&id).await;
        let sandbox = id.clone();
        let shown = self
            .run_blocking(move |manager| {
                let row = manager.row(&sandbox)?;
                work(manager, &sandbox)?;
                Ok(describe(manager, &row))
            })
            .await?;
        let event = AuditEvent::lifecycle(event, Some(id));
        store.audit().record_durable(event, wall_now()).await?;
        Ok(ControlReply::ok(shown))
    }

    /// Deletes a sandbox with its files and branch. Without force, a sandbox is kept while a
    /// command runs in it or while its branch or workspace has unmerged work.
    pub async fn delete(
        &self,
        store: &Store,
        settings: &Settings,
        id: SandboxId,
        force: Force,
    ) -> Result<ControlReply, ControlError> {
        let _lock = self.locks.acquire(&id).await;
        let (sandbox, bounds) = (id.clone(), bounds(settings));
        let row = self
            .run_blocking(move |manager| manager.mark_for_removal(&sandbox, force, &bounds))
            .await?;
        let removed = self.finish(store, &row).await?;
        tracing::info!(sandbox = %row.id, "sandbox deleted");
        Ok(ControlReply::ok(json!({
            "status": "deleted", "id": row.id, "name": row.name,
            "branch_name": row.branch(), "tip": removed.tip, "branch_kept": removed.kept,
        })))
    }

    /// Removes a sandbox whose row is not marked as kept: first from the registry, so that no
    /// connection is attributed to it.
    async fn finish(&self, store: &Store, row: &SandboxRow) -> Result<BranchRemoval, ControlError> {
        self.traffic.detach(&row.id);
        let event = AuditEvent::lifecycle("sandbox_deleted", Some(row.id.clone()));
        match store.unregister(&row.id, event, wall_now()).await {
            Ok(_) | Err(StoreError::NotFound { .. }) => {}
            Err(other) => return Err(other.into()),
        }
        let id = row.id.clone();
        self.run_blocking(move |manager| manager.remove(&id)).await
    }

    /// Commits the workspace of a sandbox to its branch.
    pub async fn snapshot(
        &self,
        store: &Store,
        settings: &Settings,
        id: SandboxId,
        body: SnapshotBody,
    ) -> Result<ControlReply, ControlError> {
        let _lock = self.locks.acquire(&id).await;
        let (sandbox, bounds) = (id.clone(), bounds(settings));
        let report = self
            .run_blocking(move |manager| manager.snapshot(&sandbox, &body.message, &bounds))
            .await?;
        if report.moved {
            let event = AuditEvent::lifecycle("sandbox_snapshot", Some(id));
            store.audit().record_durable(event, wall_now()).await?;
        }
        Ok(ControlReply::ok(json!(report)))
    }

    /// Opens an operator's session: checks the sandbox's state, records the session, and
    /// returns the environment variables that may be passed on.
    pub async fn enter(
        &self,
        store: &Store,
        settings: &Settings,
        id: SandboxId,
        body: SessionBody,
    ) -> Result<ControlReply, ControlError> {
        let sandbox = id.clone();
        let (row, status, stopped) = self
            .run_blocking(move |manager| {
                let stopped = manager.backend().stopped(&sandbox);
                Ok((manager.row(&sandbox)?, manager.status(&sandbox), stopped))
            })
            .await?;
        let name = || row.name.to_string();
        match (status, stopped) {
            (SandboxStatus::Active, _) => {}
            // No process runs in a stopped sandbox, but its files can still be downloaded.
            (SandboxStatus::Error(_), Some(_)) if body.purpose == Purpose::Download => {}
            (SandboxStatus::Error(_), Some(reason)) => {
                let name = name();
                return Err(refusal(SandboxError::Stopped { name, reason }));
            }
            (SandboxStatus::Paused, _) => return Err(refusal(SandboxError::Paused(name()))),
            (SandboxStatus::Missing, _) => return Err(refusal(SandboxError::NotFound(name()))),
            (status @ (SandboxStatus::Unknown | SandboxStatus::Error(_)), _) => {
                return Err(refusal(SandboxError::NotResponding(status.to_string())));
            }
        }
        let event = AuditEvent {
            method: Some(body.purpose.as_str().to_owned()),
            ..AuditEvent::lifecycle("sandbox_entered", Some(id.clone()))
        };
        store.audit().record_durable(event, wall_now()).await?;
        Ok(ControlReply::ok(json!({
            "id": id,
            "backend": "namespace",
            "environment": settings.sandbox.env,
            "placeholders": self.placeholders(store, settings, &id),
        })))
    }

    /// Runs work with the manager on a blocking thread.
    async fn run_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Manager) -> Result<T, ManagerError> + Send + 'static,
    ) -> Result<T, ControlError> {
        let manager = Arc::clone(&self.manager);
        tokio::task::spawn_blocking(move || work(&manager))
            .await
            .map_err(|error| ControlError::Failed(error.to_string()))?
            .map_err(ControlError::from)
    }
}

/// Size limits of a snapshot.
fn bounds(settings: &Settings) -> SnapshotBounds {
    let snapshot = &settings.sandbox.snapshot;
    SnapshotBounds {
        file: snapshot.file,
        total: snapshot.total,
        ..SnapshotBounds::default()
    }
}

fn refusal(error: SandboxError) -> ControlError {
    ControlError::Sandbox(error.into())
}

/// Adds the notes about the repository's own file to a sandbox's JSON.
fn with_notes(mut sandbox: Value, notes: Vec<String>) -> Value {
    if let Some(fields) = sandbox.as_object_mut() {
        fields.insert("notes".to_owned(), json!(notes));
    }
    sandbox
}

/// A sandbox as JSON.
fn describe(manager: &Manager, row: &SandboxRow) -> Value {
    let statuses = manager.statuses(std::slice::from_ref(row));
    let status = statuses.into_iter().next();
    describe_with_status(manager, row, &status.unwrap_or(SandboxStatus::Missing))
}

/// A sandbox with a known status as JSON.
fn describe_with_status(manager: &Manager, row: &SandboxRow, status: &SandboxStatus) -> Value {
    let system = manager
        .backend()
        .config(&row.id)
        .map(|config| config.system);
    let system = system.unwrap_or_default();
    let created = i64::try_from(row.created)
        .ok()
        .and_then(|at| Timestamp::from_millisecond(at).ok());
    let (status, reason) = match status {
        SandboxStatus::Error(reason) => ("error".to_owned(), Some(reason.clone())),
        other => (other.to_string(), None),
    };
    let egress = EgressAdditions::of(row);
    json!({
        "id": row.id,
        "name": row.name,
        "branch_name": row.branch(),
        "container_id": row.id,
        "status": status,
        "reason": reason,
        "backend": "namespace",
        "repository": row.repository,
        "common": row.common,
        "base": row.base,
        "root": system.root,
        "nested": system.nested,
        "published": row.published,
        "repository_file": row.repository_file,
        "tier": egress.tier,
        "presets": egress.presets,
        "egress": egress.line(),
        "created_at": created.map(|at| at.to_string()),
        "warnings": manager.backend().warnings(&row.id).unwrap_or_default(),
    })
}
