//! Sandboxes as an operator knows them: a name in a repository, with a branch, a workspace
//! and a place to run.
//!
//! ```text
//!            begin            keep
//!   (none) ───────▶ making ───────▶ kept ⇄ paused (the backend's own)
//!                     │               │ condemn
//!                     │  found at     ▼
//!                     └─────────▶ removing ── remove ──▶ (none)
//!                        a start
//!
//!   rows/<id>.json       written before anything it describes exists, gone after all of it
//!       /<id>.manifest   what the workspace held at its last snapshot
//!   sandboxes/<id>/      the backend's own
//!   checkouts/ spares/   git's
//!   checkpoints/<id>/<label>/   files of a sandbox as of then
//! ```
//!
//! One gate uses a state directory, and only the gate makes and removes: what it finds
//! unfinished when it starts is what a crash left. Calls block.

pub mod checkpoints;
mod ending;
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
    Command, Limits, Ports, Sandbox, SandboxConfig, SandboxError, SandboxStatus, System, Trust,
    setup,
};
use crate::git::checkout::Checkouts;
use crate::git::error::GitError;
use crate::git::home::Home;
use crate::git::snapshot::Bounds;
use crate::git::workspace::Plan;
use crate::name::Slug;
use crate::namespace::Namespace;
use crate::parallel;
use crate::progress::Progress;
use crate::worker::{SnapshotOrder, SnapshotReport, Worker};
use row::{Published, Row, Rows, Stage};

/// The most that checkouts may take of the disk.
const CHECKOUTS: u64 = 4 << 30;

/// How many sandboxes are asked how they are at the same time.
const ASKED_AT_ONCE: usize = 16;

/// What a new sandbox is to be.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// What to call it, as typed.
    pub name: String,
    /// A path in the operator's repository; none for an empty workspace.
    pub repository: Option<PathBuf>,
    /// How many generations of history come along; all of them if not said.
    pub depth: Option<u32>,
    /// Whether uncommitted changes come along.
    pub dirty: bool,
    /// Variables of every process inside.
    pub environment: Vec<(String, String)>,
    /// Ports on which the gate answers.
    pub ports: Ports,
    /// What it may use.
    pub limits: Limits,
    /// What it sees of the system.
    pub system: System,
    /// Whom its programs trust beside those whom the system does.
    pub trust: Option<Trust>,
    /// What its row shall keep of the repository's own file.
    pub repository_file: Option<serde_json::Value>,
    /// A program and its arguments, for [`Manager::set_up`].
    pub setup_command: Option<Vec<String>>,
    /// Hears how far it is.
    pub progress: Arc<Progress>,
}

/// Why something could not be done.
#[derive(Debug, thiserror::Error)]
pub enum ManagerError {
    /// The place to run.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// The branch or the workspace.
    #[error(transparent)]
    Git(#[from] GitError),
    /// A checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// No checkpoint of that label.
    #[error("sandbox '{name}' has no checkpoint '{label}'; it has {known}")]
    NoCheckpoint {
        /// The sandbox.
        name: Slug,
        /// What was asked for.
        label: Slug,
        /// What there is.
        known: String,
    },
    /// Deleting would lose work.
    #[error(
        "the branch '{branch}' holds {commits} commit(s) that are nowhere else; bring them to \
         your branch with `palisade merge {name}`, or look at them with `palisade diff {name}`"
    )]
    Unmerged {
        /// The sandbox.
        name: Slug,
        /// The branch.
        branch: String,
        /// How many.
        commits: usize,
    },
    /// Deleting would lose what is not on the branch.
    #[error(
        "sandbox '{name}' holds work that is nowhere else: {what}; {fix}{}",
        .way_out.map(|option| format!(", or use {option} to lose it")).unwrap_or_default()
    )]
    Unsaved {
        /// The sandbox.
        name: Slug,
        /// What.
        what: String,
        /// How to keep it.
        fix: String,
        /// The option of the command that does it all the same.
        way_out: Option<&'static str>,
    },
    /// The repository is not where it was.
    #[error(
        "the repository of sandbox '{name}' is no longer at '{path}'; if it was moved, move it \
         back or put a link there. `palisade download {name} .` fetches the files; `palisade delete \
         --help` says how to discard them", path = .path.display()
    )]
    RepositoryGone {
        /// The sandbox.
        name: Slug,
        /// Where it was.
        path: PathBuf,
    },
    /// Somebody deleted the branch.
    #[error(
        "the branch '{branch}' of sandbox '{name}' is gone; `git -C '{path}' branch {branch} \
         {commit}` makes it anew where it began; `palisade delete --help` says how to discard the \
         sandbox", path = .repository.display()
    )]
    BranchGone {
        /// The sandbox.
        name: Slug,
        /// Its branch.
        branch: String,
        /// Where it should be.
        repository: PathBuf,
        /// Where it began.
        commit: String,
    },
    /// Something that needs a repository.
    #[error("sandbox '{0}' works on no repository: it has no branch")]
    NoRepository(Slug),
}

