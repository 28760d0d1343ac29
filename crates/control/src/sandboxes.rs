//! Sandboxes, as an operator asks for them.
//!
//! The manager makes and removes; here it gets its thread, its place in the registry, its
//! audit record and its traffic. Order is everything: a sandbox is registered before it is
//! kept and served after it, and at deletion it is unregistered before it stops
//! being.

mod checkpoints;
mod create_plan;
mod creation;
mod git_redirects;
mod ports;
mod repository;
mod repository_file;
mod root_distribution;
mod tool_sandboxes;

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use config::Settings;
use config::section::egress::DomainRule;
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
use tokio::sync::OwnedMutexGuard;

use crate::body::{Purpose, SessionBody, SnapshotBody};
use crate::reply::{ControlError, Reply};
use crate::wall_now;
use repository::RepositoryInfo;
use repository_file::Additions;

/// Serves the sockets of sandboxes. The port is here and not in `policy::ports`, because its types
/// are those of `sandbox` and `config`.
pub trait ListenerHost: Send + Sync + std::fmt::Debug {
    /// Serves these; whatever served the sandbox before ends.
    /// `added` are hosts that it may reach beside those of the operator's settings.
    fn attach(
        &self,
        sandbox: &SandboxId,
        listeners: Vec<SandboxListener>,
        added: Vec<DomainRule>,
    ) -> std::io::Result<()>;

    /// Leads connections of a listener of the host to a port inside.
    fn publish(&self, sandbox: &SandboxId, listener: TcpListener, to: Inside);

    /// Takes one back.
    fn unpublish(&self, sandbox: &SandboxId, host: SocketAddr);

    /// Stops serving, and takes every published port back.
    fn detach(&self, sandbox: &SandboxId);

    /// Whether it is served.
    fn serves(&self, sandbox: &SandboxId) -> bool;

    /// The root that signs now, which a sandbox that starts is to trust.
    fn trust(&self) -> Trust;

    /// Whether a running sandbox may know an older root only.
    fn has_older_roots(&self) -> bool;
}

/// A port inside a sandbox, and the way to it.
#[derive(Clone, Debug)]
pub struct Inside {
    manager: Arc<Manager>,
    sandbox: SandboxId,
    port: u16,
}

impl Inside {
    /// Connects. Blocks for a moment.
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
    turns: SandboxLocks,
    /// Held while the root is replaced.
    root_turn: tokio::sync::Mutex<()>,
    /// The list of repository files that the operator trusts.
    trusted: PathBuf,
}

/// One change at a time to each sandbox.
#[derive(Debug, Default)]
struct SandboxLocks(Mutex<HashMap<SandboxId, Arc<tokio::sync::Mutex<()>>>>);

impl SandboxLocks {
    async fn take(&self, id: &SandboxId) -> OwnedMutexGuard<()> {
        let turn = {
            let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            // Nobody waits for, or has, a turn that is only in this map.
            turns.retain(|_, turn| Arc::strong_count(turn) > 1);
            Arc::clone(turns.entry(id.clone()).or_default())
        };
        turn.lock_owned().await
    }
}

impl Sandboxes {
    /// The sandboxes that `manager` keeps, served by `traffic`. `trusted` is the list of
    /// repository files that the operator trusts.
    pub fn new(manager: Manager, traffic: Arc<dyn ListenerHost>, trusted: PathBuf) -> Self {
        Self {
            trusted,
            manager: Arc::new(manager),
            traffic,
            turns: SandboxLocks::default(),
            root_turn: tokio::sync::Mutex::default(),
        }
    }

    /// After a start: clears what a crash left, and serves again what lives.
    pub async fn recover_after_restart(&self, store: &Store) -> Result<(), ControlError> {
        for row in self.ask(|manager| manager.unfinished()).await? {
            match self.finish(store, &row).await {
                Ok(_) => {
                    tracing::info!(sandbox = %row.id, "what a crash left of a sandbox was removed");
                }
                // It stays on record and is tried again at the next start; the gate is needed.
                Err(error) => {
                    tracing::warn!(sandbox = %row.id, %error, "what a crash left was not removed");
                }
            }
        }
        let rows = self.ask(Manager::rows).await?;
        for row in rows.iter().filter(|row| row.stage == RowStage::Kept) {
            if let Err(error) = self.serve(&row.id).await {
                // It is shown with its reason; the others must not wait for it.
                tracing::warn!(sandbox = %row.id, %error, "a sandbox is not served");
            }
        }
        Ok(())
    }

