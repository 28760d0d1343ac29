//! Where what an agent made is parsed: a process of its own that holds no key and may do
//! little.
//!
//! ```text
//!   gate (threads, keys)                 worker (one thread, nothing)
//!     │ ── Order + bundle's pipe ──────────▶ │ opens repository, workspace, manifest
//!     │                                      │ gives up capabilities, limits, seccomp
//!     │                                      │ reads the bundle, walks the files, commits
//!     │ ◀─────────────── Done | Failed ───── │
//! ```
//!
//! Packs and trees go through libgit2, which is C. A worker that crashes, hangs or runs over
//! its limits is an error with a sentence; the branch is as it was, because moving it comes
//! last, and what it left on probation is removed by the next one.
//!
//! **Never here:** a key, the operator's environment, a program started, a socket opened.

pub(crate) mod confinement;
mod duty;

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

use crate::git::error::GitError;
use crate::git::snapshot::Bounds;
use crate::name::Slug;
use crate::namespace::loan::Loan;
use crate::namespace::packet;

pub use duty::worker_main;

/// Variables that tell libgit2 where the operator's configuration is: identity and
/// `safe.directory`.
const PASSED_ON: &[&str] = &["HOME", "XDG_CONFIG_HOME"];

/// A commit's message is cut; an order is one packet.
const LONGEST_MESSAGE: usize = 8192;

/// Starts a worker for each order.
#[derive(Clone, Debug)]
pub struct Worker {
    program: PathBuf,
    arguments: Vec<OsString>,
    limits: WorkerLimits,
    loan: Option<Loan>,
}

/// What a worker may use up.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerLimits {
    /// Bytes of address space. Large packs of the operator's are mapped in parts, their
    /// indexes whole.
    pub memory: u64,
    /// Seconds of processor time.
    pub processor: u64,
    /// Seconds until it is given up.
    pub seconds: u64,
    /// Seconds that the agent's bundle may take to arrive.
    pub bundle_seconds: u64,
}

impl Default for WorkerLimits {
    fn default() -> Self {
        Self {
            memory: 4 << 30,
            processor: 120,
            seconds: 300,
            bundle_seconds: 60,
        }
    }
}

/// A snapshot to make.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotOrder {
    /// The operator's repository, or a directory in it.
    #[serde(with = "bytes")]
    pub repository: PathBuf,
    /// The sandbox.
    pub slug: Slug,
    /// The workspace's root, as the host sees it.
    #[serde(with = "bytes")]
    pub workspace: PathBuf,
    /// The workspace's manifest: read before, replaced after. One that is not there, or is
    /// damaged, costs a reading of every file.
    #[serde(with = "bytes")]
    pub manifest: PathBuf,
    /// What was done, such as `bash: cargo test`.
    pub message: String,
    /// What it may cost.
    pub bounds: Bounds,
}

/// What a snapshot did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotReport {
    /// Where the branch points now.
    pub tip: String,
    /// Whether it moved.
    pub moved: bool,
    /// How many commits of the agent's came in.
    pub commits: u64,
    /// How many files were read.
    pub read: u64,
    /// What was left out, as far as it fits; see `left_out`.
    pub skipped: Vec<Skipped>,
    /// How many paths were left out.
    pub left_out: u64,
    /// How many of those may be work.
    pub unsaved: u64,
    /// Why the agent's commits did not come in, where they did not.
    pub import_error: Option<String>,
    /// Commits that are in the workspace's repository only, in words, as far as they fit.
    pub strays: Vec<String>,
    /// How many of those there are.
    pub stray_count: u64,
}

impl SnapshotReport {
    /// What is in the workspace only, in words: the first few, and how many more.
    pub fn unsaved_work(&self) -> Option<String> {
        const SHOWN: usize = 5;
        let files = usize::try_from(self.unsaved).unwrap_or(usize::MAX);
        let files = self.skipped.iter().take(files);
        let files = files.map(|one| format!("'{}' ({})", one.path.escape_debug(), one.why));
        let all = self.unsaved.saturating_add(self.stray_count);
        let named: Vec<String> = self
            .strays
            .iter()
            .cloned()
            .chain(files)
            .take(SHOWN)
            .collect();
        let more = all.saturating_sub(named.len() as u64);
        let more = (more > 0).then(|| format!("{more} more"));
        let refused = self.import_error.iter().cloned();
        let parts: Vec<String> = named.into_iter().chain(more).chain(refused).collect();
        (!parts.is_empty()).then(|| parts.join(", "))
    }
}

/// A path that a snapshot left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Skipped {
    /// From the workspace's root; what is not text is replaced.
    pub path: String,
    /// Why.
    pub why: String,
}

/// What the worker is sent.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Order {
    snapshot: SnapshotOrder,
    limits: WorkerLimits,
    /// Leave to read as the workspace's ids, where they are lent.
    loan: Option<Loan>,
}

/// What it answers.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Done(SnapshotReport),
    Failed(String),
}

impl Worker {
    /// Workers are this program with these arguments, which must end in [`worker_main`].
    pub fn new(program: PathBuf, arguments: Vec<OsString>) -> Self {
        Self {
            program,
            arguments,
            limits: WorkerLimits::default(),
            loan: None,
        }
    }

