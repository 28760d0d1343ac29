//! What the server for agents asks for, done: sandboxes by the gate, tools by the workbench
//! inside, the branch from the operator's repository.

use std::path::PathBuf;

use anyhow::Result;
use async_trait::async_trait;
use control::client::{Client, ClientError};
use control::sandboxes::body::{CreateBody, Purpose};
use mcp::agents::parameters::{Bash, Edit, Glob, Grep, Ls, Read, Write};
use mcp::agents::workshop::{
    Changes, Content, Deleted, Edited, FileChange, Found, Listed, Matches, Moved, Ports, Published,
    Ran, Sandbox, Snapshot, Workshop, WorkshopError, Written,
};
use policy::id::SandboxId;
use sandbox::contract::{SandboxError, Transfer};
use sandbox::namespace::Namespace;
use sandbox::transfer::within::Within;
use sandbox::transfer::{Refusal, TransferError};
use sandbox::worker::SnapshotReport;
use serde::Deserialize;
use serde_json::{Value, json};

use super::tools::Tools;
use crate::cli::enter;
use crate::cli::files::{fetch, send};
use crate::cli::place::{self, Here, Place};
use crate::cli::sandboxes::{below, route};
use crate::cli::summary::{left_behind, letter};
use crate::exit::{Exit, Failure, exit_of};
use crate::gate::background;
use crate::paths::Paths;

const NO_REPOSITORY: &str = "palisade mcp was started in no git repository; start it in one, or \
                             name one with --directory";

/// The most that an agent moves at once.
const BOUNDS: Transfer = Transfer {
    bytes: 1 << 30,
    entries: 100_000,
};

/// The sandboxes of the repository we stand in.
pub struct Shop {
    paths: Paths,
    verbose: u8,
    backend: Namespace,
}

/// What the gate tells of a sandbox's ports.
#[derive(Deserialize)]
struct Told {
    open: Option<Vec<u16>>,
    reason: Option<String>,
    published: Vec<sandbox::manager::row::Published>,
}

impl Shop {
    pub fn new(paths: Paths, verbose: u8) -> Self {
        let backend = enter::backend(&paths);
        Self {
            paths,
            verbose,
            backend,
        }
    }

    /// A gate that runs, started if need be.
    async fn gate(&self) -> Result<Client> {
        background::client(&self.paths, self.verbose).await
    }

    fn here() -> Result<Here> {
        Ok(Here::find().ok_or_else(|| Failure::new(Exit::Usage, NO_REPOSITORY))?)
    }

    /// The sandbox of that name or id. Those of other repositories are not there.
    async fn place(gate: &Client, name: &str) -> Result<Place> {
        let here = Self::here()?;
        let found = place::find(gate, name).await?;
        if found.is_of(&here) {
            return Ok(found);
        }
        let message = SandboxError::NotFound(name.to_owned()).to_string();
        Err(Failure::new(Exit::NotFound, message).into())
    }

    /// The tools of a sandbox, entered on record.
    async fn tools(&self, at: &SandboxId, purpose: Purpose) -> Result<Tools, WorkshopError> {
        self.enter(at, purpose).await.map_err(told)?;
        Tools::new(self.backend.clone(), at.clone())
    }

