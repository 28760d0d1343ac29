//! Manages sandboxes: name, repository, branch, workspace and backend state.
//!
//! ```text
//!            begin         mark_complete
//!   (none) ───────▶ making ───────▶ kept ⇄ paused (state of the backend)
//!                     │               │ mark_for_removal
//!                     │  found at     ▼
//!                     └─────────▶ removing ── remove ──▶ (none)
//!                        a start
//!
//!   rows/<id>.json       written before the sandbox exists, removed after it
//!       /<id>.manifest   the files of the workspace at its last snapshot
//!   sandboxes/<id>/      files of the backend
//!   checkouts/ spares/   files of the git module
//!   checkpoints/<id>/<label>/   a checkpoint's files
//! ```
//!
//! One gate uses a state directory, and only the gate creates and removes sandboxes: unfinished
//! rows at its start were left by a crash. Calls block.

pub mod checkpoints;
mod removal;
pub mod row;

use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use git2::Oid;
use policy::id::SandboxId;

use crate::checkpoint::{self, CheckpointError};
use crate::contract::{
    GatePorts, SandboxBackend, SandboxCommand, SandboxConfig, SandboxError, SandboxLimits,
    SandboxStatus, SystemConfig, Trust, setup,
};
use crate::create_progress::CreateProgress;
use crate::git::checkout_cache::CheckoutCache;
use crate::git::error::GitError;
use crate::git::host_repository::HostRepository;
use crate::git::snapshot::SnapshotBounds;
use crate::git::workspace::WorkspacePlan;
use crate::name::Slug;
use crate::namespace::Namespace;
use crate::parallel;
use crate::worker::{SnapshotReport, SnapshotRequest, SnapshotWorker};
use row::{PublishedPort, RowStage, RowStore, SandboxRow};

/// Maximum bytes of the checkout cache.
const MAX_CHECKOUT_BYTES: u64 = 4 << 30;

/// Maximum number of concurrent status queries.
const MAX_STATUS_QUERIES: usize = 16;

/// The parameters of a new sandbox.
#[derive(Clone, Debug, Default)]
pub struct NewSandbox {
    /// The name as typed.
    pub name: String,
    /// A path in the operator's repository; `None` for an empty workspace.
    pub repository: Option<PathBuf>,
    /// Clone depth; full history if `None`.
    pub depth: Option<u32>,
    /// Whether the operator's uncommitted changes are copied.
    pub dirty: bool,
    /// Environment variables of every process in the sandbox.
    pub environment: Vec<(String, String)>,
    /// Ports of the gate's listeners.
    pub ports: GatePorts,
    /// The resource limits.
    pub limits: SandboxLimits,
    /// The system that the sandbox sees.
    pub system: SystemConfig,
    /// An additional root certificate that the sandbox's programs trust.
    pub trust: Option<Trust>,
    /// The part of the repository's own configuration file that the row stores.
    pub repository_file: Option<serde_json::Value>,
    /// The additional hosts that the row stores.
    pub egress: Option<serde_json::Value>,
    /// The set-up command and its arguments, for [`Manager::set_up`].
    pub setup_command: Option<Vec<String>>,
    /// Receives the progress.
    pub progress: Arc<CreateProgress>,
}

