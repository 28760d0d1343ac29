//! What can go wrong between the operator's repository and a workspace.

use std::path::{Path, PathBuf};

use git2::Oid;

use super::names::quote;

/// A failure of the git side: what happened, to what, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum GitError {
    /// No repository at or above the path.
    #[error("'{path}' is not inside a git repository; run `git init` there, or go to one", path = .0.display())]
    NotARepository(PathBuf),
    /// The repository belongs to another user.
    #[error(
        "the repository at '{path}' belongs to another user, who could steer git through it; if you \
         trust it, run `git config --global --add safe.directory {path}`", path = .0.display()
    )]
    NotYours(PathBuf),
    /// A format libgit2 cannot read, such as SHA-256 objects.
    #[error(
        "the repository at '{path}' uses a format that Palisade cannot read ({detail}); only SHA-1 \
         repositories with ordinary refs work: convert it, or clone it with the default format",
        path = .path.display()
    )]
    Unsupported {
        /// The repository.
        path: PathBuf,
        /// What is not understood.
        detail: String,
    },
    /// A repository without a commit.
    #[error("the repository at '{path}' has no commit yet; make a first one with `git commit`", path = .0.display())]
    NoCommits(PathBuf),
    /// The branch to make exists.
    #[error(
        "the branch '{0}' already exists; choose another name, or delete it with `git branch -D {0}`"
    )]
    BranchExists(String),
    /// A branch `palisade` stands where the directory of branches must be.
    #[error(
        "the branch '{0}' cannot be made because a branch named 'palisade' stands in its way; rename that one"
    )]
    BranchBlocked(String),
    /// The branch to use is not there.
    #[error(
        "the branch '{0}' does not exist; `git branch --list 'palisade/*'` shows those that do"
    )]
    NoBranch(String),
    /// The branch is checked out somewhere.
    #[error(
        "the branch '{0}' is checked out in one of your worktrees; switch that worktree to another branch first"
    )]
    BranchInUse(String),
    /// Somebody else moved a branch at the same moment.
    #[error("'{0}' moved while Palisade was working; nothing was changed, try again")]
    Moved(String),
    /// A name that must never be in a tree.
    #[error("the path {path} is refused: {why}; remove or rename it in the workspace", path = quote(.path))]
    Forbidden {
        /// The path, from the workspace's root.
        path: Vec<u8>,
        /// What is wrong with it.
        why: &'static str,
    },
    /// One of the bounds that keep an agent from filling the host.
    #[error("{what} is over its bound of {bound} ({at}); remove or ignore what is not needed", at = quote(.path))]
    TooMuch {
        /// What there is too much of.
        what: &'static str,
        /// The bound.
        bound: u64,
        /// Where it was noticed.
        path: Vec<u8>,
    },
    /// The agent's objects are not what they claim.
    #[error("the agent's commits are refused: {why} ({id}); they stay in the workspace")]
    BadObject {
        /// What is wrong.
        why: String,
        /// Where.
        id: Oid,
    },
    /// A bundle's head could not be understood.
    #[error("the agent's commits are refused: {0}")]
    BadBundle(&'static str),
    /// Both sides changed the same lines.
    #[error("merging conflicts in {list}; nothing was changed. Merge with git to resolve them by hand", list = list(.0))]
    Conflicts(Vec<Vec<u8>>),
    /// The operator's own changes would be lost.
    #[error("your worktree has changes of its own in {list}; nothing was changed. Commit or stash them first", list = list(.0))]
    Dirty(Vec<Vec<u8>>),
    /// A fast-forward was asked for and is not possible.
    #[error(
        "'{0}' cannot be fast-forwarded to: your branch has commits of its own. Merge or squash instead"
    )]
    NotFastForward(String),
    /// There is no worktree to write to.
    #[error("the repository at '{path}' is bare and has no worktree to apply changes to; use merge", path = .0.display())]
    Bare(PathBuf),
    /// Another operation is under way in the operator's repository.
    #[error("the repository at '{path}' is in the middle of something ({state}); finish or abort that first", path = .path.display())]
    Busy {
        /// The repository.
        path: PathBuf,
        /// What is under way.
        state: String,
    },
    /// A lock on a branch that nobody takes away.
    #[error("'{name}' is locked by another git process; if none is running, it crashed: remove '{path}'", path = .lock.display())]
    Locked {
        /// The ref.
        name: String,
        /// The file that says so.
        lock: PathBuf,
    },
    /// A crash in the middle of a merge cannot be put right without losing something.
    #[error("an earlier merge was interrupted and {path} has changed since; the file it had before is in '{stage}': put it where it belongs, or delete that directory and the file of its name in .git", path = quote(.path), stage = .stage.display())]
    Interrupted {
        /// The path in the worktree.
        path: Vec<u8>,
        /// Where the interrupted landing kept the files.
        stage: PathBuf,
    },
    /// The two histories share nothing.
    #[error("'{0}' shares no history with your branch; nothing was changed")]
    Unrelated(String),
    /// A manifest that we did not write.
    #[error("the manifest '{path}' is damaged; delete its directory and it is made again", path = .0.display())]
    BadManifest(PathBuf),
    /// What the worker said of a snapshot it would not or could not make.
    #[error("{0}")]
    Refused(String),
    /// The worker ended without an answer.
    #[error("the worker that reads the workspace {how}; the branch is as it was{hint}")]
    Worker {
        /// How it ended.
        how: String,
        /// What to do, if anything.
        hint: &'static str,
    },
    /// libgit2 failed.
    #[error("could not {doing}: {message}", message = .source.message())]
    Git {
        /// What was tried.
        doing: String,
        /// libgit2's word on it.
        source: git2::Error,
    },
    /// The file system failed.
    #[error("could not {doing} '{path}': {source}", path = .path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
}

fn list(paths: &[Vec<u8>]) -> String {
    const SHOWN: usize = 10;
    let mut text = paths
        .iter()
        .take(SHOWN)
        .map(|path| quote(path))
        .collect::<Vec<_>>()
        .join(", ");
    if paths.len() > SHOWN {
        text.push_str(&format!(" and {} more", paths.len() - SHOWN));
    }
    text
}

/// For `map_err` on libgit2's results.
pub(super) fn git(doing: impl Into<String>) -> impl FnOnce(git2::Error) -> GitError {
    let doing = doing.into();
    move |source| GitError::Git { doing, source }
}

/// For `map_err` on the standard library's and nix's results.
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