/// What became of a sandbox's branch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Where it pointed, where it is gone now.
    pub tip: Option<String>,
    /// Why it is still there, where it is.
    pub kept: Option<String>,
}

/// The sandboxes of a state directory.
#[derive(Debug)]
pub struct Manager {
    rows: Rows,
    backend: Namespace,
    checkouts: Checkouts,
    worker: Worker,
    /// Held while a name is claimed.
    names: Mutex<()>,
    checkpoints: PathBuf,
}

/// How this program is started again for its hidden parts.
#[derive(Clone, Debug)]
pub struct Program {
    /// The executable.
    pub path: PathBuf,
    /// The words that make it an init ([`crate::namespace::launch::init_main`]).
    pub init: Vec<OsString>,
    /// The words that make it a worker ([`crate::worker::worker_main`]).
    pub worker: Vec<OsString>,
}

impl Manager {
    /// Opens the sandboxes in `state`.
    pub fn open(state: &Path, program: Program) -> Result<Self, ManagerError> {
        let Program { path, init, worker } = program;
        Ok(Self {
            rows: Rows::open(state.join("rows"))?,
            backend: Namespace::new(state.join("sandboxes"), path.clone(), init),
            checkouts: Checkouts::open(state, CHECKOUTS)?,
            worker: Worker::new(path, worker),
            names: Mutex::new(()),
            checkpoints: state.join("checkpoints"),
        })
    }

    /// The backend itself, for commands and sockets.
    pub fn backend(&self) -> &Namespace {
        &self.backend
    }

    /// Every sandbox, oldest first: those that are kept, and those that could not be removed.
    pub fn rows(&self) -> Result<Vec<Row>, ManagerError> {
        let mut rows = self.rows.all()?;
        rows.retain(|row| row.stage != Stage::Making);
        Ok(rows)
    }

    /// One sandbox that is kept.
    pub fn row(&self, id: &SandboxId) -> Result<Row, ManagerError> {
        match self.rows.read(id)? {
            row if row.stage == Stage::Kept => Ok(row),
            row => Err(SandboxError::NotFound(row.name.to_string()).into()),
        }
    }

    /// How each of these is, in their order. A silent one holds up few of the others.
    pub fn statuses(&self, rows: &[Row]) -> Vec<SandboxStatus> {
        parallel::ask_all(rows, ASKED_AT_ONCE, |row| match row.stage {
            Stage::Kept => self.status(&row.id),
            Stage::Making | Stage::Removing => {
                SandboxStatus::Error("it could not be removed; delete it again".to_owned())
            }
        })
    }

    /// How a sandbox is.
    pub fn status(&self, id: &SandboxId) -> SandboxStatus {
        self.backend.status(id)
    }

    /// What a crash left: rows that were being made or removed. Each wants
    /// [`Manager::remove`]. Clears up after the backend as well.
    pub fn unfinished(&self) -> Result<Vec<Row>, ManagerError> {
        let mut rows = self.rows.all()?;
        for row in &rows {
            let checkpoints = self.checkpoints.join(row.id.as_str());
            checkpoint::clear_unfinished(&checkpoints, &|path| self.backend.remove_files(path));
        }
        rows.retain(|row| row.stage != Stage::Kept);
        for id in self.backend.cleanup()? {
            tracing::info!(sandbox = %id, "a half-made sandbox was cleared away");
        }
        for row in &rows {
            self.break_lock(row);
        }
        Ok(rows)
    }

    /// The branch of a sandbox that was being made or removed is nobody's to hold now.
    fn break_lock(&self, row: &Row) {
        let Ok(home) = home_of(row) else {
            return;
        };
        if let Err(error) = home.break_lock(&row.name) {
            tracing::warn!(sandbox = %row.id, %error, "a branch may still be locked");
        }
    }

