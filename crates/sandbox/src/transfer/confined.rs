//! Transfers between a sandbox and a host directory, with host paths chosen by an agent that must
//! not leave that directory.
//!
//! Paths are opened component by component below the directory, never through a link. A `.git` is
//! neither packed nor written, existing files are never replaced, and files that run programs or
//! configure tools on the host are refused.

use std::ffi::CString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::stat::{Mode, mkdirat};

use super::packer::Packer;
use super::path::split_path;
use super::reader::{Kind, Reader};
use super::stage::Stage;
use super::{MemberRefusal, TransferError, UnpackRules};
use crate::beneath;
use crate::contract::{TransferBounds, TransferSummary};
use crate::git::names::is_dot_git;
use crate::git::sensitive_paths::sensitive_reason;

/// A directory of the operator's to which transfers are confined.
#[derive(Debug)]
pub struct ConfinedDirectory {
    path: PathBuf,
    root: OwnedFd,
}

impl ConfinedDirectory {
    /// Opens the directory. Its parents are the operator's and may be links.
    pub fn open(path: &Path) -> Result<Self, TransferError> {
        let opening = |error| TransferError::system("opening", path)(error);
        let real = std::fs::canonicalize(path).map_err(TransferError::system("finding", path))?;
        let root = beneath::open_root(&real).map_err(opening)?;
        Ok(Self { path: real, root })
    }

    /// Packs a file or a directory. Every `.git` in it is skipped with a note, and so is the gate's
    /// state directory.
    pub fn pack(
        &self,
        source: &str,
        state: &Path,
        into: &mut dyn Write,
        bounds: &TransferBounds,
    ) -> Result<TransferSummary, TransferError> {
        let names = check_path(source)?;
        let mut progress = |_| {};
        let mut packer = Packer::new(into, bounds, &mut progress);
        packer.skip(state)?;
        packer.skip_repositories();
        let path_error = |errno| path_error(source, errno);
        match names.split_last() {
            None => packer.add_tree(&self.root, b"")?,
            Some((name, parents)) => {
                let parent = self.open_path(parents).map_err(path_error)?;
                let data = beneath::stat(&parent, name).map_err(path_error)?;
                let data = data.ok_or_else(|| TransferError::Missing(source.to_owned()))?;
                match beneath::file_kind(&data) {
                    beneath::FileKind::Directory => {
                        let tree = beneath::open_directory(&parent, name).map_err(path_error)?;
                        packer.add_tree(&tree, name.to_bytes())?;
                    }
                    beneath::FileKind::File => {
                        let file: File = beneath::open_file(&parent, name).map_err(path_error)?;
                        packer.add_file(file, name.to_bytes())?;
                    }
                    beneath::FileKind::Symlink => return Err(refused(source, MemberRefusal::Link)),
                    beneath::FileKind::Other => {
                        return Err(refused(source, MemberRefusal::Unknown));
                    }
                }
            }
        }
        packer.finish()
    }

    /// Unpacks an archive below a directory, which is created if it does not exist. On failure
    /// nothing is left, and nothing that existed is changed.
    pub fn unpack(
        &self,
        archive: &mut dyn Read,
        to: &str,
        bounds: &TransferBounds,
    ) -> Result<TransferSummary, TransferError> {
        let names = check_path(to)?;
        let (target, created) = self
            .create_directories(&names)
            .map_err(|errno| path_error(to, errno))?;
        let mut path = self.path.clone();
        path.extend(
            names
                .iter()
                .map(|name| beneath::path_from_bytes(name.to_bytes())),
        );
        let mut stage = Stage::in_directory(target, &path, created, bounds, UnpackRules::FOR_HOST)?;
        let mut members = Reader::new(archive);
        while let Some(member) = members.next_member()? {
            let full_path = [to.as_bytes(), b"/", &member.path].concat();
            if member.kind != Kind::Directory && sensitive_reason(&full_path).is_some() {
                return Err(TransferError::refused(
                    &member.path,
                    MemberRefusal::ConfiguresTools,
                ));
            }
            stage.unpack_member(&member, &mut members)?;
        }
        stage.publish()
    }

    fn open_path(&self, names: &[CString]) -> nix::Result<OwnedFd> {
        let mut directory = self.root.try_clone().map_err(|_| Errno::EMFILE)?;
        for name in names {
            directory = beneath::open_directory(&directory, name)?;
        }
        Ok(directory)
    }

    /// Opens a directory, creates missing parents, and returns those, highest first.
    fn create_directories(&self, names: &[CString]) -> nix::Result<(OwnedFd, Vec<PathBuf>)> {
        let mut directory = self.root.try_clone().map_err(|_| Errno::EMFILE)?;
        let mut path = self.path.clone();
        let mut created = Vec::new();
        for name in names {
            path.push(beneath::path_from_bytes(name.to_bytes()));
            directory = match beneath::open_directory(&directory, name) {
                Err(Errno::ENOENT) => {
                    mkdirat(&directory, name.as_c_str(), Mode::from_bits_truncate(0o755))?;
                    created.push(path.clone());
                    beneath::open_directory(&directory, name)?
                }
                other => other?,
            };
        }
        Ok((directory, created))
    }
}

/// Splits a path, and refuses one that leaves the directory or is part of a repository.
fn check_path(path: &str) -> Result<Vec<CString>, TransferError> {
    let names = split_path(path.as_bytes()).map_err(|reason| refused(path, reason))?;
    if names.iter().any(|name| is_dot_git(name.to_bytes())) {
        return Err(refused(path, MemberRefusal::Repository));
    }
    Ok(names)
}

fn refused(path: &str, reason: MemberRefusal) -> TransferError {
    TransferError::refused(path.as_bytes(), reason)
}

fn path_error(path: &str, errno: Errno) -> TransferError {
    match errno {
        Errno::ENOENT => TransferError::Missing(path.to_owned()),
        Errno::ELOOP | Errno::ENOTDIR | Errno::EXDEV => refused(path, MemberRefusal::Link),
        errno => TransferError::system("opening", path)(errno),
    }
}
