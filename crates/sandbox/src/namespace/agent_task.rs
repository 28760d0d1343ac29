//! Uploads and downloads that run as the agent inside the sandbox. They have only the agent's
//! rights, so links and files that the agent prepared can harm only the agent.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufReader, BufWriter, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use super::stdio::redirect_to_null;
use crate::contract::{TransferBounds, TransferSummary};
use crate::transfer::{self, TransferError, UnpackRules};

/// Size of the buffers for an archive.
const CHUNK_BYTES: usize = 64 << 10;

/// An upload or a download. Relative paths start at the working directory, the workspace.
pub(crate) enum AgentTask {
    /// Unpacks the archive on standard input.
    Upload { to: PathBuf, bounds: TransferBounds },
    /// Packs a file or directory to an archive on standard output.
    Download {
        from: PathBuf,
        bounds: TransferBounds,
    },
}

impl AgentTask {
    pub(crate) fn upload(to: Vec<u8>, bounds: TransferBounds) -> Self {
        let to = PathBuf::from(OsString::from_vec(to));
        Self::Upload { to, bounds }
    }

    pub(crate) fn download(from: Vec<u8>, bounds: TransferBounds) -> Self {
        let from = PathBuf::from(OsString::from_vec(from));
        Self::Download { from, bounds }
    }

    /// Runs the task and writes its outcome to standard error. Returns the exit code.
    pub(crate) fn run(&self) -> i32 {
        let written = duplicate_stream(&std::io::stderr()).and_then(|mut stderr| {
            let outcome = self.run_task();
            // The client reads the outcome after it has reached the end of standard output.
            redirect_to_null(&[0, 1])?;
            let outcome_json = serde_json::to_vec(&outcome)?;
            stderr.write_all(&outcome_json)?;
            Ok(i32::from(outcome.is_err()))
        });
        written.unwrap_or(1)
    }

    fn run_task(&self) -> Result<TransferSummary, TransferError> {
        let open_error = |error: std::io::Error| TransferError::System {
            step: "opening".to_owned(),
            path: "archive".to_owned(),
            errno: error.raw_os_error().unwrap_or(libc::EIO),
        };
        match self {
            Self::Upload { to, bounds } => {
                let archive = duplicate_stream(&std::io::stdin()).map_err(open_error)?;
                let mut archive = BufReader::with_capacity(CHUNK_BYTES, archive);
                transfer::unpack(&mut archive, to, bounds, &UnpackRules::FOR_SANDBOX)
            }
            Self::Download { from, bounds } => {
                let archive = duplicate_stream(&std::io::stdout()).map_err(open_error)?;
                let mut archive = BufWriter::with_capacity(CHUNK_BYTES, archive);
                transfer::pack_within(from, &mut archive, bounds, &mut |_| {})
            }
        }
    }
}

/// Duplicates a standard descriptor, without the runtime's buffers and locks.
fn duplicate_stream(stream: &impl AsFd) -> std::io::Result<File> {
    Ok(stream.as_fd().try_clone_to_owned()?.into())
}
