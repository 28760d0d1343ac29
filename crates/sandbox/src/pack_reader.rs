//! Reads the objects of a push in a confined child process, before any byte is sent upstream.
//!
//! ```text
//!   gate (threads, keys)                    child (one thread, no keys)
//!     │ ── Request, context, pack, bases ──────▶ │ limits, no capability, seccomp
//!     │                                          │ reads every object of the pack
//!     │ ◀── Found | Malformed | TooMuch ──────── │
//! ```
//!
//! The child receives open files and cannot open others. The pack's own file is the object store:
//! it is read twice and nothing is written, so there is nothing to clean up. A child that crashes,
//! hangs or exceeds its limits is an error, and an error refuses the push.
//!
//! The child never gets a key or an environment variable of the gate, never starts a program, and
//! never decides about the push.

mod base_packs;
mod child_main;
mod delta;
mod error;
mod history;
mod object;
mod object_hash;
mod object_index;
mod pack;
mod profile;
mod restricted_names;
mod restricted_paths;
mod secret_paths;

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::Signal;
use policy::push::{Findings, PushContext};
use policy::reason::Reason;
use policy::verdict::Denial;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt;
use tokio::process::{Child, Command};
use tokio::sync::Semaphore;

use crate::namespace::packet;

pub use child_main::pack_reader_main;
pub use pack::PackBounds;

/// Maximum size of a push context as JSON.
const MAX_CONTEXT_BYTES: u64 = 64 << 20;
/// Maximum size of an answer as JSON.
const MAX_ANSWER_BYTES: u64 = 16 << 20;

/// Maximum number of base packs of a push; a request is one packet.
const MAX_BASES: usize = 16;

/// Starts a child process for each push, up to a maximum number at once.
#[derive(Clone, Debug)]
pub struct PackReaderPool {
    program: PathBuf,
    arguments: Vec<OsString>,
    limits: PackReaderLimits,
    permits: Arc<Semaphore>,
}

/// Resource limits of a child process.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PackReaderLimits {
    /// Bytes of writable memory.
    pub memory: u64,
    /// Seconds of processor time.
    pub processor: u64,
    /// Seconds until the child is killed.
    pub seconds: u64,
    /// Limits on the contents of a push.
    pub pack: PackBounds,
}

impl Default for PackReaderLimits {
    fn default() -> Self {
        Self {
            memory: 1 << 30,
            processor: 120,
            seconds: 180,
            pack: PackBounds::default(),
        }
    }
}

/// A pack in an open file: from `offset` to the end. The file's position does not matter.
#[derive(Debug)]
pub struct PackFile {
    /// The file.
    pub file: File,
    /// The offset of the pack.
    pub offset: u64,
}

/// Why a push could not be read. Every variant refuses the push.
#[derive(Debug, thiserror::Error)]
pub enum PackReaderError {
    /// The file is no pack, or the pack is damaged.
    #[error("{0}")]
    Malformed(String),
    /// The push exceeds a limit on the contents of one push.
    #[error("{0}")]
    TooMuch(String),
    /// The child exceeded its time limit.
    #[error("reading the push took longer than {0} s")]
    TimedOut(u64),
    /// The child process failed or sent no answer.
    #[error("pack reader process failed: {0}")]
    Child(String),
}

impl PackReaderError {
    /// Converts the error to the denial of the push.
    pub fn denial(&self) -> Denial {
        let (reason, rule) = match self {
            PackReaderError::Malformed(_) => (Reason::GitMalformed, "git:form"),
            PackReaderError::TooMuch(_) | PackReaderError::TimedOut(_) => {
                (Reason::ScanBudget, "git:bounds")
            }
            PackReaderError::Child(_) => (Reason::Internal, "git:judge"),
        };
        let denial = Denial::new(reason, rule);
        match self {
            PackReaderError::Malformed(why) => {
                denial.with_message(format!("The push was refused: {why}."))
            }
            PackReaderError::TooMuch(_) | PackReaderError::TimedOut(_) => denial.with_message(
                format!("The push is too large to be scanned: {self}. Push it in parts."),
            ),
            PackReaderError::Child(_) => denial.with_evidence(self.to_string()),
        }
    }
}

/// Sent to the child, with the push context, the pack and the base packs as open files.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    limits: PackReaderLimits,
    /// Offset of the pack in its file; `None` if the push has no pack.
    pack: Option<u64>,
    /// Offset of each base pack in its file.
    bases: Vec<u64>,
}

/// The child's answer.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Found(Findings),
    Malformed(String),
    TooMuch(String),
    Failed(String),
}

impl PackReaderPool {
    /// Children run `program` with `arguments`, which must call [`pack_reader_main`]. At most
    /// `max_children` of them run at a time.
    pub fn new(program: PathBuf, arguments: Vec<OsString>, max_children: usize) -> Self {
        Self {
            program,
            arguments,
            limits: PackReaderLimits::default(),
            permits: Arc::new(Semaphore::new(max_children)),
        }
    }

