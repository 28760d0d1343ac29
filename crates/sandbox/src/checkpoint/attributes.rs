//! Copies a file's attributes, owner, mode and times.

use std::ffi::CStr;
use std::io::{Error, Result};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::fcntl::AtFlags;
use nix::sys::stat::{FileStat, Mode, UtimensatFlags, fchmod, futimens, utimensat};
use nix::sys::time::TimeSpec;
use nix::unistd::{Gid, Uid, fchown, fchownat};

/// The number of ids of one sandbox.
const IDS_IN_RANGE: u32 = 1 << 16;
/// The agent's id in the sandbox, which gets files of owners outside the range.
const AGENT_ID: u32 = 1000;

/// The kernel's maximum size of the list of attribute names, and of one value.
const MAX_ATTRIBUTE_BYTES: usize = 64 << 10;

/// How a copy maps the owners of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdMapping {
    /// Every owner is kept.
    Keep,
    /// An owner in one range becomes the one at the same offset in another range.
    Shift { from: u32, to: u32 },
    /// Every owner becomes the agent's id in the range that starts at `to`.
    ToAgent { to: u32 },
    /// Every owner becomes the effective user of the copying process.
    ToProcess,
}

impl IdMapping {
    /// Chooses the mapping between two sandboxes by the first ids of their ranges; a sandbox with
    /// `None` has the single id of this process.
    pub(super) fn between(from: Option<u32>, to: Option<u32>) -> Self {
        match (from, to) {
            (Some(from), Some(to)) => Self::Shift { from, to },
            (None, Some(to)) => Self::ToAgent { to },
            (Some(_), None) => Self::ToProcess,
            (None, None) => Self::Keep,
        }
    }

    fn map(self, id: u32, own: u32) -> u32 {
        match self {
            Self::Keep => id,
            Self::Shift { from, to } => match id.checked_sub(from) {
                Some(offset) if offset < IDS_IN_RANGE => to.saturating_add(offset),
                _ => to.saturating_add(AGENT_ID),
            },
            Self::ToAgent { to } => to.saturating_add(AGENT_ID),
            Self::ToProcess => own,
        }
    }

    /// Returns the owner to set; `None` if it is the owner that new files of this process have.
    fn owner(self, stat: &FileStat) -> Option<(Uid, Gid)> {
        let (user, group) = (Uid::effective(), Gid::effective());
        let new = (
            Uid::from_raw(self.map(stat.st_uid, user.as_raw())),
            Gid::from_raw(self.map(stat.st_gid, group.as_raw())),
        );
        // A new file has the ids of this process already, and only root may set others.
        (new != (user, group)).then_some(new)
    }
}

/// Applies the original's attributes, owner, mode and times to a copied file or directory. The mode
/// is set after the attributes, because attributes cannot be set on a file without owner
/// permissions.
pub(super) fn apply_attributes(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    stat: &FileStat,
    ids: IdMapping,
) -> Result<()> {
    copy_attributes(from, to)?;
    if let Some((user, group)) = ids.owner(stat) {
        fchown(to, Some(user), Some(group))?;
    }
    let directory = stat.st_mode & libc::S_IFMT == libc::S_IFDIR;
    let kept = if directory { 0o7777 } else { 0o1777 };
    fchmod(to, Mode::from_bits_truncate(stat.st_mode & kept))?;
    let (access, change) = times(stat);
    Ok(futimens(to, &access, &change)?)
}

/// As [`apply_attributes`] for a link or a whiteout, which cannot be opened.
pub(super) fn apply_attributes_by_name(
    directory: impl AsFd,
    name: &CStr,
    stat: &FileStat,
    ids: IdMapping,
) -> Result<()> {
    let directory = directory.as_fd();
    if let Some((user, group)) = ids.owner(stat) {
        let flags = AtFlags::AT_SYMLINK_NOFOLLOW;
        fchownat(directory, name, Some(user), Some(group), flags)?;
    }
    let (access, change) = times(stat);
    let flags = UtimensatFlags::NoFollowSymlink;
    Ok(utimensat(directory, name, &access, &change, flags)?)
}

