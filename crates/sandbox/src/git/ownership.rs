//! Changes the owner of a workspace's files to a sandbox's ids, before any process runs in it.

use std::fs;
use std::os::unix::fs::lchown;
use std::path::Path;

use super::copy::{directories, stamp_of};
use super::error::{GitError, io};
use super::manifest::{FileStamp, Manifest, now};
use super::tree::SUBMODULE;
use super::workspace::Owner;
use crate::beneath;
use crate::parallel::parallel;

/// Changes the owner of one file, directory or link.
pub(super) fn chown(path: &Path, (user, group): Owner) -> Result<(), GitError> {
    lchown(path, Some(user), Some(group)).map_err(io("change the owner of", path))
}

/// Changes the owner of a directory and everything below it.
pub(super) fn chown_below(dir: &Path, owner: Owner) -> Result<(), GitError> {
    chown(dir, owner)?;
    for entry in fs::read_dir(dir).map_err(io("list", dir))? {
        let entry = entry.map_err(io("list", dir))?;
        if entry.file_type().map_err(io("stat", dir))?.is_dir() {
            chown_below(&entry.path(), owner)?;
        } else {
            chown(&entry.path(), owner)?;
        }
    }
    Ok(())
}

/// Changes the owner of a manifest's files and returns the updated manifest: a change of owner
/// changes the ctime.
pub(super) fn chown_manifest(
    root: &Path,
    manifest: &Manifest,
    owner: Owner,
) -> Result<Manifest, GitError> {
    let below: Vec<_> = directories(manifest.modes()).into_iter().collect();
    let no_state = || Ok(());
    parallel(&below, no_state, |(), path| {
        chown(&root.join(beneath::path_from_bytes(path)), owner)
    })?;
    let rows: Vec<_> = manifest.entries.iter().collect();
    let entries = parallel(&rows, no_state, |(), (path, stamp)| {
        if stamp.mode == SUBMODULE {
            return Ok(((*path).clone(), **stamp));
        }
        let at = root.join(beneath::path_from_bytes(path));
        chown(&at, owner)?;
        let metadata = fs::symlink_metadata(&at).map_err(io("stat", &at))?;
        Ok(((*path).clone(), stamp_of(&metadata, stamp)))
    })?;
    Ok(Manifest {
        taken: now(),
        entries: entries.into_iter().collect(),
    })
}

/// Changes the owner of everything below a directory and returns the updated manifest. A file that
/// differs from its manifest entry keeps the old entry, which does not match, so the next snapshot
/// reads the file again.
pub(super) fn chown_all(
    root: &Path,
    manifest: &Manifest,
    owner: Owner,
) -> Result<Manifest, GitError> {
    let is_unchanged = |path: &[u8], stamp: &FileStamp| {
        let found = fs::symlink_metadata(root.join(beneath::path_from_bytes(path)));
        stamp.mode != SUBMODULE && found.is_ok_and(|found| stamp_of(&found, stamp) == *stamp)
    };
    let mut entries = manifest.entries.clone();
    let unchanged: Vec<_> = manifest
        .entries
        .iter()
        .filter(|(path, stamp)| is_unchanged(path, stamp))
        .collect();
    chown_below(root, owner)?;
    for (path, stamp) in unchanged {
        let at = root.join(beneath::path_from_bytes(path));
        let metadata = fs::symlink_metadata(&at).map_err(io("stat", &at))?;
        entries.insert(path.clone(), stamp_of(&metadata, stamp));
    }
    let taken = now();
    Ok(Manifest { taken, entries })
}
