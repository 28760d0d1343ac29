//! Checks whether a sandbox is idle, so that it may be deleted.

use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::poll;
use policy::id::SandboxId;

use super::Namespace;
use crate::beneath;
use crate::contract::{SandboxError, SandboxStatus};

/// Timeout for leftover processes of a command that has exited.
const EXIT_TIMEOUT: Duration = Duration::from_millis(500);

/// Polling interval in milliseconds.
const POLL_INTERVAL_MS: u8 = 20;

impl Namespace {
    /// Fails if a command is running in a sandbox, or if that cannot be determined. A paused or
    /// exited sandbox runs none.
    pub fn refuse_if_busy(&self, id: &SandboxId) -> Result<(), SandboxError> {
        if self.recorded_status(id) != SandboxStatus::Active {
            return Ok(());
        }
        let name = self.read(id)?.config.name;
        let deadline = Instant::now() + EXIT_TIMEOUT;
        let what = loop {
            let running = self
                .init_connection(id)
                .and_then(|connection| connection.running_commands());
            match running {
                Ok(commands) if commands.total == 0 => return Ok(()),
                // The children of a command that has just exited may need a moment.
                Ok(_) if Instant::now() < deadline => {
                    let _ = poll(&mut [], POLL_INTERVAL_MS);
                }
                Ok(commands) => break commands.to_string(),
                Err(error) => break format!("its running commands are unknown ({error})"),
            }
        };
        Err(SandboxError::Busy { name, what })
    }

    /// Whether the workspace is empty. A workspace that cannot be listed counts as not empty.
    pub fn has_empty_workspace(&self, id: &SandboxId) -> bool {
        let open = || {
            let fs = beneath::open_directory(beneath::open_root(&self.sandbox_dir(id))?, c"fs")?;
            let workspace =
                beneath::open_directory(beneath::open_directory(fs, c"root")?, c"workspace")?;
            beneath::list_names(&workspace, 0)
        };
        match open() {
            Ok(names) => names.is_some(),
            Err(errno) => errno == Errno::ENOENT,
        }
    }
}
