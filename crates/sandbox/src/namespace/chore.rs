//! What is done to the files of lent ids, by a process that acts as them.
//!
//! The operator can neither read a file that such an id has closed, nor give it away, nor
//! remove it. So the gate has it done: by this program again, which takes a [`Loan`], gives up
//! the rest and does one thing. The same code serves where no ids are lent, in the gate itself.

mod confinement;

use std::io::{Error, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use nix::fcntl::Flock;
use nix::sys::prctl;
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

use super::loan::Loan;
use super::protocol::Order;
use super::step::{Step, Stumble};
use super::{Namespace, launch, packet, removal, reuse};
use crate::checkpoint::{self, CheckpointBounds, CopySummary};
use crate::git;

/// One thing to do. Paths are the gate's own, but for what is beneath a sandbox's tree.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Chore {
    /// To remove a directory and everything in it.
    Remove { path: PathBuf },
    /// To take every link and odd file out of our way ([`reuse::tame`]).
    Tame { tree: PathBuf },
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
struct Done(Result<Option<CopySummary>, Failure>);

#[derive(Debug, Serialize, Deserialize)]
struct Failure {
    errno: Option<i32>,
    words: String,
}

impl Chore {
    /// Does it, here.
    pub(crate) fn run(&self) -> std::io::Result<Option<CopySummary>> {
        let bounds = CheckpointBounds::default();
        match self {
            Self::Remove { path } => removal::remove_tree(path)?,
            Self::Tame { tree } => reuse::tame(tree)?,
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
    pub(super) fn have_done(
        &self,
        loan: Loan,
        lock: Option<PathBuf>,
        chore: Chore,
    ) -> std::io::Result<Option<CopySummary>> {
        let (line, its) = packet::line()?;
        packet::widen(&line)?;
        let mut steward = std::process::Command::new(&self.program)
            .args(&self.arguments)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(its))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let chore = Box::new(chore);
        let said = packet::send(line.as_fd(), &Order::Chore { loan, lock, chore }, &[])
            .and_then(|()| packet::receive::<Done>(line.as_fd()));
        drop(line);
        let ended = steward.wait()?;
        match said? {
            Some((Done(Ok(copied)), _)) => Ok(copied),
            Some((Done(Err(failure)), _)) => Err(failure.into()),
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
    loan: &Loan,
    lock: Option<&Path>,
    chore: &Chore,
) -> Result<(), Stumble> {
    let done = match prepare(line, loan, lock) {
        Ok(_lock) => chore.run().map_err(Failure::from),
        Err(stumble) => Err(Failure {
            errno: stumble.source.raw_os_error(),
            words: stumble.to_string(),
        }),
    };
    packet::send(line, &Done(done), &[]).step("reporting")
}

fn prepare(
    line: BorrowedFd<'_>,
    loan: &Loan,
    lock: Option<&Path>,
) -> Result<Option<Flock<std::fs::File>>, Stumble> {
    loan.take()?;
    // With the gate that asked, or the next one would meet us at work. After the change of
    // namespace, which may clear it; so the line is looked at then.
    prctl::set_pdeathsig(Signal::SIGKILL).step("tying the process to the gate")?;
    launch::see_orderer(line)?;
    let lock = lock.map(launch::take_lock).transpose()?;
    confinement::shut_in().step("shutting the process in")?;
    Ok(lock)
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self {
            errno: error.raw_os_error(),
            words: error.to_string(),
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure.errno {
            Some(errno) => Error::new(Error::from_raw_os_error(errno).kind(), failure.words),
            None => Error::other(failure.words),
        }
    }
}
