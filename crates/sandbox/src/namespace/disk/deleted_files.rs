//! Files that were deleted and are still open: they take room and are in no directory. Found
//! where they are held, in the descriptors of every thread inside (threads may have tables of
//! their own); only looked at, never opened.
//!
//! What is mapped without a descriptor, or on its way through a socket, is not found. With one
//! id, neither is what a process has that forbids others to look into it; that there is such
//! a process is told. For these there is the floor.

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

/// The most of them that are told apart; each is counted with its inode at least.
const MAX_DELETED_FILES: usize = 1 << 16;

/// `memfd_create` on a kernel without tmpfs.
const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);

/// A look at them under way.
pub(super) struct DeletedFiles {
    /// A `/proc` in which nothing is hidden.
    proc: OwnedFd,
    /// The file system whose room is at stake.
    device: u64,
    processes: Vec<i32>,
    /// Directories of descriptors, by path.
    tables: Vec<CString>,
    listing: Option<(OwnedFd, OwningIter)>,
    seen: HashSet<(u64, u64)>,
    bytes: u64,
    has_hidden_process: bool,
}

impl DeletedFiles {
    pub(super) fn begin(inside: &SandboxProcesses<'_>, top: &OwnedFd) -> std::io::Result<Self> {
        let mut processes = numbers(inside.proc, c".")?;
        // Init itself and its keepers hold nothing of the kind.
        processes.retain(|pid| *pid != 1 && !inside.subreapers.contains(&Pid::from_raw(*pid)));
        Self::of(inside.proc, top, processes)
    }

    fn of(proc: &OwnedFd, top: &OwnedFd, processes: Vec<i32>) -> std::io::Result<Self> {
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

    /// What was found.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether somebody could not be looked at.
    pub(super) fn has_hidden_process(&self) -> bool {
        self.has_hidden_process
    }

    /// Looks at one more descriptor, or for more of them; whether there was any. Whatever
    /// goes away meanwhile has given its room back.
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
                let taken = blocks.saturating_mul(512).max(MIN_ENTRY_BYTES);
                self.bytes = self.bytes.saturating_add(taken);
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
                    self.has_hidden_process |= matches!(errno, Errno::EACCES | Errno::EPERM)
                }
            }
            return true;
        }
        let Some(pid) = self.processes.pop() else {
            return false;
        };
        if let Ok(path) = CString::new(format!("{pid}/task"))
            && let Ok(threads) = numbers(&self.proc, &path)
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

/// The entries of a directory that are numbers: processes, or threads.
fn numbers(at: &OwnedFd, path: &std::ffi::CStr) -> nix::Result<Vec<i32>> {
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

/// Whether a file of another file system, such as an overlay over ours, is on disk: memory
/// has a limit of its own.
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

    fn held(top: &OwnedFd) -> u64 {
        let proc = File::open("/proc").unwrap().into();
        let own = i32::try_from(std::process::id()).unwrap();
        let mut unnamed = DeletedFiles::of(&proc, top, vec![own]).unwrap();
        while unnamed.next() {}
        unnamed.bytes()
    }

    #[test]
    fn a_deleted_file_counts_once_and_only_if_it_is_on_disk() {
        // Not a memory file system, as a place for temporary files may be.
        let place = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let top: OwnedFd = File::open(place.path()).unwrap().into();
        let before = held(&top);
        let path = place.path().join("file");
        let mut file = File::create(&path).unwrap();
        file.write_all(&vec![1; 1 << 20]).unwrap();
        file.sync_all().unwrap();
        assert_eq!(held(&top), before, "it has a name");
        fs::remove_file(&path).unwrap();
        let _twice = file.try_clone().unwrap();
        let found = held(&top) - before;
        assert!((1 << 20..1 << 21).contains(&found), "{found}");
        let memory = memfd_create("memory", MFdFlags::empty()).unwrap();
        File::from(memory.try_clone().unwrap())
            .write_all(&vec![1; 1 << 20])
            .unwrap();
        assert_eq!(held(&top) - before, found, "memory is no disk");
        // In a table of its own, which nobody else has.
        let elsewhere = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                nix::sched::unshare(nix::sched::CloneFlags::CLONE_FILES).unwrap();
                let path = place.path().join("another");
                let mut another = File::create(&path).unwrap();
                another.write_all(&vec![1; 1 << 20]).unwrap();
                another.sync_all().unwrap();
                fs::remove_file(&path).unwrap();
                elsewhere.wait();
                elsewhere.wait();
            });
            elsewhere.wait();
            let both = held(&top) - before;
            assert!((2 << 20..4 << 20).contains(&both), "{both}");
            elsewhere.wait();
        });
    }
}
