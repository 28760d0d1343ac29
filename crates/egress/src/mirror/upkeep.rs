//! What is done about mirrors while nobody asks for them: those that are not configured any
//! more are removed, and those in many pieces packed anew.
//!
//! Nothing of this is in anybody's way. A mirror that is in use is not removed. One that is
//! packed anew is served and fetched into meanwhile: what git finds in another pack than a
//! moment ago it looks for again, and nothing is thrown away that somebody could still be
//! reading.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::PoisonError;

use config::Settings;
use tokio::task::spawn_blocking;

use super::room::{is_name, name_of};
use super::stale::Stale;
use super::{Mirror, Mirrors};

/// How a mirror is called while it is removed.
pub(super) const GONE: &str = ".gone-";

/// A mirror with more packs or more loose objects is packed anew. A fetch of less than a
/// hundred objects leaves each of them loose, and a larger one a pack.
const MOST_PACKS: usize = 16;
const MOST_LOOSE: usize = 2048;

impl Mirrors {
    /// Removes mirrors that the settings do not have any more, unless they are in use: then
    /// another time. What is not named as mirrors are is nobody's business here.
    pub async fn remove_others(&self, settings: &Settings) {
        let wanted: BTreeSet<String> = settings.git.mirrors.iter().map(name_of).collect();
        let directory = self.directory.clone();
        let listed = spawn_blocking(move || list(&directory)).await;
        let listed = match listed.map_err(io::Error::other).flatten() {
            Ok(listed) => listed,
            Err(error) => return tracing::warn!(%error, "mirrors cannot be listed"),
        };
        {
            let mut each = self.each.lock().unwrap_or_else(PoisonError::into_inner);
            each.retain(|_, mirror| wanted.contains(&name_of(&mirror.settings)));
        }
        for name in listed.into_iter().filter(|name| !wanted.contains(name)) {
            let Some(alone) = self.rooms.find(&name).lock() else {
                continue;
            };
            let (directory, mirror) = (self.directory.clone(), name.clone());
            let removed = spawn_blocking(move || {
                let aside = directory.join(format!("{GONE}{name}"));
                std::fs::rename(directory.join(name), &aside)?;
                // From here on it may be made anew.
                drop(alone);
                std::fs::remove_dir_all(aside)
            });
            match removed.await.map_err(io::Error::other).flatten() {
                Ok(()) => tracing::info!(mirror, "a mirror that is not configured was removed"),
                Err(error) => tracing::warn!(mirror, %error, "a mirror could not be removed"),
            }
        }
        self.rooms.forget(|name| wanted.contains(name));
    }

    /// Packs those mirrors anew that are in many pieces, one after the other.
    pub async fn repack(&self, settings: &Settings) {
        for mirror in &settings.git.mirrors {
            let mirror = self.find(mirror);
            match mirror.repack().await {
                Ok(true) => tracing::info!(mirror = mirror.name(), "a mirror was packed anew"),
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(mirror = mirror.name(), %error, "a mirror could not be packed");
                }
            }
        }
    }
}

impl Mirror {
    /// Packs it anew where it is in many pieces, and says whether it was.
    async fn repack(&self) -> Result<bool, Stale> {
        let _usage = self.room.enter().await;
        let directory = self.git.directory().to_owned();
        let looked = spawn_blocking(move || is_scattered(&directory)).await;
        if !looked.is_ok_and(|looked| looked.unwrap_or(false)) {
            return Ok(false);
        }
        {
            // The semaphore is never closed.
            let _turn = self.room.turn.acquire().await;
            self.git.pack_refs().await?;
        }
        let _repacking = self.room.repack();
        self.git.repack().await?;
        Ok(true)
    }
}

/// The directories that are named as mirrors are.
fn list(directory: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if let Ok(name) = entry.file_name().into_string()
            && is_name(&name)
            && entry.file_type()?.is_dir()
        {
            names.push(name);
        }
    }
    Ok(names)
}

/// Whether a repository is in many pieces.
fn is_scattered(repository: &Path) -> io::Result<bool> {
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
    Ok(packs > MOST_PACKS || loose > MOST_LOOSE)
}

#[cfg(test)]
mod tests;
