//! Background maintenance of mirrors: removes mirrors that are not configured any more, and repacks
//! mirrors with many packs or loose objects.
//!
//! Maintenance does not block requests. A mirror in use is not removed. A mirror that is being
//! repacked can be read and refreshed: git searches again when a pack has disappeared, and the
//! repack keeps every object.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::PoisonError;

use config::Settings;
use tokio::task::spawn_blocking;

use super::directory::{directory_name, is_directory_name};
use super::error::MirrorError;
use super::{Mirror, Mirrors};

/// Prefix of a mirror's directory while it is removed.
pub(super) const REMOVED_PREFIX: &str = ".gone-";

/// A mirror with more packs or more loose objects is repacked. A fetch of less than a hundred
/// objects adds loose objects, and a larger fetch adds a pack.
const MAX_PACKS: usize = 16;
const MAX_LOOSE_OBJECTS: usize = 2048;

impl Mirrors {
    /// Removes mirrors that are not in the settings. A mirror in use stays until a later call.
    /// Files and directories that are not named like a mirror stay.
    pub async fn remove_unconfigured(&self, settings: &Settings) {
        let wanted: BTreeSet<String> = settings.git.mirrors.iter().map(directory_name).collect();
        let directory = self.directory.clone();
        let listed = spawn_blocking(move || list_directories(&directory)).await;
        let listed = match listed.map_err(io::Error::other).flatten() {
            Ok(listed) => listed,
            Err(error) => return tracing::warn!(%error, "listing git mirrors failed"),
        };
        {
            let mut by_name = self.by_name.lock().unwrap_or_else(PoisonError::into_inner);
            by_name.retain(|_, mirror| wanted.contains(&directory_name(&mirror.settings)));
        }
        for name in listed.into_iter().filter(|name| !wanted.contains(name)) {
            let Some(lock) = self.directories.find(&name).try_lock() else {
                continue;
            };
            let (directory, mirror) = (self.directory.clone(), name.clone());
            let removed = spawn_blocking(move || {
                let renamed = directory.join(format!("{REMOVED_PREFIX}{name}"));
                std::fs::rename(directory.join(name), &renamed)?;
                // From here on the mirror may be created again.
                drop(lock);
                std::fs::remove_dir_all(renamed)
            });
            match removed.await.map_err(io::Error::other).flatten() {
                Ok(()) => tracing::info!(mirror, "git mirror removed: not configured any more"),
                Err(error) => tracing::warn!(mirror, %error, "removing a git mirror failed"),
            }
        }
        self.directories.prune(|name| wanted.contains(name));
    }

    /// Repacks mirrors with many packs or loose objects, one after the other.
    pub async fn repack(&self, settings: &Settings) {
        for mirror in &settings.git.mirrors {
            let mirror = self.find(mirror);
            match mirror.repack().await {
                Ok(true) => tracing::info!(mirror = mirror.name(), "git mirror repacked"),
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(mirror = mirror.name(), %error, "repacking a git mirror failed");
                }
            }
        }
    }
}

impl Mirror {
    /// Repacks the mirror if it has many packs or loose objects. Returns whether it was repacked.
    async fn repack(&self) -> Result<bool, MirrorError> {
        let _usage = self.directory.acquire().await;
        let directory = self.git.directory().to_owned();
        let checked = spawn_blocking(move || needs_repack(&directory)).await;
        if !checked.is_ok_and(|checked| checked.unwrap_or(false)) {
            return Ok(false);
        }
        {
            // The semaphore is never closed.
            let _permit = self.directory.fetch_slot.acquire().await;
            self.git.pack_refs().await?;
        }
        let _repacking = self.directory.begin_repack();
        self.git.repack().await?;
        Ok(true)
    }
}

/// Names of the directories that have the form of a mirror's.
fn list_directories(directory: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if let Ok(name) = entry.file_name().into_string()
            && is_directory_name(&name)
            && entry.file_type()?.is_dir()
        {
            names.push(name);
        }
    }
    Ok(names)
}

/// Whether a repository has too many packs or loose objects.
fn needs_repack(repository: &Path) -> io::Result<bool> {
    let objects = repository.join("objects");
    if !objects.exists() {
        return Ok(false);
    }
    let mut loose = 0;
    for entry in std::fs::read_dir(&objects)? {
        let entry = entry?;
        let is_pair = |name: &str| name.len() == 2 && name.bytes().all(|b| b.is_ascii_hexdigit());
        if entry.file_name().to_str().is_some_and(is_pair) {
            loose += std::fs::read_dir(entry.path())?.count();
        }
    }
    let mut packs = 0;
    for entry in std::fs::read_dir(objects.join("pack"))? {
        let name = entry?.file_name();
        packs += usize::from(name.as_encoded_bytes().ends_with(b".pack"));
    }
    Ok(packs > MAX_PACKS || loose > MAX_LOOSE_OBJECTS)
}

#[cfg(test)]
mod tests;
