//! A sandbox's files as the gate has them changed: by itself where it can, else by a process
//! that acts as the sandbox's lent ids.

use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};

use nix::unistd::Uid;
use policy::id::SandboxId;

use super::file_op::FileOp;
use super::protocol::Identity;
use super::subid_map::SubidMap;
use super::subids::{Slice, SubidGrant, SubidsUnavailable};
use super::{Namespace, removal};
use crate::checkpoint::{self, CheckpointBounds, CheckpointError, CopySummary};
use crate::contract::{SandboxConfig, SandboxError};

/// What works without ids of the sandbox's own.
const ROOT_ALTERNATIVES: &str = "without --root, installs into the home, a virtual environment or an npm \
                         prefix work";

/// How many may die of a removal.
const MAX_REMOVE_TRIES: u32 = 3;

impl Namespace {
    /// Leave to act as these sandboxes' ids, where any of them are lent.
    pub fn subid_map(&self, ids: &[&SandboxId]) -> Result<Option<SubidMap>, SandboxError> {
        let mut slices = Vec::new();
        for id in ids {
            slices.extend(slice_of(self.read(id)?.identity));
        }
        subid_map_of(&slices)
    }

    /// Whether an agent can be root inside, before anything is touched.
    pub(super) fn check_root(config: &SandboxConfig) -> Result<(), SandboxError> {
        if !config.system.root || Uid::effective().is_root() {
            return Ok(());
        }
        SubidGrant::read().map_err(root_unavailable)?;
        let asked = config.system.host_paths.iter().chain(&config.system.rootfs);
        for path in asked {
            let closed = path
                .ancestors()
                .skip(1)
                .find(|above| !is_world_searchable(above));
            if let Some(above) = closed {
                let above = above.display();
                return Err(SandboxError::Create {
                    step: path.display().to_string(),
                    reason: format!(
                        "with --root the sandbox has ids of its own, which may not walk \
                         through {above}; chmod o+x {above}, or put it elsewhere"
                    ),
                });
            }
        }
        Ok(())
    }

