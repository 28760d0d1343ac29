//! A sandbox's files as of some moment: kept under a label, put back, given to another.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use policy::id::SandboxId;
use serde::Serialize;

use super::row::{Row, Stage};
use super::{Manager, ManagerError, commit_of, home_of, new_id, now};
use crate::checkpoint::{self, Copied};
use crate::contract::{Sandbox, SandboxConfig, SandboxError, SandboxStatus, Trust};
use crate::git::home::Home;
use crate::name::Slug;

/// A checkpoint that is there.
#[derive(Clone, Debug, Serialize)]
pub struct Checkpoint {
    /// What it is called.
    pub label: Slug,
    /// When it was made, in milliseconds since 1970.
    pub created: u64,
}

impl Manager {
    /// The checkpoints of a sandbox, oldest first.
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

    /// Keeps the files of a sandbox as they are now. It stands still meanwhile.
    pub fn checkpoint(&self, id: &SandboxId, label: &str) -> Result<Copied, ManagerError> {
        let to = self.checkpoint_at(id, &label_of(label)?)?;
        let above = self.checkpoints.join(id.as_str());
        private(&self.checkpoints)
            .and_then(|()| private(&above))
            .map_err(SandboxError::system("making the directory of checkpoints"))?;
        self.standing_still(id, || Ok(self.backend.save(id, &to)?))
    }

    /// Puts the files of a checkpoint in the place of a sandbox's. Its processes end, and it
    /// starts again, and trusts `trust`.
    pub fn restore(&self, id: &SandboxId, label: &str, trust: &Trust) -> Result<(), ManagerError> {
        let from = self.find_checkpoint(id, label)?;
        self.backend.replace(id, trust, |tree, first| {
            self.backend.unpack(id, &from, tree, first)?;
            Ok::<(), ManagerError>(())
        })
    }

    /// Where a checkpoint is, if there is one of that label.
    pub fn find_checkpoint(&self, id: &SandboxId, label: &str) -> Result<PathBuf, ManagerError> {
        let label = label_of(label)?;
        let from = self.checkpoint_at(id, &label)?;
        if !from.is_dir() {
            let known = self.checkpoints(id)?;
            let known: Vec<&str> = known.iter().map(|one| one.label.as_str()).collect();
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

    /// Makes a sandbox with another one's files and branch, as they are now. As
    /// [`Manager::begin`], it wants [`Manager::keep`].
    pub fn fork(&self, id: &SandboxId, name: &str, trust: &Trust) -> Result<Row, ManagerError> {
        let name = Slug::from_name(name).map_err(SandboxError::from)?;
        let source = self.row(id)?;
        let home = source.repository.as_ref().map(|_| home_of(&source));
        let home = home.transpose()?;
        let tip = home
            .as_ref()
            .map(|home| home.tip(&source.name))
            .transpose()?;
        let row = self.claim(Row {
            id: new_id(&name)?,
            name,
            start: tip.map(|tip| tip.to_string()),
            created: now(),
            stage: Stage::Making,
            branch_made: false,
            published: Vec::new(),
            ..source.clone()
        })?;
        let made = self.build_fork(&source, &row, home.as_ref(), trust);
        self.or_undo(row, made)
    }

    fn build_fork(
        &self,
        source: &Row,
        row: &Row,
        home: Option<&Home>,
        trust: &Trust,
    ) -> Result<(), ManagerError> {
        if let (Some(home), Some(start)) = (home, &row.start) {
            self.make_branch(row, home, commit_of(start)?)?;
        }
        let config = SandboxConfig {
            id: row.id.clone(),
            name: row.name.clone(),
            trust: Some(trust.clone()),
            ..self.backend.config(&source.id)?
        };
        self.standing_still(&source.id, || {
            self.backend.create_from(&config, |tree, first| {
                self.backend.copy_tree(&source.id, &row.id, tree, first)?;
                Ok::<(), ManagerError>(())
            })
        })?;
        // The copies have other inodes: the next snapshot reads them all, and learns them.
        let manifest = self.rows.manifest(&source.id);
        match fs::copy(manifest, self.rows.manifest(&row.id)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(SandboxError::system("copying the manifest")(error).into())
            }
            _ => Ok(()),
        }
    }

    /// Does something while nothing moves in a sandbox.
    fn standing_still<T>(
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

    fn checkpoint_at(&self, id: &SandboxId, label: &Slug) -> Result<PathBuf, ManagerError> {
        self.row(id)?;
        Ok(self.checkpoints.join(id.as_str()).join(label.as_str()))
    }

    pub(super) fn remove_checkpoints(&self, id: &SandboxId) -> Result<(), ManagerError> {
        let checkpoints = self.checkpoints.join(id.as_str());
        let remove = |path: &Path| self.backend.remove_files(path);
        Ok(checkpoint::remove(&checkpoints, &remove)?)
    }
}

fn label_of(label: &str) -> Result<Slug, ManagerError> {
    Ok(Slug::from_name(label).map_err(SandboxError::from)?)
}

fn private(directory: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    match fs::DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}
