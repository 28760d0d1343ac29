//! What is written down of a sandbox, one file each.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use policy::id::SandboxId;
use serde::{Deserialize, Serialize};

use super::ManagerError;
use crate::contract::SandboxError;
use crate::name::Slug;

/// A sandbox as an operator knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// What it is called everywhere but in front of people.
    pub id: SandboxId,
    /// What people call it; one of a kind in its repository.
    pub name: Slug,
    /// The operator's repository, unless it works on none.
    pub repository: Option<PathBuf>,
    /// The directory that all worktrees of that repository share.
    #[serde(default)]
    pub common: Option<PathBuf>,
    /// Whether the branch is known to be ours. A crash may have come before.
    #[serde(default)]
    pub branch_made: bool,
    /// The commit its workspace began at, which is known inside.
    pub base: Option<String>,
    /// The commit its branch was made at: another one where it is a fork.
    pub start: Option<String>,
    /// When it was asked for, in milliseconds since 1970.
    pub created: u64,
    /// How far it has come.
    pub stage: Stage,
    /// Ports of the host that lead to ports inside.
    #[serde(default)]
    pub published: Vec<Published>,
    /// What the repository's own file adds, as the control crate wrote it. Not interpreted
    /// here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repository_file: Option<serde_json::Value>,
}

/// A port of the host's loopback that leads to one inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// Where the host listens.
    pub host: SocketAddr,
    /// The port inside.
    pub port: u16,
}

/// How far a sandbox has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// Parts of it may be missing. Found at a start, it is removed.
    Making,
    /// All of it is there.
    Kept,
    /// Parts of it may be gone. Found at a start, the rest goes.
    Removing,
}

impl Row {
    /// Whether both are called the same in the same repository.
    pub(super) fn is_twin_of(&self, other: &Self) -> bool {
        let same_repository = self.repository == other.repository
            || (self.common.is_some() && self.common == other.common);
        self.name == other.name && same_repository
    }

    /// The branch it works on, where it has one.
    pub fn branch(&self) -> Option<String> {
        self.repository.as_ref().map(|_| self.name.branch())
    }
}

/// The directory of rows.
#[derive(Clone, Debug)]
pub(super) struct Rows(PathBuf);

impl Rows {
    pub(super) fn open(directory: PathBuf) -> Result<Self, ManagerError> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&directory)
            .map_err(SandboxError::system("making the directory of sandboxes"))?;
        let rows = Self(directory);
        rows.sweep()
            .map_err(SandboxError::system("clearing half-written rows"))?;
        Ok(rows)
    }

    /// A crash between writing a row and its rename leaves a file that nobody reads.
    fn sweep(&self) -> std::io::Result<()> {
        for entry in fs::read_dir(&self.0)?.flatten() {
            let name = entry.file_name();
            if name.to_str().is_some_and(|name| name.ends_with(".new")) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    /// Where the manifest of a sandbox's last snapshot is.
    pub(super) fn manifest(&self, id: &SandboxId) -> PathBuf {
        self.0.join(format!("{id}.manifest"))
    }

    fn path(&self, id: &SandboxId) -> PathBuf {
        self.0.join(format!("{id}.json"))
    }

    pub(super) fn all(&self) -> Result<Vec<Row>, ManagerError> {
        let entries = fs::read_dir(&self.0).map_err(SandboxError::system("listing sandboxes"))?;
        let mut rows = Vec::new();
        for entry in entries.flatten() {
            let name = entry.file_name();
            let id = name.to_str().and_then(|name| name.strip_suffix(".json"));
            let Some(Ok(id)) = id.map(SandboxId::parse) else {
                continue;
            };
            // One that cannot be read must not hide the others.
            match self.read(&id) {
                Ok(row) => rows.push(row),
                Err(error) => {
                    tracing::warn!(sandbox = %id, %error, "a sandbox's row is unreadable");
                }
            }
        }
        rows.sort_by(|a, b| (a.created, &a.id).cmp(&(b.created, &b.id)));
        Ok(rows)
    }

    pub(super) fn read(&self, id: &SandboxId) -> Result<Row, ManagerError> {
        match fs::read(self.path(id)) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Err(SandboxError::NotFound(id.to_string()).into())
            }
            Err(error) => Err(SandboxError::system("reading the sandbox's row")(error).into()),
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map_err(SandboxError::system("reading the sandbox's row"))
                .map_err(ManagerError::from),
        }
    }

    /// Writes a row, whole or not at all.
    pub(super) fn write(&self, row: &Row) -> Result<(), ManagerError> {
        let write = || {
            let bytes = serde_json::to_vec_pretty(row)?;
            let new = self.0.join(format!("{}.new", row.id));
            let mut file = File::options()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&new)?;
            file.write_all(&bytes)?;
            // What is unfinished is undone after a crash of ours, not after a power cut: a
            // row that the disk has lost describes processes that it has lost, too.
            if row.stage == Stage::Kept {
                file.sync_all()?;
            }
            fs::rename(new, self.path(&row.id))
        };
        Ok(write().map_err(SandboxError::system("writing the sandbox's row"))?)
    }

    /// Forgets a sandbox. The row goes last.
    pub(super) fn forget(&self, id: &SandboxId) -> Result<(), ManagerError> {
        let gone = |path: &Path| match fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
        let manifest = self.manifest(id);
        // What a crash left of writing one.
        gone(&manifest.with_extension("manifest.fresh"))
            .and_then(|()| gone(&manifest))
            .and_then(|()| gone(&self.path(id)))
            .map_err(SandboxError::system("removing the sandbox's row"))?;
        Ok(())
    }
}
