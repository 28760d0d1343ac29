//! Snapshot worker: a confined process that parses the agent's files and commits.
//!
//! ```text
//!   gate (threads, keys)                 worker (one thread, no keys)
//!     │ ── request + bundle's pipe ────────▶ │ opens repository, workspace, manifest
//!     │                                      │ drops capabilities, sets limits, seccomp
//!     │                                      │ reads the bundle, walks the files, commits
//!     │ ◀─────────────── Done | Failed ───── │
//! ```
//!
//! Packs and trees are parsed by libgit2, which is C. A worker that crashes, hangs or exceeds its
//! limits is an error; the branch is unchanged, because it moves last, and the next worker removes
//! the quarantine that was left.
//!
//! The worker never gets a key or the operator's environment, never starts a program, and never
//! opens a socket.

mod child_main;
pub(crate) mod profile;

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
use crate::git::snapshot::SnapshotBounds;
use crate::name::Slug;
use crate::namespace::packet;
use crate::namespace::subid_map::SubidMap;

pub use child_main::worker_main;

/// Environment variables that locate the operator's git configuration: identity and
/// `safe.directory`.
const PASSED_VARIABLES: &[&str] = &["HOME", "XDG_CONFIG_HOME"];

/// Maximum size of a commit message; a request is one packet.
const MAX_MESSAGE_BYTES: usize = 8192;

/// Starts a worker process for each snapshot.
#[derive(Clone, Debug)]
pub struct SnapshotWorker {
    program: PathBuf,
    arguments: Vec<OsString>,
    limits: WorkerLimits,
    subid_map: Option<SubidMap>,
}

/// Resource limits of a worker.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerLimits {
    /// Bytes of address space. Large packs of the operator's are mapped in windows, their indexes
    /// completely.
    pub memory: u64,
    /// Seconds of processor time.
    pub processor: u64,
    /// Seconds until the worker is killed.
    pub seconds: u64,
    /// Seconds until the agent's bundle must have arrived.
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

/// A request for a snapshot.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotRequest {
    /// The operator's repository, or a directory in it.
    #[serde(with = "bytes")]
    pub repository: PathBuf,
    /// The sandbox.
    pub slug: Slug,
    /// The workspace's root, as the host sees it.
    #[serde(with = "bytes")]
    pub workspace: PathBuf,
    /// The path of the workspace's manifest, which is read and then replaced. If it is missing or
    /// damaged, every file is read.
    #[serde(with = "bytes")]
    pub manifest: PathBuf,
    /// The commit message, such as `bash: cargo test`.
    pub message: String,
    /// The limits.
    pub bounds: SnapshotBounds,
}

/// The result of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotReport {
    /// The branch's commit now.
    pub tip: String,
    /// Whether the branch moved.
    pub moved: bool,
    /// The number of imported commits.
    pub commits: u64,
    /// The number of files that were read.
    pub read: u64,
    /// The first skipped paths; `left_out` counts all.
    pub skipped: Vec<SkippedPath>,
    /// The number of skipped paths.
    pub left_out: u64,
    /// The number of skipped paths that may be work.
    pub unsaved: u64,
    /// Why the agent's commits were not imported, if the import failed.
    pub import_error: Option<String>,
    /// Descriptions of the first commits that only the workspace's repository has.
    pub strays: Vec<String>,
    /// The number of such commits.
    pub stray_count: u64,
}

impl SnapshotReport {
    /// Describes the work that exists in the workspace only: the first few items, and the number of
    /// others.
    pub fn unsaved_work(&self) -> Option<String> {
        const MAX_LISTED: usize = 5;
        let files = usize::try_from(self.unsaved).unwrap_or(usize::MAX);
        let files = self.skipped.iter().take(files);
        let files = files.map(|one| format!("'{}' ({})", one.path.escape_debug(), one.why));
        let all = self.unsaved.saturating_add(self.stray_count);
        let named: Vec<String> = self
            .strays
            .iter()
            .cloned()
            .chain(files)
            .take(MAX_LISTED)
            .collect();
        let more = all.saturating_sub(named.len() as u64);
        let more = (more > 0).then(|| format!("{more} more"));
        let refused = self.import_error.iter().cloned();
        let parts: Vec<String> = named.into_iter().chain(more).chain(refused).collect();
        (!parts.is_empty()).then(|| parts.join(", "))
    }
}

/// A path that a snapshot skipped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SkippedPath {
    /// The path from the workspace's root, with invalid UTF-8 replaced.
    pub path: String,
    /// The reason.
    pub why: String,
}

/// Sent to the worker.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    snapshot: SnapshotRequest,
    limits: WorkerLimits,
    /// The subordinate ids that own the workspace, if it has any.
    subid_map: Option<SubidMap>,
}

/// The worker's answer.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Done(SnapshotReport),
    Failed(String),
}

impl SnapshotWorker {
    /// Workers run `program` with `arguments`, which must call [`worker_main`].
    pub fn new(program: PathBuf, arguments: Vec<OsString>) -> Self {
        Self {
            program,
            arguments,
            limits: WorkerLimits::default(),
            subid_map: None,
        }
    }

