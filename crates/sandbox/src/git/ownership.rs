//! Giving a workspace to a sandbox's own ids. Nobody works in it yet.

use std::fs;
use std::os::unix::fs::lchown;
use std::path::Path;

use super::copy::{directories, stamp_of};
use super::error::{GitError, io};
use super::manifest::{Manifest, Stamp, now};
use super::tree::SUBMODULE;
use super::workspace::Owner;
use crate::beneath;
use crate::parallel::parallel;

/// Gives one file, directory or link away.
pub(super) fn give(path: &Path, (user, group): Owner) -> Result<(), GitError> {
    lchown(path, Some(user), Some(group)).map_err(io("give away", path))
}

/// Gives a directory and everything below it away.
pub(super) fn give_below(dir: &Path, owner: Owner) -> Result<(), GitError> {
    give(dir, owner)?;
    for entry in fs::read_dir(dir).map_err(io("list", dir))? {
        let entry = entry.map_err(io("list", dir))?;
        if entry.file_type().map_err(io("look at", dir))?.is_dir() {
            give_below(&entry.path(), owner)?;
        } else {
            give(&entry.path(), owner)?;
        }
    }
    Ok(())
}

/// Gives the files of a manifest away, and returns the manifest as it is then: a change of
/// owner is a change of the inode.
pub(super) fn give_tree(
    root: &Path,
    manifest: &Manifest,
    owner: Owner,
) -> Result<Manifest, GitError> {
    let below: Vec<_> = directories(manifest.modes()).into_iter().collect();
    let nothing = || Ok(());
    parallel(&below, nothing, |(), path| {
        give(&root.join(beneath::path(path)), owner)
    })?;
    let rows: Vec<_> = manifest.entries.iter().collect();
    let entries = parallel(&rows, nothing, |(), (path, stamp)| {
        if stamp.mode == SUBMODULE {
            return Ok(((*path).clone(), **stamp));
        }
        let at = root.join(beneath::path(path));
        give(&at, owner)?;
        let given = fs::symlink_metadata(&at).map_err(io("look at", &at))?;
        Ok(((*path).clone(), stamp_of(&given, stamp)))
    })?;
    Ok(Manifest {
        taken: now(),
        entries: entries.into_iter().collect(),
    })
}

/// Gives everything below a directory away, and returns the manifest as it is then. A file that
/// is no longer what the manifest says keeps its row, which then is not true of it: it is read
/// again.
pub(super) fn give_all(
    root: &Path,
    manifest: &Manifest,
    owner: Owner,
) -> Result<Manifest, GitError> {
    let is_known = |path: &[u8], stamp: &Stamp| {
        let found = fs::symlink_metadata(root.join(beneath::path(path)));
        stamp.mode != SUBMODULE && found.is_ok_and(|found| stamp_of(&found, stamp) == *stamp)
    };
    let mut entries = manifest.entries.clone();
    let known: Vec<_> = manifest
        .entries
        .iter()
        .filter(|(path, stamp)| is_known(path, stamp))
        .collect();
    give_below(root, owner)?;
    for (path, stamp) in known {
        let at = root.join(beneath::path(path));
        let given = fs::symlink_metadata(&at).map_err(io("look at", &at))?;
        entries.insert(path.clone(), stamp_of(&given, stamp));
    }
    let taken = now();
    Ok(Manifest { taken, entries })
}
