//! Implements the MCP server's sandbox operations: sandboxes through the gate, tools through
//! the workbench in the sandbox, diffs from the operator's repository.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use async_trait::async_trait;
use control::body::{CreateBody, Purpose};
use control::client::{ControlClient, ControlClientError};
use mcp::agents::parameters::{Bash, Edit, Glob, Grep, Ls, Read, Write};
use mcp::agents::sandbox_service::{
    AgentSandbox, Changes, CommandRun, CopiedFiles, DeletedSandbox, DirectoryListing, EditedFile,
    FileChange, FileContent, FoundFiles, GrepMatches, HostPort, Ports, SandboxService,
    SandboxServiceError, Snapshot, WrittenFile,
};
use policy::id::SandboxId;
use sandbox::contract::{SandboxBackend as Backend, SandboxError, TransferBounds};
use sandbox::namespace::Namespace;
use sandbox::transfer::confined::ConfinedDirectory;
use sandbox::worker::SnapshotReport;
use serde::Deserialize;
use serde_json::{Value, json};

use super::failure::service_error;
use super::remote_container::RemoteSandbox;
use super::tools::SandboxTools;
use crate::cli::Global;
use crate::cli::enter;
use crate::cli::files::{fetch, send};
use crate::cli::remote::NO_BRANCH;
use crate::cli::sandbox_lookup::{self, CurrentRepository, SandboxInfo};
use crate::cli::sandboxes::route;
use crate::cli::summary::{letter, skipped_lines};
use crate::exit::{CliError, CliExit};
use crate::gate::background;
use crate::paths::Paths;

const NO_REPOSITORY: &str = "palisade mcp is not in a git repository; start it in one, or name \
                             one with --directory";

/// Limits of one transfer.
const BOUNDS: TransferBounds = TransferBounds {
    bytes: 1 << 30,
    entries: 100_000,
};

/// How long a gate counts as running after a response.
const GATE_CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Maximum number of cached workbench clients.
const MAX_CACHED_CLIENTS: usize = 64;

/// The sandboxes of the current repository.
///
/// Every method that takes an id receives one that `find` returned, so it belongs to this
/// repository.
pub struct GateSandboxService {
    global: Global,
    paths: Paths,
    backend: Namespace,
    /// When the gate last answered.
    last_answer: Mutex<Option<Instant>>,
    /// Clients of workbenches.
    clients: Mutex<HashMap<SandboxId, Arc<SandboxTools>>>,
}

/// The gate's response about a sandbox's ports.
#[derive(Deserialize)]
struct PortList {
    open: Option<Vec<u16>>,
    reason: Option<String>,
    published: Vec<sandbox::manager::row::PublishedPort>,
}

impl GateSandboxService {
    pub fn new(global: Global, paths: Paths) -> Self {
        let backend = enter::backend(&paths);
        Self {
            global,
            paths,
            backend,
            last_answer: Mutex::default(),
            clients: Mutex::default(),
        }
    }

    /// A client of the running gate, which is started if necessary.
    async fn gate(&self) -> Result<ControlClient> {
        let last_answer = *self
            .last_answer
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if last_answer.is_some_and(|at| at.elapsed() < GATE_CHECK_INTERVAL) {
            return Ok(ControlClient::new(&self.paths.control));
        }
        let gate = background::client(&self.paths, self.global.verbose).await?;
        let mut last_answer = self
            .last_answer
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *last_answer = Some(Instant::now());
        Ok(gate)
    }

    async fn look_up(&self, name: &str) -> Result<AgentSandbox> {
        let gate = self.gate().await?;
        Ok(agent_sandbox(Self::find_sandbox(&gate, name).await?))
    }

    fn current_repository() -> Result<CurrentRepository> {
        Ok(
            CurrentRepository::find()
                .ok_or_else(|| CliError::new(CliExit::Usage, NO_REPOSITORY))?,
        )
    }

    /// The sandbox with a name or id. Sandboxes of other repositories are not found; containers
    /// of `sandbox.remote` are, because the operator configured them.
    async fn find_sandbox(gate: &ControlClient, name: &str) -> Result<SandboxInfo> {
        let found = sandbox_lookup::find(gate, name).await;
        let found = match found {
            Ok(found) if found.is_remote() => return Ok(found),
            found => found,
        };
        let current = Self::current_repository()?;
        let found = found?;
        if found.belongs_to(&current) {
            return Ok(found);
        }
        let message = SandboxError::NotFound(name.to_owned()).to_string();
        Err(CliError::new(CliExit::NotFound, message).into())
    }

