//! The gate's side of a launch: supervises the launcher until the sandbox is recorded as active.

use std::fs;
use std::io::{Error, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};

use super::protocol::{LaunchMessage, LauncherRequest};
use super::record::{Process, Record};
use super::{Namespace, client, packet};
use crate::contract::SandboxError;
use crate::contract::lifecycle::LifecycleEvent;

/// Timeout of building a sandbox.
const BUILD_TIMEOUT: Duration = Duration::from_secs(20);

/// Timeout of building a sandbox whose layers must be scanned first, possibly on a slow disk.
const BUILD_TIMEOUT_WITH_LAYERS: Duration = Duration::from_secs(180);

impl Namespace {
    /// Supervises a launch: the launcher's messages are recorded before init is released.
    pub(super) fn supervise_launch(
        &self,
        record: &mut Record,
        channel: &OwnedFd,
        request: &LauncherRequest,
        event: LifecycleEvent,
    ) -> Result<(), SandboxError> {
        let failed = |error: Error| SandboxError::Create {
            step: "communicating with the launcher".to_owned(),
            reason: error.to_string(),
        };
        packet::send(channel.as_fd(), request, &[]).map_err(failed)?;
        let system = &record.config.system;
        let timeout = if system.root || !system.host_paths.is_empty() {
            BUILD_TIMEOUT_WITH_LAYERS
        } else {
            BUILD_TIMEOUT
        };
        let deadline = Instant::now() + timeout;
        let next = || receive_message(channel, deadline).map_err(failed);
        match next()? {
            LaunchMessage::Cloned { pid, started } => record.init = Some(Process { pid, started }),
            LaunchMessage::Failed { step, reason } => {
                return Err(SandboxError::Create { step, reason });
            }
            other => return Err(failed(unexpected_message(&other))),
        }
        // Init does not run yet, but from now on clean-up after a crash finds its process.
        self.write(record)?;
        record.phase = record.phase.after(event)?;
        // The new record is written while init sets up the sandbox, and renamed at the end.
        let mut ready = self.write_temporary(record)?;
        match next()? {
            LaunchMessage::Running { warnings } if warnings.is_empty() => {}
            LaunchMessage::Running { warnings } => {
                record.warnings.extend(warnings);
                ready = self.write_temporary(record)?;
            }
            LaunchMessage::Failed { step, reason } => {
                return Err(SandboxError::Create { step, reason });
            }
            other => return Err(failed(unexpected_message(&other))),
        }
        packet::send(channel.as_fd(), &LaunchMessage::Detach, &[]).map_err(failed)?;
        // The end of the channel means that init no longer depends on the launcher.
        if let Some((LaunchMessage::Failed { step, reason }, _)) =
            packet::receive::<LaunchMessage>(channel.as_fd()).map_err(failed)?
        {
            return Err(SandboxError::Create { step, reason });
        }
        fs::rename(
            ready,
            self.sandbox_dir(&record.config.id).join("record.json"),
        )
        .map_err(SandboxError::system("writing the sandbox's record"))
    }
}

fn unexpected_message(message: &LaunchMessage) -> Error {
    Error::other(format!("unexpected message: {message:?}"))
}

/// Receives the launcher's next message.
fn receive_message(channel: &OwnedFd, deadline: Instant) -> std::io::Result<LaunchMessage> {
    let mut end = [PollFd::new(channel.as_fd(), PollFlags::POLLIN)];
    match client::poll_until(&mut end, Some(deadline))? {
        0 => Err(Error::from(ErrorKind::TimedOut)),
        _ => match packet::receive::<LaunchMessage>(channel.as_fd())? {
            Some((report, _)) => Ok(report),
            None => Err(Error::from(ErrorKind::UnexpectedEof)),
        },
    }
}
