//! Size of files that were deleted and are still open: such files use space and are in no
//! directory. They are found in the descriptor tables of all threads in the sandbox (threads may
//! have their own tables), by stat only.
//!
//! Files that are only mapped, or in flight through a socket, are not found. With a single id,
//! files of an undumpable process are not found either; such a process is reported. The floor
//! covers these cases.

use std::collections::HashSet;
use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};

use nix::dir::{Dir, OwningIter};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat};
use nix::sys::statfs::{FsType, HUGETLBFS_MAGIC, TMPFS_MAGIC, fstatfs};
use nix::unistd::Pid;

use super::SandboxProcesses;
use super::measure::MIN_ENTRY_BYTES;

/// Maximum number of distinct files; each counts at least its inode.
const MAX_DELETED_FILES: usize = 1 << 16;

/// The type of ramfs, which backs `memfd_create` on a kernel without tmpfs.
const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);

/// A search in progress.
pub(super) struct DeletedFiles {
    /// A `/proc` in which nothing is hidden.
    proc: OwnedFd,
    /// The measured file system.
    device: u64,
    processes: Vec<i32>,
    /// The paths of descriptor tables to examine.
    tables: Vec<CString>,
    listing: Option<(OwnedFd, OwningIter)>,
    seen: HashSet<(u64, u64)>,
    bytes: u64,
    has_hidden_process: bool,
}

impl DeletedFiles {
    pub(super) fn begin(
        processes_view: &SandboxProcesses<'_>,
        top: &OwnedFd,
    ) -> std::io::Result<Self> {
        let mut processes = list_numeric_names(processes_view.proc, c".")?;
        // Init and the subreapers have no deleted files open.
        processes
            .retain(|pid| *pid != 1 && !processes_view.subreapers.contains(&Pid::from_raw(*pid)));
        Self::new(processes_view.proc, top, processes)
    }

    fn new(proc: &OwnedFd, top: &OwnedFd, processes: Vec<i32>) -> std::io::Result<Self> {
        Ok(Self {
            proc: proc.as_fd().try_clone_to_owned()?,
            device: fstat(top)?.st_dev,
            processes,
            tables: Vec::new(),
            listing: None,
            seen: HashSet::new(),
            bytes: 0,
            has_hidden_process: false,
        })
    }

    /// The size found so far.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether a process could not be examined.
    pub(super) fn has_hidden_process(&self) -> bool {
        self.has_hidden_process
    }

    /// Examines the next descriptor or opens the next table; returns `false` at the end. A file
    /// that is closed meanwhile uses no space.
    pub(super) fn next(&mut self) -> bool {
        if let Some((table, listing)) = &mut self.listing {
            let Some(Ok(entry)) = listing.next() else {
                self.listing = None;
                return true;
            };
            let name = entry.file_name();
            if let Ok(data) = fstatat(&*table, name, AtFlags::empty())
                && data.st_nlink == 0
                && is_file(&data)
                && self.seen.len() < MAX_DELETED_FILES
                && (data.st_dev == self.device || is_on_disk(table, name))
                && self.seen.insert((data.st_dev, data.st_ino))
            {
                let blocks = u64::try_from(data.st_blocks).unwrap_or(0);
                let size = blocks.saturating_mul(512).max(MIN_ENTRY_BYTES);
                self.bytes = self.bytes.saturating_add(size);
            }
            return true;
        }
        if let Some(table) = self.tables.pop() {
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
            let opened = openat(&self.proc, table.as_c_str(), flags, Mode::empty())
                .and_then(|table| Ok((Dir::openat(&table, ".", flags, Mode::empty())?, table)));
            match opened {
                Ok((listing, table)) => self.listing = Some((table, listing.into_iter())),
                Err(errno) => {
                    self.has_hidden_process |= matches!(errno, Errno::EACCES | Errno::EPERM);
                }
            }
            return true;
        }
        let Some(pid) = self.processes.pop() else {
            return false;
        };
        if let Ok(path) = CString::new(format!("{pid}/task"))
            && let Ok(threads) = list_numeric_names(&self.proc, &path)
        {
            let tables = threads
                .into_iter()
                .map(|thread| format!("{pid}/task/{thread}/fd"));
            self.tables
                .extend(tables.filter_map(|path| CString::new(path).ok()));
        }
        true
    }
}

/// The numeric entries of a directory: processes or threads.
fn list_numeric_names(at: &OwnedFd, path: &std::ffi::CStr) -> nix::Result<Vec<i32>> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let mut listing = Dir::openat(at, path, flags, Mode::empty())?;
    let entries = listing.iter().flatten();
    Ok(entries
        .filter_map(|entry| entry.file_name().to_str().ok()?.parse().ok())
        .collect())
}

fn is_file(data: &FileStat) -> bool {
    SFlag::from_bits_truncate(data.st_mode & SFlag::S_IFMT.bits()) == SFlag::S_IFREG
}

/// Whether a file of another file system, such as an overlay, is on disk: memory has its own limit.
fn is_on_disk(table: &OwnedFd, name: &std::ffi::CStr) -> bool {
    let found = openat(table, name, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty());
    let kind = found.and_then(fstatfs).map(|found| found.filesystem_type());
    kind.is_ok_and(|kind| ![TMPFS_MAGIC, HUGETLBFS_MAGIC, RAMFS_MAGIC].contains(&kind))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::Write;

    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;

    fn deleted_bytes(top: &OwnedFd) -> u64 {
        let proc = File::open("/proc").unwrap().into();
        let own = i32::try_from(std::process::id()).unwrap();
        let mut unnamed = DeletedFiles::new(&proc, top, vec![own]).unwrap();
        while unnamed.next() {}
        unnamed.bytes()
    }

    #[test]
    fn deleted_file_on_disk_counts_once() {
        // The directory for temporary files may be on tmpfs, which does not count.
        let place = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let top: OwnedFd = File::open(place.path()).unwrap().into();
        let before = deleted_bytes(&top);
        let path = place.path().join("file");
        let mut file = File::create(&path).unwrap();
        file.write_all(&vec![1; 1 << 20]).unwrap();
        file.sync_all().unwrap();
        assert_eq!(deleted_bytes(&top), before, "it has a name");
        fs::remove_file(&path).unwrap();
        let _twice = file.try_clone().unwrap();
        let found = deleted_bytes(&top) - before;
        assert!((1 << 20..1 << 21).contains(&found), "{found}");
        let memory = memfd_create("memory", MFdFlags::empty()).unwrap();
        File::from(memory.try_clone().unwrap())
            .write_all(&vec![1; 1 << 20])
            .unwrap();
        assert_eq!(deleted_bytes(&top) - before, found, "memory does not count");
        // In a descriptor table that no other thread shares.
        let barrier = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                nix::sched::unshare(nix::sched::CloneFlags::CLONE_FILES).unwrap();
                let path = place.path().join("second");
                let mut second = File::create(&path).unwrap();
                second.write_all(&vec![1; 1 << 20]).unwrap();
                second.sync_all().unwrap();
                fs::remove_file(&path).unwrap();
                barrier.wait();
                barrier.wait();
            });
            barrier.wait();
            let both = deleted_bytes(&top) - before;
            assert!((2 << 20..4 << 20).contains(&both), "{both}");
            barrier.wait();
        });
    }
}
