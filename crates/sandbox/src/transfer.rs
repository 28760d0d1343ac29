//! Uploads and downloads as tar archives.
//!
//! ```text
//!   operator's files ── pack ──▶ archive ──▶ unpack in the sandbox, as the agent
//!   operator's files ◀─ unpack ─ archive ◀── pack in the sandbox, as the agent
//! ```
//!
//! The host never opens a path that an agent controls: in the sandbox the same code runs as the
//! agent. A downloaded archive is still untrusted. Members are opened component by component and
//! never through a link, collected in a staging directory, and moved to their targets after the
//! last member was checked.
//!
//! A strict parser reads the format: extension headers of a hostile archive must be bounded, and
//! unknown members must be refused, not skipped.

pub mod confined;
mod header;
mod merge;
mod packer;
mod path;
mod reader;
mod stage;
mod writer;

#[cfg(test)]
mod tests;

use std::ffi::OsStr;
use std::io::{Read, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::contract::{TransferBounds, TransferSummary};
use packer::Packer;
use stage::Stage;

/// Maximum number of notes about skipped entries.
const MAX_NOTES: usize = 100;

/// Maximum number of characters of a path in a note.
const MAX_NOTE_CHARS: usize = 300;

/// Packs a file or directory of the operator's. The members' paths begin with the source's own
/// name.
///
/// Links stay links, except the source itself. Entries that are neither file, directory nor link
/// are skipped with a note. `progress` receives the number of content bytes read so far.
pub fn pack(
    source: &Path,
    into: &mut dyn Write,
    progress: &mut dyn FnMut(u64),
) -> Result<TransferSummary, TransferError> {
    pack_within(source, into, &UNLIMITED, progress)
}

/// As [`pack`], but skips the gate's state directory `state` with a note, because the state
/// directory contains the sandbox that receives the archive. A source in the state directory is
/// refused.
pub fn pack_except(
    state: &Path,
    source: &Path,
    into: &mut dyn Write,
    progress: &mut dyn FnMut(u64),
) -> Result<TransferSummary, TransferError> {
    let mut packer = Packer::new(into, &UNLIMITED, progress);
    packer.skip(state)?;
    packer.add(source)?;
    packer.finish()
}

const UNLIMITED: TransferBounds = TransferBounds {
    bytes: u64::MAX,
    entries: u64::MAX,
};

/// As [`pack`], limited by `bounds`.
pub(crate) fn pack_within(
    source: &Path,
    into: &mut dyn Write,
    bounds: &TransferBounds,
    progress: &mut dyn FnMut(u64),
) -> Result<TransferSummary, TransferError> {
    let mut packer = Packer::new(into, bounds, progress);
    packer.add(source)?;
    packer.finish()
}

/// Packs the entries of a directory to which an archive was unpacked. A top-level link is skipped
/// with a note, because its target is not part of the archive.
pub(crate) fn pack_members(
    directory: &Path,
    into: &mut dyn Write,
) -> Result<TransferSummary, TransferError> {
    let failed = || TransferError::system("reading", directory);
    let mut names = std::fs::read_dir(directory)
        .and_then(|entries| entries.collect::<Result<Vec<_>, _>>())
        .map_err(failed())?;
    names.sort_by_key(std::fs::DirEntry::file_name);
    let mut nothing = |_| {};
    let mut packer = Packer::new(into, &UNLIMITED, &mut nothing);
    let mut links = Vec::new();
    for entry in names {
        if entry.file_type().map_err(failed())?.is_symlink() {
            links.push(entry.file_name());
        } else {
            packer.add(&entry.path())?;
        }
    }
    let mut summary = packer.finish()?;
    for link in links {
        skip(&mut summary, link.as_encoded_bytes(), "it is a link");
    }
    Ok(summary)
}

/// Unpacks an archive below `target`, which is created if it does not exist. On failure nothing is
/// left, and nothing that existed is changed.
pub fn unpack(
    archive: &mut dyn Read,
    target: &Path,
    bounds: &TransferBounds,
    rules: &UnpackRules,
) -> Result<TransferSummary, TransferError> {
    let mut stage = Stage::open(target, bounds, *rules)?;
    let mut members = reader::Reader::new(archive);
    while let Some(member) = members.next_member()? {
        stage.unpack_member(&member, &mut members)?;
    }
    stage.publish()
}

/// The rules of an unpacking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnpackRules {
    /// How an existing file is treated.
    pub overwrite: Overwrite,
    /// Which links are created.
    pub links: LinkPolicy,
    /// How `.git` directories are treated.
    pub repositories: RepositoryPolicy,
}

impl UnpackRules {
    /// The rules for archives of an agent.
    pub const FOR_HOST: Self = Self {
        overwrite: Overwrite::No,
        links: LinkPolicy::BelowTarget,
        repositories: RepositoryPolicy::Skip,
    };

