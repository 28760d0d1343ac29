//! Removing a tree that an agent had for itself.
//!
//! It may be deeper than a stack or a table of descriptors, its directories may be closed to
//! their owner, and its links may lead anywhere. So: by descriptor, never through a link,
//! and what is too deep is first moved up. The sandbox is dead by then; nobody interferes.

use std::ffi::CString;
use std::io::Result;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat, renameat};
use nix::sys::stat::{FchmodatFlags, Mode, fchmodat};
use nix::unistd::{UnlinkatFlags, unlinkat};

/// How deep we go before moving things up: as many descriptors are open at a time.
const MAX_DEPTH: usize = 64;

/// Removes a directory and everything in it. One that is not there is no error.
pub fn remove_tree(path: &Path) -> Result<()> {
    let top = match open_directory(AT_FDCWD, path) {
        Err(Errno::ENOENT) => return Ok(()),
        other => other?,
    };
    let mut moved = 0;
    loop {
        clear(&top, &top, 0, &mut moved)?;
        match unlinkat(AT_FDCWD, path, UnlinkatFlags::RemoveDir) {
            // Something was moved up; one round more.
            Err(Errno::ENOTEMPTY) => {}
            other => return Ok(other?),
        }
    }
}

fn clear(directory: &OwnedFd, top: &OwnedFd, depth: usize, moved: &mut u64) -> nix::Result<()> {
    for name in names(directory)? {
        match unlinkat(directory, name.as_c_str(), UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => continue,
            Err(Errno::EISDIR) => {}
            Err(errno) => return Err(errno),
        }
        match unlinkat(directory, name.as_c_str(), UnlinkatFlags::RemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => continue,
            Err(Errno::ENOTEMPTY) => {}
            Err(errno) => return Err(errno),
        }
        let child = open_directory(directory, name.as_c_str())?;
        if depth < MAX_DEPTH {
            clear(&child, top, depth + 1, moved)?;
            unlinkat(directory, name.as_c_str(), UnlinkatFlags::RemoveDir)?;
        } else {
            // Under a name that nothing else there has.
            loop {
                *moved += 1;
                let up = format!("moved-up-{moved}");
                match renameat(directory, name.as_c_str(), top, up.as_str()) {
                    Err(Errno::ENOTEMPTY | Errno::EEXIST | Errno::ENOTDIR) => {}
                    other => break other?,
                }
            }
        }
    }
    Ok(())
}

/// Opens a directory and makes it ours to empty, whatever its mode was.
fn open_directory<P: nix::NixPath + ?Sized>(at: impl AsFd, name: &P) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let all = Mode::S_IRWXU;
    let opened = match openat(at.as_fd(), name, flags, Mode::empty()) {
        Err(Errno::EACCES) => {
            fchmodat(at.as_fd(), name, all, FchmodatFlags::NoFollowSymlink)
                .or_else(|_| fchmodat(at.as_fd(), name, all, FchmodatFlags::FollowSymlink))?;
            openat(at.as_fd(), name, flags, Mode::empty())?
        }
        other => other?,
    };
    // Fails only for one who is neither owner nor root, whom emptying will tell the same.
    let _ = nix::sys::stat::fchmod(&opened, all);
    Ok(opened)
}

fn names(directory: &OwnedFd) -> nix::Result<Vec<CString>> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let mut listing = Dir::openat(directory, ".", flags, Mode::empty())?;
    listing
        .iter()
        .map(|entry| entry.map(|entry| entry.file_name().to_owned()))
        .filter(|name| {
            !name
                .as_ref()
                .is_ok_and(|name| matches!(name.to_bytes(), b"." | b".."))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_tree_goes_and_what_its_links_point_to_stays() {
        let place = tempfile::tempdir().unwrap();
        let kept = place.path().join("kept");
        std::fs::create_dir(&kept).unwrap();
        std::fs::write(kept.join("file"), "x").unwrap();
        let tree = place.path().join("tree");
        std::fs::create_dir_all(tree.join("a/b")).unwrap();
        symlink(&kept, tree.join("a/link")).unwrap();
        let closed = tree.join("closed");
        std::fs::create_dir_all(closed.join("inner")).unwrap();
        std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o0)).unwrap();
        remove_tree(&tree).unwrap();
        remove_tree(&tree).unwrap();
        assert!(!tree.exists() && kept.join("file").exists());
    }

    #[test]
    fn a_tree_deeper_than_any_path_goes_too() {
        let place = tempfile::tempdir().unwrap();
        let tree = place.path().join("tree");
        std::fs::create_dir(&tree).unwrap();
        let mut at = open_directory(AT_FDCWD, &tree).unwrap();
        for _ in 0..3000 {
            nix::sys::stat::mkdirat(&at, "deep", Mode::S_IRWXU).unwrap();
            at = open_directory(&at, "deep").unwrap();
        }
        drop(at);
        remove_tree(&tree).unwrap();
        assert!(!tree.exists());
    }
}
