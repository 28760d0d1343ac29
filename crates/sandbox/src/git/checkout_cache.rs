//! Cache of read-only checkouts, one for each commit, shared by all workspaces that start from it.
//!
//! A directory gets its final name when it is complete. One gate uses a state directory at a time;
//! incomplete directories that a crash left are removed at the next start.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use git2::{Oid, Repository};

use super::copy::{make_directories, stamp_of};
use super::error::{GitError, git, io};
use super::host_repository::HostRepository;
use super::manifest::{FileStamp, Manifest, now};
use super::quarantine::unique_name;
use super::tree::{self, EXECUTABLE, LINK, Leaf, SUBMODULE};
use crate::beneath;
use crate::create_progress::{CreateProgress, CreateStep};
use crate::parallel::parallel;

/// The checkouts of a state directory.
#[derive(Debug)]
pub struct CheckoutCache {
    pub(super) state: PathBuf,
    max_bytes: u64,
}

/// The cached files of one commit.
pub struct CachedCheckout {
    pub(super) dir: PathBuf,
    /// The files' manifest.
    pub manifest: Manifest,
}

/// The start of the name of an incomplete directory.
const UNFINISHED_PREFIX: &str = ".unfinished-";

impl CheckoutCache {
    /// Keeps checkouts and spare workspaces in the directory `state`, at most `max_bytes` bytes of
    /// checkouts.
    pub fn open(state: &Path, max_bytes: u64) -> Result<Self, GitError> {
        for below in ["checkouts", "spares"] {
            let dir = state.join(below);
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&dir)
                .map_err(io("create", &dir))?;
            for entry in fs::read_dir(&dir).map_err(io("list", &dir))?.flatten() {
                if is_unfinished(&entry.file_name()) {
                    let _ = fs::remove_dir_all(entry.path());
                }
            }
        }
        Ok(Self {
            state: state.to_owned(),
            max_bytes,
        })
    }

    /// Returns the checkout of `commit`, and creates it if it does not exist.
    pub fn get(
        &self,
        host_repository: &HostRepository,
        commit: Oid,
    ) -> Result<CachedCheckout, GitError> {
        self.get_with_progress(host_repository, commit, &CreateProgress::default())
    }

    pub(super) fn get_with_progress(
        &self,
        host_repository: &HostRepository,
        commit: Oid,
        progress: &CreateProgress,
    ) -> Result<CachedCheckout, GitError> {
        let dir = self.state.join("checkouts").join(commit.to_string());
        if !dir.join("manifest").exists() {
            self.create(host_repository, commit, &dir, progress)?;
            self.evict(&dir)?;
        }
        let used = dir.join("used");
        fs::write(&used, b"").map_err(io("write", &used))?;
        let manifest = Manifest::load(&dir.join("manifest"))?;
        Ok(CachedCheckout { dir, manifest })
    }

    fn create(
        &self,
        host_repository: &HostRepository,
        commit: Oid,
        dir: &Path,
        progress: &CreateProgress,
    ) -> Result<(), GitError> {
        self.publish("checkouts", dir, |temporary| {
            let tree = temporary.join("tree");
            fs::create_dir(&tree).map_err(io("create", &tree))?;
            let manifest = write_tree(host_repository, commit, &tree, progress)?;
            manifest.save(&temporary.join("manifest"))
        })
    }

    /// Fills a directory under a temporary name and renames it when it is complete. If another
    /// process was faster, its directory is used.
    pub(super) fn publish(
        &self,
        subdirectory: &str,
        dir: &Path,
        fill: impl FnOnce(&Path) -> Result<(), GitError>,
    ) -> Result<(), GitError> {
        let temporary = self
            .state
            .join(subdirectory)
            .join(unique_name(UNFINISHED_PREFIX));
        fs::create_dir(&temporary).map_err(io("create", &temporary))?;
        let done = fill(&temporary).and_then(|()| match fs::rename(&temporary, dir) {
            Err(_) if dir.exists() => Ok(()),
            other => other.map_err(io("publish", dir)),
        });
        if done.is_err() || temporary.exists() {
            let _ = fs::remove_dir_all(&temporary);
        }
        done
    }

    /// Removes a directory after renaming it, so that no reader finds it incomplete.
    pub(super) fn discard(&self, subdirectory: &str, dir: &Path) -> Result<(), GitError> {
        let removed = self
            .state
            .join(subdirectory)
            .join(unique_name(UNFINISHED_PREFIX));
        match fs::rename(dir, &removed) {
            Ok(()) => fs::remove_dir_all(&removed).map_err(io("remove", &removed)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(io("remove", dir)(error)),
        }
    }

    /// Evicts the least recently used checkouts until the rest fits; `keep` is never evicted.
    fn evict(&self, keep: &Path) -> Result<(), GitError> {
        let root = self.state.join("checkouts");
        let mut kept = Vec::new();
        for entry in fs::read_dir(&root).map_err(io("list", &root))?.flatten() {
            let dir = entry.path();
            if is_unfinished(&entry.file_name()) {
                continue;
            }
            let used = fs::metadata(dir.join("used")).and_then(|used| used.modified());
            let size =
                Manifest::load(&dir.join("manifest")).map_or(0, |m| m.bytes()) + pack_bytes(&dir);
            kept.push((dir == keep, used.ok(), size, dir));
        }
        kept.sort();
        let mut total: u64 = kept.iter().map(|(_, _, size, _)| size).sum();
        for (keep, _, size, dir) in kept {
            if keep || total <= self.max_bytes {
                break;
            }
            self.discard("checkouts", &dir)?;
            total -= size;
        }
        Ok(())
    }
}