    /// Lent ids for one more sandbox.
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
            lent: Some(slice),
        })
    }

    /// Does something to a sandbox's tree.
    pub(super) fn run_file_op(&self, id: &SandboxId, op: FileOp) -> std::io::Result<()> {
        match self.subid_map(&[id]).map_err(Error::other)? {
            None => op.run(),
            Some(subid_map) => {
                self.run_file_op_in_child(subid_map, Some(self.launch_lock_path(id)), op)
            }
        }
        .map(drop)
    }

    /// Removes a directory and everything in it, whoever made it.
    pub fn remove_files(&self, path: &Path) -> std::io::Result<()> {
        match removal::remove_tree(path) {
            Err(error)
                if error.kind() == ErrorKind::PermissionDenied && !Uid::effective().is_root() =>
            {
                // Somebody to whom ids were lent was at work there. Which ones is not asked:
                // the record may be gone, or damaged.
                let grant = SubidGrant::read().map_err(|lack| {
                    Error::new(error.kind(), format!("{error}; lent ids may help: {lack}"))
                })?;
                self.remove_with_subids(&grant.map_for_all(), path)
            }
            other => other,
        }
    }

    /// Removes as lent ids. Whoever does it may be killed, by a kernel that wants memory for
    /// one; what is left then goes as well.
    fn remove_with_subids(&self, subid_map: &SubidMap, path: &Path) -> std::io::Result<()> {
        let mut tries = 0;
        loop {
            let path = path.to_owned();
            tries += 1;
            match self.run_file_op_in_child(subid_map.clone(), None, FileOp::Remove { path }) {
                Err(error)
                    if error.kind() == ErrorKind::UnexpectedEof && tries < MAX_REMOVE_TRIES => {}
                other => return other.map(drop),
            }
        }
    }

    /// Where a workspace is made that has to be given to lent ids.
    pub fn staging(&self, id: &SandboxId) -> PathBuf {
        self.sandbox_dir(id).join("workspace")
    }

    /// Gives the workspace at [`Namespace::staging`] to the agent and puts it in its place.
    /// `manifest` says what is in it, before and after.
    pub fn install_workspace(&self, id: &SandboxId, manifest: &Path) -> Result<(), SandboxError> {
        let owner = self.owner(id)?.ok_or_else(|| {
            SandboxError::system("giving the workspace away")(Error::other("to nobody"))
        })?;
        let op = FileOp::Settle {
            from: self.staging(id),
            to: self.workspace(id),
            manifest: manifest.to_owned(),
            owner,
        };
        self.run_file_op(id, op)
            .map_err(SandboxError::system("giving the workspace away"))
    }

    /// Keeps a sandbox's files as a checkpoint.
    pub fn save(&self, id: &SandboxId, to: &Path) -> Result<CopySummary, CheckpointError> {
        let (from, first) = self.tree(id).map_err(other("look for", to))?;
        let Some(subid_map) = self.subid_map(&[id]).map_err(other("read", &from))? else {
            let bounds = CheckpointBounds::default();
            return checkpoint::save(&from, to, first, bounds, &|_| {});
        };
        if to.symlink_metadata().is_ok() {
            return Err(CheckpointError::Exists(to.to_owned()));
        }
        let to = to.to_owned();
        self.copy(id, subid_map, FileOp::Save { from, to, first })
    }

    /// Makes the tree of a sandbox from a checkpoint.
    pub fn unpack(
        &self,
        id: &SandboxId,
        from: &Path,
        to: &Path,
        first: Option<u32>,
    ) -> Result<CopySummary, CheckpointError> {
        let Some(subid_map) = self.subid_map(&[id]).map_err(other("read", from))? else {
            let bounds = CheckpointBounds::default();
            return checkpoint::restore(from, to, first, bounds, &|_| {});
        };
        let (from, to) = (from.to_owned(), to.to_owned());
        self.copy(id, subid_map, FileOp::Restore { from, to, first })
    }

    /// Makes the tree of a sandbox from another one's.
    pub fn copy_tree(
        &self,
        source: &SandboxId,
        id: &SandboxId,
        to: &Path,
        first: Option<u32>,
    ) -> Result<CopySummary, CheckpointError> {
        let from = self.tree(source).map_err(other("look for", to))?;
        let Some(subid_map) = self
            .subid_map(&[source, id])
            .map_err(other("read", &from.0))?
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

/// The slice that an identity is, where it is one.
fn slice_of(identity: Identity) -> Option<Slice> {
    match identity {
        Identity::Range { lent, .. } => lent,
        Identity::Single => None,
    }
}

/// Leave to act as an identity, where its ids are lent.
pub(super) fn subid_map_for(identity: Identity) -> Result<Option<SubidMap>, SandboxError> {
    subid_map_of(slice_of(identity).as_slice())
}

fn subid_map_of(slices: &[Slice]) -> Result<Option<SubidMap>, SandboxError> {
    if slices.is_empty() {
        return Ok(None);
    }
    let grant = SubidGrant::read().map_err(|lack| SandboxError::Unavailable {
        backend: "namespace",
        reason: format!("the sandbox's ids are no longer lent to this user: {lack}"),
    })?;
    Ok(Some(grant.map_for(slices)))
}

fn root_unavailable(lack: SubidsUnavailable) -> SandboxError {
    SandboxError::Create {
        step: "--root".to_owned(),
        reason: format!("it needs ids of the sandbox's own: {lack} ({ROOT_ALTERNATIVES})"),
    }
}

/// Whether everybody may walk through a directory.
fn is_world_searchable(path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    path.metadata().is_ok_and(|data| data.mode() & 0o001 != 0)
}

fn other(doing: &'static str, path: &Path) -> impl FnOnce(SandboxError) -> CheckpointError {
    let path = path.to_owned();
    move |error| CheckpointError::Io {
        doing,
        path,
        source: Error::other(error),
    }
}
