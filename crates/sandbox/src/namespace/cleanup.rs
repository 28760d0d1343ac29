//! The end of sandboxes: those that are deleted, and those that a crash left.

use std::fs;
use std::io::{Error, ErrorKind};

use policy::id::SandboxId;

use super::lock::{lock, try_lock};
use super::record::{Process, Record};
use super::{Namespace, cgroup};
use crate::contract::SandboxError;
use crate::contract::lifecycle::LifecycleEvent;

impl Namespace {
    /// Removes what a crash left behind: sandboxes half made or half deleted, with nobody at
    /// work on them. Returns their ids.
    pub fn cleanup(&self) -> Result<Vec<SandboxId>, SandboxError> {
        let system = SandboxError::system("clearing what a crash left");
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
            // Nobody claims a directory while we look whether it is claimed.
            let claims = self.lock_all()?;
            let place = self.sandbox_dir(&id);
            let record = self.read(&id).ok();
            let _mine = match try_lock(&place.join("lock"))? {
                Some(mine) => mine,
                // A dead creator's child has its descriptors until it executes: not for long.
                None if record.as_ref().is_some_and(|one| !one.creator.lives()) => {
                    lock(&place.join("lock"))?
                }
                None => continue,
            };
            drop(claims);
            // A record that cannot be read says nothing, and what may hold work is not removed.
            let rubbish = match self.read(&id) {
                Ok(record) => record.phase.is_unfinished().then_some(Some(record)),
                Err(SandboxError::NotFound(_)) if !place.join("fs").exists() => Some(None),
                Err(_) => None,
            };
            if let Some(record) = rubbish {
                // One that cannot be cleared must not keep the others from being.
                match self.destroy(&id, record) {
                    Ok(()) => cleared.push(id),
                    Err(error) => tracing::warn!(sandbox = %id, %error, "a sandbox is not cleared"),
                }
            }
        }
        Ok(cleared)
    }

    /// Kills, waits, removes. Whoever calls it holds the lock.
    pub(super) fn destroy(
        &self,
        id: &SandboxId,
        record: Option<Record>,
    ) -> Result<(), SandboxError> {
        let system = |step| SandboxError::system::<Error>(step);
        let place = self.sandbox_dir(id);
        // A launcher whose creator is gone ends by itself, and takes its init along. One that
        // has not begun yet finds the lock held, and then gone.
        let launcher = place.join("launcher.lock");
        let _nobody_builds = launcher.exists().then(|| lock(&launcher)).transpose()?;
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
        // The record goes last: until then the deletion can be taken up again.
        self.remove_files(&place.join("fs"))
            .and_then(|()| self.remove_files(&place))
            .map_err(system("removing the sandbox's files"))
    }
}
