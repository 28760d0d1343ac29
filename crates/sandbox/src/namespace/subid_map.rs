//! Leave to act as ids that the operator was lent, and as nobody else.
//!
//! A process that takes a loan moves into a user namespace of its own in which it stays the
//! operator and the lent ids have the numbers they have outside. There it has the rights over
//! files that root has, and over the files of these ids alone: what the kernel lets it do is
//! what it would let the operator and the lent ids do.
//!
//! ```text
//!   taker (one thread)                     mapper (its child, outside)
//!     │ ── fork ────────────────────────────▶ │ waits
//!     │ unshare(user)                         │
//!     │ ── ready ───────────────────────────▶ │ newuidmap, newgidmap TAKER …
//!     │ ◀──────────────────── nothing, or why │ ends
//!     │ drops what it needs not               ╵
//! ```

use std::fs::File;
use std::io::{Error, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::fcntl::OFlag;
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork, getpid, pipe2};
use serde::{Deserialize, Serialize};

use super::hardening;
use super::step::{Step, StepError};

/// What maps ids, by absolute path.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Tools {
    pub(crate) users: PathBuf,
    pub(crate) groups: PathBuf,
}

/// Some ids in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Extent {
    pub(crate) inside: u32,
    pub(crate) outside: u32,
    pub(crate) count: u32,
}

impl Extent {
    /// With the same numbers inside and outside.
    pub(crate) fn same(first: u32, count: u32) -> Self {
        Self {
            inside: first,
            outside: first,
            count,
        }
    }
}

/// Which ids, and how they are got.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SubidMap {
    pub(crate) tools: Tools,
    pub(crate) users: Vec<Extent>,
    pub(crate) groups: Vec<Extent>,
}

const MAPPING: &str = "mapping the ids of /etc/subuid";

impl SubidMap {
    /// Takes it, for the rest of this process's life, which must have one thread.
    pub(crate) fn enter(&self) -> Result<(), StepError> {
        let (ready_reader, ready) = pipe2(OFlag::O_CLOEXEC).step("making a pipe")?;
        let (answer, result_writer) = pipe2(OFlag::O_CLOEXEC).step("making a pipe")?;
        let target = getpid();
        // SAFETY: this process has one thread, so the child may do whatever the parent may.
        match unsafe { fork() }.step("making a process")? {
            ForkResult::Child => {
                drop((ready, answer));
                self.write_maps(target, ready_reader, result_writer);
                std::process::exit(0)
            }
            ForkResult::Parent { child } => {
                drop((ready_reader, result_writer));
                let taken = wait_for_mapper(ready, answer);
                let _ = waitpid(child, None);
                taken?;
            }
        }
        // Nothing that this process executes gains a right, and it executes nothing.
        prctl::set_no_new_privs().step("giving up privileges")?;
        hardening::empty_bounding_set(&[]).step("emptying the bounding set")?;
        hardening::keep_capabilities(hardening::SUBID_CAPABILITIES).step("dropping capabilities")
    }

    /// The mapper's part. Says why not, or nothing.
    fn write_maps(&self, target: Pid, ready_reader: OwnedFd, result_writer: OwnedFd) {
        let mut word = [0];
        // A taker that is gone has said nothing.
        if !matches!(File::from(ready_reader).read(&mut word), Ok(1)) {
            return;
        }
        let mapped = run_mapping_tool(&self.tools.users, target, &self.users)
            .and_then(|()| run_mapping_tool(&self.tools.groups, target, &self.groups));
        let (code, words) = match mapped {
            Ok(()) => (b"+", String::new()),
            Err(error) => (b"-", error.to_string()),
        };
        let mut result_writer = File::from(result_writer);
        let _ = result_writer
            .write_all(code)
            .and_then(|()| result_writer.write_all(words.as_bytes()));
    }
}

/// The taker's part between the fork and the mapper's end.
fn wait_for_mapper(ready: OwnedFd, answer: OwnedFd) -> Result<(), StepError> {
    unshare(CloneFlags::CLONE_NEWUSER)
        .step("making a user namespace (are they allowed? see `palisade doctor`)")?;
    File::from(ready).write_all(b"+").step(MAPPING)?;
    let mut words = Vec::new();
    File::from(answer).read_to_end(&mut words).step(MAPPING)?;
    match words.split_first() {
        Some((b'+', _)) => Ok(()),
        Some((_, why)) => Err(Error::other(String::from_utf8_lossy(why).into_owned())),
        None => Err(Error::other("the mapper ended early")),
    }
    .step(MAPPING)
}

fn run_mapping_tool(tool: &Path, target: Pid, extents: &[Extent]) -> std::io::Result<()> {
    let numbers = extents
        .iter()
        .flat_map(|extent| [extent.inside, extent.outside, extent.count])
        .map(|number| number.to_string());
    let output = Command::new(tool)
        .arg(target.to_string())
        .args(numbers)
        .env_clear()
        .stdin(Stdio::null())
        .output()?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(Error::other(format!(
        "{} refused ({}): {stderr}; see `palisade doctor`",
        tool.display(),
        output.status
    )))
}