/// An error of a sandbox operation.
#[derive(Debug, thiserror::Error)]
pub enum ManagerError {
    /// The backend failed.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// A git operation failed.
    #[error(transparent)]
    Git(#[from] GitError),
    /// A checkpoint operation failed.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// No checkpoint of that label.
    #[error("sandbox '{name}' has no checkpoint '{label}'; it has {known}")]
    NoCheckpoint {
        /// The sandbox.
        name: Slug,
        /// The requested label.
        label: Slug,
        /// The existing labels.
        known: String,
    },
    /// Deleting would lose work.
    #[error(
        "the branch '{branch}' has {commits} unmerged commit(s); merge them with \
         `palisade merge {name}`, or show them with `palisade diff {name}`"
    )]
    Unmerged {
        /// The sandbox.
        name: Slug,
        /// The branch.
        branch: String,
        /// The number of commits.
        commits: usize,
    },
    /// Deleting would lose work that is not on the branch.
    #[error(
        "sandbox '{name}' has unsaved work: {what}; {fix}{}",
        .discard_option.map(|option| format!(", or use {option} to discard it")).unwrap_or_default()
    )]
    Unsaved {
        /// The sandbox.
        name: Slug,
        /// The unsaved work.
        what: String,
        /// How to save the work.
        fix: String,
        /// The command's option to proceed anyway.
        discard_option: Option<&'static str>,
    },
    /// The repository was moved or removed.
    #[error(
        "the repository of sandbox '{name}' is no longer at '{path}'; if it was moved, move it \
         back or create a link there. `palisade download {name} .` fetches the files; `palisade delete \
         --help` shows how to discard them", path = .path.display()
    )]
    RepositoryGone {
        /// The sandbox.
        name: Slug,
        /// The recorded path.
        path: PathBuf,
    },
    /// The branch was deleted.
    #[error(
        "the branch '{branch}' of sandbox '{name}' is gone; `git -C '{path}' branch {branch} \
         {commit}` creates it again at its first commit; `palisade delete --help` shows how to discard the \
         sandbox", path = .repository.display()
    )]
    BranchGone {
        /// The sandbox.
        name: Slug,
        /// Its branch.
        branch: String,
        /// The repository.
        repository: PathBuf,
        /// The branch's first commit.
        commit: String,
    },
    /// The operation needs a repository.
    #[error("sandbox '{0}' has no repository and therefore no branch")]
    NoRepository(Slug),
}

/// The result of removing a sandbox's branch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BranchRemoval {
    /// The commit of a removed branch.
    pub tip: Option<String>,
    /// Why the branch was kept, if it was.
    pub kept: Option<String>,
}

/// The sandboxes of a state directory.
#[derive(Debug)]
pub struct Manager {
    rows: RowStore,
    backend: Namespace,
    checkouts: CheckoutCache,
    worker: SnapshotWorker,
    /// Held while a name is claimed.
    names: Mutex<()>,
    checkpoints: PathBuf,
}

/// The executable and the arguments of helper processes.
#[derive(Clone, Debug)]
pub struct HelperProgram {
    /// The executable.
    pub path: PathBuf,
    /// Arguments of an init process ([`crate::namespace::launch::init_main`]).
    pub init: Vec<OsString>,
    /// Arguments of a snapshot worker ([`crate::worker::worker_main`]).
    pub worker: Vec<OsString>,
}

impl Manager {
    /// Opens the state directory.
    pub fn open(state: &Path, program: HelperProgram) -> Result<Self, ManagerError> {
        let HelperProgram { path, init, worker } = program;
        Ok(Self {
            rows: RowStore::open(state.join("rows"))?,
            backend: Namespace::new(state.join("sandboxes"), path.clone(), init),
            checkouts: CheckoutCache::open(state, MAX_CHECKOUT_BYTES)?,
            worker: SnapshotWorker::new(path, worker),
            names: Mutex::new(()),
            checkpoints: state.join("checkpoints"),
        })
    }

    /// The backend, for commands and sockets.
    pub fn backend(&self) -> &Namespace {
        &self.backend
    }

    /// Lists the sandboxes, oldest first: complete ones, and those that could not be removed.
    pub fn rows(&self) -> Result<Vec<SandboxRow>, ManagerError> {
        let mut rows = self.rows.read_all()?;
        rows.retain(|row| row.stage != RowStage::Creating);
        Ok(rows)
    }

    /// Reads the row of a complete sandbox.
    pub fn row(&self, id: &SandboxId) -> Result<SandboxRow, ManagerError> {
        match self.rows.read(id)? {
            row if row.stage == RowStage::Complete => Ok(row),
            row => Err(SandboxError::NotFound(row.name.to_string()).into()),
        }
    }

    /// Queries the status of each row, in order. A sandbox that does not answer delays few of the
    /// others.
    pub fn statuses(&self, rows: &[SandboxRow]) -> Vec<SandboxStatus> {
        parallel::map_concurrent(rows, MAX_STATUS_QUERIES, |row| match row.stage {
            RowStage::Complete => self.status(&row.id),
            RowStage::Creating | RowStage::Removing => {
                SandboxStatus::Error("it could not be removed; delete it again".to_owned())
            }
        })
    }

    /// Queries a sandbox's status.
    pub fn status(&self, id: &SandboxId) -> SandboxStatus {
        self.backend.status(id)
    }

