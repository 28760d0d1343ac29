//! Bringing a branch home: into the operator's branch, or into the worktree only.

use git2::{MergeOptions, Oid, RepositoryState};

use super::error::{GitError, git};
use super::home::{Head, Home};
use super::journal::Goal;
use super::landing::Landing;
use super::tree::{self, Change};
use crate::name::Slug;

/// How a branch comes home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// Fast-forward where that is possible, else a merge commit.
    Auto,
    /// Fast-forward or nothing.
    FastForward,
    /// A merge commit in any case.
    Merge,
    /// One commit with all changes.
    Squash,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Merged {
    /// The operator's commit now.
    pub commit: Oid,
    /// Whether it is another one than before.
    pub moved: bool,
    /// The paths that changed in the worktree.
    pub paths: Vec<Vec<u8>>,
}

/// The tree both sides make together, and what it changes for the operator.
struct Joined {
    head: Head,
    tip: Oid,
    tree: Oid,
    changes: Vec<Change>,
}

impl Home {
    /// Merges the sandbox's branch into the operator's: files, index and branch together or
    /// not at all. Files are written from the objects' bytes; no filter or hook runs.
    pub fn merge(
        &self,
        slug: &Slug,
        manner: Manner,
        message: Option<&str>,
    ) -> Result<Merged, GitError> {
        let Some(joined) = self.join(slug)? else {
            return self.nothing_to_do();
        };
        let head = joined.head.commit;
        let can_forward = self.follows(joined.tip, head)?;
        let commit = match manner {
            Manner::Auto | Manner::FastForward if can_forward => joined.tip,
            Manner::FastForward => return Err(GitError::NotFastForward(slug.branch())),
            Manner::Auto | Manner::Merge => {
                let message = message.map_or_else(
                    || format!("Merge branch '{}'\n", slug.branch()),
                    str::to_owned,
                );
                self.commit_tree(joined.tree, &message, &[head, joined.tip])?
            }
            Manner::Squash => {
                let message = match message {
                    Some(message) => message.to_owned(),
                    None => self.squash_message(slug)?,
                };
                self.commit_tree(joined.tree, &message, &[head])?
            }
        };
        let move_branch = || {
            let name = joined.head.branch.as_deref().unwrap_or("HEAD");
            let why = format!("palisade: merge {}", slug.branch());
            self.move_reference(name, head, commit, &why)
        };
        let paths = joined
            .changes
            .iter()
            .map(|change| change.path.clone())
            .collect();
        if self.repo().is_bare() {
            move_branch()?;
        } else {
            let goal = Goal::Reference {
                name: joined.head.branch.clone().unwrap_or("HEAD".to_owned()),
                commit: commit.to_string(),
            };
            Landing::prepare(self, &joined.changes, goal)?.land_with_index(move_branch)?;
        }
        Ok(Merged {
            commit,
            moved: true,
            paths,
        })
    }

    /// Puts the sandbox's changes into the worktree, uncommitted. Index and branches stay.
    pub fn apply(&self, slug: &Slug) -> Result<Merged, GitError> {
        if self.repo().is_bare() {
            return Err(GitError::Bare(self.root().to_owned()));
        }
        let Some(joined) = self.join(slug)? else {
            return self.nothing_to_do();
        };
        let commit = joined.head.commit;
        let paths = joined
            .changes
            .iter()
            .map(|change| change.path.clone())
            .collect();
        Landing::prepare(self, &joined.changes, Goal::Files)?.land()?;
        Ok(Merged {
            commit,
            moved: false,
            paths,
        })
    }

    fn nothing_to_do(&self) -> Result<Merged, GitError> {
        Ok(Merged {
            commit: self.head()?.commit,
            moved: false,
            paths: Vec::new(),
        })
    }

    /// Merges in memory. `None` when the operator has it all already.
    fn join(&self, slug: &Slug) -> Result<Option<Joined>, GitError> {
        let repo = self.repo();
        self.recover()?;
        self.refuse_busy()?;
        let head = self.head()?;
        let tip = self.tip(slug)?;
        if tip == head.commit || self.follows(head.commit, tip)? {
            return Ok(None);
        }
        self.base(slug, tip)?;
        let failed = || git(format!("merge '{}'", slug.branch()));
        let ours = repo.find_commit(head.commit).map_err(failed())?;
        let theirs = repo.find_commit(tip).map_err(failed())?;
        let tree = if self.follows(tip, head.commit)? {
            theirs.tree_id()
        } else {
            let mut options = MergeOptions::new();
            options.find_renames(true).target_limit(1000);
            let mut index = repo
                .merge_commits(&ours, &theirs, Some(&options))
                .map_err(failed())?;
            if index.has_conflicts() {
                return Err(GitError::Conflicts(conflicts(&index).map_err(failed())?));
            }
            index.write_tree_to(repo).map_err(failed())?
        };
        let odb = repo.odb().map_err(git("open the objects"))?;
        let changes = tree::changes(&odb, Some(ours.tree_id()), Some(tree))?;
        for change in &changes {
            change.check()?;
        }
        Ok(Some(Joined {
            head,
            tip,
            tree,
            changes,
        }))
    }

    /// Refuses where a merge, a rebase or the like is under way.
    pub(super) fn refuse_busy(&self) -> Result<(), GitError> {
        match self.repo().state() {
            RepositoryState::Clean => Ok(()),
            state => Err(GitError::Busy {
                path: self.root().to_owned(),
                state: format!("{state:?}").to_lowercase(),
            }),
        }
    }

    pub(super) fn follows(&self, commit: Oid, ancestor: Oid) -> Result<bool, GitError> {
        if commit == ancestor {
            return Ok(true);
        }
        self.repo()
            .graph_descendant_of(commit, ancestor)
            .map_err(git("compare the two histories"))
    }

    fn commit_tree(&self, tree: Oid, message: &str, parents: &[Oid]) -> Result<Oid, GitError> {
        let repo = self.repo();
        let failed = || git("write a commit");
        let tree = repo.find_tree(tree).map_err(failed())?;
        let parents = parents
            .iter()
            .map(|id| repo.find_commit(*id))
            .collect::<Result<Vec<_>, _>>()
            .map_err(failed())?;
        let who = self.signature()?;
        let parents: Vec<_> = parents.iter().collect();
        repo.commit(None, &who, &who, message, &tree, &parents)
            .map_err(failed())
    }

    fn squash_message(&self, slug: &Slug) -> Result<String, GitError> {
        let mut message = format!("Squash branch '{}'\n\n", slug.branch());
        for entry in self.log(slug, 50)?.iter().rev() {
            message.push_str(&format!("- {}\n", entry.subject));
        }
        Ok(message)
    }
}

fn conflicts(index: &git2::Index) -> Result<Vec<Vec<u8>>, git2::Error> {
    let mut paths = Vec::new();
    for conflict in index.conflicts()? {
        let conflict = conflict?;
        let side = conflict.our.or(conflict.their).or(conflict.ancestor);
        paths.extend(side.map(|entry| entry.path));
    }
    paths.sort();
    paths.dedup();
    Ok(paths)
}
