//! Where a push is read before anybody upstream sees it: a process of its own that holds no
//! key and may do next to nothing.
//!
//! ```text
//!   gate (threads, keys)                    child (one thread, nothing)
//!     │ ── Order, case, pack, bases ───────────▶ │ limits, no capability, seccomp
//!     │                                          │ reads every object of the pack
//!     │ ◀── Found | Malformed | TooMuch ──────── │
//! ```
//!
//! The child gets open files and cannot open another. The pack's own file is its store: it is
//! read twice, and nothing of it is written anywhere, so there is nothing to clean up. A child
//! that crashes, hangs or runs over its limits is an error with a sentence, and an error
//! refuses the push.
//!
//! **Never here:** a key, an environment, a program started, a decision about the push.

mod bases;
mod confinement;
mod delta;
mod duty;
mod error;
mod hash;
mod history;
mod learnt;
mod object;
mod pack;
mod restricted;
mod spelling;
mod whereabouts;

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
use policy::push::{Case, Findings};
use policy::reason::Reason;
use policy::verdict::Denial;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt;
use tokio::process::{Child, Command};
use tokio::sync::Semaphore;

use crate::namespace::packet;

pub use duty::judge_main;
pub use pack::PackBounds;

/// The longest case and the longest answer, as JSON.
const LONGEST_CASE: u64 = 64 << 20;
const LONGEST_ANSWER: u64 = 16 << 20;

/// The most packs that come beside a push; an order is one packet.
const MOST_BASES: usize = 16;

/// Reads pushes, a few at a time.
#[derive(Clone, Debug)]
pub struct Judge {
    program: PathBuf,
    arguments: Vec<OsString>,
    limits: JudgeLimits,
    turns: Arc<Semaphore>,
}

/// What a child may use up.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JudgeLimits {
    /// Bytes of memory it can write to.
    pub memory: u64,
    /// Seconds of processor time.
    pub processor: u64,
    /// Seconds until it is given up.
    pub seconds: u64,
    /// What a push may hold.
    pub pack: PackBounds,
}

impl Default for JudgeLimits {
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
    /// Where the pack begins.
    pub offset: u64,
}

/// Why a push was not judged. Whatever it is, the push is refused.
#[derive(Debug, thiserror::Error)]
pub enum JudgeError {
    /// The pack is none, or is damaged.
    #[error("{0}")]
    Malformed(String),
    /// It is more than is read of one push.
    #[error("{0}")]
    TooMuch(String),
    /// It took too long.
    #[error("reading the push took longer than {0} s")]
    TimedOut(u64),
    /// The process that reads it did not answer.
    #[error("the process that reads the push {0}")]
    Child(String),
}

impl JudgeError {
    /// The refusal that it is.
    pub fn denial(&self) -> Denial {
        let (reason, rule) = match self {
            JudgeError::Malformed(_) => (Reason::GitMalformed, "git:form"),
            JudgeError::TooMuch(_) | JudgeError::TimedOut(_) => (Reason::ScanBudget, "git:bounds"),
            JudgeError::Child(_) => (Reason::Internal, "git:judge"),
        };
        let denial = Denial::new(reason, rule);
        match self {
            JudgeError::Malformed(why) => denial.saying(format!("The push was refused: {why}.")),
            JudgeError::TooMuch(_) | JudgeError::TimedOut(_) => denial.saying(format!(
                "The push is more than can be looked through: {self}. Push it in parts."
            )),
            JudgeError::Child(_) => denial.because(self.to_string()),
        }
    }
}

/// What the child is sent, with the case, the pack and the bases as open files.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Order {
    limits: JudgeLimits,
    /// Where the pack begins in its file; none where the push has none.
    pack: Option<u64>,
    /// Where each base begins in its file.
    bases: Vec<u64>,
}

/// What it answers.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Found(Findings),
    Malformed(String),
    TooMuch(String),
    Failed(String),
}

impl Judge {
    /// Children are this program with these arguments, which must end in [`judge_main`], and
    /// there are at most so many at once.
    pub fn new(program: PathBuf, arguments: Vec<OsString>, at_once: usize) -> Self {
        Self {
            program,
            arguments,
            limits: JudgeLimits::default(),
            turns: Arc::new(Semaphore::new(at_once)),
        }
    }