    /// The tools of a sandbox; opens a session, which the gate records.
    async fn tools(&self, id: &SandboxId) -> Result<Arc<SandboxTools>, SandboxServiceError> {
        let container = self.enter(id, Purpose::Exec).await.map_err(service_error)?;
        if let Some(container) = container {
            return Ok(Arc::new(
                SandboxTools::remote(container).map_err(service_error)?,
            ));
        }
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tools) = clients.get(id) {
            return Ok(Arc::clone(tools));
        }
        if clients.len() >= MAX_CACHED_CLIENTS {
            clients.clear();
        }
        let tools = Arc::new(SandboxTools::new(self.backend.clone(), id.clone())?);
        clients.insert(id.clone(), Arc::clone(&tools));
        Ok(tools)
    }

    /// Opens a session, which the gate records. Returns the container if the sandbox is one of
    /// `sandbox.remote`, which has its own workbench.
    async fn enter(&self, id: &SandboxId, purpose: Purpose) -> Result<Option<RemoteSandbox>> {
        let body = json!({ "purpose": purpose });
        let gate = self.gate().await?;
        let session = gate.post(&subroute(id, "session"), &body).await?;
        match session.get("backend").and_then(Value::as_str) {
            Some("remote") => RemoteSandbox::read(id, &self.global).await.map(Some),
            _ => Ok(None),
        }
    }

    async fn create_sandbox(&self, name: &str, dirty: bool) -> Result<AgentSandbox> {
        Self::current_repository()?;
        let body = CreateBody {
            name: name.to_owned(),
            repository: Some(std::env::current_dir()?),
            depth: None,
            dirty,
            repos: None,
            auth_mode: None,
            backend: None,
            root: false,
            nested: false,
            setup_command: None,
            publish: Vec::new(),
            credentials: None,
            tier: None,
            presets: Vec::new(),
        };
        let made = self.gate().await?.post("/v1/sandboxes", &json!(body)).await;
        Ok(agent_sandbox(serde_json::from_value(made?)?))
    }

    async fn list_sandboxes(&self) -> Result<Vec<AgentSandbox>> {
        let current = Self::current_repository()?;
        let rows = self.gate().await?.get("/v1/sandboxes").await?;
        let sandboxes: Vec<SandboxInfo> = serde_json::from_value(rows)?;
        let listed = sandboxes
            .into_iter()
            .filter(|sandbox| sandbox.belongs_to(&current) || sandbox.is_remote());
        Ok(listed.map(agent_sandbox).collect())
    }

    async fn port_report(&self, id: &SandboxId) -> Result<Ports> {
        let ports = self.gate().await?.get(&subroute(id, "ports")).await?;
        let list: PortList = serde_json::from_value(ports)?;
        let published = list.published.iter().map(|published| HostPort {
            host: published.host.to_string(),
            port: published.port,
        });
        Ok(Ports {
            open: list.open,
            reason: list.reason,
            published: published.collect(),
        })
    }

    async fn post_action(&self, id: &SandboxId, what: &str) -> Result<()> {
        let gate = self.gate().await?;
        gate.post(&subroute(id, what), &json!({})).await?;
        Ok(())
    }

    /// Deletes a sandbox. Without force, the gate refuses if work would be lost.
    async fn remove(&self, id: &SandboxId, force: bool) -> Result<DeletedSandbox> {
        let gate = self.gate().await?;
        let sandbox = Self::find_sandbox(&gate, id.as_str()).await?;
        let force = if force { "?force=true" } else { "" };
        let answer = gate.delete(&format!("{}{force}", route(&sandbox))).await?;
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        clients.remove(id);
        let text = |name: &str| answer.get(name).and_then(Value::as_str).map(str::to_owned);
        Ok(DeletedSandbox {
            tip: text("tip"),
            branch_kept: text("branch_kept"),
        })
    }

    async fn commit(&self, id: &SandboxId, message: &str) -> Result<Snapshot> {
        let body = json!({ "message": message });
        let gate = self.gate().await?;
        let report = match gate.post(&subroute(id, "snapshot"), &body).await {
            // A container that is managed externally has no branch to commit to.
            Err(ControlClientError::Refused { code, .. }) if code == "managed_elsewhere" => {
                return Ok(Snapshot::default());
            }
            report => report?,
        };
        let report: SnapshotReport = serde_json::from_value(report)?;
        Ok(Snapshot {
            left_out: skipped_lines(&report),
            commit: report.moved.then_some(report.tip),
        })
    }

    /// Copies a path of the worktree into the sandbox. Paths outside the worktree are refused.
    async fn upload_path(&self, id: &SandboxId, from: &str, to: &str) -> Result<CopiedFiles> {
        let root = worktree()?;
        let (from, to) = (from.to_owned(), PathBuf::from(to));
        let state = self.paths.state_dir.clone();
        let work = move |backend: &(dyn Backend + Sync), id: &SandboxId| {
            let within = ConfinedDirectory::open(&root)?;
            send(backend, id, &to, &BOUNDS, |archive| {
                within.pack(&from, &state, archive, &BOUNDS)
            })
        };
        Ok(moved_summary(
            self.with_backend(id, Purpose::Upload, work).await?,
        ))
    }

    /// Copies a path of the sandbox into the worktree.
    async fn download_path(&self, id: &SandboxId, from: &str, to: &str) -> Result<CopiedFiles> {
        let root = worktree()?;
        let (from, to) = (PathBuf::from(from), to.to_owned());
        let work = move |backend: &(dyn Backend + Sync), id: &SandboxId| {
            let within = ConfinedDirectory::open(&root)?;
            fetch(backend, id, &from, &BOUNDS, |archive| {
                within.unpack(archive, &to, &BOUNDS)
            })
        };
        Ok(moved_summary(
            self.with_backend(id, Purpose::Download, work).await?,
        ))
    }

    /// Opens a session, which the gate records, and runs blocking work with the backend.
    async fn with_backend<T: Send + 'static>(
        &self,
        id: &SandboxId,
        purpose: Purpose,
        work: impl FnOnce(&(dyn Backend + Sync), &SandboxId) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        if let Some(container) = self.enter(id, purpose).await? {
            return container.run_blocking(work).await;
        }
        let (backend, id) = (self.backend.clone(), id.clone());
        tokio::task::spawn_blocking(move || work(&backend, &id)).await?
    }

    async fn changes(&self, id: &SandboxId, max_patch: usize) -> Result<Changes> {
        let gate = self.gate().await?;
        let sandbox = Self::find_sandbox(&gate, id.as_str()).await?;
        if sandbox.is_remote() {
            return Err(CliError::new(CliExit::Exists, NO_BRANCH).into());
        }
        // Reading a repository blocks.
        tokio::task::spawn_blocking(move || diff(&sandbox, max_patch)).await?
    }
}

