//! The record of a sandbox, and the process that it names.

use std::fs::{self, File};
use std::io::{Error, ErrorKind, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};
use policy::id::SandboxId;
use serde::{Deserialize, Serialize};

use super::protocol::Identity;
use super::{Namespace, cgroup, client, launch, process};
use crate::contract::lifecycle::Phase;
use crate::contract::{SandboxConfig, SandboxError};

/// Timeout for the exit of a killed sandbox.
const KILL_TIMEOUT: Duration = Duration::from_secs(20);

/// The state of a sandbox that is stored on disk.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) phase: Phase,
    pub(super) config: SandboxConfig,
    pub(super) identity: Identity,
    pub(super) cgroups: Vec<PathBuf>,
    pub(super) init: Option<Process>,
    /// The process that creates the sandbox.
    pub(super) creator: Process,
    pub(super) warnings: Vec<String>,
}

/// A process, identified by its number and start time, because numbers are reused.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Process {
    pub(super) pid: i32,
    pub(super) started: u64,
}

impl Namespace {
    pub(super) fn read(&self, id: &SandboxId) -> Result<Record, SandboxError> {
        match fs::read(self.sandbox_dir(id).join("record.json")) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Err(SandboxError::NotFound(id.to_string()))
            }
            Err(error) => Err(SandboxError::system("reading the sandbox's record")(error)),
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map_err(SandboxError::system("reading the sandbox's record")),
        }
    }

    /// Writes the record atomically.
    pub(super) fn write(&self, record: &Record) -> Result<(), SandboxError> {
        let new = self.write_temporary(record)?;
        fs::rename(new, self.sandbox_dir(&record.config.id).join("record.json"))
            .map_err(SandboxError::system("writing the sandbox's record"))
    }

    /// Writes the new record to a temporary file.
    pub(super) fn write_temporary(&self, record: &Record) -> Result<PathBuf, SandboxError> {
        let new = self.sandbox_dir(&record.config.id).join("record.new");
        let write = || {
            let mut file = File::create(&new)?;
            file.write_all(&serde_json::to_vec_pretty(record)?)?;
            // An unfinished record need not survive a power cut, because its processes do not.
            if !record.phase.is_unfinished() {
                file.sync_all()?;
            }
            Ok(())
        };
        write().map_err(SandboxError::system::<Error>(
            "writing the sandbox's record",
        ))?;
        Ok(new)
    }
}

impl Process {
    /// This process.
    pub(super) fn current() -> std::io::Result<Self> {
        let pid = nix::unistd::getpid().as_raw();
        let started = process::start_time(pid)?;
        Ok(Self { pid, started })
    }

    /// Finds the init that listens at a sandbox's `init.sock`, for a sandbox without a readable
    /// record.
    pub(super) fn find_listener(directory: &Path) -> Option<Self> {
        let pid = client::listener_pid(directory).ok()?;
        let started = process::start_time(pid).ok()?;
        // Init still listens, so the number was not reused meanwhile.
        (client::listener_pid(directory).ok()? == pid).then_some(Self { pid, started })
    }

    /// Whether the process exists: its number still has the recorded start time.
    pub(super) fn is_running(self) -> bool {
        process::start_time(self.pid).is_ok_and(|started| started == self.started)
    }

    /// Kills the process, and with it its PID namespace, and waits for the exit.
    pub(super) fn kill_and_wait(self, cgroups: &[PathBuf]) -> std::io::Result<()> {
        let Ok(process_fd) = launch::open_process(self.pid) else {
            return Ok(());
        };
        // The descriptor is opened before the comparison, so that the number cannot be reused in
        // between.
        if !self.is_running() {
            return Ok(());
        }
        kill_process_and_wait(process_fd.as_fd(), cgroups)
    }
}

fn kill_process_and_wait(process: BorrowedFd<'_>, cgroups: &[PathBuf]) -> std::io::Result<()> {
    match launch::kill_process(process) {
        // The process has exited since it was found alive.
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(()),
        other => other?,
    }
    cgroup::thaw_all(cgroups);
    let mut end = [PollFd::new(process, PollFlags::POLLIN)];
    match client::poll_until(&mut end, Some(Instant::now() + KILL_TIMEOUT))? {
        0 => Err(Error::from(ErrorKind::TimedOut)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exited_process_needs_no_kill() {
        let mut child = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let process_fd = launch::open_process(pid).unwrap();
        kill_process_and_wait(process_fd.as_fd(), &[]).unwrap();
        child.wait().unwrap();
        // The descriptor's process has exited.
        assert!(launch::kill_process(process_fd.as_fd()).is_err());
        kill_process_and_wait(process_fd.as_fd(), &[]).unwrap();
    }
}
