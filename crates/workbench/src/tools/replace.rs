//! Files are replaced, never written into: a reader sees the old one or the new one, a full disk
//! leaves the old one, and a second name of the file elsewhere keeps its content.

use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, RenameFlags, renameat, renameat2};
use nix::poll::{PollTimeout, poll};
use nix::sys::stat::{FileStat, Mode, SFlag, fchmod, fstat};
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchown, unlinkat};

use crate::error::ToolError;
use crate::request::{WriteRequest, WriteResult};
use crate::root::{Root, Slot, kind, new_file};
use crate::truncation::as_u64;

/// Names that are locked at once without meeting by chance.
const LOCKS: usize = 64;

/// Names that are tried for a file beside another.
const MOST_NAMES: usize = 32;

/// How long a directory may be locked by others. A place is taken within microseconds; whoever
/// holds it for longer is a command that means no change of ours.
const LONGEST_TURN: Duration = Duration::from_secs(5);

/// Milliseconds between two looks whether a directory is free; nothing tells.
const LOOK_AGAIN_MS: u8 = 1;

/// One lock per name of a file: who changes it within this server waits for the others. The
/// file's own number would not do, for every change makes a new file.
#[derive(Debug)]
pub(super) struct Locks {
    places: [Mutex<()>; LOCKS],
    hasher: RandomState,
}

impl Default for Locks {
    fn default() -> Self {
        Self {
            places: std::array::from_fn(|_| Mutex::new(())),
            hasher: RandomState::new(),
        }
    }
}

impl Locks {
    pub(super) fn lock(&self, slot: &Slot) -> nix::Result<MutexGuard<'_, ()>> {
        let directory = fstat(&slot.directory)?;
        let name = (directory.st_dev, directory.st_ino, &slot.name);
        let place = usize::try_from(self.hasher.hash_one(name) % as_u64(LOCKS)).unwrap_or(0);
        let place = self.places.get(place).ok_or(Errno::EINVAL)?;
        Ok(place.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

pub(super) fn write(
    root: &Root,
    locks: &Locks,
    request: &WriteRequest,
) -> Result<WriteResult, ToolError> {
    let asked = request.path.as_str();
    let fail = |errno| ToolError::of(asked, errno);
    let slot = root.slot(asked, true)?;
    let _turn = locks.lock(&slot).map_err(fail)?;
    let old = slot.look().map_err(fail)?;
    if let Some(old) = &old {
        refuse_other_than_file(asked, old)?;
    }
    let fresh = Fresh::make(&slot, request.content.as_bytes(), old.as_ref()).map_err(fail)?;
    fresh.take_place().map_err(fail)?;
    let path = root.locate(asked)?;
    let path = path.strip_prefix(root.path()).unwrap_or(&path);
    Ok(WriteResult {
        ok: true,
        path: path.to_string_lossy().into_owned(),
        bytes: as_u64(request.content.len()),
    })
}

pub(super) fn refuse_other_than_file(asked: &str, data: &FileStat) -> Result<(), ToolError> {
    match kind(data) {
        SFlag::S_IFREG => Ok(()),
        SFlag::S_IFDIR => Err(ToolError::IsDirectory(asked.to_owned())),
        _ => Err(ToolError::NotAFile(asked.to_owned())),
    }
}

/// A file with new content, beside the one whose place it is to take. Dropped, it is removed.
pub(super) struct Fresh<'a> {
    slot: &'a Slot,
    name: String,
    /// Whether the name is still ours to remove.
    there: bool,
}

impl<'a> Fresh<'a> {
    /// Writes it out, down to the disk, with owner and mode of the old one.
    pub(super) fn make(
        slot: &'a Slot,
        content: &[u8],
        old: Option<&FileStat>,
    ) -> nix::Result<Self> {
        let (mut file, name) = make_beside(slot)?;
        let fresh = Self {
            slot,
            name,
            there: true,
        };
        let errno =
            |error: std::io::Error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
        file.write_all(content).map_err(errno)?;
        if let Some(old) = old {
            keep_owner_and_mode(&file, old)?;
        }
        file.sync_all().map_err(errno)?;
        Ok(fresh)
    }

