//! Directories of mirrors: their names and their locks. A mirror whose key changes keeps its
//! directory, so the locks belong to the directory and not to the settings.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aws_lc_rs::digest::{SHA256, digest};
use config::section::git;
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock, Semaphore};

/// Suffix of every mirror's directory name.
const SUFFIX: &str = ".git";

/// Number of hex digits of the upstream's hash in the directory name.
const HASH_DIGITS: usize = 16;

/// The directories of all mirrors, by name.
#[derive(Debug, Default)]
pub struct MirrorDirectories(Mutex<BTreeMap<String, Arc<MirrorDirectory>>>);

/// The directory of one mirror.
#[derive(Debug)]
pub struct MirrorDirectory {
    /// One permit: only one fetch from upstream at a time.
    pub fetch_slot: Semaphore,
    /// Read-locked by users of the directory, write-locked to remove it.
    usage: Arc<RwLock<()>>,
    is_repacking: AtomicBool,
}

/// Keeps a directory in use, so that it is not removed.
pub type UsageGuard = OwnedRwLockReadGuard<()>;

/// Marks a directory as being repacked.
#[derive(Debug)]
pub struct RepackGuard<'a>(&'a MirrorDirectory);

impl MirrorDirectories {
    /// The directory of this name.
    pub fn find(&self, name: &str) -> Arc<MirrorDirectory> {
        let mut directories = self.lock_map();
        let directory = directories.entry(name.to_owned()).or_insert_with(|| {
            Arc::new(MirrorDirectory {
                fetch_slot: Semaphore::new(1),
                usage: Arc::default(),
                is_repacking: AtomicBool::new(false),
            })
        });
        Arc::clone(directory)
    }

    /// Removes entries that `is_wanted` rejects and that have no other owner.
    pub fn prune(&self, is_wanted: impl Fn(&str) -> bool) {
        self.lock_map()
            .retain(|name, directory| is_wanted(name) || Arc::strong_count(directory) > 1);
    }

    fn lock_map(&self) -> MutexGuard<'_, BTreeMap<String, Arc<MirrorDirectory>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MirrorDirectory {
    /// Marks the directory as in use, after a removal in progress has ended.
    pub async fn acquire(&self) -> UsageGuard {
        Arc::clone(&self.usage).read_owned().await
    }

    /// Locks the directory for removal; none if it is in use.
    pub fn try_lock(&self) -> Option<OwnedRwLockWriteGuard<()>> {
        Arc::clone(&self.usage).try_write_owned().ok()
    }

    /// Marks the directory as being repacked until the guard is dropped.
    pub fn begin_repack(&self) -> RepackGuard<'_> {
        self.is_repacking.store(true, Ordering::SeqCst);
        RepackGuard(self)
    }

    /// Whether the directory is being repacked.
    pub fn is_repacking(&self) -> bool {
        self.is_repacking.load(Ordering::SeqCst)
    }
}

impl Drop for RepackGuard<'_> {
    fn drop(&mut self) {
        self.0.is_repacking.store(false, Ordering::SeqCst);
    }
}

/// The directory name of a mirror. It has a hash of the upstream, so that a mirror name that is
/// reused for another upstream does not expose the objects of the first one.
pub fn directory_name(mirror: &git::MirrorSettings) -> String {
    let mut name = format!("{}-", mirror.name);
    let digest = digest(&SHA256, mirror.upstream.as_bytes());
    for byte in digest.as_ref().iter().take(HASH_DIGITS / 2) {
        let _ = write!(name, "{byte:02x}");
    }
    name + SUFFIX
}

/// Whether `name` has the form of [`directory_name`].
pub fn is_directory_name(name: &str) -> bool {
    let parts = name
        .strip_suffix(SUFFIX)
        .and_then(|name| name.rsplit_once('-'));
    parts.is_some_and(|(name, hash)| {
        let is_digit = |c: char| matches!(c, '0'..='9' | 'a'..='f');
        !name.is_empty() && hash.len() == HASH_DIGITS && hash.chars().all(is_digit)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mirror(upstream: &str) -> git::MirrorSettings {
        git::MirrorSettings {
            name: "app".to_owned(),
            upstream: upstream.to_owned(),
            identity: None,
            host_key: None,
        }
    }

    #[test]
    fn directory_name_depends_on_the_upstream() {
        let first = directory_name(&mirror("https://git.example/a"));
        assert_eq!(first, directory_name(&mirror("https://git.example/a")));
        assert_ne!(first, directory_name(&mirror("https://git.example/b")));
        assert!(is_directory_name(&first), "{first}");
    }

    #[test]
    fn foreign_directory_names_are_not_recognised() {
        for other in [
            "app.git",
            "app-0123456789abcde.git",
            "app-0123456789ABCDEF.git",
            "app-0123456789abcdef",
            "-0123456789abcdef.git",
            ".git",
            "",
        ] {
            assert!(!is_directory_name(other), "{other}");
        }
    }

    #[tokio::test]
    async fn directory_in_use_cannot_be_locked_or_pruned() {
        let directories = MirrorDirectories::default();
        let directory = directories.find("a");
        let usage = directory.acquire().await;
        assert!(directory.try_lock().is_none());
        directories.prune(|_| false);
        assert!(
            Arc::ptr_eq(&directory, &directories.find("a")),
            "the entry has another owner"
        );
        drop(usage);
        assert!(directory.try_lock().is_some());
        drop(directory);
        directories.prune(|_| false);
        assert!(directories.lock_map().is_empty());
    }
}
