//! Objects on probation: written beside the operator's, moved among them once all is well.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use git2::Repository;

use super::error::{GitError, git, io};
use super::home::Home;

static NEXT: AtomicU64 = AtomicU64::new(0);

/// A name that no other call of this process, and no other process, uses now.
pub(super) fn unique(prefix: &str) -> String {
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{prefix}{}-{next}", std::process::id())
}

/// A bare repository that sees the host's objects and writes to its own directory. A failed
/// snapshot or import leaves nothing behind in the operator's repository.
///
/// Its name starts as git's own quarantine does, so that `git gc` sweeps up after a crash.
pub(super) struct Quarantine {
    dir: PathBuf,
    host: PathBuf,
    repo: Repository,
}

impl Quarantine {
    pub(super) fn open(home: &Home) -> Result<Self, GitError> {
        let host = home.objects();
        let host = fs::canonicalize(&host).map_err(io("find", &host))?;
        let dir = host.join(unique("tmp_objdir-palisade-"));
        match Self::fill(&dir, &host) {
            Ok(repo) => Ok(Self { dir, host, repo }),
            Err(error) => {
                let _ = fs::remove_dir_all(&dir);
                Err(error)
            }
        }
    }

    fn fill(dir: &Path, host: &Path) -> Result<Repository, GitError> {
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
        Repository::open_bare(dir).map_err(git("open a place for new objects"))
    }

    pub(super) fn repo(&self) -> &Repository {
        &self.repo
    }

    /// Where a pack may be put.
    pub(super) fn packs(&self) -> PathBuf {
        self.dir.join("objects/pack")
    }

    /// Gives every object its place in the host's repository.
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
                move_in(&object.path(), &to.join(object.file_name()))?;
            }
        }
        self.publish_packs()
    }

    /// The index goes last: git takes a pack for there when its index is.
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
                move_in(&path, &to.join(name))?;
            }
        }
        Ok(())
    }
}

fn move_in(from: &Path, to: &Path) -> Result<(), GitError> {
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
