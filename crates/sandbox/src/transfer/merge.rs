//! Moves a complete tree to its target, after checking all entries, so that a refusal comes before
//! the first move.

use std::collections::HashSet;
use std::ffi::CString;
use std::os::fd::OwnedFd;

use nix::errno::Errno;
use nix::fcntl::renameat;
use nix::sys::stat::{Mode, fstat, mkdirat};

use super::{MemberRefusal, Overwrite, TransferError};
use crate::beneath::{self, FileKind};

/// Moves the entries of `from` into `to`. Returns the directories that existed before.
pub(super) fn merge(
    from: &OwnedFd,
    to: &OwnedFd,
    overwrite: Overwrite,
) -> Result<HashSet<Vec<CString>>, TransferError> {
    let mut merged = HashSet::new();
    check_entries(from, to, overwrite, &mut Vec::new(), &mut merged)?;
    move_all(from, to, overwrite, &mut Vec::new())?;
    Ok(merged)
}

fn check_entries(
    from: &OwnedFd,
    to: &OwnedFd,
    overwrite: Overwrite,
    path: &mut Vec<CString>,
    merged: &mut HashSet<Vec<CString>>,
) -> Result<(), TransferError> {
    for name in list(from, path)? {
        path.push(name.clone());
        let kind_of = |at| {
            beneath::stat(at, &name)
                .map_err(|e| TransferError::system("stat of", &display_path(path))(e))
        };
        let new = kind_of(from)?.map(|data| beneath::file_kind(&data));
        match (new, kind_of(to)?.map(|data| beneath::file_kind(&data))) {
            (_, None) => {}
            (Some(FileKind::Directory), Some(FileKind::Directory)) => {
                let opened = display_path(path);
                let below = beneath::open_directory(from, &name)
                    .and_then(|new| Ok((new, beneath::open_directory(to, &name)?)))
                    .map_err(TransferError::system("opening", &opened))?;
                merged.insert(path.clone());
                check_entries(&below.0, &below.1, overwrite, path, merged)?;
            }
            _ if overwrite == Overwrite::No => {
                return Err(TransferError::Exists(display_path(path)));
            }
            (Some(FileKind::Directory), Some(_))
            | (_, Some(FileKind::Directory | FileKind::Other)) => {
                return Err(TransferError::refused(
                    display_path(path).as_bytes(),
                    MemberRefusal::OtherKind,
                ));
            }
            (_, Some(FileKind::File | FileKind::Symlink)) => {}
        }
        path.pop();
    }
    Ok(())
}

fn move_all(
    from: &OwnedFd,
    to: &OwnedFd,
    overwrite: Overwrite,
    path: &mut Vec<CString>,
) -> Result<(), TransferError> {
    for name in list(from, path)? {
        path.push(name.clone());
        let failed = |errno| match errno {
            Errno::EEXIST => TransferError::Exists(display_path(path)),
            errno => TransferError::system("moving", &display_path(path))(errno),
        };
        let new = beneath::stat(from, &name).map_err(failed)?;
        let is_directory = new.is_some_and(|data| beneath::file_kind(&data) == FileKind::Directory);
        match beneath::rename_no_replace(from, to, &name) {
            Ok(()) => {}
            // The directory exists, or is in an overlay layer to which directories cannot be moved.
            Err(Errno::EEXIST | Errno::ENOTEMPTY | Errno::EXDEV) if is_directory => {
                let below = beneath::open_directory(from, &name)
                    .and_then(|new| {
                        let mode = Mode::from_bits_truncate(fstat(&new)?.st_mode & 0o777);
                        match mkdirat(to, name.as_c_str(), mode) {
                            Ok(()) | Err(Errno::EEXIST) => {}
                            Err(errno) => return Err(errno),
                        }
                        Ok((new, beneath::open_directory(to, &name)?))
                    })
                    .map_err(failed)?;
                move_all(&below.0, &below.1, overwrite, path)?;
            }
            Err(Errno::EEXIST) if overwrite == Overwrite::Yes => {
                renameat(from, name.as_c_str(), to, name.as_c_str()).map_err(failed)?;
            }
            Err(errno) => return Err(failed(errno)),
        }
        path.pop();
    }
    Ok(())
}

fn list(directory: &OwnedFd, path: &[CString]) -> Result<Vec<CString>, TransferError> {
    let names = beneath::list_names(directory, u64::MAX)
        .map_err(|errno| TransferError::system("listing", &display_path(path))(errno))?;
    Ok(names.unwrap_or_default())
}

fn display_path(path: &[CString]) -> String {
    let names: Vec<_> = path.iter().map(|name| name.to_string_lossy()).collect();
    names.join("/")
}
