//! Checkpoints of a sandbox: saved under a label, restored, or forked.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use policy::id::SandboxId;
use serde::Serialize;

use super::row::{RowStage, SandboxRow};
use super::{Manager, ManagerError, new_id, now_millis, parse_commit, repository_of};
use crate::checkpoint::{self, CopySummary};
use crate::contract::{SandboxBackend, SandboxConfig, SandboxError, SandboxStatus, Trust};
use crate::git::host_repository::HostRepository;
use crate::name::Slug;

/// An existing checkpoint.
#[derive(Clone, Debug, Serialize)]
pub struct Checkpoint {
    /// The label.
    pub label: Slug,
    /// The time of its creation, in milliseconds since 1970.
    pub created: u64,
}

impl Manager {
    /// Lists the checkpoints of a sandbox, oldest first.
    pub fn checkpoints(&self, id: &SandboxId) -> Result<Vec<Checkpoint>, ManagerError> {
        self.row(id)?;
        let entries = match fs::read_dir(self.checkpoints.join(id.as_str())) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(SandboxError::system("listing checkpoints"))?,
        };
        let mut all: Vec<Checkpoint> = entries
            .flatten()
            .filter_map(|entry| {
                let label = Slug::try_from(entry.file_name().into_string().ok()?).ok()?;
                let made = entry.metadata().ok()?.modified().ok()?;
                let since = made.duration_since(std::time::UNIX_EPOCH).ok()?;
                let created = u64::try_from(since.as_millis()).ok()?;
                Some(Checkpoint { label, created })
            })
            .collect();
        all.sort_by(|a, b| (a.created, &a.label).cmp(&(b.created, &b.label)));
        Ok(all)
    }

    /// Saves the files of a sandbox. The sandbox is paused while its files are copied.
    pub fn checkpoint(&self, id: &SandboxId, label: &str) -> Result<CopySummary, ManagerError> {
        let to = self.checkpoint_dir(id, &parse_label(label)?)?;
        let parent = self.checkpoints.join(id.as_str());
        create_private_directory(&self.checkpoints)
            .and_then(|()| create_private_directory(&parent))
            .map_err(SandboxError::system("making the directory of checkpoints"))?;
        self.while_paused(id, || Ok(self.backend.save(id, &to)?))
    }

    /// Replaces a sandbox's files by those of a checkpoint. The sandbox's processes are killed, and
    /// it restarts with `trust`.
    pub fn restore(&self, id: &SandboxId, label: &str, trust: &Trust) -> Result<(), ManagerError> {
        let from = self.find_checkpoint(id, label)?;
        self.backend.replace(id, trust, |tree, first| {
            self.backend.unpack(id, &from, tree, first)?;
            Ok::<(), ManagerError>(())
        })
    }

    /// Returns the directory of a checkpoint.
    pub fn find_checkpoint(&self, id: &SandboxId, label: &str) -> Result<PathBuf, ManagerError> {
        let label = parse_label(label)?;
        let from = self.checkpoint_dir(id, &label)?;
        if !from.is_dir() {
            let known = self.checkpoints(id)?;
            let known: Vec<&str> = known
                .iter()
                .map(|checkpoint| checkpoint.label.as_str())
                .collect();
            return Err(ManagerError::NoCheckpoint {
                name: self.row(id)?.name,
                label,
                known: if known.is_empty() {
                    "none".to_owned()
                } else {
                    known.join(", ")
                },
            });
        }
        Ok(from)
    }

    /// Creates a sandbox with a copy of another sandbox's files and branch. As after
    /// [`Manager::begin`], the result needs [`Manager::mark_complete`].
    pub fn fork(
        &self,
        id: &SandboxId,
        name: &str,
        trust: &Trust,
    ) -> Result<SandboxRow, ManagerError> {
        let name = Slug::from_name(name).map_err(SandboxError::from)?;
        let source = self.row(id)?;
        let host_repository = source.repository.as_ref().map(|_| repository_of(&source));
        let host_repository = host_repository.transpose()?;
        let tip = host_repository
            .as_ref()
            .map(|host_repository| host_repository.tip(&source.name))
            .transpose()?;
        let row = self.claim(SandboxRow {
            id: new_id(&name)?,
            name,
            start: tip.map(|tip| tip.to_string()),
            created: now_millis(),
            stage: RowStage::Creating,
            branch_made: false,
            published: Vec::new(),
            ..source.clone()
        })?;
        let made = self.build_fork(&source, &row, host_repository.as_ref(), trust);
        self.undo_on_error(row, made)
    }

    fn build_fork(
        &self,
        source: &SandboxRow,
        row: &SandboxRow,
        host_repository: Option<&HostRepository>,
        trust: &Trust,
    ) -> Result<(), ManagerError> {
        if let (Some(host_repository), Some(start)) = (host_repository, &row.start) {
            self.make_branch(row, host_repository, parse_commit(start)?)?;
        }
        let config = SandboxConfig {
            id: row.id.clone(),
            name: row.name.clone(),
            trust: Some(trust.clone()),
            ..self.backend.config(&source.id)?
        };
        self.while_paused(&source.id, || {
            self.backend.create_from(&config, |tree, first| {
                self.backend.copy_tree(&source.id, &row.id, tree, first)?;
                Ok::<(), ManagerError>(())
            })
        })?;
        // The copies have other inodes, so the next snapshot reads all files and updates the
        // manifest.
        let manifest = self.rows.manifest(&source.id);
        match fs::copy(manifest, self.rows.manifest(&row.id)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(SandboxError::system("copying the manifest")(error).into())
            }
            _ => Ok(()),
        }
    }

    /// Calls `work` while the sandbox is paused.
    fn while_paused<T>(
        &self,
        id: &SandboxId,
        work: impl FnOnce() -> Result<T, ManagerError>,
    ) -> Result<T, ManagerError> {
        let active = self.status(id) == SandboxStatus::Active;
        if active {
            self.backend.pause(id)?;
        }
        let done = work();
        if active {
            self.backend.resume(id)?;
        }
        done
    }

    fn checkpoint_dir(&self, id: &SandboxId, label: &Slug) -> Result<PathBuf, ManagerError> {
        self.row(id)?;
        Ok(self.checkpoints.join(id.as_str()).join(label.as_str()))
    }

    pub(super) fn remove_checkpoints(&self, id: &SandboxId) -> Result<(), ManagerError> {
        let checkpoints = self.checkpoints.join(id.as_str());
        let remove = |path: &Path| self.backend.remove_files(path);
        Ok(checkpoint::remove(&checkpoints, &remove)?)
    }
}

fn parse_label(label: &str) -> Result<Slug, ManagerError> {
    Ok(Slug::from_name(label).map_err(SandboxError::from)?)
}

fn create_private_directory(directory: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    match fs::DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}
