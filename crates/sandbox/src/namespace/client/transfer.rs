//! Uploads and downloads through the pipes of an agent task.

use std::io::{Error, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags};

use super::{InitConnection, unexpected, wait};
use crate::contract::{SandboxError, TransferBounds, TransferSummary};
use crate::namespace::protocol::{Answer, Request};
use crate::transfer::TransferError;

/// Timeout without progress. The agent can stop a process of its own id.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum size of an outcome: a hundred notes with a path in each.
const MAX_OUTCOME_BYTES: usize = 1 << 20;

/// Maximum overhead of an entry: headers, a long name, a long link, padding.
const PER_ENTRY: u64 = 16 << 10;

const CHUNK: usize = 64 << 10;

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
        let [feed, _, outcome] = self.begin("upload", &request)?;
        let mut buffer = vec![0; CHUNK];
        let read = loop {
            match archive.read(&mut buffer) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => break Err(error),
                Ok(0) => break Ok(()),
                Ok(length) => match write_all(&feed, buffer.get(..length).unwrap_or_default()) {
                    Ok(()) => {}
                    // The process has finished or failed; its outcome says which.
                    Err(error) if error.kind() == ErrorKind::BrokenPipe => break Ok(()),
                    Err(error) => return Err(SandboxError::NotResponding(error.to_string())),
                },
            }
        };
        // A truncated archive is discarded in the sandbox.
        drop(feed);
        let outcome = self.outcome("upload", &outcome);
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
        let [_, out, outcome] = self.begin("download", &request)?;
        let most = bounds
            .bytes
            .saturating_add(bounds.entries.saturating_mul(PER_ENTRY))
            .saturating_add(MAX_OUTCOME_BYTES as u64);
        let mut total = 0_u64;
        let mut buffer = vec![0; CHUNK];
        loop {
            let length = read_some(&out, &mut buffer)
                .map_err(|error| SandboxError::NotResponding(error.to_string()))?;
            if length == 0 {
                break;
            }
            total += length as u64;
            if total > most {
                return Err(TransferError::TooLarge(bounds.bytes).into());
            }
            archive
                .write_all(buffer.get(..length).unwrap_or_default())
                .map_err(SandboxError::system("writing the archive"))?;
        }
        self.outcome("download", &outcome)
    }

    fn begin(&self, what: &str, request: &Request) -> Result<[OwnedFd; 3], SandboxError> {
        self.send(request)?;
        let ends = match self.receive()? {
            (Answer::Started, ends) => <[OwnedFd; 3]>::try_from(ends)
                .map_err(|_| SandboxError::NotResponding("init sent no pipes".to_owned()))?,
            (Answer::Failed { step, reason }, _) => return Err(not_started(what, step, reason)),
            (answer, _) => return Err(unexpected(&answer)),
        };
        for end in &ends {
            fcntl(end, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))
                .map_err(SandboxError::system("preparing a pipe"))?;
        }
        Ok(ends)
    }

    /// Reads the outcome of the process in the sandbox.
    fn outcome(&self, what: &str, end: &OwnedFd) -> Result<TransferSummary, SandboxError> {
        let silent = |error: Error| SandboxError::NotResponding(error.to_string());
        let mut outcome_bytes = Vec::new();
        let mut buffer = vec![0; CHUNK];
        loop {
            let length = read_some(end, &mut buffer).map_err(silent)?;
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
            (answer, _) => Err(unexpected(&answer)),
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
            Err(Errno::EAGAIN) => until_ready(end, PollFlags::POLLOUT)?,
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
            Err(Errno::EAGAIN) => until_ready(end, PollFlags::POLLIN)?,
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn until_ready(end: &OwnedFd, what: PollFlags) -> std::io::Result<()> {
    let mut ends = [PollFd::new(end.as_fd(), what)];
    match wait(&mut ends, Some(Instant::now() + IDLE_TIMEOUT))? {
        0 => Err(Error::new(
            ErrorKind::TimedOut,
            format!("no progress for {} s", IDLE_TIMEOUT.as_secs()),
        )),
        _ => Ok(()),
    }
}
