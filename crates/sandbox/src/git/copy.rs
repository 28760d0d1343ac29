//! Copying a checkout into a workspace: by reflink where the file system can, else in
//! parallel. Never by hard link: an agent's write must not reach the cache.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::fcntl::AT_FDCWD;
use nix::sys::stat::{UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;

use super::error::{GitError, io};
use super::manifest::{Manifest, Moment, Stamp, now};
use super::open;
use super::tree::{EXECUTABLE, LINK, SUBMODULE};

/// How many items a worker takes at a time.
const BATCH: usize = 32;

/// Does `work` on every item, on as many threads as there are cores (eight at most), each
/// with a state of its own. The first failure ends it; the results come in no order.
pub(super) fn parallel<T: Sync, S, R: Send>(
    items: &[T],
    start: impl Fn() -> Result<S, GitError> + Sync,
    work: impl Fn(&mut S, &T) -> Result<R, GitError> + Sync,
) -> Result<Vec<R>, GitError> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = cores.clamp(1, 8).min(items.len().div_ceil(BATCH)).max(1);
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let run = || {
        let mut state = start()?;
        let mut done = Vec::new();
        while !failed.load(Ordering::Relaxed) {
            let from = next.fetch_add(BATCH, Ordering::Relaxed);
            let Some(rest) = items.get(from..).filter(|rest| !rest.is_empty()) else {
                break;
            };
            for item in rest.iter().take(BATCH) {
                done.push(work(&mut state, item)?);
            }
        }
        Ok(done)
    };
    let marked = || run().inspect_err(|_| failed.store(true, Ordering::Relaxed));
    if threads == 1 {
        return marked();
    }
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(marked)).collect();
        let mut all = Vec::with_capacity(items.len());
        for worker in workers {
            match worker.join() {
                Ok(done) => all.extend(done?),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        Ok(all)
    })
}

/// Makes every directory that these paths need below `root`.
pub(super) fn make_directories<'a>(
    root: &Path,
    paths: impl Iterator<Item = (&'a [u8], u32)>,
) -> Result<(), GitError> {
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
    for path in wanted {
        let path = root.join(open::path(path));
        fs::create_dir(&path).map_err(io("create", &path))?;
    }
    Ok(())
}

/// Copies every file of `manifest` from one directory to an empty other one, and returns
/// the manifest of the copy. Times of change are kept, so that one git index fits all copies.
pub(super) fn copy_tree(from: &Path, to: &Path, manifest: &Manifest) -> Result<Manifest, GitError> {
    make_directories(
        to,
        manifest
            .entries
            .iter()
            .map(|(path, stamp)| (path.as_slice(), stamp.mode)),
    )?;
    let rows: Vec<_> = manifest.entries.iter().collect();
    let can_clone = AtomicBool::new(true);
    let entries = parallel(
        &rows,
        || Ok(()),
        |(), (path, stamp)| {
            let relative = open::path(path);
            let (source, target) = (from.join(relative), to.join(relative));
            let stamp = copy_one(&source, &target, stamp, &can_clone)?;
            Ok(((*path).clone(), stamp))
        },
    )?;
    Ok(Manifest {
        taken: now(),
        entries: entries.into_iter().collect(),
    })
}

fn copy_one(
    source: &Path,
    target: &Path,
    stamp: &Stamp,
    can_clone: &AtomicBool,
) -> Result<Stamp, GitError> {
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
            .map_err(io("date", target))?;
            fs::symlink_metadata(target).map_err(io("look at", target))?
        }
        mode => {
            let mode = if mode == EXECUTABLE { 0o755 } else { 0o644 };
            let copy = copy_file(source, target, mode, can_clone)?;
            copy.set_modified(time(stamp.mtime))
                .map_err(io("date", target))?;
            copy.metadata().map_err(io("look at", target))?
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
    if can_clone.load(Ordering::Relaxed) {
        if clone_file(&original, &copy) {
            return Ok(copy);
        }
        can_clone.store(false, Ordering::Relaxed);
    }
    std::io::copy(&mut original, &mut copy).map_err(io("copy to", target))?;
    Ok(copy)
}

/// Shares the blocks of `original` with `copy`, to be copied on write (btrfs, XFS, bcachefs).
#[allow(
    unsafe_code,
    reason = "FICLONE is an ioctl, for which neither std nor nix has a safe call"
)]
fn clone_file(original: &File, copy: &File) -> bool {
    // SAFETY: FICLONE takes a descriptor by value and touches no memory of ours; both
    // descriptors are open for as long as the borrows last.
    unsafe { libc::ioctl(copy.as_raw_fd(), libc::FICLONE, original.as_raw_fd()) == 0 }
}

/// The stat data of a copy, with the mode and blob of what was copied.
pub(super) fn stamp_of(metadata: &fs::Metadata, original: &Stamp) -> Stamp {
    Stamp {
        mode: original.mode,
        size: metadata.len(),
        mtime: (metadata.mtime(), metadata.mtime_nsec()),
        ctime: (metadata.ctime(), metadata.ctime_nsec()),
        ino: metadata.ino(),
        id: original.id,
    }
}

fn time((seconds, nanos): Moment) -> SystemTime {
    let seconds = u64::try_from(seconds).unwrap_or_default();
    UNIX_EPOCH + Duration::new(seconds, u32::try_from(nanos).unwrap_or_default())
}
