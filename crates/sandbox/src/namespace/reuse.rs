//! Prepares a sandbox's existing tree for a restart.
//!
//! The tree may contain links at paths that init writes. No process runs in it any more, so
//! checking before every step is sufficient. Where init needs a directory, an entry of another type
//! is removed. Every file that init writes is removed, too.

use std::fs;
use std::io::{ErrorKind, Result};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use super::removal::remove_tree;

/// Directories of `root` that are kept; the rest is created by every start.
const KEPT_DIRECTORIES: &[&str] = &["home", "tmp", "var", "workspace"];

/// Directories below `root`, and below the upper layer of a `rootfs`, through which init writes.
/// Parents come first.
const TRAVERSED_DIRECTORIES: &[&str] = &[
    "home",
    "home/agent",
    "workspace",
    "tmp",
    "run",
    "var",
    "var/tmp",
    "var/cache",
    "var/lib",
    "var/log",
    "dev",
    "proc",
    "sys",
    "etc",
    "etc/palisade",
];

/// Paths that init writes, below the same two directories.
const WRITTEN_PATHS: &[&str] = &[
    "src",
    "var/run",
    "etc/passwd",
    "etc/group",
    "etc/hostname",
    "etc/hosts",
    "etc/resolv.conf",
    "etc/nsswitch.conf",
];

/// The path of the old tree until the new one is complete.
fn old_tree(fs: &Path) -> PathBuf {
    fs.with_file_name("fs.before")
}

/// Moves a sandbox's tree aside, to be replaced by another.
///
/// If a crash left an old tree, that tree may be the only copy, so it is restored first.
pub(crate) fn move_aside(fs: &Path, first: Option<u32>) -> Result<()> {
    if exists(&old_tree(fs))? {
        renew_tree(fs, first)?;
    }
    fs::rename(fs, old_tree(fs))
}

/// Moves the old tree back.
pub(crate) fn restore_old_tree(fs: &Path) -> Result<()> {
    remove_tree(fs)?;
    fs::rename(old_tree(fs), fs)
}

/// Creates a tree for a restart from the kept parts of the last one, or continues after a crash in
/// this function. `first` is the first id of the sandbox's range, if it has one.
pub(crate) fn renew_tree(fs: &Path, first: Option<u32>) -> Result<()> {
    let before = old_tree(fs);
    if !exists(&before)? {
        fs::rename(fs, &before)?;
    }
    for own in [fs.to_owned(), fs.join("root")] {
        create_directory(&own)?;
        chown(&own, first, first)?;
    }
    add_owner_permissions(&before.join("root"))?;
    for part in KEPT_DIRECTORIES {
        let part = Path::new("root").join(part);
        add_owner_permissions(&before.join(&part))?;
        move_part(&before.join(&part), &fs.join(&part))?;
    }
    move_part(&before.join("upper"), &fs.join("upper"))?;
    remove_tree(&before)
}

/// Removes the old tree.
pub(crate) fn remove_old_tree(fs: &Path) -> Result<()> {
    remove_tree(&old_tree(fs))
}

/// Removes links and special files from paths that init writes.
pub(crate) fn remove_unsafe_entries(fs: &Path) -> Result<()> {
    for top in [fs.join("root"), fs.join("upper/rootfs")] {
        add_owner_permissions(&top)?;
        for directory in TRAVERSED_DIRECTORIES {
            remove_unless_directory(&top, directory)?;
            add_owner_permissions(&top.join(directory))?;
        }
        for written in WRITTEN_PATHS {
            let parent = Path::new(written).parent().unwrap_or(Path::new(""));
            if is_directory(&top.join(parent))? {
                remove_entry(&top.join(written))?;
            }
        }
    }
    Ok(())
}

/// Removes an entry that is no directory. A path below a missing entry does not exist either.
fn remove_unless_directory(top: &Path, directory: &str) -> Result<()> {
    let parent = Path::new(directory).parent().unwrap_or(Path::new(""));
    if is_directory(&top.join(parent))? && !is_directory(&top.join(directory))? {
        remove_entry(&top.join(directory))?;
    }
    Ok(())
}

