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
        let mut cleared = Vec::new();
        for entry in entries.flatten() {
            let name = entry.file_name();
            let Some(Ok(id)) = name.to_str().map(SandboxId::parse) else {
                continue;
            };
            // No directory is reserved while its lock is checked.
            let claims = self.lock_all()?;
            let place = self.sandbox_dir(&id);
            let record = self.read(&id).ok();
            let _mine = match try_lock(&place.join("lock"))? {
                Some(mine) => mine,
                // A child of a dead creator holds its descriptors only until it executes.
                None if record.as_ref().is_some_and(|one| !one.creator.lives()) => {
                    lock(&place.join("lock"))?
                }
                None => continue,
            };
            drop(claims);
            // An unreadable record proves nothing, and a directory that may hold work is not
            // removed.
            let rubbish = match self.read(&id) {
                Ok(record) => record.phase.is_unfinished().then_some(Some(record)),
                Err(SandboxError::NotFound(_)) if !place.join("fs").exists() => Some(None),
                Err(_) => None,
            };
            if let Some(record) = rubbish {
                // A failure must not prevent the removal of the others.
                match self.destroy(&id, record) {
                    Ok(()) => cleared.push(id),
                    Err(error) => {
                        tracing::warn!(sandbox = %id, %error, "namespace backend could not remove an incomplete sandbox");
                    }
                }
            }
        }
        Ok(cleared)
    }

    /// Kills the processes, waits for their exit and removes the files. The caller holds the lock.
    pub(super) fn destroy(
        &self,
        id: &SandboxId,
        record: Option<Record>,
    ) -> Result<(), SandboxError> {
        let system = |step| SandboxError::system::<Error>(step);
        let place = self.sandbox_dir(id);
        // A launcher without its creator exits and takes its init along. A launcher that has not
        // started yet waits for the lock and then finds it removed.
        let launcher = place.join("launcher.lock");
        let _launch_lock = launcher.exists().then(|| lock(&launcher)).transpose()?;
        let (init, cgroups) = match record {
            Some(mut record) => {
                record.phase = record.phase.after(LifecycleEvent::Delete)?;
                self.write(&record)?;
                (record.init, record.cgroups)
            }
            None => (Process::behind(&place), cgroup::plan(&self.cgroup_name(id))),
        };
        if let Some(init) = init {
            init.end(&cgroups)
                .map_err(system("ending the sandbox's processes"))?;
        }
        cgroup::remove(&cgroups).map_err(system("removing the sandbox's cgroups"))?;
        // The record is removed last, so that an interrupted deletion can be continued.
        self.remove_files(&place.join("fs"))
            .and_then(|()| self.remove_files(&place))
            .map_err(system("removing the sandbox's files"))
    }
}
