//! What a file is beside its bytes: attributes, owner, mode, times.

use std::ffi::CStr;
use std::io::{Error, Result};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::fcntl::AtFlags;
use nix::sys::stat::{FileStat, Mode, UtimensatFlags, fchmod, futimens, utimensat};
use nix::sys::time::TimeSpec;
use nix::unistd::{Gid, Uid, fchown, fchownat};

/// Ids of one sandbox.
const RANGE: u32 = 1 << 16;
/// The agent inside, who gets what belonged to nobody in the range.
const AGENT: u32 = 1000;

/// The longest list of names, and the longest value: the kernel's own bounds.
const LONGEST: usize = 64 << 10;

/// How owners change on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ids {
    /// Not at all.
    Kept,
    /// From one range to the same place in another.
    Shifted { from: u32, to: u32 },
    /// From one id to the agent of a range.
    ToAgent { to: u32 },
    /// From a range to the one id of whoever copies.
    ToUs,
}

impl Ids {
    pub(super) fn between(from: Option<u32>, to: Option<u32>) -> Self {
        match (from, to) {
            (Some(from), Some(to)) => Self::Shifted { from, to },
            (None, Some(to)) => Self::ToAgent { to },
            (Some(_), None) => Self::ToUs,
            (None, None) => Self::Kept,
        }
    }

    fn change(self, id: u32, us: u32) -> u32 {
        match self {
            Self::Kept => id,
            Self::Shifted { from, to } => match id.checked_sub(from) {
                Some(offset) if offset < RANGE => to.saturating_add(offset),
                _ => to.saturating_add(AGENT),
            },
            Self::ToAgent { to } => to.saturating_add(AGENT),
            Self::ToUs => us,
        }
    }

    fn owner(self, stat: &FileStat) -> Option<(Uid, Gid)> {
        let (user, group) = (Uid::effective(), Gid::effective());
        let new = (
            Uid::from_raw(self.change(stat.st_uid, user.as_raw())),
            Gid::from_raw(self.change(stat.st_gid, group.as_raw())),
        );
        // What is ours already need not be given, which only root may.
        (new != (user, group)).then_some(new)
    }
}

/// Makes a copy's file or directory what the original is, its bytes aside. The mode comes
/// late: a file that is closed to its owner takes no attributes.
pub(super) fn settle(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    stat: &FileStat,
    ids: Ids,
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

/// The same for a link or a whiteout, which cannot be opened.
pub(super) fn settle_by_name(
    directory: impl AsFd,
    name: &CStr,
    stat: &FileStat,
    ids: Ids,
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

/// `user.*` only: an overlay's marks (`user.overlay.*`) and the agent's own. What the kernel
/// obeys (`security.*`, access lists) stays behind.
fn copy_attributes(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<()> {
    for name in list(from)?.split_inclusive(|b| *b == 0) {
        let Ok(name) = CStr::from_bytes_with_nul(name) else {
            continue;
        };
        if !name.to_bytes().starts_with(b"user.") {
            continue;
        }
        let mut value = vec![0_u8; LONGEST];
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

/// The names of a file's attributes, each with its NUL.
fn list(file: BorrowedFd<'_>) -> Result<Vec<u8>> {
    // Most files have none: asking for the length needs no buffer.
    // SAFETY: a length of 0 tells the kernel to write nothing.
    let length = unsafe { libc::flistxattr(file.as_raw_fd(), std::ptr::null_mut(), 0) };
    match length {
        0 => return Ok(Vec::new()),
        -1 => {
            let error = Error::last_os_error();
            // A file system without attributes.
            return match error.raw_os_error().map(Errno::from_raw) {
                Some(Errno::EOPNOTSUPP) => Ok(Vec::new()),
                _ => Err(error),
            };
        }
        _ => {}
    }
    let mut names = vec![0_u8; LONGEST];
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
    fn owners_move_to_the_same_place_in_another_range() {
        let (from, to) = (1 << 30, (1 << 30) + 7 * RANGE);
        let shifted = Ids::between(Some(from), Some(to));
        assert_eq!(shifted.change(from, 0), to);
        assert_eq!(shifted.change(from + 1000, 0), to + 1000);
        assert_eq!(shifted.change(from + RANGE - 1, 0), to + RANGE - 1);
        // Nobody outside the range is anybody inside the new one, root least of all.
        for id in [0, 1000, from - 1, from + RANGE] {
            assert_eq!(shifted.change(id, 0), to + 1000);
        }
        assert_eq!(Ids::between(None, Some(to)).change(4711, 4711), to + 1000);
        assert_eq!(Ids::between(Some(from), None).change(from, 4711), 4711);
        assert_eq!(Ids::between(None, None).change(4711, 4711), 4711);
    }
}
