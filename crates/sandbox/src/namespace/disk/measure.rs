//! Measures a tree that an agent may change meanwhile: by descriptor, through no link, opening only
//! directories, a few entries at a time.

use std::ffi::{CStr, CString};
use std::io::Result;
use std::os::fd::{AsFd, OwnedFd};

use nix::dir::{Dir, OwningIter};
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstatat};

use super::SandboxProcesses;
use super::deleted_files::DeletedFiles;

/// Maximum number of open directories. Deeper directories are visited later from the top.
const MAX_DEPTH: usize = 64;

/// Minimum size of an entry, for its inode.
pub(super) const MIN_ENTRY_BYTES: u64 = 4096;

/// A measurement in progress.
pub(super) struct Measurement {
    top: OwnedFd,
    /// The open directories, from the top.
    levels: Vec<Level>,
    /// The names on the path to the last open directory.
    path_names: Vec<CString>,
    /// Directories that were too deep to enter, by path.
    too_deep: Vec<Vec<CString>>,
    bytes: u64,
    /// The deleted files that are still open.
    deleted_files: Option<DeletedFiles>,
}

/// An open directory, and its subdirectories that are not measured yet.
struct Level {
    directory: OwnedFd,
    listing: Option<OwningIter>,
    subdirectories: Vec<CString>,
}

impl Measurement {
    /// Starts a measurement of `top`, and of deleted files that the sandbox's processes have open.
    pub(super) fn begin(top: &OwnedFd, processes: Option<&SandboxProcesses<'_>>) -> Result<Self> {
        let first = Level::open(top, c".")?;
        Ok(Self {
            top: top.as_fd().try_clone_to_owned()?,
            levels: vec![first],
            path_names: vec![c".".to_owned()],
            too_deep: Vec::new(),
            bytes: 0,
            deleted_files: processes
                .map(|processes| DeletedFiles::begin(processes, top))
                .transpose()?,
        })
    }

    /// The size measured so far.
    pub(super) fn bytes(&self) -> u64 {
        let deleted_files = self.deleted_files.as_ref().map_or(0, DeletedFiles::bytes);
        self.bytes.saturating_add(deleted_files)
    }

    /// Whether a process could not be examined.
    pub(super) fn has_hidden_process(&self) -> bool {
        self.deleted_files
            .as_ref()
            .is_some_and(DeletedFiles::has_hidden_process)
    }

    /// Measures up to `entries` more entries; returns whether the measurement is complete.
    pub(super) fn resume(&mut self, entries: usize) -> bool {
        for _ in 0..entries {
            if !self.next() {
                return true;
            }
        }
        false
    }

    /// Measures one entry, or opens or leaves one directory; returns `false` at the end.
    fn next(&mut self) -> bool {
        let Some(level) = self.levels.last_mut() else {
            return self.enter_too_deep()
                || self.deleted_files.as_mut().is_some_and(DeletedFiles::next);
        };
        if let Some(listing) = &mut level.listing {
            // An error ends the listing, because the agent has removed the directory.
            let Some(Ok(entry)) = listing.next() else {
                level.listing = None;
                return true;
            };
            let name = entry.file_name();
            if !matches!(name.to_bytes(), b"." | b"..")
                && let Ok(data) = fstatat(&level.directory, name, AtFlags::AT_SYMLINK_NOFOLLOW)
            {
                self.bytes = self.bytes.saturating_add(size_of_entry(&data));
                if is_directory(&data) {
                    level.subdirectories.push(name.to_owned());
                }
            }
            return true;
        }
        let Some(name) = level.subdirectories.pop() else {
            self.levels.pop();
            self.path_names.pop();
            return true;
        };
        if self.levels.len() >= MAX_DEPTH {
            let mut path_names = self.path_names.clone();
            path_names.push(name);
            self.too_deep.push(path_names);
        } else if let Some(level) = self.levels.last()
            && let Ok(inner) = Level::open(&level.directory, &name)
        {
            self.levels.push(inner);
            self.path_names.push(name);
        }
        true
    }