    async fn enter(&self, at: &SandboxId, purpose: Purpose) -> Result<Place> {
        let gate = self.gate().await?;
        let place = Self::place(&gate, at.as_str()).await?;
        let body = json!({ "purpose": purpose });
        gate.post(&below(&place, "session"), &body).await?;
        Ok(place)
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
            publish: Vec::new(),
        };
        let made = self.gate().await?.post("/v1/sandboxes", &json!(body)).await;
        Ok(shown(serde_json::from_value(made?)?))
    }

    async fn all(&self) -> Result<Vec<Sandbox>> {
        let here = Self::here()?;
        let rows = self.gate().await?.get("/v1/sandboxes").await?;
        let places: Vec<Place> = serde_json::from_value(rows)?;
        let ours = places.into_iter().filter(|place| place.is_of(&here));
        Ok(ours.map(shown).collect())
    }

    async fn told_ports(&self, at: &SandboxId) -> Result<Ports> {
        let gate = self.gate().await?;
        let place = Self::place(&gate, at.as_str()).await?;
        let told: Told = serde_json::from_value(gate.get(&below(&place, "ports")).await?)?;
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
        let place = Self::place(&gate, at.as_str()).await?;
        gate.post(&below(&place, what), &json!({})).await?;
        Ok(())
    }

    /// Deletes it. Without force it stands still while the gate finds out whether anything
    /// would be lost, and goes on if so.
    async fn remove(&self, at: &SandboxId, force: bool) -> Result<Deleted> {
        let gate = self.gate().await?;
        let place = Self::place(&gate, at.as_str()).await?;
        let answer = if force {
            gate.delete(&format!("{}?force=true", route(&place))).await
        } else {
            let was_active = place.status == "active";
            if was_active {
                gate.post(&below(&place, "pause"), &json!({})).await?;
            }
            let answer = gate.delete(&route(&place)).await;
            if answer.is_err() && was_active {
                gate.post(&below(&place, "resume"), &json!({})).await?;
            }
            answer
        };
        let answer = answer?;
        let text = |name: &str| answer.get(name).and_then(Value::as_str).map(str::to_owned);
        Ok(Deleted {
            tip: text("tip"),
            branch_kept: text("branch_kept"),
        })
    }

    async fn commit(&self, at: &SandboxId, message: &str) -> Result<Snapshot> {
        let gate = self.gate().await?;
        let place = Self::place(&gate, at.as_str()).await?;
        let body = json!({ "message": message });
        let report = gate.post(&below(&place, "snapshot"), &body).await?;
        let report: SnapshotReport = serde_json::from_value(report)?;
        Ok(Snapshot {
            left_out: left_behind(&report),
            commit: report.moved.then_some(report.tip),
        })
    }

    /// Copies something of the worktree in. What it names there stays below it.
    async fn bring(&self, at: &SandboxId, from: &str, to: &str) -> Result<Moved> {
        let root = worktree()?;
        self.enter(at, Purpose::Upload).await?;
        let (backend, at) = (self.backend.clone(), at.clone());
        let (from, to) = (from.to_owned(), PathBuf::from(to));
        let state = self.paths.state_dir.clone();
        let moved = tokio::task::spawn_blocking(move || {
            let within = Within::open(&root)?;
            send(&backend, &at, &to, &BOUNDS, |archive| {
                within.pack(&from, &state, archive, &BOUNDS)
            })
        });
        Ok(counted(moved.await??))
    }

    /// Copies something out, into the worktree.
    async fn take(&self, at: &SandboxId, from: &str, to: &str) -> Result<Moved> {
        let root = worktree()?;
        self.enter(at, Purpose::Download).await?;
        let (backend, at) = (self.backend.clone(), at.clone());
        let (from, to) = (PathBuf::from(from), to.to_owned());
        let moved = tokio::task::spawn_blocking(move || {
            let within = Within::open(&root)?;
            fetch(&backend, &at, &from, &BOUNDS, |archive| {
                within.unpack(archive, &to, &BOUNDS)
            })
        });
        Ok(counted(moved.await??))
    }

    async fn changes(&self, at: &SandboxId, most: usize) -> Result<Changes> {
        let gate = self.gate().await?;
        let place = Self::place(&gate, at.as_str()).await?;
        // Reading a repository blocks.
        tokio::task::spawn_blocking(move || diff(&place, most)).await?
    }
}

/// The operator's files that may be named.
fn worktree() -> Result<PathBuf> {
    let home = place::here().ok_or_else(|| Failure::new(Exit::Usage, NO_REPOSITORY))?;
    Ok(home.root().to_owned())
}

