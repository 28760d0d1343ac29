//! Quarantine for new objects: they are written to a temporary object directory and moved to the
//! operator's once all checks pass.

use std::fs::{self, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use git2::{Repository, RepositoryOpenFlags};
use nix::fcntl::{Flock, FlockArg};

use super::error::{GitError, git, io};
use super::host_repository::HostRepository;

/// The start of the name of a quarantine directory.
const NAME_PREFIX: &str = "tmp_objdir-palisade-";

/// The number in the next unique name of this process.
static NEXT_NAME: AtomicU64 = AtomicU64::new(0);

/// Returns a name that no other call and no other process uses.
pub(super) fn unique_name(prefix: &str) -> String {
    let next = NEXT_NAME.fetch_add(1, Ordering::Relaxed);
    format!("{prefix}{}-{next}", std::process::id())
}

/// A bare repository that reads the host's objects as an alternate and writes to its own directory.
/// A failed snapshot or import leaves nothing in the operator's repository.
///
/// The directory's name has the prefix of git's own quarantine, so that `git gc` removes the
/// directory after a crash.
pub(crate) struct Quarantine {
    dir: PathBuf,
    /// Held while the quarantine is in use; an unlocked directory was left by a killed process.
    _lock: Flock<File>,
    host: PathBuf,
    repo: Repository,
}

impl Quarantine {
    pub(crate) fn open(host_repository: &HostRepository) -> Result<Self, GitError> {
        let host = host_repository.objects();
        let host = fs::canonicalize(&host).map_err(io("find", &host))?;
        remove_abandoned(&host);
        loop {
            let dir = host.join(unique_name(NAME_PREFIX));
            fs::DirBuilder::new()
                .mode(0o700)
                .create(&dir)
                .map_err(io("create", &dir))?;
            let Some(lock) = lock_directory(&dir, FlockArg::LockExclusive) else {
                // Another process removed the directory before it was locked.
                continue;
            };
            return match Self::create_repository(&dir, &host, host_repository) {
                Ok(repo) => Ok(Self {
                    dir,
                    _lock: lock,
                    host,
                    repo,
                }),
                Err(error) => {
                    let _ = fs::remove_dir_all(&dir);
                    Err(error)
                }
            };
        }
    }

    fn create_repository(
        dir: &Path,
        host: &Path,
        host_repository: &HostRepository,
    ) -> Result<Repository, GitError> {
        use std::os::unix::ffi::OsStrExt;
        for below in ["refs", "objects/info", "objects/pack"] {
            let below = dir.join(below);
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&below)
                .map_err(io("create", &below))?;
        }
        let mut alternate = host.as_os_str().as_bytes().to_vec();
        alternate.push(b'\n');
        let config = "[core]\n\trepositoryformatversion = 0\n\tbare = true\n";
        for (name, text) in [
            ("HEAD", b"ref: refs/heads/none\n".as_slice()),
            ("config", config.as_bytes()),
            ("objects/info/alternates", &alternate),
        ] {
            let path = dir.join(name);
            fs::write(&path, text).map_err(io("write", &path))?;
        }
        // The boundary of a shallow repository applies to the quarantine, too.
        let shallow = host_repository.repo().commondir().join("shallow");
        if shallow.exists() {
            fs::copy(&shallow, dir.join("shallow")).map_err(io("copy", &shallow))?;
        }
        // `open_bare` is not used, because it does not read `shallow`.
        let flags = RepositoryOpenFlags::NO_SEARCH | RepositoryOpenFlags::BARE;
        Repository::open_ext(dir, flags, std::iter::empty::<&Path>())
            .map_err(git("open a quarantine for new objects"))
    }

    pub(crate) fn repo(&self) -> &Repository {
        &self.repo
    }

    /// The directory for packs.
    pub(super) fn packs(&self) -> PathBuf {
        self.dir.join("objects/pack")
    }

    /// Moves every object to the host's repository.
    pub(super) fn publish(self) -> Result<(), GitError> {
        let own = self.dir.join("objects");
        for entry in fs::read_dir(&own).map_err(io("list", &own))? {
            let entry = entry.map_err(io("list", &own))?;
            let name = entry.file_name();
            if name == "info" || name == "pack" {
                continue;
            }
            let to = self.host.join(&name);
            if !to.is_dir() {
                fs::create_dir(&to)
                    .or_else(|error| if to.is_dir() { Ok(()) } else { Err(error) })
                    .map_err(io("create", &to))?;
            }
            for object in fs::read_dir(entry.path()).map_err(io("list", &entry.path()))? {
                let object = object.map_err(io("list", &entry.path()))?;
                move_object(&object.path(), &to.join(object.file_name()))?;
            }
        }
        self.publish_packs()
    }

    /// Moves the packs to the host's repository, each index after its pack, because git uses a pack
    /// as soon as the index exists.
    fn publish_packs(&self) -> Result<(), GitError> {
        let own = self.packs();
        let mut packs: Vec<_> = fs::read_dir(&own)
            .map_err(io("list", &own))?
            .flatten()
            .map(|entry| entry.path())
            .collect();
        packs.sort_by_key(|path| path.extension().is_some_and(|ext| ext == "idx"));
        let to = self.host.join("pack");
        for path in packs {
            if let Some(name) = path.file_name() {
                move_object(&path, &to.join(name))?;
            }
        }
        Ok(())
    }
}

/// Locks a directory; `None` if it was removed before the lock was held.
fn lock_directory(dir: &Path, how: FlockArg) -> Option<Flock<File>> {
    use std::os::unix::fs::MetadataExt;
    let lock = Flock::lock(File::open(dir).ok()?, how).ok()?;
    let (held, found) = (lock.metadata().ok()?, fs::symlink_metadata(dir).ok()?);
    ((held.dev(), held.ino()) == (found.dev(), found.ino())).then_some(lock)
}

/// Removes unlocked quarantine directories that killed processes left.
fn remove_abandoned(objects: &Path) {
    for entry in fs::read_dir(objects).into_iter().flatten().flatten() {
        let is_quarantine = entry
            .file_name()
            .as_encoded_bytes()
            .starts_with(NAME_PREFIX.as_bytes());
        if is_quarantine
            && let Some(_held) = lock_directory(&entry.path(), FlockArg::LockExclusiveNonblock)
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn move_object(from: &Path, to: &Path) -> Result<(), GitError> {
    if to.exists() {
        return Ok(());
    }
    fs::rename(from, to).map_err(io("move an object to", to))
}

impl Drop for Quarantine {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}