/// Adds owner permissions to a directory, because its entries cannot be moved without them.
fn add_owner_permissions(path: &Path) -> Result<()> {
    match path.symlink_metadata() {
        Ok(found) if found.is_dir() && found.mode() & 0o700 != 0o700 => {
            let mode = fs::Permissions::from_mode(found.mode() & 0o7777 | 0o700);
            fs::set_permissions(path, mode)
        }
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn is_directory(path: &Path) -> Result<bool> {
    match path.symlink_metadata() {
        Ok(found) => Ok(found.is_dir()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn exists(path: &Path) -> Result<bool> {
    match path.symlink_metadata() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn remove_entry(path: &Path) -> Result<()> {
    match path.symlink_metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(found) if found.is_dir() => remove_tree(path),
        Ok(_) => fs::remove_file(path),
    }
}

fn create_directory(path: &Path) -> Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

/// Moves a part of the tree, unless it was moved before.
fn move_part(from: &Path, to: &Path) -> Result<()> {
    if exists(from)? && !exists(to)? {
        fs::rename(from, to)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn write(path: &Path, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn links_at_written_paths_are_removed_not_followed() {
        let temp = tempfile::tempdir().unwrap();
        let outside = temp.path().join("outside");
        write(&outside.join("agent/keep"), "mine");
        write(&outside.join("passwd"), "mine");
        let fs_dir = temp.path().join("fs");
        let root = fs_dir.join("root");
        fs::create_dir_all(root.join("var")).unwrap();
        symlink(&outside, root.join("home")).unwrap();
        symlink(&outside, root.join("var/tmp")).unwrap();
        symlink(&outside, root.join("var/run")).unwrap();
        write(&root.join("tmp"), "a file");
        write(&root.join("workspace/a"), "work");
        let etc = fs_dir.join("upper/rootfs/etc");
        fs::create_dir_all(&etc).unwrap();
        symlink(outside.join("passwd"), etc.join("passwd")).unwrap();
        symlink(&outside, etc.join("palisade")).unwrap();

        remove_unsafe_entries(&fs_dir).unwrap();
        for gone in ["home", "var/tmp", "var/run", "tmp"] {
            assert!(root.join(gone).symlink_metadata().is_err(), "{gone}");
        }
        assert!(etc.join("passwd").symlink_metadata().is_err());
        assert!(etc.join("palisade").symlink_metadata().is_err());
        assert_eq!(fs::read(root.join("workspace/a")).unwrap(), b"work");
        assert_eq!(fs::read(outside.join("agent/keep")).unwrap(), b"mine");
        assert_eq!(fs::read(outside.join("passwd")).unwrap(), b"mine");
    }

    #[test]
    fn interrupted_renewal_ends_in_the_same_state() {
        for completed_steps in 0..4 {
            let temp = tempfile::tempdir().unwrap();
            let fs_dir = temp.path().join("fs");
            write(&fs_dir.join("root/workspace/a"), "work");
            write(&fs_dir.join("root/home/agent/b"), "home");
            write(&fs_dir.join("root/etc/passwd"), "old");
            write(&fs_dir.join("upper/usr/c"), "upper");
            let before = old_tree(&fs_dir);
            if completed_steps > 0 {
                fs::rename(&fs_dir, &before).unwrap();
            }
            if completed_steps > 1 {
                fs::create_dir_all(fs_dir.join("root")).unwrap();
            }
            if completed_steps > 2 {
                fs::rename(before.join("root/workspace"), fs_dir.join("root/workspace")).unwrap();
            }
            renew_tree(&fs_dir, None).unwrap();
            assert_eq!(fs::read(fs_dir.join("root/workspace/a")).unwrap(), b"work");
            assert_eq!(fs::read(fs_dir.join("root/home/agent/b")).unwrap(), b"home");
            assert_eq!(fs::read(fs_dir.join("upper/usr/c")).unwrap(), b"upper");
            assert!(
                !fs_dir.join("root/etc").exists() && !before.exists(),
                "{completed_steps}"
            );
        }
    }
}