    /// Makes a sandbox: branch, place, workspace. What fails leaves nothing behind; what
    /// succeeds wants [`Manager::keep`].
    pub fn begin(&self, wanted: &Wanted) -> Result<Row, ManagerError> {
        let name = Slug::from_name(&wanted.name).map_err(SandboxError::from)?;
        let home = wanted.repository.as_deref().map(Home::discover);
        let home = home.transpose()?;
        let head = home.as_ref().map(Home::head).transpose()?;
        let row = self.claim(Row {
            id: new_id(&name)?,
            // Without the slash at its end.
            repository: home.as_ref().map(|home| home.root().components().collect()),
            common: home.as_ref().map(Home::common),
            branch_made: false,
            base: head.as_ref().map(|head| head.commit.to_string()),
            start: head.as_ref().map(|head| head.commit.to_string()),
            created: now(),
            stage: Stage::Making,
            published: Vec::new(),
            repository_file: wanted.repository_file.clone(),
            name,
        })?;
        let start = home.as_ref().zip(head.map(|head| head.commit));
        let built = self.build(&row, start, wanted);
        self.or_undo(row, built)
    }

    /// Undoes a sandbox that was not made. What cannot be undone now is on record, and is at
    /// the next start.
    fn or_undo(&self, row: Row, made: Result<(), ManagerError>) -> Result<Row, ManagerError> {
        let Err(error) = made else {
            return Ok(row);
        };
        if let Err(left) = self.remove(&row.id) {
            tracing::warn!(sandbox = %row.id, error = %left, "a failed create was not undone");
        }
        Err(error)
    }

    /// Writes the row of a new sandbox, unless its name is taken.
    fn claim(&self, row: Row) -> Result<Row, ManagerError> {
        let _claiming = self.claiming();
        if self.rows.all()?.iter().any(|other| other.is_twin_of(&row)) {
            return Err(SandboxError::Exists(row.name.to_string()).into());
        }
        self.rows.write(&row)?;
        Ok(row)
    }