fn times(stat: &FileStat) -> (TimeSpec, TimeSpec) {
    (
        TimeSpec::new(stat.st_atime, stat.st_atime_nsec),
        TimeSpec::new(stat.st_mtime, stat.st_mtime_nsec),
    )
}

/// Copies `user.*` only: those that the overlay sets (`user.overlay.*`) and those that the agent
/// sets. Attributes that the kernel obeys (`security.*`, access lists) are not copied.
fn copy_attributes(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<()> {
    for name in list_attributes(from)?.split_inclusive(|b| *b == 0) {
        let Ok(name) = CStr::from_bytes_with_nul(name) else {
            continue;
        };
        if !name.to_bytes().starts_with(b"user.") {
            continue;
        }
        let mut value = vec![0_u8; MAX_ATTRIBUTE_BYTES];
        // SAFETY: the name ends in NUL, and the kernel writes at most the buffer's length.
        let length = unsafe {
            libc::fgetxattr(
                from.as_raw_fd(),
                name.as_ptr(),
                value.as_mut_ptr().cast(),
                value.len(),
            )
        };
        let Ok(length) = usize::try_from(length) else {
            return Err(Error::last_os_error());
        };
        // SAFETY: the name ends in NUL, and `length` bytes of the buffer were written.
        let set = unsafe {
            libc::fsetxattr(
                to.as_raw_fd(),
                name.as_ptr(),
                value.as_ptr().cast(),
                length.min(value.len()),
                0,
            )
        };
        if set != 0 {
            return Err(Error::last_os_error());
        }
    }
    Ok(())
}

/// Lists the names of a file's attributes, each with its NUL.
fn list_attributes(file: BorrowedFd<'_>) -> Result<Vec<u8>> {
    // Most files have no attributes, and a query of the length needs no buffer. SAFETY: with a
    // length of 0 the kernel writes nothing.
    let length = unsafe { libc::flistxattr(file.as_raw_fd(), std::ptr::null_mut(), 0) };
    match length {
        0 => return Ok(Vec::new()),
        -1 => {
            let error = Error::last_os_error();
            // The file system does not support attributes.
            return match error.raw_os_error().map(Errno::from_raw) {
                Some(Errno::EOPNOTSUPP) => Ok(Vec::new()),
                _ => Err(error),
            };
        }
        _ => {}
    }
    let mut names = vec![0_u8; MAX_ATTRIBUTE_BYTES];
    // SAFETY: the kernel writes at most the buffer's length.
    let length =
        unsafe { libc::flistxattr(file.as_raw_fd(), names.as_mut_ptr().cast(), names.len()) };
    let length = usize::try_from(length).map_err(|_| Error::last_os_error())?;
    names.truncate(length);
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_map_to_the_same_offset_in_another_range() {
        let (from, to) = (1 << 30, (1 << 30) + 7 * IDS_IN_RANGE);
        let shifted = IdMapping::between(Some(from), Some(to));
        assert_eq!(shifted.map(from, 0), to);
        assert_eq!(shifted.map(from + 1000, 0), to + 1000);
        assert_eq!(
            shifted.map(from + IDS_IN_RANGE - 1, 0),
            to + IDS_IN_RANGE - 1
        );
        // An owner outside the range, root included, maps to the agent.
        for id in [0, 1000, from - 1, from + IDS_IN_RANGE] {
            assert_eq!(shifted.map(id, 0), to + 1000);
        }
        assert_eq!(
            IdMapping::between(None, Some(to)).map(4711, 4711),
            to + 1000
        );
        assert_eq!(IdMapping::between(Some(from), None).map(from, 4711), 4711);
        assert_eq!(IdMapping::between(None, None).map(4711, 4711), 4711);
    }
}