    /// Returns the rows that a crash left unfinished; each needs [`Manager::remove`]. Also cleans
    /// up the backend.
    pub fn unfinished(&self) -> Result<Vec<SandboxRow>, ManagerError> {
        let mut rows = self.rows.read_all()?;
        for row in &rows {
            let checkpoints = self.checkpoints.join(row.id.as_str());
            checkpoint::clear_unfinished(&checkpoints, &|path| self.backend.remove_files(path));
        }
        rows.retain(|row| row.stage != RowStage::Complete);
        for id in self.backend.cleanup()? {
            tracing::info!(sandbox = %id, "sandbox manager removed an incomplete sandbox");
        }
        for row in &rows {
            self.break_lock(row);
        }
        Ok(rows)
    }

    /// Removes a stale ref lock: no process works on the branch of an unfinished sandbox.
    fn break_lock(&self, row: &SandboxRow) {
        let Ok(host_repository) = repository_of(row) else {
            return;
        };
        if let Err(error) = host_repository.break_lock(&row.name) {
            tracing::warn!(sandbox = %row.id, %error, "sandbox manager could not remove a stale branch lock");
        }
    }

    /// Creates a sandbox: branch, backend state, workspace. A failure is rolled back; a success
    /// needs [`Manager::mark_complete`].
    pub fn begin(&self, wanted: &NewSandbox) -> Result<SandboxRow, ManagerError> {
        let name = Slug::from_name(&wanted.name).map_err(SandboxError::from)?;
        let host_repository = wanted.repository.as_deref().map(HostRepository::discover);
        let host_repository = host_repository.transpose()?;
        let head = host_repository
            .as_ref()
            .map(HostRepository::head)
            .transpose()?;
        let row = self.claim(SandboxRow {
            id: new_id(&name)?,
            // `components` drops the trailing slash.
            repository: host_repository
                .as_ref()
                .map(|host_repository| host_repository.root().components().collect()),
            common: host_repository.as_ref().map(HostRepository::common_dir),
            branch_made: false,
            base: head.as_ref().map(|head| head.commit.to_string()),
            start: head.as_ref().map(|head| head.commit.to_string()),
            created: now_millis(),
            stage: RowStage::Creating,
            published: Vec::new(),
            repository_file: wanted.repository_file.clone(),
            egress: wanted.egress.clone(),
            name,
        })?;
        let start = host_repository.as_ref().zip(head.map(|head| head.commit));
        let built = self.build(&row, start, wanted);
        self.undo_on_error(row, built)
    }

    /// Rolls back a failed creation. If the rollback fails, the row stays and is removed at the
    /// next start.
    fn undo_on_error(
        &self,
        row: SandboxRow,
        made: Result<(), ManagerError>,
    ) -> Result<SandboxRow, ManagerError> {
        let Err(error) = made else {
            return Ok(row);
        };
        if let Err(left) = self.remove(&row.id) {
            tracing::warn!(sandbox = %row.id, error = %left, "sandbox manager could not roll back a failed create");
        }
        Err(error)
    }

    /// Writes the row of a new sandbox; fails if its name is in use.
    fn claim(&self, row: SandboxRow) -> Result<SandboxRow, ManagerError> {
        let _claiming = self.lock_names();
        if self
            .rows
            .read_all()?
            .iter()
            .any(|other| other.has_same_name(&row))
        {
            return Err(SandboxError::Exists(row.name.to_string()).into());
        }
        self.rows.write(&row)?;
        Ok(row)
    }

    fn lock_names(&self) -> MutexGuard<'_, ()> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates the branch, the sandbox in the backend, and the workspace. `start` is the repository
    /// with its first commit.
    fn build(
        &self,
        row: &SandboxRow,
        start: Option<(&HostRepository, Oid)>,
        wanted: &NewSandbox,
    ) -> Result<(), ManagerError> {
        if let Some((host_repository, commit)) = start {
            self.make_branch(row, host_repository, commit)?;
        }
        let plan = start.map(|(_, commit)| WorkspacePlan {
            commit,
            depth: wanted.depth,
            dirty: wanted.dirty,
        });
        let spare = plan
            .as_ref()
            .and_then(|plan| self.checkouts.spare_owner(plan));
        let config = SandboxConfig {
            id: row.id.clone(),
            name: row.name.clone(),
            environment: wanted.environment.clone(),
            ports: wanted.ports.clone(),
            limits: wanted.limits,
            system: wanted.system.clone(),
            trust: wanted.trust.clone(),
            setup_command: wanted.setup_command.clone(),
        };
        self.backend.create_for(&config, spare)?;
        if let (Some((host_repository, _)), Some(plan)) = (start, &plan) {
            self.fill(row, host_repository, plan, &wanted.progress)?;
        }
        Ok(())
    }