    /// The rules for archives of the operator, which are unpacked as the agent. Links are not
    /// restricted, because the agent could create any link itself.
    pub(crate) const FOR_SANDBOX: Self = Self {
        overwrite: Overwrite::Yes,
        links: LinkPolicy::Any,
        repositories: RepositoryPolicy::Any,
    };
}

/// How an existing file is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overwrite {
    /// The file is kept, and nothing is unpacked.
    No,
    /// The file is replaced. A directory and another kind of entry never replace each other.
    Yes,
}

/// Which symbolic links are created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkPolicy {
    /// Links that point below the target. Other links are skipped with a note.
    BelowTarget,
    /// All links.
    Any,
}

/// How a `.git` is treated, in any spelling that some file system accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RepositoryPolicy {
    /// The `.git` is skipped with a note, because its hooks and configuration run programs as soon
    /// as git is run there. Other files that configure tools are reported.
    Skip,
    /// The `.git` is unpacked like any other file.
    Any,
}

/// An error of a transfer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum TransferError {
    /// A forbidden member.
    #[error("'{shown}' is refused: {reason}; nothing was changed", shown = .path.escape_debug())]
    Refused {
        /// The path.
        path: String,
        /// The reason.
        reason: MemberRefusal,
    },
    /// The archive is malformed or truncated.
    #[error("the archive cannot be read: {0}; nothing was changed")]
    Malformed(String),
    /// The target exists already.
    #[error("'{shown}' already exists; nothing was changed", shown = .0.escape_debug())]
    Exists(String),
    /// The source does not exist.
    #[error("'{shown}' does not exist", shown = .0.escape_debug())]
    Missing(String),
    /// Too many bytes.
    #[error("the transfer is larger than {0} bytes; transfer less at a time, or raise the limit")]
    TooLarge(u64),
    /// Too many files.
    #[error("the transfer has more than {0} entries; transfer less at a time, or raise the limit")]
    TooMany(u64),
    /// A system call failed.
    #[error("{step} '{shown}': {}", std::io::Error::from_raw_os_error(*.errno), shown = .path.escape_debug())]
    System {
        /// The failed step.
        step: String,
        /// The path.
        path: String,
        /// The system's error.
        errno: i32,
    },
}

/// Why a member is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum MemberRefusal {
    /// The path is absolute.
    #[error("its path is absolute")]
    Absolute,
    /// The path contains `..`.
    #[error("its path has '..' in it")]
    #[serde(rename = "Climbs")]
    DotDot,
    /// The path is invalid.
    #[error("its path is empty, too long, too deep or has a NUL in it")]
    #[serde(rename = "NoPath")]
    InvalidPath,
    /// A parent of the member is no directory.
    #[error("a parent of it is a link or a file")]
    ThroughLink,
    /// A hard link to a path that is no file of this archive.
    #[error("it is a hard link to a path that is no file of the archive")]
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
    /// The archive has the path twice.
    #[error("it is in the archive twice")]
    #[serde(rename = "Twice")]
    Duplicate,
    /// The member has another type.
    #[error("it is neither file, directory nor link")]
    Unknown,
    /// A directory would replace another kind of entry, or the reverse.
    #[error("an entry of another kind exists there")]
    OtherKind,
    /// The path is a link, or a parent of it is no directory.
    #[error("it, or a parent of it, is a link or a file")]
    Link,
    /// The path is part of a repository, whose hooks and configuration run programs.
    #[error("it is a '.git', or in one")]
    Repository,
    /// The file would run a program or configure a tool on the operator's machine.
    #[error(
        "it runs or configures tools on the operator's machine; the operator can download it themselves"
    )]
    #[serde(rename = "Steers")]
    ConfiguresTools,
    /// The path is in the gate's state directory.
    #[error("it is in palisade's own state directory, which contains the target sandbox")]
    #[serde(rename = "OurOwn")]
    StateDirectory,
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

    fn refused(path: &[u8], reason: MemberRefusal) -> Self {
        Self::Refused {
            path: String::from_utf8_lossy(path).into_owned(),
            reason,
        }
    }

    fn malformed(what: &str) -> Self {
        Self::Malformed(what.to_owned())
    }
}

/// Adds a note about a skipped entry.
fn skip(summary: &mut TransferSummary, path: &[u8], why: &str) {
    note(&mut summary.left_out, path, why);
}

fn note(notes: &mut Vec<String>, path: &[u8], why: &str) {
    if notes.len() < MAX_NOTES {
        let path = String::from_utf8_lossy(path);
        // The path is truncated, so that a note is readable and all notes together fit a pipe.
        let path: String = path.escape_debug().take(MAX_NOTE_CHARS).collect();
        notes.push(format!("{path}: {why}"));
    }
}
