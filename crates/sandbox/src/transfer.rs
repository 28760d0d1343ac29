//! Files on their way in and out of a sandbox, as tar archives.
//!
//! ```text
//!   operator's files ── pack ──▶ archive ──▶ unpack, inside, as the agent
//!   operator's files ◀─ unpack ─ archive ◀── pack, inside, as the agent
//! ```
//!
//! The host never opens a path that an agent controls: inside, the same code runs as the
//! agent. What comes out is still hostile. Members are opened component by component and
//! never through a link, put together in a directory aside, and moved to their places when
//! the last of them was found good.
//!
//! The format is read by our own strict reader: extension headers of a hostile archive have
//! to be bounded, and what is not understood has to be refused, not skipped.

mod header;
mod merge;
mod packer;
mod path;
mod reader;
mod stage;
pub mod within;
mod writer;

#[cfg(test)]
mod tests;

use std::ffi::OsStr;
use std::io::{Read, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::contract::{Moved, Transfer};
use packer::Packer;
use stage::Stage;

/// Notes kept about what was left out.
const MOST_NOTES: usize = 100;

/// Characters of a path in a note.
const LONGEST_NOTE: usize = 300;

/// Packs a file or directory of the operator's. The archive's members begin with the
/// source's own name.
///
/// Links stay links, but for the source itself. What is neither file, directory nor link is
/// left out with a note. `progress` hears how many bytes of content have been read so far.
pub fn pack(
    source: &Path,
    into: &mut dyn Write,
    progress: &mut dyn FnMut(u64),
) -> Result<Moved, TransferError> {
    pack_within(source, into, &NO_BOUNDS, progress)
}

/// As [`pack`], but for our own state directory: it is left out with a note, whatever it is
/// called there. The sandbox that the archive goes to is in it, and would pack itself. A
/// source within it is refused.
pub fn pack_around(
    state: &Path,
    source: &Path,
    into: &mut dyn Write,
    progress: &mut dyn FnMut(u64),
) -> Result<Moved, TransferError> {
    let mut packer = Packer::new(into, &NO_BOUNDS, progress);
    packer.leave_out(state)?;
    packer.add(source)?;
    packer.finish()
}

const NO_BOUNDS: Transfer = Transfer {
    bytes: u64::MAX,
    entries: u64::MAX,
};

/// As [`pack`], and no more than `bounds`.
pub(crate) fn pack_within(
    source: &Path,
    into: &mut dyn Write,
    bounds: &Transfer,
    progress: &mut dyn FnMut(u64),
) -> Result<Moved, TransferError> {
    let mut packer = Packer::new(into, bounds, progress);
    packer.add(source)?;
    packer.finish()
}

/// Packs everything in a directory that an archive was unpacked to, under the names there. A
/// link among them is left out with a note: what it points to is none of the archive's.
pub(crate) fn pack_members(directory: &Path, into: &mut dyn Write) -> Result<Moved, TransferError> {
    let failed = || TransferError::system("reading", directory);
    let mut names = std::fs::read_dir(directory)
        .and_then(|entries| entries.collect::<Result<Vec<_>, _>>())
        .map_err(failed())?;
    names.sort_by_key(std::fs::DirEntry::file_name);
    let mut nothing = |_| {};
    let mut packer = Packer::new(into, &NO_BOUNDS, &mut nothing);
    let mut links = Vec::new();
    for entry in names {
        if entry.file_type().map_err(failed())?.is_symlink() {
            links.push(entry.file_name());
        } else {
            packer.add(&entry.path())?;
        }
    }
    let mut moved = packer.finish()?;
    for link in links {
        leave_out(&mut moved, link.as_encoded_bytes(), "it is a link");
    }
    Ok(moved)
}

/// Unpacks an archive below `target`, which is made if it is not there. What is refused
/// leaves nothing behind, and nothing that was there is changed.
pub fn unpack(
    archive: &mut dyn Read,
    target: &Path,
    bounds: &Transfer,
    rules: &Rules,
) -> Result<Moved, TransferError> {
    let mut stage = Stage::open(target, bounds, *rules)?;
    let mut members = reader::Reader::new(archive);
    while let Some(member) = members.next_member()? {
        stage.take(&member, &mut members)?;
    }
    stage.settle()
}

/// How careful an unpacking is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// What happens to a file that is already there.
    pub overwrite: Overwrite,
    /// Which links are made.
    pub links: Links,
    /// What becomes of repositories.
    pub repositories: Repositories,
}

impl Rules {
    /// For what comes from an agent.
    pub const FOR_HOST: Self = Self {
        overwrite: Overwrite::No,
        links: Links::Inside,
        repositories: Repositories::LeftOut,
    };

