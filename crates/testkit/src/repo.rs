//! A git repository for tests, created with the machine's git.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::operator::Operator;
use crate::output;

/// An operator's repository, or a linked worktree of a repository.
#[derive(Clone, Debug)]
pub struct TestRepo {
    dir: PathBuf,
    operator: Operator,
}

/// Mode, modification time and content of every file of a repository, to show that a command did
/// not change the operator's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoFingerprint(BTreeMap<PathBuf, (u32, i128, Vec<u8>)>);

impl RepoFingerprint {
    /// The paths that differ from `other`.
    pub fn differences(&self, other: &Self) -> Vec<PathBuf> {
        let one_way = |from: &Self, to: &Self| -> Vec<PathBuf> {
            let differs = |path: &&PathBuf| from.0.get(*path) != to.0.get(*path);
            from.0.keys().filter(differs).cloned().collect()
        };
        let mut all = [one_way(self, other), one_way(other, self)].concat();
        all.sort();
        all.dedup();
        all
    }
}

#[expect(
    clippy::expect_used,
    reason = "a test without its files cannot continue"
)]
impl TestRepo {
    /// A repository without a commit.
    pub fn empty(dir: &Path, operator: Operator) -> Self {
        std::fs::create_dir_all(dir).expect("a directory");
        operator.chown(dir);
        let repo = Self {
            dir: dir.to_owned(),
            operator,
        };
        repo.git(&["init", "-q", "-b", "main"]);
        for (key, value) in [
            ("user.name", "Operator"),
            ("user.email", "operator@example.com"),
            // Submodules of these tests are local directories.
            ("protocol.file.allow", "always"),
            ("gc.auto", "0"),
        ] {
            repo.git(&["config", key, value]);
        }
        repo
    }

    /// A repository with a few files and two commits.
    pub fn new(dir: &Path, operator: Operator) -> Self {
        let repo = Self::empty(dir, operator);
        repo.write("README.md", "hello\n");
        repo.commit("first");
        repo.write("src/lib.rs", "one\ntwo\nthree\nfour\nfive\nsix\nseven\n");
        repo.write(".gitignore", "*.log\n");
        repo.commit("second");
        repo
    }

    /// A linked worktree (`git worktree add`).
    pub fn linked(&self, dir: &Path, branch: &str) -> Self {
        let path = dir.to_string_lossy();
        self.git(&["worktree", "add", "-q", "-b", branch, &path]);
        Self {
            dir: dir.to_owned(),
            operator: self.operator,
        }
    }

    /// The directory of the worktree.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A path in the worktree.
    pub fn path(&self, path: &str) -> PathBuf {
        self.dir.join(path)
    }

    /// A `git` command of the operator that reads only the repository's configuration.
    pub fn git_command(&self, args: &[&str]) -> Command {
        let mut command = self.operator.command("git");
        command
            .args(args)
            .current_dir(&self.dir)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", "/nonexistent")
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .env("GIT_CONFIG_GLOBAL", "/dev/null");
        command
    }

    /// Runs git, which may fail.
    pub fn try_git(&self, args: &[&str]) -> Output {
        self.git_command(args).output().expect("git")
    }

    /// Runs git, which must succeed, and returns its standard output.
    pub fn git(&self, args: &[&str]) -> String {
        let output = self.try_git(args);
        assert!(
            output.status.success(),
            "git {args:?}: {}{}",
            output::stdout(&output),
            output::stderr(&output)
        );
        output::stdout(&output).trim_end().to_owned()
    }

    /// Writes a file, with the directories above it.
    pub fn write(&self, path: &str, text: impl AsRef<[u8]>) {
        let full = self.dir.join(path);
        let mut above: Vec<&Path> = Vec::new();
        for parent in full.ancestors().skip(1) {
            if parent.exists() {
                break;
            }
            above.push(parent);
        }
        for parent in above.into_iter().rev() {
            std::fs::create_dir(parent).expect("a directory");
            self.operator.chown(parent);
        }
        std::fs::write(&full, text).expect("a file");
        self.operator.chown(&full);
    }

    /// The content of a file of the worktree.
    pub fn read(&self, path: &str) -> String {
        std::fs::read_to_string(self.dir.join(path)).expect("a file")
    }

    /// Commits everything.
    pub fn commit(&self, message: &str) {
        self.git(&["add", "-A"]);
        self.git(&["commit", "-q", "-m", message]);
    }

    /// The branches of sandboxes in this repository.
    pub fn sandbox_branches(&self) -> Vec<String> {
        let refs = self.git(&[
            "for-each-ref",
            "--format=%(refname:short)",
            "refs/heads/palisade/",
        ]);
        refs.lines().map(ToOwned::to_owned).collect()
    }

    /// The files of the worktree and of the git directory, without what sandbox branches add:
    /// objects, refs and reflogs.
    pub fn fingerprint(&self) -> RepoFingerprint {
        let own = PathBuf::from(self.git(&["rev-parse", "--absolute-git-dir"]));
        let common = self.git(&["rev-parse", "--path-format=absolute", "--git-common-dir"]);
        let mut files = BTreeMap::new();
        for root in [self.dir.clone(), own, common.into()] {
            collect(&root, &mut files);
        }
        RepoFingerprint(files)
    }
}

#[expect(
    clippy::expect_used,
    reason = "a test without its files cannot continue"
)]
fn collect(dir: &Path, files: &mut BTreeMap<PathBuf, (u32, i128, Vec<u8>)>) {
    for entry in std::fs::read_dir(dir).expect("a directory") {
        let path = entry.expect("an entry").path();
        let data = path.symlink_metadata().expect("its data");
        if data.is_dir() {
            let ends = ["objects", "refs/heads/palisade", "logs/refs/heads/palisade"];
            let of_a_branch = ends.iter().any(|end| path.ends_with(end));
            if !of_a_branch {
                collect(&path, files);
            }
            continue;
        }
        let bytes = if data.is_symlink() {
            let target = std::fs::read_link(&path).expect("a link");
            target.as_os_str().as_bytes().to_vec()
        } else {
            std::fs::read(&path).expect("a file")
        };
        let time = i128::from(data.mtime()) * 1_000_000_000 + i128::from(data.mtime_nsec());
        files.insert(path, (data.mode(), time, bytes));
    }
}
