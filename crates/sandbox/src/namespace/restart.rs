//! Starts of sandboxes with existing files: forks, restored checkpoints, and sandboxes whose
//! processes are gone.

use std::fs;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};

use policy::id::SandboxId;

use super::file_op::FileOp;
use super::protocol::Identity;
use super::{Namespace, cgroup};
use crate::contract::lifecycle::LifecycleEvent;
use crate::contract::{SandboxConfig, SandboxError, SandboxStatus, Trust};

impl Namespace {
    /// The sandbox's tree on the host, and the first id of its range, if it has one.
    pub fn tree(&self, id: &SandboxId) -> Result<(PathBuf, Option<u32>), SandboxError> {
        let first = match self.read(id)?.identity {
            Identity::Range { first, .. } => Some(first),
            Identity::Single => None,
        };
        Ok((self.sandbox_dir(id).join("fs"), first))
    }

    /// Creates a sandbox whose tree is created by `fill`, which receives the path, which does not
    /// exist, and the first id of the sandbox's range, if it has one.
    pub fn create_from<E: From<SandboxError>>(
        &self,
        config: &SandboxConfig,
        fill: impl FnOnce(&Path, Option<u32>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.check_config(config)?;
        let (mut record, _lock) = self.reserve(config, None)?;
        let build_from_tree = || {
            let (tree, first) = self.tree(&config.id)?;
            fill(&tree, first)?;
            self.run_file_op(&config.id, FileOp::RemoveUnsafeEntries { tree })
                .map_err(SandboxError::system("preparing the tree"))?;
            Ok(self.build(&mut record, true, LifecycleEvent::Started)?)
        };
        let made = build_from_tree();
        if made.is_err() {
            // If the rollback fails, the record is unfinished, and the next start removes the
            // sandbox.
            let _ = self.destroy(&config.id, Some(record));
        }
        made
    }

    /// Restarts a sandbox whose processes are gone, with its current files. The new processes trust
    /// the certificate `trust`.
    pub fn restart(&self, id: &SandboxId, trust: &Trust) -> Result<(), SandboxError> {
        let (_, first) = self.tree(id)?;
        let renew = |tree: &Path| {
            let tree = tree.to_owned();
            self.run_file_op(id, FileOp::Renew { tree, first })
                .map_err(SandboxError::system("preparing the tree"))
        };
        self.restart_with(id, trust, renew)
    }

    /// Kills a sandbox's processes and restarts it with a tree that `fill` creates. The new
    /// processes trust the certificate `trust`. On failure its files are restored.
    pub fn replace<E: From<SandboxError>>(
        &self,
        id: &SandboxId,
        trust: &Trust,
        fill: impl FnOnce(&Path, Option<u32>) -> Result<(), E>,
    ) -> Result<(), E> {
        let (tree, first) = self.tree(id)?;
        let done = self.restart_with(id, trust, |tree| {
            let op = FileOp::SetAside {
                tree: tree.to_owned(),
                first,
            };
            self.run_file_op(id, op)
                .map_err(SandboxError::system("moving the old tree aside"))?;
            fill(tree, first)
        });
        if done.is_ok() {
            self.run_file_op(id, FileOp::RemoveOld { tree })
                .map_err(SandboxError::system("removing the old tree"))?;
        } else if tree.with_file_name("fs.before").exists() {
            self.run_file_op(id, FileOp::RestoreOld { tree })
                .map_err(SandboxError::system("restoring the old tree"))?;
        }
        done
    }

    /// Kills the processes of a sandbox, calls `prepare` with the path of its tree, and starts it.
    fn restart_with<E: From<SandboxError>>(
        &self,
        id: &SandboxId,
        trust: &Trust,
        prepare: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<(), E> {
        let system = |step| SandboxError::system::<Error>(step);
        let _lock = self.lock_sandbox(id)?;
        let mut record = self.read(id)?;
        if record.phase.is_unfinished() {
            return Err(SandboxError::NotResponding(
                SandboxStatus::from_phase(record.phase).to_string(),
            )
            .into());
        }
        if let Some(init) = record.init {
            init.kill_and_wait(&record.cgroups)
                .map_err(system("ending the sandbox's processes"))?;
        }
        cgroup::remove(&record.cgroups).map_err(system("removing the sandbox's cgroups"))?;
        let directory = self.sandbox_dir(id);
        for stale in ["init.sock", "stopped"] {
            match fs::remove_file(directory.join(stale)) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(system("removing the old socket")(error).into());
                }
                _ => {}
            }
        }
        let tree = directory.join("fs");
        prepare(&tree)?;
        self.run_file_op(id, FileOp::RemoveUnsafeEntries { tree })
            .map_err(system("preparing the tree"))?;
        record.warnings.clear();
        record.config.trust = Some(trust.clone());
        self.build(&mut record, true, LifecycleEvent::Restarted)?;
        Ok(())
    }
}