    /// Takes the place, whatever is there.
    pub(super) fn take_place(self) -> nix::Result<()> {
        let _turn = turn(self.slot)?;
        self.rename()
    }

    fn rename(mut self) -> nix::Result<()> {
        renameat(
            &self.slot.directory,
            self.name.as_str(),
            &self.slot.directory,
            self.slot.name.as_os_str(),
        )?;
        self.there = false;
        Ok(())
    }

    /// Takes the place of exactly `old`. False, and nothing has changed, if somebody else was
    /// quicker.
    pub(super) fn take_place_of(self, old: &FileStat) -> nix::Result<bool> {
        let _turn = turn(self.slot)?;
        if !self.slot.look()?.is_some_and(|now| is_same(&now, old)) {
            return Ok(false);
        }
        match self.exchange() {
            Ok(()) => {}
            // File systems that cannot; the look before was the last one.
            Err(Errno::EINVAL | Errno::ENOSYS) => return self.rename().map(|()| true),
            Err(Errno::ENOENT) => return Ok(false),
            Err(errno) => return Err(errno),
        }
        // What we put aside is what was replaced: were it something newer, it goes back. Only
        // who takes no turns (an editor) can have been so quick.
        let aside = Slot {
            directory: self.slot.directory.try_clone().map_err(|_| Errno::EMFILE)?,
            name: self.name.clone().into(),
        };
        if aside.look()?.is_some_and(|was| is_same(&was, old)) {
            return Ok(true);
        }
        self.exchange()?;
        Ok(false)
    }

    fn exchange(&self) -> nix::Result<()> {
        renameat2(
            &self.slot.directory,
            self.name.as_str(),
            &self.slot.directory,
            self.slot.name.as_os_str(),
            RenameFlags::RENAME_EXCHANGE,
        )
    }
}

impl Drop for Fresh<'_> {
    fn drop(&mut self) {
        if self.there {
            let _ = unlinkat(
                &self.slot.directory,
                self.name.as_str(),
                UnlinkatFlags::NoRemoveDir,
            );
        }
    }
}

/// The turn of whoever takes a place in this directory: other servers on the same workspace wait,
/// so none builds on a content that is about to go back. None on file systems that lock no
/// directories.
fn turn(slot: &Slot) -> nix::Result<Option<Flock<OwnedFd>>> {
    let until = Instant::now() + LONGEST_TURN;
    let mut directory = slot.directory.try_clone().map_err(|_| Errno::EMFILE)?;
    loop {
        match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
            Ok(turn) => return Ok(Some(turn)),
            Err((again, Errno::EWOULDBLOCK)) if Instant::now() < until => directory = again,
            Err((_, Errno::EWOULDBLOCK)) => return Err(Errno::EBUSY),
            Err((again, Errno::EINTR)) => {
                directory = again;
                continue;
            }
            Err(_) => return Ok(None),
        }
        let _ = poll(&mut [], PollTimeout::from(LOOK_AGAIN_MS));
    }
}

/// Whether a file is the one that was read, unchanged. Not its change time: a rename is a
/// change.
fn is_same(now: &FileStat, then: &FileStat) -> bool {
    let of = |data: &FileStat| {
        (
            data.st_dev,
            data.st_ino,
            data.st_size,
            data.st_mtime,
            data.st_mtime_nsec,
        )
    };
    of(now) == of(then)
}

/// A new file in the same directory, under a name that nobody has.
fn make_beside(slot: &Slot) -> nix::Result<(File, String)> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    for _ in 0..MOST_NAMES {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!(".palisade-{}-{number}.tmp", std::process::id());
        match new_file(&slot.directory, &name, Mode::from_bits_truncate(0o666)) {
            Ok(file) => return Ok((file, name)),
            Err(Errno::EEXIST) => {}
            Err(errno) => return Err(errno),
        }
    }
    Err(Errno::EEXIST)
}