    fn forward_port(&self, id: &SandboxId, listener: TcpListener, port: u16) {
        let inside = Inside {
            manager: Arc::clone(&self.manager),
            sandbox: id.clone(),
            port,
        };
        self.traffic.publish(id, listener, inside);
    }

    /// Serves a sandbox: its traffic, and the ports it has published.
    async fn serve(&self, id: &SandboxId) -> Result<(), ControlError> {
        let of = id.clone();
        let (listeners, row) = self
            .ask(move |manager| {
                let listeners = manager.backend().listeners(&of)?;
                Ok((listeners, manager.any_row(&of)?))
            })
            .await?;
        // Before anything is signed for it.
        self.refresh_trust(id).await;
        let added = Additions::of(&row).map(|additions| additions.egress);
        self.traffic
            .attach(id, listeners, added.unwrap_or_default())
            .map_err(|error| ControlError::Unavailable(error.to_string()))?;
        for PublishedPort { host, port } in row.published {
            match TcpListener::bind(host) {
                Ok(listener) => self.forward_port(id, listener, port),
                // Somebody else has it now; the sandbox is well without.
                Err(error) => {
                    tracing::warn!(sandbox = %id, %host, %error, "a port is not published");
                }
            }
        }
        Ok(())
    }

    /// Every sandbox, or those that a name or id may mean; no other init is queried.
    pub async fn list(&self, named: Option<String>) -> Result<Reply, ControlError> {
        let shown = self.ask(move |manager| {
            let mut rows = manager.rows()?;
            if let Some(word) = named {
                let slug = Slug::from_name(&word).ok();
                rows.retain(|row| row.id.as_str() == word || Some(&row.name) == slug.as_ref());
            }
            let statuses = manager.statuses(&rows);
            let both = rows.iter().zip(&statuses);
            Ok(both
                .map(|(row, status)| describe_as(manager, row, status))
                .collect())
        });
        Ok(Reply::ok(Value::Array(shown.await?)))
    }

    /// One sandbox.
    pub async fn show(&self, id: SandboxId) -> Result<Reply, ControlError> {
        let trusted = self.trusted.clone();
        let shown = self.ask(move |manager| {
            let row = manager.row(&id)?;
            let host = RepositoryInfo::of(row.repository.as_deref(), &trusted);
            let shown = describe(manager, &row);
            Ok(with_notes(
                shown,
                host.file.notes(Additions::of(&row).as_ref()),
            ))
        });
        Ok(Reply::ok(shown.await?))
    }

    /// Stops every process of one.
    pub async fn pause(&self, store: &Store, id: SandboxId) -> Result<Reply, ControlError> {
        self.change(store, id, "sandbox_paused", |manager, id| {
            Ok(manager.backend().pause(id)?)
        })
        .await
    }

    /// Resumes all processes of a sandbox.
    pub async fn resume(&self, store: &Store, id: SandboxId) -> Result<Reply, ControlError> {
        let of = id.clone();
        let status = self.ask(move |manager| Ok(manager.status(&of))).await?;
        if !matches!(status, SandboxStatus::Active | SandboxStatus::Paused) {
            // One that is started again has new sockets.
            self.traffic.detach(&id);
        }
        let trust = self.traffic.trust();
        let reply = self
            .change(store, id.clone(), "sandbox_resumed", move |manager, id| {
                manager.resume(id, &trust)
            })
            .await?;
        // One that stood still when this gate started could not be asked for its sockets.
        let _turn = self.turns.take(&id).await;
        if self.traffic.serves(&id) {
            self.refresh_trust(&id).await;
        } else {
            self.serve(&id).await?;
        }
        Ok(reply)
    }

    async fn change(
        &self,
        store: &Store,
        id: SandboxId,
        event: &'static str,
        work: impl FnOnce(&Manager, &SandboxId) -> Result<(), ManagerError> + Send + 'static,
    ) -> Result<Reply, ControlError> {
        let _turn = self.turns.take(&id).await;
        let of = id.clone();
        let shown = self
            .ask(move |manager| {
                let row = manager.row(&of)?;
                work(manager, &of)?;
                Ok(describe(manager, &row))
            })
            .await?;
        let event = AuditEvent::lifecycle(event, Some(id));
        store.audit().record_durable(event, wall_now()).await?;
        Ok(Reply::ok(shown))
    }