/// A route below the route of a sandbox.
fn subroute(id: &SandboxId, what: &str) -> String {
    format!("/v1/sandboxes/{id}/{what}")
}

/// The root of the operator's worktree.
fn worktree() -> Result<PathBuf> {
    let repository = sandbox_lookup::current_repository()
        .ok_or_else(|| CliError::new(CliExit::Usage, NO_REPOSITORY))?;
    Ok(repository.root().to_owned())
}

fn moved_summary(moved: sandbox::contract::TransferSummary) -> CopiedFiles {
    CopiedFiles {
        files: moved.files,
        bytes: moved.bytes,
        left_out: moved.left_out,
    }
}

fn diff(sandbox: &SandboxInfo, max_patch: usize) -> Result<Changes> {
    let repository = sandbox
        .host_repository()?
        .ok_or_else(|| CliError::new(CliExit::Usage, "the sandbox has no repository"))?;
    let changes = repository.diff(&sandbox.name, max_patch)?;
    let files = changes.files.iter().map(|file| FileChange {
        path: String::from_utf8_lossy(&file.path).into_owned(),
        renamed_from: file
            .renamed_from
            .as_deref()
            .map(|path| String::from_utf8_lossy(path).into_owned()),
        kind: letter(file.kind).to_string(),
        added: file.added as u64,
        removed: file.removed as u64,
        binary: file.binary,
    });
    Ok(Changes {
        base: changes.base.to_string(),
        tip: changes.tip.to_string(),
        files: files.collect(),
        patch: String::from_utf8_lossy(&changes.patch).into_owned(),
        cut: max_patch > 0 && changes.truncated,
    })
}

