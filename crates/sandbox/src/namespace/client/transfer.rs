//! Uploads and downloads through the pipes of an agent task.

use std::io::{Error, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags};

use super::{InitConnection, poll_until, unexpected_answer};
use crate::contract::{SandboxError, TransferBounds, TransferSummary};
use crate::namespace::protocol::{Answer, Request};
use crate::transfer::TransferError;

/// Timeout without progress, because the agent can stop the process that unpacks or packs.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum size of an outcome: a hundred notes with a path in each.
const MAX_OUTCOME_BYTES: usize = 1 << 20;

/// Maximum overhead of an archive's entry: headers, a long name, a long link, padding.
const MAX_ENTRY_OVERHEAD_BYTES: u64 = 16 << 10;

const CHUNK_BYTES: usize = 64 << 10;

impl InitConnection {
    /// Sends an archive to a process in the sandbox that unpacks it.
    pub(crate) fn upload(
        self,
        to: &Path,
        archive: &mut dyn Read,
        bounds: &TransferBounds,
    ) -> Result<TransferSummary, SandboxError> {
        let request = Request::Upload {
            to: to.as_os_str().as_bytes().to_vec(),
            bounds: *bounds,
        };
        let [input, _, outcome] = self.start_task("upload", &request)?;
        let mut buffer = vec![0; CHUNK_BYTES];
        let read = loop {
            match archive.read(&mut buffer) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => break Err(error),
                Ok(0) => break Ok(()),
                Ok(length) => match write_all(&input, buffer.get(..length).unwrap_or_default()) {
                    Ok(()) => {}
                    // The process has closed its input: it has finished or failed, which its
                    // outcome shows.
                    Err(error) if error.kind() == ErrorKind::BrokenPipe => break Ok(()),
                    Err(error) => return Err(SandboxError::NotResponding(error.to_string())),
                },
            }
        };
        // A truncated archive is discarded in the sandbox.
        drop(input);
        let outcome = self.read_outcome("upload", &outcome);
        match read {
            Ok(()) => outcome,
            Err(source) => Err(SandboxError::system("reading the archive")(source)),
        }
    }

    /// Receives the archive that a process in the sandbox packs.
    pub(crate) fn download(
        self,
        from: &Path,
        archive: &mut dyn Write,
        bounds: &TransferBounds,
    ) -> Result<TransferSummary, SandboxError> {
        let request = Request::Download {
            from: from.as_os_str().as_bytes().to_vec(),
            bounds: *bounds,
        };
        let [_, output, outcome] = self.start_task("download", &request)?;
        let max_bytes = bounds
            .bytes
            .saturating_add(bounds.entries.saturating_mul(MAX_ENTRY_OVERHEAD_BYTES))
            .saturating_add(MAX_OUTCOME_BYTES as u64);
        let mut total = 0_u64;
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            let length = read_some(&output, &mut buffer)
                .map_err(|error| SandboxError::NotResponding(error.to_string()))?;
            if length == 0 {
                break;
            }
            total += length as u64;
            if total > max_bytes {
                return Err(TransferError::TooLarge(bounds.bytes).into());
            }
            archive
                .write_all(buffer.get(..length).unwrap_or_default())
                .map_err(SandboxError::system("writing the archive"))?;
        }
        self.read_outcome("download", &outcome)
    }

    fn start_task(&self, what: &str, request: &Request) -> Result<[OwnedFd; 3], SandboxError> {
        self.send(request)?;
        let ends = match self.receive()? {
            (Answer::Started, ends) => <[OwnedFd; 3]>::try_from(ends)
                .map_err(|_| SandboxError::NotResponding("init sent no pipes".to_owned()))?,
            (Answer::Failed { step, reason }, _) => return Err(not_started(what, step, reason)),
            (answer, _) => return Err(unexpected_answer(&answer)),
        };
        for end in &ends {
            fcntl(end, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))
                .map_err(SandboxError::system("preparing a pipe"))?;
        }
        Ok(ends)
    }

    /// Reads the outcome of the process in the sandbox.
    fn read_outcome(&self, what: &str, end: &OwnedFd) -> Result<TransferSummary, SandboxError> {
        let not_responding = |error: Error| SandboxError::NotResponding(error.to_string());
        let mut outcome_bytes = Vec::new();
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            let length = read_some(end, &mut buffer).map_err(not_responding)?;
            outcome_bytes.extend_from_slice(buffer.get(..length).unwrap_or_default());
            if length == 0 || outcome_bytes.len() > MAX_OUTCOME_BYTES {
                break;
            }
        }
        match self.receive()? {
            (Answer::Failed { step, reason }, _) => Err(not_started(what, step, reason)),
            (Answer::Exited { code, stopped }, _) => {
                match serde_json::from_slice::<Result<TransferSummary, TransferError>>(
                    &outcome_bytes,
                ) {
                    Ok(outcome) => Ok(outcome?),
                    Err(_) => Err(SandboxError::NotResponding(match stopped {
                        Some(reason) => format!("the {what} was killed in the sandbox: {reason}"),
                        None => format!("the {what} failed in the sandbox with exit code {code}"),
                    })),
                }
            }
            (answer, _) => Err(unexpected_answer(&answer)),
        }
    }
}

fn not_started(what: &str, step: String, reason: String) -> SandboxError {
    SandboxError::Start {
        program: what.to_owned(),
        step,
        reason,
    }
}

fn write_all(end: &OwnedFd, mut bytes: &[u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        match nix::unistd::write(end, bytes) {
            Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => wait_until_ready(end, PollFlags::POLLOUT)?,
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Reads some bytes; 0 at the end.
fn read_some(end: &OwnedFd, buffer: &mut [u8]) -> std::io::Result<usize> {
    loop {
        match nix::unistd::read(end, buffer) {
            Ok(length) => return Ok(length),
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => wait_until_ready(end, PollFlags::POLLIN)?,
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn wait_until_ready(end: &OwnedFd, what: PollFlags) -> std::io::Result<()> {
    let mut ends = [PollFd::new(end.as_fd(), what)];
    match poll_until(&mut ends, Some(Instant::now() + IDLE_TIMEOUT))? {
        0 => Err(Error::new(
            ErrorKind::TimedOut,
            format!("no progress for {} s", IDLE_TIMEOUT.as_secs()),
        )),
        _ => Ok(()),
    }
}
