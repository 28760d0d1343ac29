//! File operations on a sandbox's tree: in the gate itself if it has the rights, otherwise in a
//! process with the sandbox's subordinate ids.

use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};

use nix::unistd::Uid;
use policy::id::SandboxId;

use super::file_op::FileOp;
use super::protocol::Identity;
use super::subid_map::SubidMap;
use super::subids::{SubidGrant, SubidSlice, SubidsUnavailable};
use super::{Namespace, removal};
use crate::checkpoint::{self, CheckpointBounds, CheckpointError, CopySummary};
use crate::contract::{SandboxConfig, SandboxError};

/// A hint for an operator who cannot use `--root`.
const ROOT_ALTERNATIVES: &str = "without --root, installing into the home directory, a virtual environment or an npm \
                         prefix works";

/// Maximum number of attempts of a removal whose process is killed.
const MAX_REMOVE_ATTEMPTS: u32 = 3;

impl Namespace {
    /// The subid map of these sandboxes, if any of them has subordinate ids.
    pub fn subid_map(&self, ids: &[&SandboxId]) -> Result<Option<SubidMap>, SandboxError> {
        let mut slices = Vec::new();
        for id in ids {
            slices.extend(subids_of(self.read(id)?.identity));
        }
        subid_map_of(&slices)
    }

    /// Checks that an agent can be root in the sandbox, before anything is created.
    pub(super) fn check_root(config: &SandboxConfig) -> Result<(), SandboxError> {
        if !config.system.root || Uid::effective().is_root() {
            return Ok(());
        }
        SubidGrant::read().map_err(root_unavailable)?;
        let paths = config.system.host_paths.iter().chain(&config.system.rootfs);
        for path in paths {
            let unsearchable = path
                .ancestors()
                .skip(1)
                .find(|above| !is_world_searchable(above));
            if let Some(above) = unsearchable {
                let above = above.display();
                return Err(SandboxError::Create {
                    step: path.display().to_string(),
                    reason: format!(
                        "with --root the sandbox has its own ids, which have no search permission for \
                         {above}; run `chmod o+x {above}`, or move the directory"
                    ),
                });
            }
        }
        Ok(())
    }

    /// Allocates subordinate ids for a new sandbox.
    pub(super) fn allocate_subids(
        &self,
        seed: &str,
        taken: &[u32],
    ) -> Result<Identity, SandboxError> {
        let slice = SubidGrant::read()
            .and_then(|grant| grant.choose(seed, taken))
            .map_err(root_unavailable)?;
        Ok(Identity::Range {
            first: slice.first,
            subids: Some(slice),
        })
    }

    /// Runs an operation on a sandbox's tree.
    pub(super) fn run_file_op(&self, id: &SandboxId, op: FileOp) -> std::io::Result<()> {
        match self.subid_map(&[id]).map_err(Error::other)? {
            None => op.run(),
            Some(subid_map) => {
                self.run_file_op_in_child(subid_map, Some(self.launch_lock_path(id)), op)
            }
        }
        .map(drop)
    }

    /// Removes a directory with its content, whatever its owner.
    pub fn remove_files(&self, path: &Path) -> std::io::Result<()> {
        match removal::remove_tree(path) {
            Err(error)
                if error.kind() == ErrorKind::PermissionDenied && !Uid::effective().is_root() =>
            {
                // The directory has files of subordinate ids. All granted ids are mapped, because
                // the record with the sandbox's ids may be missing or damaged.
                let grant = SubidGrant::read().map_err(|reason| {
                    Error::new(
                        error.kind(),
                        format!("{error}; subordinate ids may help: {reason}"),
                    )
                })?;
                self.remove_with_subids(&grant.map_for_all(), path)
            }
            other => other,
        }
    }

    /// Removes with subordinate ids. The process may be killed, for example by the OOM killer; the
    /// removal is then tried again.
    fn remove_with_subids(&self, subid_map: &SubidMap, path: &Path) -> std::io::Result<()> {
        let mut attempts = 0;
        loop {
            let path = path.to_owned();
            attempts += 1;
            match self.run_file_op_in_child(subid_map.clone(), None, FileOp::Remove { path }) {
                Err(error)
                    if error.kind() == ErrorKind::UnexpectedEof
                        && attempts < MAX_REMOVE_ATTEMPTS => {}
                other => return other.map(drop),
            }
        }
    }

    /// The staging directory of a workspace that will be owned by subordinate ids.
    pub fn staging_dir(&self, id: &SandboxId) -> PathBuf {
        self.sandbox_dir(id).join("workspace")
    }