fn agent_sandbox(sandbox: SandboxInfo) -> AgentSandbox {
    AgentSandbox {
        id: sandbox.id,
        name: sandbox.name.to_string(),
        branch: sandbox.branch_name,
        status: sandbox.status,
        reason: sandbox.reason,
        created_at: sandbox.created_at,
        warnings: sandbox.warnings,
    }
}

#[async_trait]
impl SandboxService for GateSandboxService {
    async fn create(&self, name: &str, dirty: bool) -> Result<AgentSandbox, SandboxServiceError> {
        self.create_sandbox(name, dirty)
            .await
            .map_err(service_error)
    }

    async fn list(&self) -> Result<Vec<AgentSandbox>, SandboxServiceError> {
        self.list_sandboxes().await.map_err(service_error)
    }

    async fn find(&self, name: &str) -> Result<AgentSandbox, SandboxServiceError> {
        self.look_up(name).await.map_err(service_error)
    }

    async fn ports(&self, id: &SandboxId) -> Result<Ports, SandboxServiceError> {
        self.port_report(id).await.map_err(service_error)
    }

    async fn pause(&self, id: &SandboxId) -> Result<(), SandboxServiceError> {
        self.post_action(id, "pause").await.map_err(service_error)
    }

    async fn resume(&self, id: &SandboxId) -> Result<(), SandboxServiceError> {
        self.post_action(id, "resume").await.map_err(service_error)
    }

    async fn delete(
        &self,
        id: &SandboxId,
        force: bool,
    ) -> Result<DeletedSandbox, SandboxServiceError> {
        self.remove(id, force).await.map_err(service_error)
    }

    async fn read(
        &self,
        id: &SandboxId,
        arguments: &Read,
    ) -> Result<FileContent, SandboxServiceError> {
        self.tools(id).await?.read(arguments).await
    }

    async fn write(
        &self,
        id: &SandboxId,
        arguments: &Write,
    ) -> Result<WrittenFile, SandboxServiceError> {
        self.tools(id).await?.write(arguments).await
    }

    async fn edit(
        &self,
        id: &SandboxId,
        arguments: &Edit,
    ) -> Result<EditedFile, SandboxServiceError> {
        self.tools(id).await?.edit(arguments).await
    }

    async fn patch(&self, id: &SandboxId, patch: &str) -> Result<Vec<String>, SandboxServiceError> {
        self.tools(id).await?.patch(patch).await
    }

    async fn bash(
        &self,
        id: &SandboxId,
        arguments: &Bash,
    ) -> Result<CommandRun, SandboxServiceError> {
        self.tools(id).await?.bash(arguments).await
    }

    async fn ls(
        &self,
        id: &SandboxId,
        arguments: &Ls,
    ) -> Result<DirectoryListing, SandboxServiceError> {
        self.tools(id).await?.ls(arguments).await
    }

    async fn glob(
        &self,
        id: &SandboxId,
        arguments: &Glob,
    ) -> Result<FoundFiles, SandboxServiceError> {
        self.tools(id).await?.glob(arguments).await
    }

    async fn grep(
        &self,
        id: &SandboxId,
        arguments: &Grep,
    ) -> Result<GrepMatches, SandboxServiceError> {
        self.tools(id).await?.grep(arguments).await
    }

    async fn upload(
        &self,
        id: &SandboxId,
        from: &str,
        to: &str,
    ) -> Result<CopiedFiles, SandboxServiceError> {
        self.upload_path(id, from, to).await.map_err(service_error)
    }

    async fn download(
        &self,
        id: &SandboxId,
        from: &str,
        to: &str,
    ) -> Result<CopiedFiles, SandboxServiceError> {
        self.download_path(id, from, to)
            .await
            .map_err(service_error)
    }

    async fn snapshot(
        &self,
        id: &SandboxId,
        message: &str,
    ) -> Result<Snapshot, SandboxServiceError> {
        self.commit(id, message).await.map_err(service_error)
    }

    async fn diff(&self, id: &SandboxId, max_patch: usize) -> Result<Changes, SandboxServiceError> {
        self.changes(id, max_patch).await.map_err(service_error)
    }
}
