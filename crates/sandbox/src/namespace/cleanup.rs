//! Removal of deleted sandboxes, and of sandboxes that a crash left unfinished.

use std::fs;
use std::io::{Error, ErrorKind};

use policy::id::SandboxId;

use super::lock::{lock, try_lock};
use super::record::{Process, Record};
use super::{Namespace, cgroup};
use crate::contract::SandboxError;
use crate::contract::lifecycle::LifecycleEvent;

impl Namespace {
    /// Removes sandboxes that a crash left incomplete, unless an operation holds their lock.
    /// Returns their ids.
    pub fn cleanup(&self) -> Result<Vec<SandboxId>, SandboxError> {
        let system = SandboxError::system("removing incomplete sandboxes");
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(system)?,
        };
        let mut removed = Vec::new();
        for entry in entries.flatten() {
            let name = entry.file_name();
            let Some(Ok(id)) = name.to_str().map(SandboxId::parse) else {
                continue;
            };
            // No directory is reserved while its lock is checked.
            let claims = self.lock_all()?;
            let directory = self.sandbox_dir(&id);
            let record = self.read(&id).ok();
            let _lock = match try_lock(&directory.join("lock"))? {
                Some(lock) => lock,
                // The creator has exited. A child that it forked may hold the lock until the child
                // executes its program.
                None if record.as_ref().is_some_and(|one| !one.creator.is_running()) => {
                    lock(&directory.join("lock"))?
                }
                None => continue,
            };
            drop(claims);
            // A sandbox with an unreadable record may be complete, and a directory that may hold
            // work is not removed.
            let to_remove = match self.read(&id) {
                Ok(record) => record.phase.is_unfinished().then_some(Some(record)),
                Err(SandboxError::NotFound(_)) if !directory.join("fs").exists() => Some(None),
                Err(_) => None,
            };
            if let Some(record) = to_remove {
                // A failure must not prevent the removal of the others.
                match self.destroy(&id, record) {
                    Ok(()) => removed.push(id),
                    Err(error) => {
                        tracing::warn!(sandbox = %id, %error, "namespace backend could not remove an incomplete sandbox");
                    }
                }
            }
        }
        Ok(removed)
    }

    /// Kills the processes, waits for their exit and removes the files. The caller holds the lock.
    pub(super) fn destroy(
        &self,
        id: &SandboxId,
        record: Option<Record>,
    ) -> Result<(), SandboxError> {
        let system = |step| SandboxError::system::<Error>(step);
        let directory = self.sandbox_dir(id);
        // A launcher whose creator has exited exits as well, and its init is killed. A launcher
        // that starts later waits for the lock and fails, because the lock file was removed.
        let launcher = directory.join("launcher.lock");
        let _launch_lock = launcher.exists().then(|| lock(&launcher)).transpose()?;
        let (init, cgroups) = match record {
            Some(mut record) => {
                record.phase = record.phase.after(LifecycleEvent::Delete)?;
                self.write(&record)?;
                (record.init, record.cgroups)
            }
            None => (
                Process::find_listener(&directory),
                cgroup::plan(&self.cgroup_name(id)),
            ),
        };
        if let Some(init) = init {
            init.kill_and_wait(&cgroups)
                .map_err(system("ending the sandbox's processes"))?;
        }
        cgroup::remove(&cgroups).map_err(system("removing the sandbox's cgroups"))?;
        // The record is removed last, so that an interrupted deletion can be continued.
        self.remove_files(&directory.join("fs"))
            .and_then(|()| self.remove_files(&directory))
            .map_err(system("removing the sandbox's files"))
    }
}
