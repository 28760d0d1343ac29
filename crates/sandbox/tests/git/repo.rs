//! Test fixtures: a repository, and a sandbox's workspace of it.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use git2::Oid;
use sandbox::git::checkout_cache::CheckoutCache;
use sandbox::git::error::GitError;
use sandbox::git::host_repository::HostRepository;
use sandbox::git::manifest::Manifest;
use sandbox::git::snapshot::{CommitRequest, SnapshotBounds, SnapshotOutcome};
use sandbox::git::walk::Walk;
use sandbox::git::workspace::WorkspacePlan;
use sandbox::name::Slug;
use tempfile::TempDir;

pub(crate) struct Repo {
    pub(crate) temp: TempDir,
    pub(crate) dir: PathBuf,
}

/// Runs git as the operator, with no configuration but the repository's.
pub(crate) fn git(dir: &Path, args: &[&str]) -> String {
    let (ok, out) = try_git(dir, args);
    assert!(ok, "git {args:?}: {out}");
    out
}

pub(crate) fn try_git(dir: &Path, args: &[&str]) -> (bool, String) {
    let output = Command::new("git")
        .args(args)
        .current_dir(dir)
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap())
        .env("HOME", "/nonexistent")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_AUTHOR_NAME", "A")
        .env("GIT_AUTHOR_EMAIL", "a@example.com")
        .env("GIT_COMMITTER_NAME", "A")
        .env("GIT_COMMITTER_EMAIL", "a@example.com")
        .output()
        .unwrap();
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        text.push_str(&String::from_utf8_lossy(&output.stderr));
    }
    (output.status.success(), text.trim_end().to_owned())
}

impl Repo {
    /// A repository without a commit.
    pub(crate) fn empty() -> Self {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("project");
        std::fs::create_dir(&dir).unwrap();
        git(&dir, &["init", "-q", "-b", "main"]);
        Self { temp, dir }
    }

    /// A repository with a few files of each kind and two commits.
    pub(crate) fn with_files() -> Self {
        let repo = Self::empty();
        repo.write("README.md", "hello\n");
        repo.commit("first");
        repo.write("src/main.rs", "fn main() {}\n");
        repo.write("src/lib.rs", "one\ntwo\nthree\nfour\nfive\nsix\nseven\n");
        repo.write("run.sh", "#!/bin/sh\n");
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(repo.dir.join("run.sh"), mode).unwrap();
        std::os::unix::fs::symlink("README.md", repo.dir.join("link")).unwrap();
        repo.write(".gitignore", "*.log\ntarget/\n!keep.log\n");
        repo.commit("second");
        repo
    }

    pub(crate) fn write(&self, path: &str, text: &str) {
        write(&self.dir, path, text);
    }

    pub(crate) fn commit(&self, message: &str) -> Oid {
        git(&self.dir, &["add", "-A"]);
        git(&self.dir, &["commit", "-q", "-m", message]);
        self.rev("HEAD")
    }

    pub(crate) fn rev(&self, name: &str) -> Oid {
        Oid::from_str(&git(&self.dir, &["rev-parse", name])).unwrap()
    }

    pub(crate) fn host_repository(&self) -> HostRepository {
        HostRepository::discover(&self.dir).unwrap()
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.temp.path().join("state")
    }

    pub(crate) fn checkouts(&self) -> CheckoutCache {
        CheckoutCache::open(&self.state(), u64::MAX).unwrap()
    }

    /// A sandbox with its branch and workspace, as `create` makes it.
    pub(crate) fn sandbox(&self, name: &str) -> SandboxFixture {
        let host_repository = self.host_repository();
        let slug = Slug::from_name(name).unwrap();
        let plan = WorkspacePlan {
            commit: host_repository.head().unwrap().commit,
            depth: None,
            dirty: false,
        };
        host_repository
            .create_branch(&slug, plan.commit, "made")
            .unwrap();
        let dir = self.temp.path().join(format!("workspace-{name}"));
        let manifest = self
            .checkouts()
            .create_workspace(&host_repository, &plan, &slug, &dir, None)
            .unwrap();
        SandboxFixture {
            host_repository,
            slug,
            dir,
            manifest,
        }
    }
}

pub(crate) fn write(dir: &Path, path: &str, text: &str) {
    let path = dir.join(path);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

/// A sandbox's workspace and branch on the host.
pub(crate) struct SandboxFixture {
    pub(crate) host_repository: HostRepository,
    pub(crate) slug: Slug,
    pub(crate) dir: PathBuf,
    pub(crate) manifest: Manifest,
}

impl SandboxFixture {
    pub(crate) fn write(&self, path: &str, text: &str) {
        write(&self.dir, path, text);
    }

    pub(crate) fn snapshot(&mut self, message: &str) -> SnapshotOutcome {
        self.try_snapshot(message, &SnapshotBounds::default(), None)
            .unwrap()
    }

    pub(crate) fn try_snapshot(
        &mut self,
        message: &str,
        bounds: &SnapshotBounds,
        agent_head: Option<Oid>,
    ) -> Result<SnapshotOutcome, GitError> {
        let mut walk = Walk::new(&self.dir, &self.manifest, bounds)?;
        let request = CommitRequest {
            slug: &self.slug,
            message,
            agent_head,
            bounds,
        };
        let snapshot = self
            .host_repository
            .snapshot(&request, &self.manifest, &mut walk)?;
        self.manifest = snapshot.manifest.clone();
        Ok(snapshot)
    }
}

/// The observable state: each file's bytes, mode, inode and time, HEAD, the index, the
/// configuration and every branch that is no sandbox's.
pub(crate) fn fingerprint(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    collect(dir, dir, &mut all);
    all
}

fn collect(root: &Path, dir: &Path, all: &mut BTreeMap<PathBuf, Vec<u8>>) {
    use std::os::unix::fs::MetadataExt;
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let relative = path.strip_prefix(root).unwrap().to_owned();
        let text = relative.to_string_lossy().into_owned();
        if text.starts_with(".git/objects") || text.contains("heads/palisade") {
            continue;
        }
        let metadata = std::fs::symlink_metadata(&path).unwrap();
        let mut seen = format!("{:o} ", metadata.mode()).into_bytes();
        if metadata.is_symlink() {
            seen.extend(std::fs::read_link(&path).unwrap().as_os_str().as_bytes());
        } else if metadata.is_dir() {
            collect(root, &path, all);
        } else {
            seen.extend(format!("{} {} ", metadata.ino(), metadata.mtime_nsec()).into_bytes());
            seen.extend(std::fs::read(&path).unwrap());
        }
        all.insert(relative, seen);
    }
}

/// The paths and modes of a commit, in git's order.
pub(crate) fn listing(dir: &Path, commit: &str) -> String {
    git(dir, &["-c", "core.quotepath=true", "ls-tree", "-r", commit])
        .lines()
        .map(|line| {
            let (head, path) = line.split_once('\t').unwrap();
            format!("{} {path}\n", head.split(' ').next().unwrap())
        })
        .collect()
}
