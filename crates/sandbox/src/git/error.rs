//! Errors of the git operations.

use std::path::{Path, PathBuf};

use git2::Oid;

use super::names::quote;

/// An error of a git operation. Its text names the failure, its object and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum GitError {
    /// There is no repository at the path or above it.
    #[error("'{path}' is not inside a git repository; run `git init` there, or change to a repository", path = .0.display())]
    NotARepository(PathBuf),
    /// The repository belongs to another user.
    #[error(
        "the repository at '{path}' belongs to another user, whose configuration git would follow; if you \
         trust it, run `git config --global --add safe.directory {path}`", path = .0.display()
    )]
    OtherOwner(PathBuf),
    /// A format libgit2 cannot read, such as SHA-256 objects.
    #[error(
        "the repository at '{path}' uses a format that Palisade cannot read ({detail}); only SHA-1 \
         repositories with ordinary refs work: convert it, or clone it with the default format",
        path = .path.display()
    )]
    Unsupported {
        /// The repository.
        path: PathBuf,
        /// The unsupported feature.
        detail: String,
    },
    /// A repository without a commit.
    #[error("the repository at '{path}' has no commit yet; create one with `git commit`", path = .0.display())]
    NoCommits(PathBuf),
    /// The branch to create exists.
    #[error(
        "the branch '{0}' already exists; choose another name, or delete it with `git branch -D {0}`"
    )]
    BranchExists(String),
    /// A branch `palisade` exists where the namespace `palisade/` is needed.
    #[error(
        "the branch '{0}' cannot be created because a branch named 'palisade' exists; rename that branch"
    )]
    BranchBlocked(String),
    /// The branch does not exist.
    #[error(
        "the branch '{0}' does not exist; `git branch --list 'palisade/*'` shows those that do"
    )]
    NoBranch(String),
    /// The branch is checked out in a worktree.
    #[error(
        "the branch '{0}' is checked out in one of your worktrees; switch that worktree to another branch first"
    )]
    BranchInUse(String),
    /// Another process moved a branch meanwhile.
    #[error("'{0}' was moved by another process; nothing was changed, try again")]
    Moved(String),
    /// A name that must never be in a tree.
    #[error("the path {path} is refused: {why}; remove or rename it in the workspace", path = quote(.path))]
    Forbidden {
        /// The path, from the workspace's root.
        path: Vec<u8>,
        /// The reason.
        why: &'static str,
    },
    /// A limit that keeps an agent from filling the host.
    #[error("{what} exceeds the limit of {bound} ({at}); remove or ignore files that are not needed", at = quote(.path))]
    TooMuch {
        /// The limited quantity.
        what: &'static str,
        /// The limit.
        bound: u64,
        /// The path at which the limit was exceeded.
        path: Vec<u8>,
    },
    /// A git object of the agent is malformed.
    #[error("the agent's commits are refused: {why} ({id}); they stay in the workspace")]
    BadObject {
        /// The reason.
        why: String,
        /// The malformed object.
        id: Oid,
    },
    /// The header of a bundle is malformed.
    #[error("the agent's commits are refused: {0}")]
    BadBundle(&'static str),
    /// Both sides changed the same lines.
    #[error("the merge conflicts in {list}; nothing was changed. Merge with git to resolve the conflicts by hand", list = list(.0))]
    Conflicts(Vec<Vec<u8>>),
    /// The operator's own changes would be lost.
    #[error("your worktree has uncommitted changes in {list}; nothing was changed. Commit or stash them first", list = list(.0))]
    Dirty(Vec<Vec<u8>>),
    /// A fast-forward is not possible.
    #[error(
        "your branch cannot be fast-forwarded to '{0}', because it has commits that '{0}' does not have; merge or squash instead"
    )]
    NotFastForward(String),
    /// The repository has no worktree.
    #[error("the repository at '{path}' is bare and has no worktree to apply changes to; use merge", path = .0.display())]
    Bare(PathBuf),
    /// Another git operation is in progress in the operator's repository.
    #[error("the repository at '{path}' is busy ({state}); finish or abort that operation first", path = .path.display())]
    Busy {
        /// The repository.
        path: PathBuf,
        /// The operation in progress.
        state: String,
    },
    /// A stale lock on a branch.
    #[error("'{name}' is locked by another git process; if none is running, it crashed: remove '{path}'", path = .lock.display())]
    Locked {
        /// The ref.
        name: String,
        /// The lock file.
        lock: PathBuf,
    },
    /// An interrupted merge cannot be rolled back without losing a change.
    #[error("an earlier merge was interrupted and {path} has changed since; the previous file is in '{stage}': move it back, or delete that directory and the file of the same name in .git", path = quote(.path), stage = .stage.display())]
    Interrupted {
        /// The path in the worktree.
        path: Vec<u8>,
        /// The staging directory of the interrupted update.
        stage: PathBuf,
    },
    /// The two histories have no common commit.
    #[error("'{0}' shares no history with your branch; nothing was changed")]
    Unrelated(String),
    /// A damaged manifest.
    #[error("the manifest '{path}' is damaged; delete its directory and it is created again", path = .0.display())]
    BadManifest(PathBuf),
    /// The worker's reason for a failed snapshot.
    #[error("{0}")]
    Refused(String),
    /// The worker failed without a reply.
    #[error("snapshot worker failed: {cause}; the branch is unchanged{hint}")]
    Worker {
        /// The cause.
        cause: String,
        /// The remedy, if there is one.
        hint: &'static str,
    },
    /// libgit2 failed.
    #[error("could not {doing}: {message}", message = .source.message())]
    Git {
        /// The failed operation.
        doing: String,
        /// libgit2's error.
        source: git2::Error,
    },
    /// The file system failed.
    #[error("could not {doing} '{path}': {source}", path = .path.display())]
    Io {
        /// The failed operation.
        doing: &'static str,
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
}

fn list(paths: &[Vec<u8>]) -> String {
    const MAX_LISTED: usize = 10;
    let mut text = paths
        .iter()
        .take(MAX_LISTED)
        .map(|path| quote(path))
        .collect::<Vec<_>>()
        .join(", ");
    if paths.len() > MAX_LISTED {
        text.push_str(&format!(" and {} more", paths.len() - MAX_LISTED));
    }
    text
}

/// Converts an error of libgit2, for `map_err`.
pub(super) fn git(doing: impl Into<String>) -> impl FnOnce(git2::Error) -> GitError {
    let doing = doing.into();
    move |source| GitError::Git { doing, source }
}

/// Converts an error of the standard library or nix, for `map_err`.
pub(super) fn io<E: Into<std::io::Error>>(
    doing: &'static str,
    path: &Path,
) -> impl FnOnce(E) -> GitError {
    let path = path.to_owned();
    move |source| GitError::Io {
        doing,
        path,
        source: source.into(),
    }
}
