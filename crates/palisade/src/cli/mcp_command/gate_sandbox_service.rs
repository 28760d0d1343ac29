//! What the server for agents asks for, done: sandboxes by the gate, tools by the workbench
//! inside, the branch from the operator's repository.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use async_trait::async_trait;
use control::body::{CreateBody, Purpose};
use control::client::{Client, ClientError};
use mcp::agents::parameters::{Bash, Edit, Glob, Grep, Ls, Read, Write};
use mcp::agents::workshop::{
    Changes, Content, Deleted, Edited, FileChange, Found, Listed, Matches, Moved, Ports, Published,
    Ran, Sandbox, Snapshot, Workshop, WorkshopError, Written,
};
use policy::id::SandboxId;
use sandbox::contract::{SandboxBackend as Backend, SandboxError, TransferBounds};
use sandbox::namespace::Namespace;
use sandbox::transfer::confined::ConfinedDirectory;
use sandbox::worker::SnapshotReport;
use serde::Deserialize;
use serde_json::{Value, json};

use super::failure::told;
use super::remote_container::Elsewhere;
use super::tools::Tools;
use crate::cli::Global;
use crate::cli::enter;
use crate::cli::files::{fetch, send};
use crate::cli::remote::NO_BRANCH;
use crate::cli::sandbox_lookup::{self, Here, Place};
use crate::cli::sandboxes::route;
use crate::cli::summary::{left_behind, letter};
use crate::exit::{Exit, Failure};
use crate::gate::background;
use crate::paths::Paths;

const NO_REPOSITORY: &str = "palisade mcp was started in no git repository; start it in one, or \
                             name one with --directory";

/// The most that an agent moves at once.
const BOUNDS: TransferBounds = TransferBounds {
    bytes: 1 << 30,
    entries: 100_000,
};

/// For how long a gate that answered is taken to be there.
const FRESH: Duration = Duration::from_secs(2);

/// Workbenches that are remembered.
const MOST_REMEMBERED: usize = 64;

/// The sandboxes of the repository we stand in.
///
/// An id that a call is about has been found first, so it is one of this repository's.
pub struct GateSandboxService {
    global: Global,
    paths: Paths,
    backend: Namespace,
    /// When the gate last answered.
    heard: Mutex<Option<Instant>>,
    /// The way to each workbench, once it was found well.
    benches: Mutex<HashMap<SandboxId, Arc<Tools>>>,
}

