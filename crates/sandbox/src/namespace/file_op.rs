//! File operations on files of subordinate ids, by a process that has these ids.
//!
//! The operator can neither read files that only their owner may read, nor change their owner, nor
//! remove them. The gate therefore starts this program again, which enters a [`SubidMap`], drops
//! all other rights and runs one operation. For a sandbox without subordinate ids the gate runs the
//! operation itself.

mod profile;

use std::io::{Error, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use nix::fcntl::Flock;
use nix::sys::prctl;
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

use super::protocol::LauncherRequest;
use super::step::{Step, StepError};
use super::subid_map::SubidMap;
use super::{Namespace, launch, packet, removal, reuse};
use crate::checkpoint::{self, CheckpointBounds, CopySummary};
use crate::git;

/// One operation. Paths are the gate's own, except those beneath a sandbox's tree.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum FileOp {
    /// Removes a directory with its content.
    Remove { path: PathBuf },
    /// Removes links and special files from the paths that init writes
    /// ([`reuse::remove_unsafe_entries`]).
    RemoveUnsafeEntries { tree: PathBuf },
    /// Prepares a tree for a restart ([`reuse::renew_tree`]).
    Renew { tree: PathBuf, first: Option<u32> },
    /// Moves a tree aside ([`reuse::move_aside`]).
    SetAside { tree: PathBuf, first: Option<u32> },
    /// Moves a tree back ([`reuse::restore_old_tree`]).
    #[serde(rename = "PutBack")]
    RestoreOld { tree: PathBuf },
    /// Removes a tree that was moved aside ([`reuse::remove_old_tree`]).
    #[serde(rename = "Forget")]
    RemoveOld { tree: PathBuf },
    /// Changes the owner of a staged workspace and moves it to the tree.
    #[serde(rename = "Settle")]
    InstallWorkspace {
        from: PathBuf,
        to: PathBuf,
        manifest: PathBuf,
        owner: (u32, u32),
    },
    /// Saves a sandbox's files ([`checkpoint::save`]).
    Save {
        from: PathBuf,
        to: PathBuf,
        first: Option<u32>,
    },
    /// Creates a tree from a checkpoint ([`checkpoint::restore`]).
    Restore {
        from: PathBuf,
        to: PathBuf,
        first: Option<u32>,
    },
    /// Creates a tree from another sandbox's ([`checkpoint::fork`]).
    Fork {
        from: (PathBuf, Option<u32>),
        to: (PathBuf, Option<u32>),
    },
}

/// The result sent back to the gate.
#[derive(Debug, Serialize, Deserialize)]
struct FileOpOutcome(Result<Option<CopySummary>, FileOpFailure>);

#[derive(Debug, Serialize, Deserialize)]
struct FileOpFailure {
    errno: Option<i32>,
    #[serde(rename = "words")]
    message: String,
}

impl FileOp {
    /// Runs the operation in this process.
    pub(crate) fn run(&self) -> std::io::Result<Option<CopySummary>> {
        let bounds = CheckpointBounds::default();
        match self {
            Self::Remove { path } => removal::remove_tree(path)?,
            Self::RemoveUnsafeEntries { tree } => reuse::remove_unsafe_entries(tree)?,
            Self::Renew { tree, first } => reuse::renew_tree(tree, *first)?,
            Self::SetAside { tree, first } => reuse::move_aside(tree, *first)?,
            Self::RestoreOld { tree } => reuse::restore_old_tree(tree)?,
            Self::RemoveOld { tree } => reuse::remove_old_tree(tree)?,
            Self::InstallWorkspace {
                from,
                to,
                manifest,
                owner,
            } => {
                git::workspace::install_staged(from, to, manifest, *owner).map_err(Error::other)?;
            }
            Self::Save { from, to, first } => {
                let copied = checkpoint::save(from, to, *first, bounds, &|_| {});
                return copied.map(Some).map_err(Error::other);
            }
            Self::Restore { from, to, first } => {
                let copied = checkpoint::restore(from, to, *first, bounds, &|_| {});
                return copied.map(Some).map_err(Error::other);
            }
            Self::Fork { from, to } => {
                let copied = checkpoint::fork(&from.0, from.1, &to.0, to.1, bounds, &|_| {});
                return copied.map(Some).map_err(Error::other);
            }
        }
        Ok(None)
    }
}

impl Namespace {
    /// Runs an operation in a child process with subordinate ids. `lock` is that of the sandbox
    /// that owns the files: the removal of the sandbox waits for this lock.
    pub(super) fn run_file_op_in_child(
        &self,
        subid_map: SubidMap,
        lock: Option<PathBuf>,
        op: FileOp,
    ) -> std::io::Result<Option<CopySummary>> {
        let (channel, child_end) = packet::socket_pair()?;
        packet::enlarge_buffers(&channel)?;
        let mut child = std::process::Command::new(&self.program)
            .args(&self.arguments)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(child_end))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let op = Box::new(op);
        let answer = packet::send(
            channel.as_fd(),
            &LauncherRequest::RunFileOp {
                subid_map,
                lock,
                op,
            },
            &[],
        )
        .and_then(|()| packet::receive::<FileOpOutcome>(channel.as_fd()));
        drop(channel);
        let ended = child.wait()?;
        match answer? {
            Some((FileOpOutcome(Ok(copied)), _)) => Ok(copied),
            Some((FileOpOutcome(Err(failure)), _)) => Err(failure.into()),
            None => Err(Error::new(
                ErrorKind::UnexpectedEof,
                format!("file operation process exited without an answer ({ended})"),
            )),
        }
    }
}

/// The child's side: enters the subid map, applies the seccomp profile, runs the operation and
/// reports the result.
pub(crate) fn run_in_child(
    channel: BorrowedFd<'_>,
    subid_map: &SubidMap,
    lock: Option<&Path>,
    op: &FileOp,
) -> Result<(), StepError> {
    let done = match prepare(channel, subid_map, lock) {
        Ok(_lock) => op.run().map_err(FileOpFailure::from),
        Err(error) => Err(FileOpFailure {
            errno: error.source.raw_os_error(),
            message: error.to_string(),
        }),
    };
    packet::send(channel, &FileOpOutcome(done), &[]).step("reporting")
}

fn prepare(
    channel: BorrowedFd<'_>,
    subid_map: &SubidMap,
    lock: Option<&Path>,
) -> Result<Option<Flock<std::fs::File>>, StepError> {
    subid_map.enter()?;
    // The process must die with its gate; otherwise it would run concurrently with the next gate.
    // The signal is set after the change of namespace, which may clear it. The gate may have exited
    // before, so the channel is checked afterwards.
    prctl::set_pdeathsig(Signal::SIGKILL).step("setting the parent-death signal")?;
    launch::check_requester_alive(channel)?;
    let lock = lock.map(launch::lock_for_launch).transpose()?;
    profile::apply_profile().step("applying the seccomp profile")?;
    Ok(lock)
}

impl From<Error> for FileOpFailure {
    fn from(error: Error) -> Self {
        Self {
            errno: error.raw_os_error(),
            message: error.to_string(),
        }
    }
}

impl From<FileOpFailure> for Error {
    fn from(failure: FileOpFailure) -> Self {
        match failure.errno {
            Some(errno) => Error::new(Error::from_raw_os_error(errno).kind(), failure.message),
            None => Error::other(failure.message),
        }
    }
}