/// The old file's owner, if we may give files away, and its mode. A file of another owner does
/// not get the bits that lend his rights.
fn keep_owner_and_mode(file: &File, old: &FileStat) -> nix::Result<()> {
    let new = fstat(file)?;
    let mut mode = Mode::from_bits_truncate(old.st_mode);
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid) {
        let (uid, gid) = (Uid::from_raw(old.st_uid), Gid::from_raw(old.st_gid));
        if fchown(file.as_fd(), Some(uid), Some(gid)).is_err() {
            mode.remove(Mode::S_ISUID | Mode::S_ISGID);
        }
    }
    fchmod(file, mode)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::root::Reach;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    fn place() -> (tempfile::TempDir, Root) {
        let place = tempfile::tempdir().unwrap();
        let root = Root::open(place.path(), Reach::Workspace).unwrap();
        (place, root)
    }

    fn put(root: &Root, path: &str, content: &str) -> Result<WriteResult, ToolError> {
        let request = WriteRequest {
            path: path.to_owned(),
            content: content.to_owned(),
        };
        write(root, &Locks::default(), &request)
    }

    fn names(place: &tempfile::TempDir) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(place.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn a_file_is_replaced_with_its_mode() {
        let (place, root) = place();
        let result = put(&root, "/a/b.sh", "one").unwrap();
        assert_eq!((result.path.as_str(), result.bytes), ("a/b.sh", 3));
        let file = place.path().join("a/b.sh");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o751)).unwrap();
        let before = std::fs::metadata(&file).unwrap();
        put(&root, "a/b.sh", "two").unwrap();
        let after = std::fs::metadata(&file).unwrap();
        assert_eq!(after.mode(), before.mode());
        assert_ne!(after.ino(), before.ino());
        assert_eq!(std::fs::read(&file).unwrap(), b"two");
    }

    #[test]
    fn the_other_name_of_a_file_keeps_its_content() {
        let (place, root) = place();
        let outside = tempfile::tempdir_in(place.path().parent().unwrap()).unwrap();
        let secret = outside.path().join("secret");
        std::fs::write(&secret, "before").unwrap();
        std::fs::hard_link(&secret, place.path().join("link")).unwrap();
        put(&root, "link", "after").unwrap();
        assert_eq!(std::fs::read(&secret).unwrap(), b"before");
        assert_eq!(std::fs::read(place.path().join("link")).unwrap(), b"after");
    }

    #[test]
    fn what_is_no_file_is_not_replaced() {
        let (place, root) = place();
        nix::unistd::mkfifo(&place.path().join("pipe"), Mode::S_IRWXU).unwrap();
        std::fs::create_dir(place.path().join("directory")).unwrap();
        assert_eq!(
            put(&root, "pipe", "x").unwrap_err(),
            ToolError::NotAFile("pipe".into())
        );
        for path in ["directory", ".", "/"] {
            assert!(matches!(
                put(&root, path, "x").unwrap_err(),
                ToolError::IsDirectory(_)
            ));
        }
        assert_eq!(names(&place), ["directory", "pipe"]);
    }

    #[test]
    fn a_directory_that_is_never_let_go_is_an_error_and_changes_nothing() {
        let (place, root) = place();
        put(&root, "file", "before").unwrap();
        let held = File::open(place.path()).unwrap();
        held.lock().unwrap();
        let busy = ToolError::Busy("file".into());
        assert_eq!(put(&root, "file", "after").unwrap_err(), busy);
        assert_eq!(std::fs::read(place.path().join("file")).unwrap(), b"before");
        assert_eq!(names(&place), ["file"]);
        drop(held);
        put(&root, "file", "after").unwrap();
    }

    #[test]
    fn whoever_was_quicker_keeps_his_change() {
        let (place, root) = place();
        let file = place.path().join("file");
        let slot = root.slot("file", false).unwrap();
        std::fs::write(&file, "read").unwrap();
        let read = slot.look().unwrap().unwrap();
        let fresh = Fresh::make(&slot, b"mine", Some(&read)).unwrap();
        put(&root, "file", "his").unwrap();
        assert!(!fresh.take_place_of(&read).unwrap());
        assert_eq!(std::fs::read(&file).unwrap(), b"his");
        let read = slot.look().unwrap().unwrap();
        let fresh = Fresh::make(&slot, b"mine", Some(&read)).unwrap();
        assert!(fresh.take_place_of(&read).unwrap());
        assert_eq!(std::fs::read(&file).unwrap(), b"mine");
        assert_eq!(names(&place), ["file"]);
    }
}
