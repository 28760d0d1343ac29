//! The operator's repository: branches, refs and HEAD.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use git2::{ErrorClass, ErrorCode, Oid, Repository, Signature};

use super::error::{GitError, git, io};
use crate::name::Slug;

/// The operator's repository. Its configuration is read, but no program that it names is run.
pub struct HostRepository {
    repo: Repository,
}

/// The operator's HEAD.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostHead {
    /// The commit.
    pub commit: Oid,
    /// The full name of the branch, unless HEAD is detached.
    pub branch: Option<String>,
}

impl HostRepository {
    /// Finds the repository that contains `path`: an ordinary one, a linked worktree, a submodule
    /// or a bare one.
    pub fn discover(path: &Path) -> Result<Self, GitError> {
        let repo = Repository::discover(path).map_err(|error| convert_open_error(path, error))?;
        Ok(Self { repo })
    }

    /// Reads the commit and the branch of HEAD.
    pub fn head(&self) -> Result<HostHead, GitError> {
        let head = match self.repo.head() {
            Ok(head) => head,
            Err(error) if matches!(error.code(), ErrorCode::UnbornBranch | ErrorCode::NotFound) => {
                return Err(GitError::NoCommits(self.root().to_owned()));
            }
            Err(error) => return Err(git("read HEAD")(error)),
        };
        let commit = head
            .peel_to_commit()
            .map_err(git("read HEAD's commit"))?
            .id();
        let branch = head
            .is_branch()
            .then(|| String::from_utf8_lossy(head.name_bytes()).into_owned());
        Ok(HostHead { commit, branch })
    }

    /// The worktree, or the repository itself if it is bare.
    pub fn root(&self) -> &Path {
        self.repo.workdir().unwrap_or_else(|| self.repo.path())
    }

    /// The common directory that all linked worktrees share; it identifies the repository.
    pub fn common_dir(&self) -> PathBuf {
        let common = self.repo.commondir();
        std::fs::canonicalize(common).unwrap_or_else(|_| common.to_owned())
    }

    /// The name of the repository's directory, for container names.
    pub fn name(&self) -> String {
        let named = if self.repo.is_bare() {
            self.repo.path()
        } else {
            self.root()
        };
        let name = named
            .file_name()
            .map(|name| name.to_string_lossy().into_owned());
        let name = name.unwrap_or_else(|| "repo".to_owned());
        name.strip_suffix(".git").map(str::to_owned).unwrap_or(name)
    }

    /// The names of the remotes and their URLs, as the operator's git would use them.
    pub fn remotes(&self) -> Result<Vec<(String, String)>, GitError> {
        let names = self.repo.remotes().map_err(git("list the remotes"))?;
        let names = names.iter().flatten().flatten();
        Ok(names
            .filter_map(|name| {
                let remote = self.repo.find_remote(name).ok()?;
                Some((name.to_owned(), remote.url().ok()?.to_owned()))
            })
            .collect())
    }

    /// Creates the sandbox's branch at `commit`. HEAD, index and worktree stay unchanged. `why` is
    /// the reflog message, by which [`HostRepository::was_created_for`] recognises the branch.
    pub fn create_branch(&self, slug: &Slug, commit: Oid, why: &str) -> Result<(), GitError> {
        let name = slug.branch();
        self.repo
            .find_commit(commit)
            .map_err(git(format!("find commit {commit}")))?;
        // In a linked worktree libgit2 looks for the loose ref in the wrong directory and would
        // overwrite the branch.
        if self.repo.refname_to_id(&refname(slug)).is_ok() {
            return Err(GitError::BranchExists(name));
        }
        let made = self.repo.reference(&refname(slug), commit, false, why);
        match made {
            Ok(_) => Ok(()),
            Err(error) if error.code() == ErrorCode::Exists => Err(GitError::BranchExists(name)),
            Err(error) if error.code() == ErrorCode::Locked => Err(self.locked(&refname(slug))),
            Err(_) if self.repo.find_reference("refs/heads/palisade").is_ok() => {
                Err(GitError::BranchBlocked(name))
            }
            Err(error) => Err(git(format!("create the branch '{name}'"))(error)),
        }
    }

    /// Deletes the sandbox's branch. With `only_at`, the branch is deleted only if it points to
    /// that commit, so that undoing [`HostRepository::create_branch`] loses no later commit.
    pub fn delete_branch(&self, slug: &Slug, only_at: Option<Oid>) -> Result<(), GitError> {
        let name = slug.branch();
        let mut found = match self.repo.find_reference(&refname(slug)) {
            Ok(found) => found,
            Err(error) if error.code() == ErrorCode::NotFound => {
                return Err(GitError::NoBranch(name));
            }
            Err(error) => return Err(git(format!("find the branch '{name}'"))(error)),
        };
        if only_at.is_some_and(|commit| found.target() != Some(commit)) {
            return Err(GitError::Moved(name));
        }
        if self.is_checked_out(&refname(slug)) {
            return Err(GitError::BranchInUse(name));
        }
        found.delete().map_err(|error| match error.code() {
            ErrorCode::Modified => GitError::Moved(name.clone()),
            ErrorCode::Locked => self.locked(&refname(slug)),
            _ => git(format!("delete the branch '{name}'"))(error),
        })
    }