    /// Fills the workspace. With subordinate ids, the workspace is created in a staging directory
    /// as the operator and then moved by a process with those ids.
    fn fill(
        &self,
        row: &SandboxRow,
        host_repository: &HostRepository,
        plan: &WorkspacePlan,
        progress: &CreateProgress,
    ) -> Result<(), ManagerError> {
        let has_subids = self.backend.subid_map(&[&row.id])?.is_some();
        let (to, owner) = if has_subids {
            (self.backend.staging_dir(&row.id), None)
        } else {
            let owner = self.backend.owner(&row.id)?;
            (self.backend.workspace(&row.id), owner)
        };
        let made = self.checkouts.create_workspace_with_progress(
            host_repository,
            plan,
            &row.name,
            &to,
            owner,
            progress,
        );
        let manifest = self.rows.manifest(&row.id);
        made?.save(&manifest)?;
        if has_subids {
            self.backend.install_workspace(&row.id, &manifest)?;
        }
        Ok(())
    }

    fn make_branch(
        &self,
        row: &SandboxRow,
        host_repository: &HostRepository,
        commit: Oid,
    ) -> Result<(), ManagerError> {
        host_repository
            .create_branch(&row.name, commit, &creation_reason(row))
            .map_err(|error| {
                // The branch existed before: rolling this row back must not remove it.
                let without = SandboxRow {
                    repository: None,
                    ..row.clone()
                };
                match self.rows.write(&without) {
                    Ok(()) => ManagerError::from(error),
                    Err(unwritten) => unwritten,
                }
            })?;
        self.rows.write(&SandboxRow {
            branch_made: true,
            ..row.clone()
        })
    }

    /// Resumes a paused sandbox, or restarts one whose processes are gone. A restarted sandbox
    /// trusts `trust`.
    pub fn resume(&self, id: &SandboxId, trust: &Trust) -> Result<(), ManagerError> {
        match self.status(id) {
            SandboxStatus::Error(_) | SandboxStatus::Unknown => {
                Ok(self.backend.restart(id, trust)?)
            }
            SandboxStatus::Active | SandboxStatus::Paused | SandboxStatus::Missing => {
                Ok(self.backend.resume(id)?)
            }
        }
    }

    /// Runs the set-up command of a new sandbox whose listeners are open, if it has one.
    pub fn set_up(&self, id: &SandboxId, timeout: Duration) -> Result<(), ManagerError> {
        match self.backend.config(id)?.setup_command {
            Some(command) => Ok(setup::run(&self.backend, id, &command, timeout)?),
            None => Ok(()),
        }
    }

    /// Marks a new sandbox as complete.
    pub fn mark_complete(&self, row: SandboxRow) -> Result<SandboxRow, ManagerError> {
        let row = SandboxRow {
            stage: RowStage::Complete,
            ..row
        };
        self.rows.write(&row)?;
        Ok(row)
    }

    /// Reads a sandbox's row in any stage.
    pub fn any_row(&self, id: &SandboxId) -> Result<SandboxRow, ManagerError> {
        self.rows.read(id)
    }

    /// Stores the published ports of a sandbox.
    pub fn publish(
        &self,
        id: &SandboxId,
        published: Vec<PublishedPort>,
    ) -> Result<SandboxRow, ManagerError> {
        let row = SandboxRow {
            published,
            ..self.row(id)?
        };
        self.rows.write(&row)?;
        Ok(row)
    }

    /// Prepares a spare workspace for the next sandbox from the same commit.
    pub fn prepare_spare(&self, row: &SandboxRow, depth: Option<u32>) -> Result<(), ManagerError> {
        let (Some(repository), Some(base)) = (&row.repository, &row.base) else {
            return Ok(());
        };
        let host_repository = HostRepository::discover(repository)?;
        let commit = parse_commit(base)?;
        let dirty = false;
        let plan = WorkspacePlan {
            commit,
            depth,
            dirty,
        };
        let owner = self.backend.free_owner(&self.checkouts.spare_owners());
        Ok(self
            .checkouts
            .prepare_spare(&host_repository, &plan, owner)?)
    }