    /// Enters a directory that was too deep; returns whether there was one.
    fn enter_too_deep(&mut self) -> bool {
        let Some(path_names) = self.too_deep.pop() else {
            return false;
        };
        let mut at = None;
        for name in &path_names {
            let Ok(next) = open(at.as_ref().unwrap_or(&self.top), name) else {
                return true;
            };
            at = Some(next);
        }
        if let Some(Ok(level)) = at.map(|at| Level::open(&at, c".")) {
            self.levels.push(level);
            self.path_names = path_names;
        }
        true
    }
}

impl Level {
    fn open(at: &OwnedFd, name: &CStr) -> nix::Result<Self> {
        let directory = open(at, name)?;
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let listing = Dir::openat(&directory, ".", flags, Mode::empty())?;
        Ok(Self {
            directory,
            listing: Some(listing.into_iter()),
            subdirectories: Vec::new(),
        })
    }
}

fn open(at: &OwnedFd, name: &CStr) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    openat(at, name, flags, Mode::empty())
}

fn is_directory(data: &FileStat) -> bool {
    SFlag::from_bits_truncate(data.st_mode & SFlag::S_IFMT.bits()) == SFlag::S_IFDIR
}

/// The size of an entry. A file with several names is divided among them; all of them are in the
/// tree, because the agent can create links nowhere else.
fn size_of_entry(data: &FileStat) -> u64 {
    let whole = u64::try_from(data.st_blocks)
        .unwrap_or(0)
        .saturating_mul(512);
    let names = if is_directory(data) {
        1
    } else {
        data.st_nlink.max(1)
    };
    whole.max(MIN_ENTRY_BYTES) / names
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use super::*;

    fn measure(path: &Path) -> u64 {
        let top: OwnedFd = std::fs::File::open(path).unwrap().into();
        let mut measurement = Measurement::begin(&top, None).unwrap();
        while !measurement.resume(3) {}
        measurement.bytes()
    }

    #[test]
    fn every_file_counts_once_and_links_are_not_followed() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        assert_eq!(measure(place.path()), 0);
        std::fs::write(at("file"), vec![1; 1 << 20]).unwrap();
        let one = measure(place.path());
        assert!((1 << 20..1 << 21).contains(&one), "{one}");
        for name in ["second", "third"] {
            std::fs::hard_link(at("file"), at(name)).unwrap();
        }
        assert!(measure(place.path()).abs_diff(one) < 10);
        symlink("/usr", at("link")).unwrap();
        std::fs::create_dir(at("directory")).unwrap();
        for number in 0..100 {
            std::fs::write(at("directory").join(number.to_string()), "").unwrap();
        }
        let all = measure(place.path());
        assert!(
            (one + 100 * MIN_ENTRY_BYTES..one + 130 * MIN_ENTRY_BYTES).contains(&all),
            "{all}"
        );
    }

    #[test]
    fn directories_deeper_than_any_path_count() {
        let place = tempfile::tempdir().unwrap();
        let mut at: OwnedFd = std::fs::File::open(place.path()).unwrap().into();
        for _ in 0..1000 {
            nix::sys::stat::mkdirat(&at, "deep", Mode::S_IRWXU).unwrap();
            at = open(&at, c"deep").unwrap();
        }
        let file = openat(&at, "file", OFlag::O_CREAT | OFlag::O_WRONLY, Mode::S_IRWXU).unwrap();
        nix::unistd::write(&file, &vec![1; 1 << 20]).unwrap();
        let found = measure(place.path());
        assert!(
            (1000 * MIN_ENTRY_BYTES + (1 << 20)..8 << 20).contains(&found),
            "{found}"
        );
        drop(at);
        crate::namespace::removal::remove_tree(&place.path().join("deep")).unwrap();
    }
}