pub(super) fn is_unfinished(name: &std::ffi::OsStr) -> bool {
    name.to_string_lossy().starts_with(UNFINISHED_PREFIX)
}

/// Returns the size of the packs of the template repositories in a checkout.
fn pack_bytes(dir: &Path) -> u64 {
    let repositories = fs::read_dir(dir).into_iter().flatten().flatten();
    repositories
        .flat_map(|entry| fs::read_dir(entry.path().join("objects/pack")))
        .flat_map(|packs| packs.flatten())
        .filter_map(|pack| pack.metadata().ok())
        .map(|metadata| metadata.len())
        .sum()
}

/// Writes a commit's files from the objects' bytes: no filter, line ending conversion or attribute
/// applies.
fn write_tree(
    host_repository: &HostRepository,
    commit: Oid,
    to: &Path,
    progress: &CreateProgress,
) -> Result<Manifest, GitError> {
    let repo = host_repository.repo();
    let tree = repo
        .find_commit(commit)
        .map_err(git(format!("find commit {commit}")))?
        .tree_id();
    let odb = repo.odb().map_err(git("open the objects"))?;
    let paths = tree::flatten(&odb, tree)?;
    make_directories(
        to,
        paths
            .iter()
            .map(|(path, leaf)| (path.as_slice(), leaf.mode)),
        None,
    )?;
    let rows: Vec<_> = paths.iter().collect();
    progress.begin(CreateStep::Checkout, Some(rows.len()));
    let git_dir = repo.path();
    let entries = parallel(
        &rows,
        || Repository::open(git_dir).map_err(git("open the repository")),
        |repo, (path, leaf)| {
            let odb = repo.odb().map_err(git("open the objects"))?;
            let target = to.join(beneath::path_from_bytes(path));
            let stamp = write_file(&odb, leaf, &target)?;
            progress.advance();
            Ok(((*path).clone(), stamp))
        },
    )?;
    Ok(Manifest {
        taken: now(),
        entries: entries.into_iter().collect(),
    })
}

fn write_file(odb: &git2::Odb<'_>, leaf: &Leaf, target: &Path) -> Result<FileStamp, GitError> {
    let blank = FileStamp {
        mode: leaf.mode,
        size: 0,
        mtime: (0, 0),
        ctime: (0, 0),
        ino: 0,
        id: leaf.id,
    };
    if leaf.mode == SUBMODULE {
        return Ok(blank);
    }
    let blob = odb
        .read(leaf.id)
        .map_err(git(format!("read the blob {}", leaf.id)))?;
    let metadata = if leaf.mode == LINK {
        std::os::unix::fs::symlink(beneath::path_from_bytes(blob.data()), target)
            .map_err(io("create the link", target))?;
        fs::symlink_metadata(target)
    } else {
        let mode = if leaf.mode == EXECUTABLE {
            0o555
        } else {
            0o444
        };
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(target)
            .map_err(io("create", target))?;
        file.write_all(blob.data()).map_err(io("write", target))?;
        file.metadata()
    };
    Ok(stamp_of(&metadata.map_err(io("stat", target))?, &blank))
}