    /// Commits the workspace and imports the agent's own commits.
    pub fn snapshot(
        &self,
        id: &SandboxId,
        message: &str,
        bounds: &SnapshotBounds,
    ) -> Result<SnapshotReport, ManagerError> {
        let row = self.row(id)?;
        let Some(base) = &row.base else {
            return Err(ManagerError::NoRepository(row.name));
        };
        let host_repository = repository_of(&row)?;
        if let Err(GitError::NoBranch(branch)) = host_repository.tip(&row.name) {
            return Err(ManagerError::BranchGone {
                repository: host_repository.root().to_owned(),
                commit: row.start.unwrap_or_default(),
                name: row.name,
                branch,
            });
        }
        let request = SnapshotRequest {
            repository: host_repository.root().to_owned(),
            slug: row.name.clone(),
            workspace: self.backend.workspace(id),
            manifest: self.rows.manifest(id),
            message: message.to_owned(),
            bounds: bounds.clone(),
        };
        // Git runs inside the sandbox as the agent. A paused or stopped sandbox runs no git, but
        // its files are read nevertheless.
        let bundle = SandboxCommand {
            environment: vec![("GIT_OPTIONAL_LOCKS".into(), "0".into())],
            ..SandboxCommand::new([
                "git",
                "bundle",
                "create",
                "-q",
                "-",
                "HEAD",
                &format!("^{base}"),
            ])
        };
        let running = match self.backend.start(id, &bundle, None) {
            Ok(running) => Some(running),
            Err(
                SandboxError::Paused(_)
                | SandboxError::Stopped { .. }
                | SandboxError::NotResponding(_)
                | SandboxError::Start { .. },
            ) => None,
            Err(other) => return Err(other.into()),
        };
        let output = running
            .as_ref()
            .and_then(|running| running.stdio().get(1))
            .map(|end| end.try_clone())
            .transpose()
            .map_err(SandboxError::system("reading the agent's commits"))?;
        // The command is killed when it is dropped at the end, because an agent's git may never
        // exit.
        let subid_map = match self.backend.subid_map(&[id]) {
            // An unreadable record must not prevent the snapshot.
            Err(SandboxError::System { .. }) => None,
            other => other?,
        };
        let worker = self.worker.clone().with_subid_map(subid_map);
        Ok(worker.snapshot(&request, output)?)
    }
}

/// Opens the repository of a sandbox. An enclosing repository of the recorded path does not count;
/// if a worktree was removed, the main repository is opened.
fn repository_of(row: &SandboxRow) -> Result<HostRepository, ManagerError> {
    let Some(repository) = &row.repository else {
        return Err(ManagerError::NoRepository(row.name.clone()));
    };
    let is_recorded = |host_repository: &HostRepository| match &row.common {
        // The recorded path may be a symbolic link now.
        Some(common) => {
            std::fs::canonicalize(common).is_ok_and(|now| now == host_repository.common_dir())
        }
        None => host_repository
            .root()
            .components()
            .eq(repository.components()),
    };
    for path in [Some(repository), row.common.as_ref()]
        .into_iter()
        .flatten()
    {
        match HostRepository::discover(path) {
            Ok(host_repository) if is_recorded(&host_repository) => return Ok(host_repository),
            Ok(_) | Err(GitError::NotARepository(_)) => {}
            Err(other) => return Err(other.into()),
        }
    }
    Err(ManagerError::RepositoryGone {
        name: row.name.clone(),
        path: repository.clone(),
    })
}

/// The reflog message of a branch that was created for a sandbox.
fn creation_reason(row: &SandboxRow) -> String {
    format!("palisade: create sandbox {}", row.id)
}

fn parse_commit(text: &str) -> Result<Oid, ManagerError> {
    Oid::from_str(text).map_err(|source| {
        let doing = format!("read the commit '{text}'");
        GitError::Git { doing, source }.into()
    })
}

fn now_millis() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .ok()
        .and_then(|since| u64::try_from(since.as_millis()).ok())
        .unwrap_or_default()
}

/// Creates an id that no earlier sandbox had, because audit records of deleted sandboxes remain.
fn new_id(name: &Slug) -> Result<SandboxId, ManagerError> {
    let mut tail = [0; 5];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut random| random.read_exact(&mut tail))
        .map_err(SandboxError::system("choosing an id"))?;
    let tail: String = tail.iter().map(|byte| format!("{byte:02x}")).collect();
    SandboxId::parse(&format!("{name}-{tail}"))
        .map_err(|_| SandboxError::NotFound(name.to_string()).into())
}
