//! File operations on files of subordinate ids, by a process that has these ids.
//!
//! The operator cannot read a file that such an id has closed, nor change its owner, nor remove it.
//! The gate therefore starts this program again, which enters a [`SubidMap`], drops all other
//! rights and runs one operation. Without subordinate ids the same code runs in the gate itself.

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
    /// Prepares a tree for a restart ([`reuse::renew`]).
    Renew { tree: PathBuf, first: Option<u32> },
    /// Moves a tree aside ([`reuse::set_aside`]).
    SetAside { tree: PathBuf, first: Option<u32> },
    /// Moves a tree back ([`reuse::put_back`]).
    PutBack { tree: PathBuf },
    /// Removes a tree that was moved aside ([`reuse::forget`]).
    Forget { tree: PathBuf },
    /// Changes the owner of a staged workspace and moves it to the tree.
    Settle {
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
    words: String,
}

impl FileOp {
    /// Runs the operation in this process.
    pub(crate) fn run(&self) -> std::io::Result<Option<CopySummary>> {
        let bounds = CheckpointBounds::default();
        match self {
            Self::Remove { path } => removal::remove_tree(path)?,
            Self::RemoveUnsafeEntries { tree } => reuse::remove_unsafe_entries(tree)?,
            Self::Renew { tree, first } => reuse::renew(tree, *first)?,
            Self::SetAside { tree, first } => reuse::set_aside(tree, *first)?,
            Self::PutBack { tree } => reuse::put_back(tree)?,
            Self::Forget { tree } => reuse::forget(tree)?,
            Self::Settle {
                from,
                to,
                manifest,
                owner,
            } => git::workspace::settle(from, to, manifest, *owner).map_err(Error::other)?,
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
    /// that owns the files: its removal waits for the lock.
    pub(super) fn run_file_op_in_child(
        &self,
        subid_map: SubidMap,
        lock: Option<PathBuf>,
        op: FileOp,
    ) -> std::io::Result<Option<CopySummary>> {
        let (line, its) = packet::socket_pair()?;
        packet::enlarge_buffers(&line)?;
        let mut child = std::process::Command::new(&self.program)
            .args(&self.arguments)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(its))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let op = Box::new(op);
        let answer = packet::send(
            line.as_fd(),
            &LauncherRequest::RunFileOp {
                subid_map,
                lock,
                op,
            },
            &[],
        )
        .and_then(|()| packet::receive::<FileOpOutcome>(line.as_fd()));
        drop(line);
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
pub(crate) fn serve(
    line: BorrowedFd<'_>,
    subid_map: &SubidMap,
    lock: Option<&Path>,
    op: &FileOp,
) -> Result<(), StepError> {
    let done = match prepare(line, subid_map, lock) {
        Ok(_lock) => op.run().map_err(FileOpFailure::from),
        Err(error) => Err(FileOpFailure {
            errno: error.source.raw_os_error(),
            words: error.to_string(),
        }),
    };
    packet::send(line, &FileOpOutcome(done), &[]).step("reporting")
}

fn prepare(
    line: BorrowedFd<'_>,
    subid_map: &SubidMap,
    lock: Option<&Path>,
) -> Result<Option<Flock<std::fs::File>>, StepError> {
    subid_map.enter()?;
    // The process must die with its gate, or the next gate would run concurrently with it. Set
    // after the change of namespace, which may clear it; so the channel is checked then.
    prctl::set_pdeathsig(Signal::SIGKILL).step("setting the parent-death signal")?;
    launch::check_requester_alive(line)?;
    let lock = lock.map(launch::lock_for_launch).transpose()?;
    profile::apply_profile().step("applying the seccomp profile")?;
    Ok(lock)
}

impl From<Error> for FileOpFailure {
    fn from(error: Error) -> Self {
        Self {
            errno: error.raw_os_error(),
            words: error.to_string(),
        }
    }
}

impl From<FileOpFailure> for Error {
    fn from(failure: FileOpFailure) -> Self {
        match failure.errno {
            Some(errno) => Error::new(Error::from_raw_os_error(errno).kind(), failure.words),
            None => Error::other(failure.words),
        }
    }
}
