//! Switching the operator's worktree to a sandbox's branch (`palisade checkout`).
//!
//! While it is there, snapshots of that sandbox are refused: the branch would move under the
//! operator's feet.

use git2::Oid;

use super::error::{GitError, git};
use super::home::{Head, Home, refname};
use super::journal::Goal;
use super::landing::Landing;
use super::steering::{Steering, steering};
use super::tree::{self, Change};
use crate::name::Slug;

/// Where the operator stands after a switch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Switched {
    /// The branch.
    pub branch: String,
    /// Its commit.
    pub commit: Oid,
    /// The paths that changed in the worktree.
    pub paths: Vec<Vec<u8>>,
}

impl Home {
    /// What a [`Home::checkout`] would change that runs or steers tools on this machine: to
    /// be shown, and agreed to, before.
    pub fn checkout_steering(&self, slug: &Slug) -> Result<Vec<Steering>, GitError> {
        let changes = self.switch(slug, &self.head()?)?.1;
        Ok(steering(
            changes.iter().map(|change| change.path.as_slice()),
        ))
    }

    /// Switches the worktree to the sandbox's branch: files, index and HEAD together or not
    /// at all. Files are written from the objects' bytes; no filter or hook runs. Changes of
    /// the operator's own stay where the switch does not touch them, and else stop it.
    pub fn checkout(&self, slug: &Slug) -> Result<Switched, GitError> {
        if self.repo().is_bare() {
            return Err(GitError::Bare(self.root().to_owned()));
        }
        self.recover()?;
        self.refuse_busy()?;
        let head = self.head()?;
        let name = refname(slug);
        let (commit, changes) = self.switch(slug, &head)?;
        let mut switched = Switched {
            branch: slug.branch(),
            commit,
            paths: Vec::new(),
        };
        if head.branch.as_deref() == Some(name.as_str()) {
            return Ok(switched);
        }
        if self.is_checked_out(&name) {
            return Err(GitError::BranchInUse(slug.branch()));
        }
        let goal = Goal::Head {
            branch: name.clone(),
        };
        Landing::prepare(self, &changes, goal)?.land_with_index(|| {
            if self.head()? != head || self.tip(slug)? != commit {
                return Err(GitError::Moved("HEAD".to_owned()));
            }
            let moved = self.repo().set_head(&name);
            moved.map_err(git(format!("point HEAD to '{}'", slug.branch())))
        })?;
        switched.paths = changes.into_iter().map(|change| change.path).collect();
        Ok(switched)
    }

    /// The branch's commit, and what differs there from where the operator stands.
    fn switch(&self, slug: &Slug, head: &Head) -> Result<(Oid, Vec<Change>), GitError> {
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
