//! Removes a tree that an agent controlled.
//!
//! The tree may be deeper than the stack or the descriptor table allows, its directories may lack
//! owner permissions, and its links may point anywhere. Entries are therefore removed by
//! descriptor, never through a link, and deep directories are first moved up. No process of the
//! sandbox runs any more.

use std::ffi::CString;
use std::io::Result;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat, renameat};
use nix::sys::stat::{FchmodatFlags, Mode, fchmodat};
use nix::unistd::{UnlinkatFlags, unlinkat};

/// Maximum depth before directories are moved up, which is also the number of open descriptors.
const MAX_DEPTH: usize = 64;

/// Removes a directory with its content. A missing directory is no error.
pub fn remove_tree(path: &Path) -> Result<()> {
    let top = match open_directory(AT_FDCWD, path) {
        Err(Errno::ENOENT) => return Ok(()),
        other => other?,
    };
    let mut moved = 0;
    loop {
        clear_directory(&top, &top, 0, &mut moved)?;
        match unlinkat(AT_FDCWD, path, UnlinkatFlags::RemoveDir) {
            // A directory was moved to the top; repeat.
            Err(Errno::ENOTEMPTY) => {}
            other => return Ok(other?),
        }
    }
}

/// Removes the entries of a directory. Directories below `MAX_DEPTH` are moved to `top` under a new
/// name.
fn clear_directory(
    directory: &OwnedFd,
    top: &OwnedFd,
    depth: usize,
    moved: &mut u64,
) -> nix::Result<()> {
    for name in list_names(directory)? {
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
            clear_directory(&child, top, depth + 1, moved)?;
            unlinkat(directory, name.as_c_str(), UnlinkatFlags::RemoveDir)?;
        } else {
            // A name that is unique in the top directory.
            loop {
                *moved += 1;
                let new_name = format!("moved-up-{moved}");
                match renameat(directory, name.as_c_str(), top, new_name.as_str()) {
                    Err(Errno::ENOTEMPTY | Errno::EEXIST | Errno::ENOTDIR) => {}
                    other => break other?,
                }
            }
        }
    }
    Ok(())
}

/// Opens a directory and adds owner permissions.
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
    // The call fails only for a process that is neither owner nor root. Then the removal fails as
    // well.
    let _ = nix::sys::stat::fchmod(&opened, all);
    Ok(opened)
}

fn list_names(directory: &OwnedFd) -> nix::Result<Vec<CString>> {
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
    fn tree_is_removed_without_following_links() {
        let temp = tempfile::tempdir().unwrap();
        let kept = temp.path().join("kept");
        std::fs::create_dir(&kept).unwrap();
        std::fs::write(kept.join("file"), "x").unwrap();
        let tree = temp.path().join("tree");
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
    fn tree_deeper_than_any_path_is_removed() {
        let temp = tempfile::tempdir().unwrap();
        let tree = temp.path().join("tree");
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