    /// For what an operator brings: the agent could make any link itself.
    pub(crate) const FOR_SANDBOX: Self = Self {
        overwrite: Overwrite::Yes,
        links: Links::Any,
        repositories: Repositories::Any,
    };
}

/// What happens to a file that is already there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overwrite {
    /// It stays, and nothing is unpacked.
    No,
    /// It is replaced. A directory is never replaced by anything else, nor the other way.
    Yes,
}

/// Which symbolic links are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Links {
    /// Those that stay below the target; others are left out with a note.
    Inside,
    /// All.
    Any,
}

/// What becomes of a `.git`, in any spelling that some file system takes for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repositories {
    /// It is left out with a note: its hooks and its configuration start programs as soon as
    /// somebody runs git there. Other files that steer tools are named.
    LeftOut,
    /// It is like any other file.
    Any,
}

/// Why a transfer came to nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum TransferError {
    /// A member that must not be.
    #[error("'{shown}' is refused: {reason}; nothing was changed", shown = .path.escape_debug())]
    Refused {
        /// Its path.
        path: String,
        /// What is wrong with it.
        reason: Refusal,
    },
    /// No archive, or not all of one.
    #[error("the archive cannot be read: {0}; nothing was changed")]
    Malformed(String),
    /// Something is there already.
    #[error("'{shown}' is already there; nothing was changed", shown = .0.escape_debug())]
    Exists(String),
    /// Nothing is there.
    #[error("'{shown}' is not there", shown = .0.escape_debug())]
    Missing(String),
    /// Too many bytes.
    #[error("it is larger than {0} bytes; move less at a time, or raise the limit")]
    TooLarge(u64),
    /// Too many files.
    #[error("it has more than {0} entries; move less at a time, or raise the limit")]
    TooMany(u64),
    /// The system refused something.
    #[error("{step} '{shown}': {}", std::io::Error::from_raw_os_error(*.errno), shown = .path.escape_debug())]
    System {
        /// What was being done.
        step: String,
        /// To what.
        path: String,
        /// What the system said.
        errno: i32,
    },
}

/// What is wrong with a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum Refusal {
    /// It starts at the root.
    #[error("its path is absolute")]
    Absolute,
    /// It climbs.
    #[error("its path has '..' in it")]
    Climbs,
    /// It cannot be a path.
    #[error("its path is empty, too long, too deep or has a NUL in it")]
    NoPath,
    /// It is behind another member that is no directory.
    #[error("it is below a link or a file")]
    ThroughLink,
    /// A hard link to something that is no file of this archive.
    #[error("it is a hard link to something that is no file of the archive")]
    HardLinkOut,
    /// A device.
    #[error("it is a device")]
    Device,
    /// A FIFO.
    #[error("it is a FIFO")]
    Fifo,
    /// A sparse file.
    #[error("it is a sparse file; pack it without holes")]
    Sparse,
    /// It comes twice.
    #[error("it is in the archive twice")]
    Twice,
    /// Something else.
    #[error("it is neither file, directory nor link")]
    Unknown,
    /// A directory would take the place of something else, or the other way.
    #[error("something of another kind is there")]
    OtherKind,
    /// It is not where its name says, or what is there leads elsewhere.
    #[error("it is a link, or lies behind a link or a file")]
    Link,
    /// It is of a repository, whose hooks and configuration start programs.
    #[error("it is a '.git', or in one")]
    Repository,
    /// It would start something on the operator's machine.
    #[error("it runs or steers tools on the operator's machine; they can bring it home themselves")]
    Steers,
    /// It holds the sandboxes themselves.
    #[error("it is in palisade's own state directory, which holds the sandbox it would go to")]
    OurOwn,
}

impl TransferError {
    fn system<P: AsRef<OsStr> + ?Sized, E: Into<std::io::Error>>(
        step: &str,
        path: &P,
    ) -> impl FnOnce(E) -> Self {
        move |error| Self::System {
            step: step.to_owned(),
            path: path.as_ref().to_string_lossy().into_owned(),
            errno: error.into().raw_os_error().unwrap_or(libc::EIO),
        }
    }

    fn refused(path: &[u8], reason: Refusal) -> Self {
        Self::Refused {
            path: String::from_utf8_lossy(path).into_owned(),
            reason,
        }
    }

    fn malformed(what: &str) -> Self {
        Self::Malformed(what.to_owned())
    }
}

/// Notes that something stays behind.
fn leave_out(moved: &mut Moved, path: &[u8], why: &str) {
    note(&mut moved.left_out, path, why);
}

fn note(notes: &mut Vec<String>, path: &[u8], why: &str) {
    if notes.len() < MOST_NOTES {
        let path = String::from_utf8_lossy(path);
        // As much as a person reads, and all notes together as much as a pipe holds.
        let path: String = path.escape_debug().take(LONGEST_NOTE).collect();
        notes.push(format!("{path}: {why}"));
    }
}
