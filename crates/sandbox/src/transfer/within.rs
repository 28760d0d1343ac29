//! Transfers whose place on the host is named by somebody who may not leave it: an agent that
//! asks for files of the operator's worktree.
//!
//! A path is opened name by name below the directory, through no link. A `.git` is not there,
//! nothing is replaced, and what would run or steer something on the host does not come out.

use std::ffi::CString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::stat::{Mode, mkdirat};

use super::packer::Packer;
use super::path::names;
use super::reader::{Kind, Reader};
use super::stage::Stage;
use super::{Refusal, Rules, TransferError};
use crate::beneath;
use crate::contract::{Moved, Transfer};
use crate::git::names::is_dot_git;
use crate::git::sensitive_paths::sensitive_reason;

/// A directory of the operator's that is not left.
#[derive(Debug)]
pub struct Within {
    path: PathBuf,
    root: OwnedFd,
}

impl Within {
    /// Opens it. The way to it is the operator's and may have links.
    pub fn open(path: &Path) -> Result<Self, TransferError> {
        let opening = |error| TransferError::system("opening", path)(error);
        let real = std::fs::canonicalize(path).map_err(TransferError::system("finding", path))?;
        let root = beneath::open_root(&real).map_err(opening)?;
        Ok(Self { path: real, root })
    }

    /// Packs a file or a directory. Every `.git` in it is left out with a note, and so is
    /// palisade's own state directory.
    pub fn pack(
        &self,
        source: &str,
        state: &Path,
        into: &mut dyn Write,
        bounds: &Transfer,
    ) -> Result<Moved, TransferError> {
        let names = allowed(source)?;
        let mut progress = |_| {};
        let mut packer = Packer::new(into, bounds, &mut progress);
        packer.leave_out(state)?;
        packer.leave_out_repositories();
        let trouble = |errno| trouble(source, errno);
        match names.split_last() {
            None => packer.add_tree(&self.root, b"")?,
            Some((name, above)) => {
                let place = self.descend(above).map_err(trouble)?;
                let data = beneath::stat(&place, name).map_err(trouble)?;
                let data = data.ok_or_else(|| TransferError::Missing(source.to_owned()))?;
                match beneath::file_kind(&data) {
                    beneath::FileKind::Directory => {
                        let tree = beneath::open_directory(&place, name).map_err(trouble)?;
                        packer.add_tree(&tree, name.to_bytes())?;
                    }
                    beneath::FileKind::File => {
                        let file: File = beneath::open_file(&place, name).map_err(trouble)?;
                        packer.add_file(file, name.to_bytes())?;
                    }
                    beneath::FileKind::Symlink => return Err(refused(source, Refusal::Link)),
                    beneath::FileKind::Other => return Err(refused(source, Refusal::Unknown)),
                }
            }
        }
        packer.finish()
    }

    /// Unpacks an archive below a directory, which is made if it is not there. What is refused
    /// leaves nothing behind, and nothing that was there is changed.
    pub fn unpack(
        &self,
        archive: &mut dyn Read,
        to: &str,
        bounds: &Transfer,
    ) -> Result<Moved, TransferError> {
        let names = allowed(to)?;
        let (target, made) = self.make_way(&names).map_err(|errno| trouble(to, errno))?;
        let mut path = self.path.clone();
        path.extend(
            names
                .iter()
                .map(|name| beneath::path_from_bytes(name.to_bytes())),
        );
        let mut stage = Stage::at(target, &path, made, bounds, Rules::FOR_HOST)?;
        let mut members = Reader::new(archive);
        while let Some(member) = members.next_member()? {
            let whole = [to.as_bytes(), b"/", &member.path].concat();
            if member.kind != Kind::Directory && sensitive_reason(&whole).is_some() {
                return Err(TransferError::refused(&member.path, Refusal::Steers));
            }
            stage.take(&member, &mut members)?;
        }
        stage.settle()
    }

    fn descend(&self, names: &[CString]) -> nix::Result<OwnedFd> {
        let mut here = self.root.try_clone().map_err(|_| Errno::EMFILE)?;
        for name in names {
            here = beneath::open_directory(&here, name)?;
        }
        Ok(here)
    }

    /// Goes to a directory, making what is missing; says what that was, highest first.
    fn make_way(&self, names: &[CString]) -> nix::Result<(OwnedFd, Vec<PathBuf>)> {
        let mut here = self.root.try_clone().map_err(|_| Errno::EMFILE)?;
        let mut path = self.path.clone();
        let mut made = Vec::new();
        for name in names {
            path.push(beneath::path_from_bytes(name.to_bytes()));
            here = match beneath::open_directory(&here, name) {
                Err(Errno::ENOENT) => {
                    mkdirat(&here, name.as_c_str(), Mode::from_bits_truncate(0o755))?;
                    made.push(path.clone());
                    beneath::open_directory(&here, name)?
                }
                other => other?,
            };
        }
        Ok((here, made))
    }
}

/// The names of a path that stays below and is of no repository.
fn allowed(path: &str) -> Result<Vec<CString>, TransferError> {
    let names = names(path.as_bytes()).map_err(|reason| refused(path, reason))?;
    if names.iter().any(|name| is_dot_git(name.to_bytes())) {
        return Err(refused(path, Refusal::Repository));
    }
    Ok(names)
}

fn refused(path: &str, reason: Refusal) -> TransferError {
    TransferError::refused(path.as_bytes(), reason)
}

fn trouble(path: &str, errno: Errno) -> TransferError {
    match errno {
        Errno::ENOENT => TransferError::Missing(path.to_owned()),
        Errno::ELOOP | Errno::ENOTDIR | Errno::EXDEV => refused(path, Refusal::Link),
        errno => TransferError::system("opening", path)(errno),
    }
}
