//! What is done to the files of lent ids, by a process that acts as them.
//!
//! The operator can neither read a file that such an id has closed, nor give it away, nor
//! remove it. So the gate has it done: by this program again, which takes a [`SubidMap`], gives up
//! the rest and does one thing. The same code serves where no ids are lent, in the gate itself.

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

/// One thing to do. Paths are the gate's own, but for what is beneath a sandbox's tree.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum FileOp {
    /// To remove a directory and everything in it.
    Remove { path: PathBuf },
    /// To take every link and odd file out of our way ([`reuse::remove_unsafe_entries`]).
    RemoveUnsafeEntries { tree: PathBuf },
    /// To make a tree to start from ([`reuse::renew`]).
    Renew { tree: PathBuf, first: Option<u32> },
    /// To set a tree aside ([`reuse::set_aside`]).
    SetAside { tree: PathBuf, first: Option<u32> },
    /// To put it back ([`reuse::put_back`]).
    PutBack { tree: PathBuf },
    /// To remove what was set aside ([`reuse::forget`]).
    Forget { tree: PathBuf },
    /// To give a workspace away that was made beside the tree, and put it there.
    Settle {
        from: PathBuf,
        to: PathBuf,
        manifest: PathBuf,
        owner: (u32, u32),
    },
    /// To keep a sandbox's files ([`checkpoint::save`]).
    Save {
        from: PathBuf,
        to: PathBuf,
        first: Option<u32>,
    },
    /// To make a tree of a checkpoint ([`checkpoint::restore`]).
    Restore {
        from: PathBuf,
        to: PathBuf,
        first: Option<u32>,
    },
    /// To make a tree of another one ([`checkpoint::fork`]).
    Fork {
        from: (PathBuf, Option<u32>),
        to: (PathBuf, Option<u32>),
    },
}

/// What came of it.
#[derive(Debug, Serialize, Deserialize)]
struct FileOpOutcome(Result<Option<CopySummary>, FileOpFailure>);

#[derive(Debug, Serialize, Deserialize)]
struct FileOpFailure {
    errno: Option<i32>,
    words: String,
}

impl FileOp {
    /// Does it, here.
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
    /// Has a chore done as lent ids. `lock` is that of the sandbox whose files they are: who
    /// removes it waits until nobody works on them.
    pub(super) fn run_file_op_in_child(
        &self,
        subid_map: SubidMap,
        lock: Option<PathBuf>,
        op: FileOp,
    ) -> std::io::Result<Option<CopySummary>> {
        let (line, its) = packet::line()?;
        packet::widen(&line)?;
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
                format!("the process that acts as its ids ended without an answer ({ended})"),
            )),
        }
    }
}

/// The other side: takes the loan, shuts itself in, does the chore and says what came of it.
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
    // With the gate that asked, or the next one would meet us at work. After the change of
    // namespace, which may clear it; so the line is looked at then.
    prctl::set_pdeathsig(Signal::SIGKILL).step("tying the process to the gate")?;
    launch::check_requester_alive(line)?;
    let lock = lock.map(launch::lock_for_launch).transpose()?;
    profile::apply_profile().step("shutting the process in")?;
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