    /// Changes the owner of the workspace at [`Namespace::staging_dir`] to the agent and moves it
    /// to its final directory. `manifest` is the path of its manifest, which is updated.
    pub fn install_workspace(&self, id: &SandboxId, manifest: &Path) -> Result<(), SandboxError> {
        let owner = self.owner(id)?.ok_or_else(|| {
            SandboxError::system("changing the workspace's owner")(Error::other(
                "the sandbox has no id range",
            ))
        })?;
        let op = FileOp::InstallWorkspace {
            from: self.staging_dir(id),
            to: self.workspace(id),
            manifest: manifest.to_owned(),
            owner,
        };
        self.run_file_op(id, op)
            .map_err(SandboxError::system("changing the workspace's owner"))
    }

    /// Saves a sandbox's files as a checkpoint.
    pub fn save(&self, id: &SandboxId, to: &Path) -> Result<CopySummary, CheckpointError> {
        let (from, first) = self.tree(id).map_err(checkpoint_error("look for", to))?;
        let Some(subid_map) = self
            .subid_map(&[id])
            .map_err(checkpoint_error("read", &from))?
        else {
            let bounds = CheckpointBounds::default();
            return checkpoint::save(&from, to, first, bounds, &|_| {});
        };
        if to.symlink_metadata().is_ok() {
            return Err(CheckpointError::Exists(to.to_owned()));
        }
        let to = to.to_owned();
        self.copy(id, subid_map, FileOp::Save { from, to, first })
    }

    /// Creates the tree of a sandbox from a checkpoint.
    pub fn unpack(
        &self,
        id: &SandboxId,
        from: &Path,
        to: &Path,
        first: Option<u32>,
    ) -> Result<CopySummary, CheckpointError> {
        let Some(subid_map) = self
            .subid_map(&[id])
            .map_err(checkpoint_error("read", from))?
        else {
            let bounds = CheckpointBounds::default();
            return checkpoint::restore(from, to, first, bounds, &|_| {});
        };
        let (from, to) = (from.to_owned(), to.to_owned());
        self.copy(id, subid_map, FileOp::Restore { from, to, first })
    }

    /// Creates the tree of a sandbox from another one's.
    pub fn copy_tree(
        &self,
        source: &SandboxId,
        id: &SandboxId,
        to: &Path,
        first: Option<u32>,
    ) -> Result<CopySummary, CheckpointError> {
        let from = self
            .tree(source)
            .map_err(checkpoint_error("look for", to))?;
        let Some(subid_map) = self
            .subid_map(&[source, id])
            .map_err(checkpoint_error("read", &from.0))?
        else {
            let bounds = CheckpointBounds::default();
            return checkpoint::fork(&from.0, from.1, to, first, bounds, &|_| {});
        };
        let to = (to.to_owned(), first);
        self.copy(id, subid_map, FileOp::Fork { from, to })
    }

    fn copy(
        &self,
        id: &SandboxId,
        subid_map: SubidMap,
        op: FileOp,
    ) -> Result<CopySummary, CheckpointError> {
        let io = |source| CheckpointError::Io {
            doing: "copy",
            path: self.sandbox_dir(id).join("fs"),
            source,
        };
        let copied = self.run_file_op_in_child(subid_map, Some(self.launch_lock_path(id)), op);
        copied
            .map_err(io)?
            .ok_or_else(|| io(Error::from(ErrorKind::InvalidData)))
    }

    fn launch_lock_path(&self, id: &SandboxId) -> PathBuf {
        self.sandbox_dir(id).join("launcher.lock")
    }
}

/// The subordinate ids of an identity, if it has any.
fn subids_of(identity: Identity) -> Option<SubidSlice> {
    match identity {
        Identity::Range { subids, .. } => subids,
        Identity::Single => None,
    }
}

/// The subid map of an identity, if it has subordinate ids.
pub(super) fn subid_map_for(identity: Identity) -> Result<Option<SubidMap>, SandboxError> {
    subid_map_of(subids_of(identity).as_slice())
}

fn subid_map_of(slices: &[SubidSlice]) -> Result<Option<SubidMap>, SandboxError> {
    if slices.is_empty() {
        return Ok(None);
    }
    let grant = SubidGrant::read().map_err(|reason| SandboxError::Unavailable {
        backend: "namespace",
        reason: format!(
            "the sandbox's subordinate ids are no longer granted to this user: {reason}"
        ),
    })?;
    Ok(Some(grant.map_for(slices)))
}

fn root_unavailable(reason: SubidsUnavailable) -> SandboxError {
    SandboxError::Create {
        step: "--root".to_owned(),
        reason: format!("the option needs subordinate ids: {reason} ({ROOT_ALTERNATIVES})"),
    }
}

/// Whether a directory has search permission for others.
fn is_world_searchable(path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    path.metadata().is_ok_and(|data| data.mode() & 0o001 != 0)
}

fn checkpoint_error(
    doing: &'static str,
    path: &Path,
) -> impl FnOnce(SandboxError) -> CheckpointError {
    let path = path.to_owned();
    move |error| CheckpointError::Io {
        doing,
        path,
        source: Error::other(error),
    }
}