fn counted(moved: sandbox::contract::Moved) -> Moved {
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

/// Whether a path on the operator's side is what is wrong.
fn names_wrongly(error: &TransferError) -> bool {
    match error {
        TransferError::Missing(_) => true,
        TransferError::Refused { reason, .. } => matches!(
            reason,
            Refusal::Absolute
                | Refusal::Climbs
                | Refusal::NoPath
                | Refusal::Link
                | Refusal::Repository
                | Refusal::OurOwn
        ),
        TransferError::Malformed(_)
        | TransferError::Exists(_)
        | TransferError::TooLarge(_)
        | TransferError::TooMany(_)
        | TransferError::System { .. } => false,
    }
}

/// Which failure it is for an agent: what it named wrongly, what is refused, or what broke.
fn told(error: anyhow::Error) -> WorkshopError {
    let sentence = format!("{error:#}");
    let is_taken = matches!(
        error.downcast_ref::<ClientError>(),
        Some(ClientError::Refused { code, .. }) if code == "exists" || code == "branch_exists"
    );
    let transfer = match error.downcast_ref::<SandboxError>() {
        Some(SandboxError::Transfer(transfer)) => Some(transfer),
        _ => error.downcast_ref::<TransferError>(),
    };
    match transfer {
        Some(transfer) if names_wrongly(transfer) => return WorkshopError::Invalid(sentence),
        Some(TransferError::Refused { .. }) => return WorkshopError::Refused(sentence),
        _ => {}
    }
    match exit_of(&error) {
        Exit::Usage | Exit::NotFound => WorkshopError::Invalid(sentence),
        Exit::Exists if is_taken => WorkshopError::Invalid(sentence),
        Exit::Exists | Exit::Denied => WorkshopError::Refused(sentence),
        Exit::Ok
        | Exit::Failed
        | Exit::GateUnreachable
        | Exit::BackendUnavailable
        | Exit::TimedOut
        | Exit::Command(_) => WorkshopError::Failed(sentence),
    }
}

#[async_trait]
impl Workshop for Shop {
    async fn create(&self, name: &str, dirty: bool) -> Result<Sandbox, WorkshopError> {
        self.make(name, dirty).await.map_err(told)
    }

    async fn list(&self) -> Result<Vec<Sandbox>, WorkshopError> {
        self.all().await.map_err(told)
    }

    async fn find(&self, name: &str) -> Result<Sandbox, WorkshopError> {
        let gate = self.gate().await.map_err(told)?;
        Self::place(&gate, name).await.map(shown).map_err(told)
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
        self.tools(at, Purpose::Exec).await?.read(asked).await
    }

    async fn write(&self, at: &SandboxId, asked: &Write) -> Result<Written, WorkshopError> {
        self.tools(at, Purpose::Exec).await?.write(asked).await
    }

    async fn edit(&self, at: &SandboxId, asked: &Edit) -> Result<Edited, WorkshopError> {
        self.tools(at, Purpose::Exec).await?.edit(asked).await
    }

    async fn patch(&self, at: &SandboxId, patch: &str) -> Result<Vec<String>, WorkshopError> {
        self.tools(at, Purpose::Exec).await?.patch(patch).await
    }

    async fn bash(&self, at: &SandboxId, asked: &Bash) -> Result<Ran, WorkshopError> {
        self.tools(at, Purpose::Exec).await?.bash(asked).await
    }

    async fn ls(&self, at: &SandboxId, asked: &Ls) -> Result<Listed, WorkshopError> {
        self.tools(at, Purpose::Exec).await?.ls(asked).await
    }

    async fn glob(&self, at: &SandboxId, asked: &Glob) -> Result<Found, WorkshopError> {
        self.tools(at, Purpose::Exec).await?.glob(asked).await
    }

    async fn grep(&self, at: &SandboxId, asked: &Grep) -> Result<Matches, WorkshopError> {
        self.tools(at, Purpose::Exec).await?.grep(asked).await
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
