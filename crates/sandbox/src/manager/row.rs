//! Sandbox rows: one JSON file for each sandbox.

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

/// The record of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxRow {
    /// The unique id.
    pub id: SandboxId,
    /// The name, unique within its repository.
    pub name: Slug,
    /// The operator's repository, if there is one.
    pub repository: Option<PathBuf>,
    /// The common directory of the repository's worktrees.
    #[serde(default)]
    pub common: Option<PathBuf>,
    /// Whether the branch was created for this sandbox. After a crash between the creation and this
    /// record, the field is still `false`.
    #[serde(default)]
    pub branch_made: bool,
    /// The workspace's first commit, which the workspace's repository has.
    pub base: Option<String>,
    /// The branch's first commit, which differs from `base` for a fork.
    pub start: Option<String>,
    /// The time of the request, in milliseconds since 1970.
    pub created: u64,
    /// The stage of the sandbox.
    pub stage: RowStage,
    /// The published ports.
    #[serde(default)]
    pub published: Vec<PublishedPort>,
    /// The part of the repository's own configuration file, written by the control crate and not
    /// interpreted here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repository_file: Option<serde_json::Value>,
    /// The hosts that the sandbox may reach in addition to the operator's rules, written by the
    /// control crate and not interpreted here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<serde_json::Value>,
}

/// A loopback port of the host that is forwarded to a port in the sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PublishedPort {
    /// The listening address on the host.
    pub host: SocketAddr,
    /// The port in the sandbox.
    pub port: u16,
}

/// The stage of a sandbox, as the manager records it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowStage {
    /// The creation is in progress. After a crash the sandbox is removed.
    #[serde(rename = "making")]
    Creating,
    /// The sandbox is complete.
    #[serde(rename = "kept")]
    Complete,
    /// The removal is in progress. After a crash it is continued.
    Removing,
}

impl SandboxRow {
    /// Whether both have the same name in the same repository.
    pub(super) fn has_same_name(&self, other: &Self) -> bool {
        let same_repository = self.repository == other.repository
            || (self.common.is_some() && self.common == other.common);
        self.name == other.name && same_repository
    }

    /// The sandbox's branch, if it has a repository.
    pub fn branch(&self) -> Option<String> {
        self.repository.as_ref().map(|_| self.name.branch())
    }
}

/// The directory of rows.
#[derive(Clone, Debug)]
pub(super) struct RowStore(PathBuf);

impl RowStore {
    pub(super) fn open(directory: PathBuf) -> Result<Self, ManagerError> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&directory)
            .map_err(SandboxError::system("making the directory of sandboxes"))?;
        let rows = Self(directory);
        rows.remove_temporary_files()
            .map_err(SandboxError::system("removing incomplete rows"))?;
        Ok(rows)
    }

    /// Removes temporary files that a crash left between writing and renaming a row.
    fn remove_temporary_files(&self) -> std::io::Result<()> {
        for entry in fs::read_dir(&self.0)?.flatten() {
            let name = entry.file_name();
            if name.to_str().is_some_and(|name| name.ends_with(".new")) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    /// The path of the manifest of a sandbox's last snapshot.
    pub(super) fn manifest(&self, id: &SandboxId) -> PathBuf {
        self.0.join(format!("{id}.manifest"))
    }

    fn path(&self, id: &SandboxId) -> PathBuf {
        self.0.join(format!("{id}.json"))
    }

    pub(super) fn read_all(&self) -> Result<Vec<SandboxRow>, ManagerError> {
        let entries = fs::read_dir(&self.0).map_err(SandboxError::system("listing sandboxes"))?;
        let mut rows = Vec::new();
        for entry in entries.flatten() {
            let name = entry.file_name();
            let id = name.to_str().and_then(|name| name.strip_suffix(".json"));
            let Some(Ok(id)) = id.map(SandboxId::parse) else {
                continue;
            };
            // The other rows are returned, even if one is unreadable.
            match self.read(&id) {
                Ok(row) => rows.push(row),
                Err(error) => {
                    tracing::warn!(sandbox = %id, %error, "sandbox manager cannot read the file that describes a sandbox");
                }
            }
        }
        rows.sort_by(|a, b| (a.created, &a.id).cmp(&(b.created, &b.id)));
        Ok(rows)
    }

    pub(super) fn read(&self, id: &SandboxId) -> Result<SandboxRow, ManagerError> {
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

    /// Writes a row atomically.
    pub(super) fn write(&self, row: &SandboxRow) -> Result<(), ManagerError> {
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
            // Unfinished rows need no sync: they matter after a crash of the gate, not after a
            // power cut, which also ends the processes that they describe.
            if row.stage == RowStage::Complete {
                file.sync_all()?;
            }
            fs::rename(new, self.path(&row.id))
        };
        Ok(write().map_err(SandboxError::system("writing the sandbox's row"))?)
    }

    /// Removes the manifest and then the row of a sandbox.
    pub(super) fn forget(&self, id: &SandboxId) -> Result<(), ManagerError> {
        let remove_if_exists = |path: &Path| match fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
        let manifest = self.manifest(id);
        // A crash may have left a temporary manifest.
        remove_if_exists(&manifest.with_extension("manifest.fresh"))
            .and_then(|()| remove_if_exists(&manifest))
            .and_then(|()| remove_if_exists(&self.path(id)))
            .map_err(SandboxError::system("removing the sandbox's row"))?;
        Ok(())
    }
}