    /// With other limits.
    #[must_use]
    pub fn with_limits(mut self, limits: JudgeLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Reads a push. `pack` is what came with it, if anything did. `bases` are complete packs
    /// with commits and trees that upstream's own branches and tags reach, and nothing else:
    /// what is in them counts as upstream's. Without them restricted paths that the push has
    /// are unknown ones. A pack that builds on what it leaves out (a thin one) is read where a
    /// base holds that, files included. The `old` of an update is believed where a base has
    /// it: whoever asks compares it with what upstream advertises.
    ///
    /// Dropped, it ends the child.
    pub async fn judge(
        &self,
        case: &Case,
        pack: Option<PackFile>,
        bases: Vec<PackFile>,
    ) -> Result<Findings, JudgeError> {
        let _turn = self.turns.acquire().await.map_err(broken("has no place"))?;
        let reading = self.read(case.clone(), pack, bases);
        let limit = Duration::from_secs(self.limits.seconds);
        tokio::time::timeout(limit, reading)
            .await
            .unwrap_or(Err(JudgeError::TimedOut(self.limits.seconds)))
    }

    async fn read(
        &self,
        case: Case,
        pack: Option<PackFile>,
        bases: Vec<PackFile>,
    ) -> Result<Findings, JudgeError> {
        let this = self.clone();
        let started = tokio::task::spawn_blocking(move || this.start(&case, pack, bases));
        let mut child = started.await.map_err(broken("was not started"))??;
        let mut answer = Vec::new();
        if let Some(out) = child.stdout.take() {
            out.take(LONGEST_ANSWER)
                .read_to_end(&mut answer)
                .await
                .map_err(broken("could not be heard"))?;
        }
        let status = child.wait().await.map_err(broken("was lost"))?;
        if answer.is_empty() {
            return Err(JudgeError::Child(self.fate(status)));
        }
        match serde_json::from_slice(&answer) {
            Ok(Answer::Found(findings)) => Ok(findings),
            Ok(Answer::Malformed(why)) => Err(JudgeError::Malformed(why)),
            Ok(Answer::TooMuch(what)) => Err(JudgeError::TooMuch(what)),
            Ok(Answer::Failed(how)) => Err(JudgeError::Child(how)),
            Err(_) => Err(JudgeError::Child(self.fate(status))),
        }
    }

    /// Starts a child and tells it everything. It is killed when it is dropped.
    fn start(
        &self,
        case: &Case,
        pack: Option<PackFile>,
        bases: Vec<PackFile>,
    ) -> Result<Child, JudgeError> {
        if bases.len() > MOST_BASES {
            return Err(JudgeError::TooMuch(format!(
                "the number of base packs is over the bound of {MOST_BASES}"
            )));
        }
        let order = Order {
            limits: self.limits,
            pack: pack.as_ref().map(|pack| pack.offset),
            bases: bases.iter().map(|base| base.offset).collect(),
        };
        let case = written(case)?;
        let (line, its) = packet::line().map_err(broken("was not started"))?;
        let child = Command::new(&self.program)
            .args(&self.arguments)
            .env_clear()
            // The allocator, where it is mimalloc, takes what it uses and no more: the rest
            // would count towards the limit.
            .env("MIMALLOC_ARENA_EAGER_COMMIT", "0")
            .current_dir("/")
            .stdin(Stdio::from(its))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .map_err(broken("was not started"))?;
        let files = pack.iter().chain(&bases).map(|pack| pack.file.as_fd());
        let descriptors: Vec<_> = std::iter::once(case.as_fd()).chain(files).collect();
        match packet::send(line.as_fd(), &order, &descriptors) {
            // Gone already; how it ended says more.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
            sent => sent.map_err(broken("could not be talked to"))?,
        }
        Ok(child)
    }

    /// What the end of a child that did not answer means.
    fn fate(&self, status: ExitStatus) -> String {
        let signal = status
            .signal()
            .and_then(|number| Signal::try_from(number).ok());
        match signal {
            Some(Signal::SIGXCPU) => {
                let seconds = self.limits.processor;
                format!("used more than {seconds} s of processor time")
            }
            Some(Signal::SIGABRT) => "gave up, probably for want of memory".to_owned(),
            Some(signal) => format!("was ended by {signal}"),
            None => format!("ended without an answer ({status})"),
        }
    }
}

/// The case as a file of its own that is nowhere.
fn written(case: &Case) -> Result<OwnedFd, JudgeError> {
    let text = serde_json::to_vec(case).map_err(broken("could not be told its case"))?;
    if text.len() as u64 > LONGEST_CASE {
        return Err(JudgeError::TooMuch(format!(
            "the list of refs is over the bound of {LONGEST_CASE} bytes"
        )));
    }
    let file = memfd_create(c"case", MFdFlags::MFD_CLOEXEC)
        .map_err(broken("could not be told its case"))?;
    let mut file = File::from(file);
    file.write_all(&text)
        .map_err(broken("could not be told its case"))?;
    Ok(file.into())
}

fn broken<E: std::fmt::Display>(how: &'static str) -> impl Fn(E) -> JudgeError {
    move |error| JudgeError::Child(format!("{how} ({error})"))
}