    /// Removes one with everything it had. Without force, one stays in which a command runs, and
    /// one whose branch or workspace holds work that is nowhere else.
    pub async fn delete(
        &self,
        store: &Store,
        settings: &Settings,
        id: SandboxId,
        force: Force,
    ) -> Result<Reply, ControlError> {
        let _turn = self.turns.take(&id).await;
        let (of, bounds) = (id.clone(), bounds(settings));
        let row = self
            .ask(move |manager| manager.mark_for_removal(&of, force, &bounds))
            .await?;
        let removed = self.finish(store, &row).await?;
        tracing::info!(sandbox = %row.id, "a sandbox was deleted");
        Ok(Reply::ok(json!({
            "status": "deleted", "id": row.id, "name": row.name,
            "branch_name": row.branch(), "tip": removed.tip, "branch_kept": removed.kept,
        })))
    }

    /// Removes a sandbox that is not kept: first from the registry, so that no connection
    /// is identified as it.
    async fn finish(&self, store: &Store, row: &SandboxRow) -> Result<BranchRemoval, ControlError> {
        self.traffic.detach(&row.id);
        let event = AuditEvent::lifecycle("sandbox_deleted", Some(row.id.clone()));
        match store.unregister(&row.id, event, wall_now()).await {
            Ok(_) | Err(StoreError::NotFound { .. }) => {}
            Err(other) => return Err(other.into()),
        }
        let id = row.id.clone();
        self.ask(move |manager| manager.remove(&id)).await
    }

    /// Commits the workspace of one to its branch.
    pub async fn snapshot(
        &self,
        store: &Store,
        settings: &Settings,
        id: SandboxId,
        body: SnapshotBody,
    ) -> Result<Reply, ControlError> {
        let _turn = self.turns.take(&id).await;
        let (of, bounds) = (id.clone(), bounds(settings));
        let report = self
            .ask(move |manager| manager.snapshot(&of, &body.message, &bounds))
            .await?;
        if report.moved {
            let event = AuditEvent::lifecycle("sandbox_snapshot", Some(id));
            store.audit().record_durable(event, wall_now()).await?;
        }
        Ok(Reply::ok(json!(report)))
    }

    /// Lets an operator in: where the sandbox's door is, and what may be brought along.
    pub async fn enter(
        &self,
        store: &Store,
        settings: &Settings,
        id: SandboxId,
        body: SessionBody,
    ) -> Result<Reply, ControlError> {
        let of = id.clone();
        let (row, status, stopped) = self
            .ask(move |manager| {
                let stopped = manager.backend().stopped(&of);
                Ok((manager.row(&of)?, manager.status(&of), stopped))
            })
            .await?;
        let name = || row.name.to_string();
        match (status, stopped) {
            (SandboxStatus::Active, _) => {}
            // Nothing runs in it any more, and files can still be taken home.
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
        Ok(Reply::ok(json!({
            "id": id,
            "backend": "namespace",
            "environment": settings.sandbox.env,
        })))
    }

    /// Runs something of the manager's on a thread that may block.
    async fn ask<T: Send + 'static>(
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

/// How much of a workspace comes to its branch.
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

/// Adds what an operator should know of the repository's own file.
fn with_notes(mut shown: Value, notes: Vec<String>) -> Value {
    if let Some(fields) = shown.as_object_mut() {
        fields.insert("notes".to_owned(), json!(notes));
    }
    shown
}

/// A sandbox as clients see it.
fn describe(manager: &Manager, row: &SandboxRow) -> Value {
    let statuses = manager.statuses(std::slice::from_ref(row));
    let status = statuses.into_iter().next();
    describe_as(manager, row, &status.unwrap_or(SandboxStatus::Missing))
}

fn describe_as(manager: &Manager, row: &SandboxRow, status: &SandboxStatus) -> Value {
    let system = manager
        .backend()
        .config(&row.id)
        .map(|config| config.system);
    let system = system.unwrap_or_default();
    let created = i64::try_from(row.created)
        .ok()
        .and_then(|at| Timestamp::from_millisecond(at).ok());
    let (word, reason) = match status {
        SandboxStatus::Error(reason) => ("error".to_owned(), Some(reason.clone())),
        other => (other.to_string(), None),
    };
    json!({
        "id": row.id,
        "name": row.name,
        "branch_name": row.branch(),
        "container_id": row.id,
        "status": word,
        "reason": reason,
        "backend": "namespace",
        "repository": row.repository,
        "common": row.common,
        "base": row.base,
        "root": system.root,
        "nested": system.nested,
        "published": row.published,
        "repository_file": row.repository_file,
        "created_at": created.map(|at| at.to_string()),
        "warnings": manager.backend().warnings(&row.id).unwrap_or_default(),
    })
}