    /// With leave to read as a workspace's lent ids.
    #[must_use]
    pub fn with_loan(mut self, loan: Option<Loan>) -> Self {
        self.loan = loan;
        self
    }

    /// With other limits.
    #[must_use]
    pub fn with_limits(mut self, limits: WorkerLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Commits the workspace's files, and the agent's commits from `bundle`, to the sandbox's
    /// branch. `bundle` is the read end of a pipe with what `git bundle create -` writes; an
    /// empty one means that there is nothing. A bundle that is refused does not stop the
    /// snapshot of the files.
    pub fn snapshot(
        &self,
        order: &SnapshotOrder,
        bundle: Option<OwnedFd>,
    ) -> Result<SnapshotReport, GitError> {
        let deadline = Instant::now() + Duration::from_secs(self.limits.seconds);
        let (line, its) = packet::line().map_err(|error| died("was not started", &error))?;
        let mut child = self.start(its)?;
        let mut order = Order {
            snapshot: order.clone(),
            limits: self.limits,
            loan: self.loan.clone(),
        };
        let message = &mut order.snapshot.message;
        message.truncate(message.floor_char_boundary(LONGEST_MESSAGE));
        packet::widen(&line).map_err(|error| died("was not started", &error))?;
        let sent = {
            let descriptors: Vec<_> = bundle.iter().map(AsFd::as_fd).collect();
            packet::send(line.as_fd(), &order, &descriptors)
        };
        // The worker has a copy; ours would keep the pipe's writer from seeing that nobody
        // reads any more.
        drop(bundle);
        let answer = sent.and_then(|()| hear(&line, deadline));
        match answer {
            Ok(Some(Answer::Done(report))) => {
                child.wait();
                Ok(report)
            }
            Ok(Some(Answer::Failed(why))) => {
                child.wait();
                Err(GitError::Refused(why))
            }
            Ok(None) => Err(fate(child.wait(), &self.limits)),
            Err(error) if error.kind() == std::io::ErrorKind::TimedOut => {
                child.kill();
                Err(GitError::Worker {
                    how: format!("took longer than {} s and was ended", self.limits.seconds),
                    hint: "",
                })
            }
            // It was gone before it could be told anything.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
                Err(fate(child.kill(), &self.limits))
            }
            Err(error) => {
                child.kill();
                Err(died("could not be talked to", &error))
            }
        }
    }

    fn start(&self, line: OwnedFd) -> Result<Started, GitError> {
        let mut command = Command::new(&self.program);
        command
            .args(&self.arguments)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(line))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        for name in PASSED_ON {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        let child = command
            .spawn()
            .map_err(|error| died("was not started", &error))?;
        Ok(Started(child))
    }
}

/// A worker's process: dropped, it is killed and waited for.
struct Started(Child);

impl Started {
    fn wait(&mut self) -> Option<ExitStatus> {
        self.0.wait().ok()
    }

    /// Ends it, and tells how it ended if that was before.
    fn kill(&mut self) -> Option<ExitStatus> {
        let _ = self.0.kill();
        self.0.wait().ok()
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.kill();
    }
}

fn died(how: &str, error: &std::io::Error) -> GitError {
    GitError::Worker {
        how: format!("{how} ({error})"),
        hint: "",
    }
}

/// The worker's answer; nothing when it ended without one.
fn hear(line: &OwnedFd, deadline: Instant) -> std::io::Result<Option<Answer>> {
    if !readable(line, deadline)? {
        return Err(std::io::ErrorKind::TimedOut.into());
    }
    Ok(packet::receive::<Answer>(line.as_fd())?.map(|(answer, _)| answer))
}

/// Waits until there is something to read, or an end; `false` when the time is over.
fn readable(from: &impl AsFd, deadline: Instant) -> std::io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        let mut waiting = [PollFd::new(from.as_fd(), PollFlags::POLLIN)];
        match poll(&mut waiting, left) {
            Ok(0) if Instant::now() >= deadline => return Ok(false),
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(true),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// What the end of a worker that did not answer means.
fn fate(status: Option<ExitStatus>, limits: &WorkerLimits) -> GitError {
    let signal = status
        .and_then(|status| status.signal())
        .and_then(|number| Signal::try_from(number).ok());
    let (how, hint) = match signal {
        Some(Signal::SIGXCPU) => (
            format!("used more than {} s of processor time", limits.processor),
            "; remove or ignore what is not needed in the workspace",
        ),
        Some(Signal::SIGXFSZ) => (
            "wrote a file over its limit".to_owned(),
            "; remove or ignore what is not needed in the workspace",
        ),
        Some(Signal::SIGABRT) => (
            "gave up, probably for want of memory".to_owned(),
            "; remove or ignore what is not needed in the workspace",
        ),
        Some(signal) => (
            format!("was ended by {signal}"),
            "; the workspace may hold something made to crash it",
        ),
        None => (
            match status {
                Some(status) => format!("ended without an answer ({status})"),
                None => "ended without an answer".to_owned(),
            },
            "",
        ),
    };
    GitError::Worker { how, hint }
}

/// Paths as bytes: they need not be text.
mod bytes {
    use super::{OsStr, OsStrExt, Path, PathBuf};
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
        path.as_os_str().as_bytes().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
        let bytes = Vec::<u8>::deserialize(from)?;
        Ok(PathBuf::from(OsStr::from_bytes(&bytes)))
    }
}