    fn claiming(&self) -> MutexGuard<'_, ()> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn build(
        &self,
        row: &Row,
        start: Option<(&Home, Oid)>,
        wanted: &Wanted,
    ) -> Result<(), ManagerError> {
        if let Some((home, commit)) = start {
            self.make_branch(row, home, commit)?;
        }
        let plan = start.map(|(_, commit)| Plan {
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
        if let (Some((home, _)), Some(plan)) = (start, &plan) {
            self.fill(row, home, plan, &wanted.progress)?;
        }
        Ok(())
    }

    /// Fills the workspace. Where its ids are lent, beside it, as the operator's: git's work
    /// is done by us, and giving it away by who can.
    fn fill(
        &self,
        row: &Row,
        home: &Home,
        plan: &Plan,
        progress: &Progress,
    ) -> Result<(), ManagerError> {
        let is_lent = self.backend.loan(&[&row.id])?.is_some();
        let (to, owner) = if is_lent {
            (self.backend.staging(&row.id), None)
        } else {
            let owner = self.backend.owner(&row.id)?;
            (self.backend.workspace(&row.id), owner)
        };
        let made = self
            .checkouts
            .create_watched(home, plan, &row.name, &to, owner, progress);
        let manifest = self.rows.manifest(&row.id);
        made?.save(&manifest)?;
        if is_lent {
            self.backend.settle(&row.id, &manifest)?;
        }
        Ok(())
    }

    fn make_branch(&self, row: &Row, home: &Home, commit: Oid) -> Result<(), ManagerError> {
        home.create_branch(&row.name, commit, &made_for(row))
            .map_err(|error| {
                // The branch is somebody else's: undoing this row must not touch it.
                let without = Row {
                    repository: None,
                    ..row.clone()
                };
                match self.rows.write(&without) {
                    Ok(()) => ManagerError::from(error),
                    Err(unwritten) => unwritten,
                }
            })?;
        self.rows.write(&Row {
            branch_made: true,
            ..row.clone()
        })
    }

    /// Lets a sandbox go on: one that stands still, and one whose processes are gone. If it
    /// starts again, it trusts `trust`.
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

    /// Runs the set-up command of a sandbox that was begun and is served, if it has one.
    pub fn set_up(&self, id: &SandboxId, timeout: Duration) -> Result<(), ManagerError> {
        match self.backend.config(id)?.setup_command {
            Some(command) => Ok(setup::run(&self.backend, id, &command, timeout)?),
            None => Ok(()),
        }
    }

    /// Declares a sandbox that was begun to be whole.
    pub fn keep(&self, row: Row) -> Result<Row, ManagerError> {
        let row = Row {
            stage: Stage::Kept,
            ..row
        };
        self.rows.write(&row)?;
        Ok(row)
    }

    /// One sandbox, whatever its stage.
    pub fn any_row(&self, id: &SandboxId) -> Result<Row, ManagerError> {
        self.rows.read(id)
    }

    /// Writes down which ports of the host lead inside.
    pub fn publish(&self, id: &SandboxId, published: Vec<Published>) -> Result<Row, ManagerError> {
        let row = Row {
            published,
            ..self.row(id)?
        };
        self.rows.write(&row)?;
        Ok(row)
    }

    /// Prepares the workspace of the next sandbox from the same commit.
    pub fn prepare_spare(&self, row: &Row, depth: Option<u32>) -> Result<(), ManagerError> {
        let (Some(repository), Some(base)) = (&row.repository, &row.base) else {
            return Ok(());
        };
        let home = Home::discover(repository)?;
        let commit = commit_of(base)?;
        let dirty = false;
        let plan = Plan {
            commit,
            depth,
            dirty,
        };
        let owner = self.backend.free_owner(&self.checkouts.spare_owners());
        Ok(self.checkouts.prepare_spare(&home, &plan, owner)?)
    }

    /// Commits the workspace as it is, and the agent's own commits, to the branch.
    pub fn snapshot(
        &self,
        id: &SandboxId,
        message: &str,
        bounds: &Bounds,
    ) -> Result<SnapshotReport, ManagerError> {
        let row = self.row(id)?;
        let Some(base) = &row.base else {
            return Err(ManagerError::NoRepository(row.name));
        };
        let home = home_of(&row)?;
        if let Err(GitError::NoBranch(branch)) = home.tip(&row.name) {
            return Err(ManagerError::BranchGone {
                repository: home.root().to_owned(),
                commit: row.start.unwrap_or_default(),
                name: row.name,
                branch,
            });
        }
        let order = SnapshotOrder {
            repository: home.root().to_owned(),
            slug: row.name.clone(),
            workspace: self.backend.workspace(id),
            manifest: self.rows.manifest(id),
            message: message.to_owned(),
            bounds: bounds.clone(),
        };
        // Git runs inside, as the agent. A sandbox that stands still, or was stopped for what
        // it takes, runs no git, and its files are read all the same.
        let bundle = Command {
            environment: vec![("GIT_OPTIONAL_LOCKS".into(), "0".into())],
            ..Command::new([
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
                | SandboxError::Silent(_)
                | SandboxError::Start { .. },
            ) => None,
            Err(other) => return Err(other.into()),
        };
        let output = running
            .as_ref()
            .and_then(|running| running.ends().get(1))
            .map(|end| end.try_clone())
            .transpose()
            .map_err(SandboxError::system("reading the agent's commits"))?;
        // Dropped afterwards, the command is killed: an agent's git may never end.
        let loan = match self.backend.loan(&[id]) {
            // A record that cannot be read keeps nobody's work from coming home.
            Err(SandboxError::System { .. }) => None,
            other => other?,
        };
        let worker = self.worker.clone().with_loan(loan);
        Ok(worker.snapshot(&order, output)?)
    }
}

/// The repository of a sandbox. One further up that holds the place where it was is another;
/// a worktree that is gone has left the repository itself where it is.
fn home_of(row: &Row) -> Result<Home, ManagerError> {
    let Some(repository) = &row.repository else {
        return Err(ManagerError::NoRepository(row.name.clone()));
    };
    let is_it = |home: &Home| match &row.common {
        // By way of the link that may be where it was.
        Some(common) => std::fs::canonicalize(common).is_ok_and(|now| now == home.common()),
        None => home.root().components().eq(repository.components()),
    };
    for path in [Some(repository), row.common.as_ref()]
        .into_iter()
        .flatten()
    {
        match Home::discover(path) {
            Ok(home) if is_it(&home) => return Ok(home),
            Ok(_) | Err(GitError::NotARepository(_)) => {}
            Err(other) => return Err(other.into()),
        }
    }
    Err(ManagerError::RepositoryGone {
        name: row.name.clone(),
        path: repository.clone(),
    })
}

/// What the log of a branch says that a sandbox was made with.
fn made_for(row: &Row) -> String {
    format!("palisade: create sandbox {}", row.id)
}

fn commit_of(text: &str) -> Result<Oid, ManagerError> {
    Oid::from_str(text).map_err(|source| {
        let doing = format!("read the commit '{text}'");
        GitError::Git { doing, source }.into()
    })
}

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .ok()
        .and_then(|since| u64::try_from(since.as_millis()).ok())
        .unwrap_or_default()
}

/// A name that no sandbox ever had: audit records outlive the sandbox.
fn new_id(name: &Slug) -> Result<SandboxId, ManagerError> {
    let mut tail = [0; 5];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut random| random.read_exact(&mut tail))
        .map_err(SandboxError::system("choosing an id"))?;
    let tail: String = tail.iter().map(|byte| format!("{byte:02x}")).collect();
    SandboxId::parse(&format!("{name}-{tail}"))
        .map_err(|_| SandboxError::NotFound(name.to_string()).into())
}
