//! Whether a command runs in a sandbox: one that is idle may be deleted.

use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::poll;
use policy::id::SandboxId;

use super::Namespace;
use crate::beneath;
use crate::contract::{SandboxError, SandboxStatus};

/// How long processes may take to end that are left of a command which has ended.
const EXIT_TIMEOUT: Duration = Duration::from_millis(500);

/// Milliseconds between two looks whether they have.
const POLL_INTERVAL_MS: u8 = 20;

impl Namespace {
    /// Refuses where a command runs in a sandbox, or where that cannot be found out. A sandbox
    /// that is paused or has ended runs none.
    pub fn refuse_if_busy(&self, id: &SandboxId) -> Result<(), SandboxError> {
        if self.recorded_status(id) != SandboxStatus::Active {
            return Ok(());
        }
        let name = self.read(id)?.config.name;
        let deadline = Instant::now() + EXIT_TIMEOUT;
        let what = loop {
            let running = self
                .init_connection(id)
                .and_then(|session| session.running());
            match running {
                Ok(commands) if commands.total == 0 => return Ok(()),
                // The children of a command that has just ended may be a moment behind it.
                Ok(_) if Instant::now() < deadline => {
                    let _ = poll(&mut [], POLL_INTERVAL_MS);
                }
                Ok(commands) => break commands.to_string(),
                Err(error) => break format!("what runs in it is not known ({error})"),
            }
        };
        Err(SandboxError::Busy { name, what })
    }

    /// Whether the workspace has no files. One that the operator's ids may not list counts as
    /// having some.
    pub fn has_empty_workspace(&self, id: &SandboxId) -> bool {
        let open = || {
            let fs = beneath::open_directory(beneath::open_root(&self.sandbox_dir(id))?, c"fs")?;
            let workspace =
                beneath::open_directory(beneath::open_directory(fs, c"root")?, c"workspace")?;
            beneath::list_names(&workspace, 0)
        };
        match open() {
            Ok(within) => within.is_some(),
            Err(errno) => errno == Errno::ENOENT,
        }
    }
}
