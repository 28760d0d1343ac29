//! Where a mirror lives, and who is in there. A mirror whose key changes stays where it is, so
//! this is kept by directory and not by what the operator says of it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aws_lc_rs::digest::{SHA256, digest};
use config::section::git;
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock, Semaphore};

/// How every mirror's directory ends.
const ENDS: &str = ".git";

/// How many digits of the upstream's hash are in its name.
const DIGITS: usize = 16;

/// All of them, by the names of their directories.
#[derive(Debug, Default)]
pub struct Rooms(Mutex<BTreeMap<String, Arc<Room>>>);

/// One directory.
#[derive(Debug)]
pub struct Room {
    /// One fetch at a time.
    pub turn: Semaphore,
    /// Shared by whoever uses it; whoever removes it has it alone.
    usage: Arc<RwLock<()>>,
    is_repacked: AtomicBool,
}

/// Somebody uses a directory.
pub type Usage = OwnedRwLockReadGuard<()>;

/// Somebody packs a directory anew.
#[derive(Debug)]
pub struct Repacking<'a>(&'a Room);

impl Rooms {
    /// The one with that name.
    pub fn find(&self, name: &str) -> Arc<Room> {
        let mut rooms = self.rooms();
        let room = rooms.entry(name.to_owned()).or_insert_with(|| {
            Arc::new(Room {
                turn: Semaphore::new(1),
                usage: Arc::default(),
                is_repacked: AtomicBool::new(false),
            })
        });
        Arc::clone(room)
    }

    /// Forgets those that nobody knows any more and `is_wanted` does not want.
    pub fn forget(&self, is_wanted: impl Fn(&str) -> bool) {
        self.rooms()
            .retain(|name, room| is_wanted(name) || Arc::strong_count(room) > 1);
    }

    fn rooms(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Room>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Room {
    /// Uses it, once nobody removes it.
    pub async fn enter(&self) -> Usage {
        Arc::clone(&self.usage).read_owned().await
    }

    /// Has it alone, where nobody uses it now.
    pub fn lock(&self) -> Option<OwnedRwLockWriteGuard<()>> {
        Arc::clone(&self.usage).try_write_owned().ok()
    }

    /// Notes that it is packed anew, until that is dropped.
    pub fn repack(&self) -> Repacking<'_> {
        self.is_repacked.store(true, Ordering::SeqCst);
        Repacking(self)
    }

    /// Whether somebody packs it anew.
    pub fn is_repacked(&self) -> bool {
        self.is_repacked.load(Ordering::SeqCst)
    }
}

impl Drop for Repacking<'_> {
    fn drop(&mut self) {
        self.0.is_repacked.store(false, Ordering::SeqCst);
    }
}

/// The directory of a mirror. A name that is given to another upstream must not show what the
/// first one had.
pub fn name_of(mirror: &git::MirrorSettings) -> String {
    let mut name = format!("{}-", mirror.name);
    let digest = digest(&SHA256, mirror.upstream.as_bytes());
    for byte in digest.as_ref().iter().take(DIGITS / 2) {
        let _ = write!(name, "{byte:02x}");
    }
    name + ENDS
}

/// Whether a directory could be a mirror's.
pub fn is_name(name: &str) -> bool {
    let parts = name
        .strip_suffix(ENDS)
        .and_then(|name| name.rsplit_once('-'));
    parts.is_some_and(|(name, hash)| {
        let is_digit = |c: char| matches!(c, '0'..='9' | 'a'..='f');
        !name.is_empty() && hash.len() == DIGITS && hash.chars().all(is_digit)
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
    fn a_name_that_means_another_upstream_has_another_directory() {
        let first = name_of(&mirror("https://git.example/a"));
        assert_eq!(first, name_of(&mirror("https://git.example/a")));
        assert_ne!(first, name_of(&mirror("https://git.example/b")));
        assert!(is_name(&first), "{first}");
    }

    #[test]
    fn other_names_are_none_of_ours() {
        for other in [
            "app.git",
            "app-0123456789abcde.git",
            "app-0123456789ABCDEF.git",
            "app-0123456789abcdef",
            "-0123456789abcdef.git",
            ".git",
            "",
        ] {
            assert!(!is_name(other), "{other}");
        }
    }

    #[tokio::test]
    async fn a_room_in_use_is_nobodys_alone() {
        let rooms = Rooms::default();
        let room = rooms.find("a");
        let usage = room.enter().await;
        assert!(room.lock().is_none());
        rooms.forget(|_| false);
        assert!(Arc::ptr_eq(&room, &rooms.find("a")), "somebody knows it");
        drop(usage);
        assert!(room.lock().is_some());
        drop(room);
        rooms.forget(|_| false);
        assert!(rooms.rooms().is_empty());
    }
}