    /// Lets the worker read as the workspace's subordinate ids.
    #[must_use]
    pub fn with_subid_map(mut self, subid_map: Option<SubidMap>) -> Self {
        self.subid_map = subid_map;
        self
    }

    /// Replaces the limits.
    #[must_use]
    pub fn with_limits(mut self, limits: WorkerLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Commits the workspace's files, and the agent's commits from `bundle`, to the sandbox's
    /// branch. `bundle` is the read end of a pipe with the output of `git bundle create -`; empty
    /// output means that there are no commits. A refused bundle does not prevent the snapshot of
    /// the files.
    pub fn snapshot(
        &self,
        order: &SnapshotRequest,
        bundle: Option<OwnedFd>,
    ) -> Result<SnapshotReport, GitError> {
        let deadline = Instant::now() + Duration::from_secs(self.limits.seconds);
        let (channel, child_end) =
            packet::socket_pair().map_err(|error| worker_error("could not be started", &error))?;
        let mut child = self.start(child_end)?;
        let mut request = Request {
            snapshot: order.clone(),
            limits: self.limits,
            subid_map: self.subid_map.clone(),
        };
        let message = &mut request.snapshot.message;
        message.truncate(message.floor_char_boundary(MAX_MESSAGE_BYTES));
        packet::enlarge_buffers(&channel)
            .map_err(|error| worker_error("could not be started", &error))?;
        let sent = {
            let descriptors: Vec<_> = bundle.iter().map(AsFd::as_fd).collect();
            packet::send(channel.as_fd(), &request, &descriptors)
        };
        // The worker has its own descriptor; this one would keep the pipe open after the worker
        // closes it.
        drop(bundle);
        let answer = sent.and_then(|()| receive_answer(&channel, deadline));
        match answer {
            Ok(Some(Answer::Done(report))) => {
                child.wait();
                Ok(report)
            }
            Ok(Some(Answer::Failed(why))) => {
                child.wait();
                Err(GitError::Refused(why))
            }
            Ok(None) => Err(describe_exit(child.wait(), &self.limits)),
            Err(error) if error.kind() == std::io::ErrorKind::TimedOut => {
                child.kill();
                Err(GitError::Worker {
                    cause: format!("timed out after {} s", self.limits.seconds),
                    hint: "",
                })
            }
            // The worker exited before it received the request.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
                Err(describe_exit(child.kill(), &self.limits))
            }
            Err(error) => {
                child.kill();
                Err(worker_error("the request could not be sent", &error))
            }
        }
    }

    fn start(&self, channel: OwnedFd) -> Result<WorkerProcess, GitError> {
        let mut command = Command::new(&self.program);
        command
            .args(&self.arguments)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(channel))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        for name in PASSED_VARIABLES {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        let child = command
            .spawn()
            .map_err(|error| worker_error("could not be started", &error))?;
        Ok(WorkerProcess(child))
    }
}

/// A worker process; killed and reaped on drop.
struct WorkerProcess(Child);

impl WorkerProcess {
    fn wait(&mut self) -> Option<ExitStatus> {
        self.0.wait().ok()
    }

    /// Kills the process and returns its exit status.
    fn kill(&mut self) -> Option<ExitStatus> {
        let _ = self.0.kill();
        self.0.wait().ok()
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

fn worker_error(cause: &str, error: &std::io::Error) -> GitError {
    GitError::Worker {
        cause: format!("{cause} ({error})"),
        hint: "",
    }
}

/// Receives the worker's answer; `None` if the worker exited without one.
fn receive_answer(channel: &OwnedFd, deadline: Instant) -> std::io::Result<Option<Answer>> {
    if !wait_until_readable(channel, deadline)? {
        return Err(std::io::ErrorKind::TimedOut.into());
    }
    Ok(packet::receive::<Answer>(channel.as_fd())?.map(|(answer, _)| answer))
}

/// Waits until the descriptor is readable or closed; `false` at the deadline.
fn wait_until_readable(from: &impl AsFd, deadline: Instant) -> std::io::Result<bool> {
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

/// Converts the exit status of a worker that sent no answer.
fn describe_exit(status: Option<ExitStatus>, limits: &WorkerLimits) -> GitError {
    let signal = status
        .and_then(|status| status.signal())
        .and_then(|number| Signal::try_from(number).ok());
    let (cause, hint) = match signal {
        Some(Signal::SIGXCPU) => (
            format!("used more than {} s of processor time", limits.processor),
            "; remove or ignore files in the workspace that are not needed",
        ),
        Some(Signal::SIGXFSZ) => (
            "wrote a file over its limit".to_owned(),
            "; remove or ignore files in the workspace that are not needed",
        ),
        Some(Signal::SIGABRT) => (
            "aborted, probably out of memory".to_owned(),
            "; remove or ignore files in the workspace that are not needed",
        ),
        Some(signal) => (
            format!("killed by {signal}"),
            "; the workspace may hold a file made to crash it",
        ),
        None => (
            match status {
                Some(status) => format!("exited without an answer ({status})"),
                None => "exited without an answer".to_owned(),
            },
            "",
        ),
    };
    GitError::Worker { cause, hint }
}

/// Serialises paths as bytes, because they need not be UTF-8.
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