    /// Replaces the limits.
    #[must_use]
    pub fn with_limits(mut self, limits: PackReaderLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Reads a push. `pack` is the pack of the push, if it has one. `bases` are complete packs of
    /// commits and trees that are reachable from upstream's own branches and tags, and no other
    /// objects: upstream is assumed to have the contents of these packs. Without them, restricted
    /// paths in the push are reported as unknown. A thin pack is readable if a base holds the
    /// objects that it leaves out, blobs included. The `old` id of an update is trusted if a base
    /// has it: the caller compares it with the refs that upstream advertises.
    ///
    /// Dropping the future kills the child.
    pub async fn read(
        &self,
        context: &PushContext,
        pack: Option<PackFile>,
        bases: Vec<PackFile>,
    ) -> Result<Findings, PackReaderError> {
        let _permit = self
            .permits
            .acquire()
            .await
            .map_err(child_error("pool is closed"))?;
        let reading = self.read_in_child(context.clone(), pack, bases);
        let limit = Duration::from_secs(self.limits.seconds);
        tokio::time::timeout(limit, reading)
            .await
            .unwrap_or(Err(PackReaderError::TimedOut(self.limits.seconds)))
    }

    async fn read_in_child(
        &self,
        context: PushContext,
        pack: Option<PackFile>,
        bases: Vec<PackFile>,
    ) -> Result<Findings, PackReaderError> {
        let this = self.clone();
        let started = tokio::task::spawn_blocking(move || this.start(&context, pack, bases));
        let mut child = started
            .await
            .map_err(child_error("the child could not be started"))??;
        let mut answer = Vec::new();
        if let Some(out) = child.stdout.take() {
            out.take(MAX_ANSWER_BYTES)
                .read_to_end(&mut answer)
                .await
                .map_err(child_error("the answer could not be read"))?;
        }
        let status = child
            .wait()
            .await
            .map_err(child_error("the exit status could not be read"))?;
        if answer.is_empty() {
            return Err(PackReaderError::Child(self.describe_exit(status)));
        }
        match serde_json::from_slice(&answer) {
            Ok(Answer::Found(findings)) => Ok(findings),
            Ok(Answer::Malformed(why)) => Err(PackReaderError::Malformed(why)),
            Ok(Answer::TooMuch(what)) => Err(PackReaderError::TooMuch(what)),
            Ok(Answer::Failed(failure)) => Err(PackReaderError::Child(failure)),
            Err(_) => Err(PackReaderError::Child(self.describe_exit(status))),
        }
    }

    /// Starts a child and sends the request. The child is killed when it is dropped.
    fn start(
        &self,
        context: &PushContext,
        pack: Option<PackFile>,
        bases: Vec<PackFile>,
    ) -> Result<Child, PackReaderError> {
        if bases.len() > MAX_BASES {
            return Err(PackReaderError::TooMuch(format!(
                "the number of base packs is over the bound of {MAX_BASES}"
            )));
        }
        let request = Request {
            limits: self.limits,
            pack: pack.as_ref().map(|pack| pack.offset),
            bases: bases.iter().map(|base| base.offset).collect(),
        };
        let context = write_context(context)?;
        let (channel, child_end) =
            packet::socket_pair().map_err(child_error("the child could not be started"))?;
        let child = Command::new(&self.program)
            .args(&self.arguments)
            .env_clear()
            // With this setting mimalloc commits only the memory that it uses. Committed memory
            // counts towards the limit, even if it is unused.
            .env("MIMALLOC_ARENA_EAGER_COMMIT", "0")
            .current_dir("/")
            .stdin(Stdio::from(child_end))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .map_err(child_error("the child could not be started"))?;
        let files = pack.iter().chain(&bases).map(|pack| pack.file.as_fd());
        let descriptors: Vec<_> = std::iter::once(context.as_fd()).chain(files).collect();
        match packet::send(channel.as_fd(), &request, &descriptors) {
            // The child has exited already; its exit status explains more than this error.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
            sent => sent.map_err(child_error("the request could not be sent"))?,
        }
        Ok(child)
    }

    /// Describes the exit status of a child that sent no answer.
    fn describe_exit(&self, status: ExitStatus) -> String {
        let signal = status
            .signal()
            .and_then(|number| Signal::try_from(number).ok());
        match signal {
            Some(Signal::SIGXCPU) => {
                let seconds = self.limits.processor;
                format!("used more than {seconds} s of processor time")
            }
            Some(Signal::SIGABRT) => "aborted, probably out of memory".to_owned(),
            Some(signal) => format!("killed by {signal}"),
            None => format!("exited without an answer ({status})"),
        }
    }
}

/// Writes the push context to an anonymous file.
fn write_context(context: &PushContext) -> Result<OwnedFd, PackReaderError> {
    let text =
        serde_json::to_vec(context).map_err(child_error("the push context could not be sent"))?;
    if text.len() as u64 > MAX_CONTEXT_BYTES {
        return Err(PackReaderError::TooMuch(format!(
            "the list of refs is over the bound of {MAX_CONTEXT_BYTES} bytes"
        )));
    }
    let file = memfd_create(c"context", MFdFlags::MFD_CLOEXEC)
        .map_err(child_error("the push context could not be sent"))?;
    let mut file = File::from(file);
    file.write_all(&text)
        .map_err(child_error("the push context could not be sent"))?;
    Ok(file.into())
}

fn child_error<E: std::fmt::Display>(failure: &'static str) -> impl Fn(E) -> PackReaderError {
    move |error| PackReaderError::Child(format!("{failure} ({error})"))
}