/// What the gate tells of a sandbox's ports.
#[derive(Deserialize)]
struct Told {
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
            heard: Mutex::default(),
            benches: Mutex::default(),
        }
    }

    /// A gate that runs, started if need be.
    async fn gate(&self) -> Result<Client> {
        let heard = *self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        if heard.is_some_and(|heard| heard.elapsed() < FRESH) {
            return Ok(Client::new(&self.paths.control));
        }
        let gate = background::client(&self.paths, self.global.verbose).await?;
        let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        *heard = Some(Instant::now());
        Ok(gate)
    }

    async fn look_up(&self, name: &str) -> Result<Sandbox> {
        let gate = self.gate().await?;
        Ok(shown(Self::place(&gate, name).await?))
    }

    fn here() -> Result<Here> {
        Ok(Here::find().ok_or_else(|| Failure::new(Exit::Usage, NO_REPOSITORY))?)
    }

    /// The sandbox of that name or id. Those of other repositories are not there; the container
    /// of `sandbox.remote` is, because the operator configured it.
    async fn place(gate: &Client, name: &str) -> Result<Place> {
        let found = sandbox_lookup::find(gate, name).await;
        let found = match found {
            Ok(found) if found.is_elsewhere() => return Ok(found),
            found => found,
        };
        let here = Self::here()?;
        let found = found?;
        if found.is_of(&here) {
            return Ok(found);
        }
        let message = SandboxError::NotFound(name.to_owned()).to_string();
        Err(Failure::new(Exit::NotFound, message).into())
    }

    /// The tools of a sandbox, entered on record.
    async fn tools(&self, at: &SandboxId) -> Result<Arc<Tools>, WorkshopError> {
        let container = self.enter(at, Purpose::Exec).await.map_err(told)?;
        if let Some(container) = container {
            return Ok(Arc::new(Tools::elsewhere(container).map_err(told)?));
        }
        let mut benches = self.benches.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tools) = benches.get(at) {
            return Ok(Arc::clone(tools));
        }
        if benches.len() >= MOST_REMEMBERED {
            benches.clear();
        }
        let tools = Arc::new(Tools::new(self.backend.clone(), at.clone())?);
        benches.insert(at.clone(), Arc::clone(&tools));
        Ok(tools)
    }

    /// Enters a sandbox on record. A container of `sandbox.remote` is given back: it is entered
    /// by its own workbench.
    async fn enter(&self, at: &SandboxId, purpose: Purpose) -> Result<Option<Elsewhere>> {
        let body = json!({ "purpose": purpose });
        let gate = self.gate().await?;
        let session = gate.post(&under(at, "session"), &body).await?;
        match session.get("backend").and_then(Value::as_str) {
            Some("remote") => Elsewhere::read(at, &self.global).await.map(Some),
            _ => Ok(None),
        }
    }

    async fn make(&self, name: &str, dirty: bool) -> Result<Sandbox> {
        Self::here()?;
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
        };
        let made = self.gate().await?.post("/v1/sandboxes", &json!(body)).await;
        Ok(shown(serde_json::from_value(made?)?))
    }

    async fn all(&self) -> Result<Vec<Sandbox>> {
        let here = Self::here()?;
        let rows = self.gate().await?.get("/v1/sandboxes").await?;
        let places: Vec<Place> = serde_json::from_value(rows)?;
        let ours = places
            .into_iter()
            .filter(|place| place.is_of(&here) || place.is_elsewhere());
        Ok(ours.map(shown).collect())
    }

    async fn told_ports(&self, at: &SandboxId) -> Result<Ports> {
        let ports = self.gate().await?.get(&under(at, "ports")).await?;
        let told: Told = serde_json::from_value(ports)?;
        let published = told.published.iter().map(|one| Published {
            host: one.host.to_string(),
            port: one.port,
        });
        Ok(Ports {
            open: told.open,
            reason: told.reason,
            published: published.collect(),
        })
    }

    async fn order(&self, at: &SandboxId, what: &str) -> Result<()> {
        let gate = self.gate().await?;
        gate.post(&under(at, what), &json!({})).await?;
        Ok(())
    }

    /// Deletes it. Without force it stands still while the gate finds out whether anything
    /// would be lost, and is resumed in that case.
    async fn remove(&self, at: &SandboxId, force: bool) -> Result<Deleted> {
        let gate = self.gate().await?;
        let place = Self::place(&gate, at.as_str()).await?;
        let force = if force { "?force=true" } else { "" };
        let answer = gate.delete(&format!("{}{force}", route(&place))).await?;
        let mut benches = self.benches.lock().unwrap_or_else(PoisonError::into_inner);
        benches.remove(at);
        let text = |name: &str| answer.get(name).and_then(Value::as_str).map(str::to_owned);
        Ok(Deleted {
            tip: text("tip"),
            branch_kept: text("branch_kept"),
        })
    }

    async fn commit(&self, at: &SandboxId, message: &str) -> Result<Snapshot> {
        let body = json!({ "message": message });
        let gate = self.gate().await?;
        let report = match gate.post(&under(at, "snapshot"), &body).await {
            // An externally managed container has no branch to commit to.
            Err(ClientError::Refused { code, .. }) if code == "managed_elsewhere" => {
                return Ok(Snapshot::default());
            }
            report => report?,
        };
        let report: SnapshotReport = serde_json::from_value(report)?;
        Ok(Snapshot {
            left_out: left_behind(&report),
            commit: report.moved.then_some(report.tip),
        })
    }

    /// Copies something of the worktree in. What it names there stays below it.
    async fn bring(&self, at: &SandboxId, from: &str, to: &str) -> Result<Moved> {
        let root = worktree()?;
        let (from, to) = (from.to_owned(), PathBuf::from(to));
        let state = self.paths.state_dir.clone();
        let work = move |backend: &(dyn Backend + Sync), id: &SandboxId| {
            let within = ConfinedDirectory::open(&root)?;
            send(backend, id, &to, &BOUNDS, |archive| {
                within.pack(&from, &state, archive, &BOUNDS)
            })
        };
        Ok(counted(self.inside(at, Purpose::Upload, work).await?))
    }

    /// Copies something out, into the worktree.
    async fn take(&self, at: &SandboxId, from: &str, to: &str) -> Result<Moved> {
        let root = worktree()?;
        let (from, to) = (PathBuf::from(from), to.to_owned());
        let work = move |backend: &(dyn Backend + Sync), id: &SandboxId| {
            let within = ConfinedDirectory::open(&root)?;
            fetch(backend, id, &from, &BOUNDS, |archive| {
                within.unpack(archive, &to, &BOUNDS)
            })
        };
        Ok(counted(self.inside(at, Purpose::Download, work).await?))
    }

    /// Enters a sandbox on record, and does something that blocks with it.
    async fn inside<T: Send + 'static>(
        &self,
        at: &SandboxId,
        purpose: Purpose,
        work: impl FnOnce(&(dyn Backend + Sync), &SandboxId) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        if let Some(container) = self.enter(at, purpose).await? {
            return container.apart(work).await;
        }
        let (backend, at) = (self.backend.clone(), at.clone());
        tokio::task::spawn_blocking(move || work(&backend, &at)).await?
    }

    async fn changes(&self, at: &SandboxId, most: usize) -> Result<Changes> {
        let gate = self.gate().await?;
        let place = Self::place(&gate, at.as_str()).await?;
        if place.is_elsewhere() {
            return Err(Failure::new(Exit::Exists, NO_BRANCH).into());
        }
        // Reading a repository blocks.
        tokio::task::spawn_blocking(move || diff(&place, most)).await?
    }
}