    /// Removes a stale ref lock of the sandbox's branch that a crash left; the branch could not be
    /// created, moved or deleted otherwise. The caller must ensure that no other process of the
    /// gate uses the branch.
    pub fn break_lock(&self, slug: &Slug) -> Result<(), GitError> {
        let lock = format!("{}.lock", refname(slug));
        let lock = self.repo.commondir().join(lock);
        match std::fs::remove_file(&lock) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(io("remove", &lock)(error)),
            _ => Ok(()),
        }
    }

    /// Reads the commit that the sandbox's branch points to.
    pub fn tip(&self, slug: &Slug) -> Result<Oid, GitError> {
        match self.repo.refname_to_id(&refname(slug)) {
            Ok(id) => Ok(id),
            Err(error) if error.code() == ErrorCode::NotFound => {
                Err(GitError::NoBranch(slug.branch()))
            }
            Err(error) => Err(git(format!("read the branch '{}'", slug.branch()))(error)),
        }
    }

    /// Counts the commits of the sandbox's branch that are on no other branch, remote or tag.
    pub fn unmerged_commits(&self, slug: &Slug) -> Result<usize, GitError> {
        let tip = self.tip(slug)?;
        let own = refname(slug);
        let failed = || git(format!("look at the commits of '{}'", slug.branch()));
        let mut walk = self.repo.revwalk().map_err(failed())?;
        walk.push(tip).map_err(failed())?;
        for commit in self.commits_of(|name| name != own.as_bytes())? {
            walk.hide(commit).map_err(failed())?;
        }
        Ok(walk.flatten().count())
    }

    /// Returns the commits that refs and HEAD point to.
    pub(super) fn commits_of_refs(&self) -> Result<Vec<Oid>, GitError> {
        self.commits_of(|_| true)
    }

    /// Returns the commits that HEAD and the refs accepted by `include` point to.
    fn commits_of(&self, include: impl Fn(&[u8]) -> bool) -> Result<Vec<Oid>, GitError> {
        let references = self.repo.references().map_err(git("list the refs"))?;
        let mut commits = Vec::new();
        for reference in references.flatten() {
            // A broken ref, or a ref to another object than a commit, is skipped.
            if include(reference.name_bytes())
                && let Ok(commit) = reference.peel_to_commit()
            {
                commits.push(commit.id());
            }
        }
        // The list of refs does not contain a detached HEAD.
        commits.extend(self.head().ok().map(|head| head.commit));
        Ok(commits)
    }

    /// Moves the sandbox's branch from one commit to another; fails if another process moved it.
    pub(super) fn move_branch(
        &self,
        slug: &Slug,
        from: Oid,
        to: Oid,
        why: &str,
    ) -> Result<(), GitError> {
        if self.is_checked_out(&refname(slug)) {
            // The worktree with this branch would show changes that the operator did not make.
            return Err(GitError::BranchInUse(slug.branch()));
        }
        self.move_reference(&refname(slug), from, to, why)
    }

    pub(super) fn move_reference(
        &self,
        name: &str,
        from: Oid,
        to: Oid,
        why: &str,
    ) -> Result<(), GitError> {
        match self.repo.reference_matching(name, to, true, from, why) {
            Ok(_) => Ok(()),
            Err(error) if error.code() == ErrorCode::Modified => {
                Err(GitError::Moved(name.to_owned()))
            }
            Err(error) if error.code() == ErrorCode::Locked => Err(self.locked(name)),
            Err(error) => Err(git(format!("move '{name}'"))(error)),
        }
    }

    fn locked(&self, name: &str) -> GitError {
        GitError::Locked {
            name: name.to_owned(),
            lock: self.repo.commondir().join(format!("{name}.lock")),
        }
    }

    /// Whether the sandbox's branch was created by [`HostRepository::create_branch`] with this
    /// reason and not moved since, by its reflog. `false` without a reflog.
    pub(crate) fn was_created_for(&self, slug: &Slug, why: &str) -> bool {
        let log = self.repo.reflog(&refname(slug));
        log.is_ok_and(|log| {
            let last = log.get(0);
            last.is_some_and(|entry| entry.message_bytes() == Some(why.as_bytes()))
        })
    }

    /// The operator's git identity, for commits in the operator's name.
    pub fn signature(&self) -> Result<Signature<'static>, GitError> {
        self.repo
            .signature()
            .or_else(|_| Signature::now("Palisade", "palisade@localhost"))
            .map_err(git("sign a commit"))
    }

    pub(super) fn repo(&self) -> &Repository {
        &self.repo
    }

    /// The objects directory, which worktrees share.
    pub(super) fn objects(&self) -> PathBuf {
        self.repo.commondir().join("objects")
    }

    /// Whether a worktree of the repository has the ref `name` checked out.
    pub(super) fn is_checked_out(&self, name: &str) -> bool {
        let common = self.repo.commondir();
        let mut heads = vec![common.join("HEAD"), self.repo.path().join("HEAD")];
        if let Ok(linked) = std::fs::read_dir(common.join("worktrees")) {
            heads.extend(linked.flatten().map(|entry| entry.path().join("HEAD")));
        }
        heads.iter().any(|head| {
            std::fs::read_to_string(head)
                .is_ok_and(|text| text.trim().strip_prefix("ref: ") == Some(name))
        })
    }
}

pub(super) fn refname(slug: &Slug) -> String {
    format!("refs/heads/{}", slug.branch())
}

fn convert_open_error(path: &Path, error: git2::Error) -> GitError {
    let path = path.to_owned();
    match (error.code(), error.class()) {
        (ErrorCode::NotFound, _) => GitError::NotARepository(path),
        (ErrorCode::Owner, _) => GitError::OtherOwner(path),
        (_, ErrorClass::Repository) => GitError::Unsupported {
            path,
            detail: error.message().to_owned(),
        },
        _ => git(format!("open the repository at '{}'", path.display()))(error),
    }
}
