//! Copies a checkout into a workspace: by reflink where the file system supports it, otherwise in
//! parallel. Hard links are never used, because an agent's write must not reach the cache.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::fcntl::AT_FDCWD;
use nix::sys::stat::{UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;

use super::error::{GitError, io};
use super::manifest::{FileStamp, FileTime, Manifest, now};
use super::ownership::chown;
use super::tree::{EXECUTABLE, LINK, SUBMODULE};
use super::workspace::Owner;
use crate::beneath;
use crate::create_progress::{CreateProgress, CreateStep};
use crate::parallel::parallel;

/// Returns every parent directory of these paths, parents first.
pub(super) fn directories<'a>(paths: impl Iterator<Item = (&'a [u8], u32)>) -> BTreeSet<&'a [u8]> {
    let mut wanted: BTreeSet<&[u8]> = BTreeSet::new();
    for (path, mode) in paths {
        let mut below = path;
        if mode == SUBMODULE {
            wanted.insert(path);
        }
        while let Some(slash) = below.iter().rposition(|b| *b == b'/') {
            below = below.get(..slash).unwrap_or_default();
            if !wanted.insert(below) {
                break;
            }
        }
    }
    wanted
}

/// Creates every parent directory of these paths below `root`.
pub(super) fn make_directories<'a>(
    root: &Path,
    paths: impl Iterator<Item = (&'a [u8], u32)>,
    owner: Option<Owner>,
) -> Result<(), GitError> {
    for path in directories(paths) {
        let path = root.join(beneath::path_from_bytes(path));
        create_directory(&path)?;
        if let Some(owner) = owner {
            chown(&path, owner)?;
        }
    }
    Ok(())
}

/// Creates a directory with mode 0755, independent of the gate's umask.
pub(super) fn create_directory(path: &Path) -> Result<(), GitError> {
    fs::create_dir(path).map_err(io("create", path))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).map_err(io("open", path))
}

/// Copies every file of `manifest` to an empty directory and returns the manifest of the copy.
/// Modification times are kept, so that one git index fits all copies.
pub(super) fn copy_tree(
    from: &Path,
    to: &Path,
    manifest: &Manifest,
    owner: Option<Owner>,
    progress: &CreateProgress,
) -> Result<Manifest, GitError> {
    make_directories(to, manifest.modes(), owner)?;
    let rows: Vec<_> = manifest.entries.iter().collect();
    progress.begin(CreateStep::Copy, Some(rows.len()));
    let can_clone = AtomicBool::new(true);
    let entries = parallel(
        &rows,
        || Ok(()),
        |(), (path, stamp)| {
            let relative = beneath::path_from_bytes(path);
            let (source, target) = (from.join(relative), to.join(relative));
            let stamp = copy_entry(&source, &target, stamp, owner, &can_clone)?;
            progress.advance();
            Ok(((*path).clone(), stamp))
        },
    )?;
    Ok(Manifest {
        taken: now(),
        entries: entries.into_iter().collect(),
    })
}

fn copy_entry(
    source: &Path,
    target: &Path,
    stamp: &FileStamp,
    owner: Option<Owner>,
    can_clone: &AtomicBool,
) -> Result<FileStamp, GitError> {
    let metadata = match stamp.mode {
        SUBMODULE => return Ok(*stamp),
        LINK => {
            let text = fs::read_link(source).map_err(io("read the link", source))?;
            std::os::unix::fs::symlink(text, target).map_err(io("create the link", target))?;
            let time = TimeSpec::new(stamp.mtime.0, stamp.mtime.1);
            utimensat(
                AT_FDCWD,
                target,
                &time,
                &time,
                UtimensatFlags::NoFollowSymlink,
            )
            .map_err(io("set the times of", target))?;
            if let Some(owner) = owner {
                chown(target, owner)?;
            }
            fs::symlink_metadata(target).map_err(io("stat", target))?
        }
        mode => {
            let mode = if mode == EXECUTABLE { 0o755 } else { 0o644 };
            let copy = copy_file(source, target, mode, can_clone)?;
            copy.set_modified(time(stamp.mtime))
                .map_err(io("set the times of", target))?;
            if let Some((user, group)) = owner {
                fchown(&copy, Some(user), Some(group))
                    .map_err(io("change the owner of", target))?;
            }
            copy.metadata().map_err(io("stat", target))?
        }
    };
    Ok(stamp_of(&metadata, stamp))
}

/// Copies one file's bytes into a new file.
pub(super) fn copy_file(
    source: &Path,
    target: &Path,
    mode: u32,
    can_clone: &AtomicBool,
) -> Result<File, GitError> {
    let mut original = File::open(source).map_err(io("open", source))?;
    let mut copy = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(target)
        .map_err(io("create", target))?;
    // The mode is set again, because the gate's umask has restricted it.
    copy.set_permissions(fs::Permissions::from_mode(mode))
        .map_err(io("open", target))?;
    if can_clone.load(Ordering::Relaxed) {
        if clone_file(&original, &copy) {
            return Ok(copy);
        }
        can_clone.store(false, Ordering::Relaxed);
    }
    std::io::copy(&mut original, &mut copy).map_err(io("copy to", target))?;
    Ok(copy)
}

/// Clones the blocks of `original` to `copy` as copy-on-write (btrfs, XFS, bcachefs).
#[allow(
    unsafe_code,
    reason = "FICLONE is an ioctl, for which neither std nor nix has a safe call"
)]
fn clone_file(original: &File, copy: &File) -> bool {
    // SAFETY: FICLONE takes a descriptor by value and accesses no memory of this process; both
    // descriptors are open for as long as the borrows last.
    unsafe { libc::ioctl(copy.as_raw_fd(), libc::FICLONE, original.as_raw_fd()) == 0 }
}

/// Returns the stat data of a copy, with the mode and blob of the original.
pub(super) fn stamp_of(metadata: &fs::Metadata, original: &FileStamp) -> FileStamp {
    FileStamp {
        mode: original.mode,
        size: metadata.len(),
        mtime: (metadata.mtime(), metadata.mtime_nsec()),
        ctime: (metadata.ctime(), metadata.ctime_nsec()),
        ino: metadata.ino(),
        id: original.id,
    }
}

fn time((seconds, nanos): FileTime) -> SystemTime {
    let seconds = u64::try_from(seconds).unwrap_or_default();
    UNIX_EPOCH + Duration::new(seconds, u32::try_from(nanos).unwrap_or_default())
}
