//! User namespace in which a process has the operator's id and a set of subordinate ids.
//!
//! The process that enters the map moves into a new user namespace, in which it keeps the
//! operator's id and the subordinate ids have the same numbers as outside. There it has root's
//! rights over files of these ids only: the kernel allows what the operator and the subordinate ids
//! together may do.
//!
//! ```text
//!   target (one thread)                    mapper (its child, outside)
//!     │ ── fork ────────────────────────────▶ │ waits
//!     │ unshare(user)                         │
//!     │ ── ready ───────────────────────────▶ │ newuidmap, newgidmap TARGET …
//!     │ ◀─────────────── success or the error │ exits
//!     │ drops other capabilities              ╵
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

/// The absolute paths of the mapping tools.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MappingTools {
    pub(crate) users: PathBuf,
    pub(crate) groups: PathBuf,
}

/// A contiguous range of ids inside and outside of the user namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Extent {
    #[serde(rename = "inside")]
    pub(crate) first_inside: u32,
    #[serde(rename = "outside")]
    pub(crate) first_outside: u32,
    pub(crate) count: u32,
}

impl Extent {
    /// A range with the same numbers inside and outside.
    pub(crate) fn identical(first: u32, count: u32) -> Self {
        Self {
            first_inside: first,
            first_outside: first,
            count,
        }
    }
}

/// The ids to map, and the tools that map them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SubidMap {
    pub(crate) tools: MappingTools,
    pub(crate) users: Vec<Extent>,
    pub(crate) groups: Vec<Extent>,
}

/// The name of the step in errors.
const STEP_NAME: &str = "mapping the ids of /etc/subuid";

impl SubidMap {
    /// Moves this process irrevocably into the user namespace. It must have one thread.
    pub(crate) fn enter(&self) -> Result<(), StepError> {
        let (ready_reader, ready) = pipe2(OFlag::O_CLOEXEC).step("creating a pipe")?;
        let (result_reader, result_writer) = pipe2(OFlag::O_CLOEXEC).step("creating a pipe")?;
        let target = getpid();
        // SAFETY: this process has one thread, so the child may do whatever the parent may.
        match unsafe { fork() }.step("creating a process")? {
            ForkResult::Child => {
                drop((ready, result_reader));
                self.write_maps(target, ready_reader, result_writer);
                std::process::exit(0)
            }
            ForkResult::Parent { child } => {
                drop((ready_reader, result_writer));
                let mapped = wait_for_mapper(ready, result_reader);
                let _ = waitpid(child, None);
                mapped?;
            }
        }
        // This process executes no program. If it did, no program could gain a privilege.
        prctl::set_no_new_privs().step("setting no_new_privs")?;
        hardening::empty_bounding_set(&[]).step("emptying the bounding set")?;
        hardening::keep_capabilities(hardening::SUBID_CAPABILITIES).step("dropping capabilities")
    }

    /// Runs in the mapper: maps the ids and writes the result to the pipe.
    fn write_maps(&self, target: Pid, ready_reader: OwnedFd, result_writer: OwnedFd) {
        let mut byte = [0];
        // Without this byte the target has exited.
        if !matches!(File::from(ready_reader).read(&mut byte), Ok(1)) {
            return;
        }
        let mapped = run_mapping_tool(&self.tools.users, target, &self.users)
            .and_then(|()| run_mapping_tool(&self.tools.groups, target, &self.groups));
        let (code, message) = match mapped {
            Ok(()) => (b"+", String::new()),
            Err(error) => (b"-", error.to_string()),
        };
        let mut result_writer = File::from(result_writer);
        let _ = result_writer
            .write_all(code)
            .and_then(|()| result_writer.write_all(message.as_bytes()));
    }
}

/// Runs in the target: creates the user namespace and waits for the mapper's result.
fn wait_for_mapper(ready: OwnedFd, result_reader: OwnedFd) -> Result<(), StepError> {
    unshare(CloneFlags::CLONE_NEWUSER).step(
        "creating a user namespace (run `palisade doctor` to check whether they are allowed)",
    )?;
    File::from(ready).write_all(b"+").step(STEP_NAME)?;
    let mut message = Vec::new();
    File::from(result_reader)
        .read_to_end(&mut message)
        .step(STEP_NAME)?;
    match message.split_first() {
        Some((b'+', _)) => Ok(()),
        Some((_, why)) => Err(Error::other(String::from_utf8_lossy(why).into_owned())),
        None => Err(Error::other("the mapping process exited early")),
    }
    .step(STEP_NAME)
}

fn run_mapping_tool(tool: &Path, target: Pid, extents: &[Extent]) -> std::io::Result<()> {
    let numbers = extents
        .iter()
        .flat_map(|extent| [extent.first_inside, extent.first_outside, extent.count])
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
        "{} failed ({}): {stderr}; see `palisade doctor`",
        tool.display(),
        output.status
    )))
}
