//! Switches the operator's worktree to a sandbox's branch (`palisade checkout`).
//!
//! While the branch is checked out, snapshots of that sandbox are refused: they would move the
//! branch under the operator's worktree.

use git2::Oid;

use super::error::{GitError, git};
use super::host_repository::{HostHead, HostRepository, refname};
use super::journal::Goal;
use super::sensitive_paths::{SensitivePath, sensitive_paths};
use super::tree::{self, Change};
use super::worktree_update::WorktreeUpdate;
use crate::name::Slug;

/// The result of a checkout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckoutOutcome {
    /// The branch.
    pub branch: String,
    /// Its commit.
    pub commit: Oid,
    /// The paths that changed in the worktree.
    pub paths: Vec<Vec<u8>>,
}

impl HostRepository {
    /// Lists the sensitive paths that [`HostRepository::checkout`] would change, for the operator
    /// to confirm first.
    pub fn checkout_sensitive_paths(&self, slug: &Slug) -> Result<Vec<SensitivePath>, GitError> {
        let changes = self.checkout_changes(slug, &self.head()?)?.1;
        Ok(sensitive_paths(
            changes.iter().map(|change| change.path.as_slice()),
        ))
    }

    /// Switches the worktree to the sandbox's branch: files, index and HEAD together or not at all.
    /// Files are written from the objects' bytes; no filter or hook runs. The operator's own
    /// changes are kept if the checkout does not touch them, and otherwise refuse it.
    pub fn checkout(&self, slug: &Slug) -> Result<CheckoutOutcome, GitError> {
        if self.repo().is_bare() {
            return Err(GitError::Bare(self.root().to_owned()));
        }
        self.recover()?;
        self.refuse_repository_busy()?;
        let head = self.head()?;
        let name = refname(slug);
        let (commit, changes) = self.checkout_changes(slug, &head)?;
        let mut outcome = CheckoutOutcome {
            branch: slug.branch(),
            commit,
            paths: Vec::new(),
        };
        if head.branch.as_deref() == Some(name.as_str()) {
            return Ok(outcome);
        }
        if self.is_checked_out(&name) {
            return Err(GitError::BranchInUse(slug.branch()));
        }
        let goal = Goal::Head {
            branch: name.clone(),
        };
        WorktreeUpdate::prepare(self, &changes, goal)?.run_with_index(|| {
            if self.head()? != head || self.tip(slug)? != commit {
                return Err(GitError::Moved("HEAD".to_owned()));
            }
            let moved = self.repo().set_head(&name);
            moved.map_err(git(format!("point HEAD to '{}'", slug.branch())))
        })?;
        outcome.paths = changes.into_iter().map(|change| change.path).collect();
        Ok(outcome)
    }

    /// Returns the branch's commit and its differences from HEAD.
    fn checkout_changes(
        &self,
        slug: &Slug,
        head: &HostHead,
    ) -> Result<(Oid, Vec<Change>), GitError> {
        let tip = self.tip(slug)?;
        let tree = |id| {
            let commit = self.repo().find_commit(id);
            let commit = commit.map_err(git(format!("find commit {id}")))?;
            Ok::<_, GitError>(commit.tree_id())
        };
        let (old, new) = (tree(head.commit)?, tree(tip)?);
        let odb = self.repo().odb().map_err(git("open the objects"))?;
        let changes = tree::changes(&odb, Some(old), Some(new))?;
        for change in &changes {
            change.check()?;
        }
        Ok((tip, changes))
    }
}
