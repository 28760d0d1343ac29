//! The creator's side of a launch: from the order to a sandbox on record.

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

/// How long building a sandbox may take before it is given up.
const BUILD_TIMEOUT: Duration = Duration::from_secs(20);

/// The same for one whose layers are looked through first, from a slow disk at worst.
const BUILD_TIMEOUT_WITH_LAYERS: Duration = Duration::from_secs(180);

impl Namespace {
    /// Sees a launch through: what the launcher tells is on record before init is let go.
    pub(super) fn supervise_launch(
        &self,
        record: &mut Record,
        line: &OwnedFd,
        request: &LauncherRequest,
        then: LifecycleEvent,
    ) -> Result<(), SandboxError> {
        let failed = |error: Error| SandboxError::Create {
            step: "talking to the launcher".to_owned(),
            reason: error.to_string(),
        };
        packet::send(line.as_fd(), request, &[]).map_err(failed)?;
        let system = &record.config.system;
        let timeout = if system.root || !system.host_paths.is_empty() {
            BUILD_TIMEOUT_WITH_LAYERS
        } else {
            BUILD_TIMEOUT
        };
        let deadline = Instant::now() + timeout;
        let next = || receive_message(line, deadline).map_err(failed);
        match next()? {
            LaunchMessage::Born { pid, started } => record.init = Some(Process { pid, started }),
            LaunchMessage::Failed { step, reason } => {
                return Err(SandboxError::Create { step, reason });
            }
            other => return Err(failed(unexpected_message(&other))),
        }
        // Not yet alive, but from now on whoever finds it knows whom to end.
        self.write(record)?;
        record.phase = record.phase.after(then)?;
        // To disk while init builds; it becomes the record when all is well.
        let mut ready = self.write_aside(record)?;
        match next()? {
            LaunchMessage::Running { warnings } if warnings.is_empty() => {}
            LaunchMessage::Running { warnings } => {
                record.warnings.extend(warnings);
                ready = self.write_aside(record)?;
            }
            LaunchMessage::Failed { step, reason } => {
                return Err(SandboxError::Create { step, reason });
            }
            other => return Err(failed(unexpected_message(&other))),
        }
        packet::send(line.as_fd(), &LaunchMessage::Live, &[]).map_err(failed)?;
        // The launcher's end tells that init is on its own.
        if let Some((LaunchMessage::Failed { step, reason }, _)) =
            packet::receive::<LaunchMessage>(line.as_fd()).map_err(failed)?
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
    Error::other(format!("a word out of turn: {message:?}"))
}

/// The launcher's next word.
fn receive_message(line: &OwnedFd, deadline: Instant) -> std::io::Result<LaunchMessage> {
    let mut end = [PollFd::new(line.as_fd(), PollFlags::POLLIN)];
    match client::wait(&mut end, Some(deadline))? {
        0 => Err(Error::from(ErrorKind::TimedOut)),
        _ => match packet::receive::<LaunchMessage>(line.as_fd())? {
            Some((report, _)) => Ok(report),
            None => Err(Error::from(ErrorKind::UnexpectedEof)),
        },
    }
}