/// A route below that of a sandbox.
fn under(at: &SandboxId, what: &str) -> String {
    format!("/v1/sandboxes/{at}/{what}")
}

/// The operator's files that may be named.
fn worktree() -> Result<PathBuf> {
    let home = sandbox_lookup::here().ok_or_else(|| Failure::new(Exit::Usage, NO_REPOSITORY))?;
    Ok(home.root().to_owned())
}

fn counted(moved: sandbox::contract::TransferSummary) -> Moved {
    Moved {
        files: moved.files,
        bytes: moved.bytes,
        left_out: moved.left_out,
    }
}

fn diff(place: &Place, most: usize) -> Result<Changes> {
    let home = place
        .home()?
        .ok_or_else(|| Failure::new(Exit::Usage, "it works on no repository"))?;
    let changes = home.diff(&place.name, most)?;
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
        cut: most > 0 && changes.cut,
    })
}

fn shown(place: Place) -> Sandbox {
    Sandbox {
        id: place.id,
        name: place.name.to_string(),
        branch: place.branch_name,
        status: place.status,
        reason: place.reason,
        created_at: place.created_at,
        warnings: place.warnings,
    }
}

#[async_trait]
impl Workshop for GateSandboxService {
    async fn create(&self, name: &str, dirty: bool) -> Result<Sandbox, WorkshopError> {
        self.make(name, dirty).await.map_err(told)
    }

    async fn list(&self) -> Result<Vec<Sandbox>, WorkshopError> {
        self.all().await.map_err(told)
    }

    async fn find(&self, name: &str) -> Result<Sandbox, WorkshopError> {
        self.look_up(name).await.map_err(told)
    }

    async fn ports(&self, at: &SandboxId) -> Result<Ports, WorkshopError> {
        self.told_ports(at).await.map_err(told)
    }

    async fn pause(&self, at: &SandboxId) -> Result<(), WorkshopError> {
        self.order(at, "pause").await.map_err(told)
    }

    async fn resume(&self, at: &SandboxId) -> Result<(), WorkshopError> {
        self.order(at, "resume").await.map_err(told)
    }

    async fn delete(&self, at: &SandboxId, force: bool) -> Result<Deleted, WorkshopError> {
        self.remove(at, force).await.map_err(told)
    }

    async fn read(&self, at: &SandboxId, asked: &Read) -> Result<Content, WorkshopError> {
        self.tools(at).await?.read(asked).await
    }

    async fn write(&self, at: &SandboxId, asked: &Write) -> Result<Written, WorkshopError> {
        self.tools(at).await?.write(asked).await
    }

    async fn edit(&self, at: &SandboxId, asked: &Edit) -> Result<Edited, WorkshopError> {
        self.tools(at).await?.edit(asked).await
    }

    async fn patch(&self, at: &SandboxId, patch: &str) -> Result<Vec<String>, WorkshopError> {
        self.tools(at).await?.patch(patch).await
    }

    async fn bash(&self, at: &SandboxId, asked: &Bash) -> Result<Ran, WorkshopError> {
        self.tools(at).await?.bash(asked).await
    }

    async fn ls(&self, at: &SandboxId, asked: &Ls) -> Result<Listed, WorkshopError> {
        self.tools(at).await?.ls(asked).await
    }

    async fn glob(&self, at: &SandboxId, asked: &Glob) -> Result<Found, WorkshopError> {
        self.tools(at).await?.glob(asked).await
    }

    async fn grep(&self, at: &SandboxId, asked: &Grep) -> Result<Matches, WorkshopError> {
        self.tools(at).await?.grep(asked).await
    }

    async fn upload(&self, at: &SandboxId, from: &str, to: &str) -> Result<Moved, WorkshopError> {
        self.bring(at, from, to).await.map_err(told)
    }

    async fn download(&self, at: &SandboxId, from: &str, to: &str) -> Result<Moved, WorkshopError> {
        self.take(at, from, to).await.map_err(told)
    }

    async fn snapshot(&self, at: &SandboxId, message: &str) -> Result<Snapshot, WorkshopError> {
        self.commit(at, message).await.map_err(told)
    }

    async fn diff(&self, at: &SandboxId, most: usize) -> Result<Changes, WorkshopError> {
        self.changes(at, most).await.map_err(told)
    }
}
