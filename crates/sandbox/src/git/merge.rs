//! Merges a sandbox's branch into the operator's branch, or applies it to the worktree only.

use git2::{MergeOptions, Oid, RepositoryState};

use super::error::{GitError, git};
use super::host_repository::{HostHead, HostRepository};
use super::journal::Goal;
use super::tree::{self, Change};
use super::worktree_update::WorktreeUpdate;
use crate::name::Slug;

/// How a branch is merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeMode {
    /// Fast-forward where that is possible, else a merge commit.
    Auto,
    /// Fast-forward only.
    FastForward,
    /// Always a merge commit.
    Merge,
    /// One commit with all changes.
    Squash,
}

/// The result of a merge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MergeOutcome {
    /// The operator's commit now.
    pub commit: Oid,
    /// Whether the operator's branch moved.
    pub moved: bool,
    /// The paths that changed in the worktree.
    pub paths: Vec<Vec<u8>>,
}

/// The merged tree and its changes to the operator's worktree.
struct MergePlan {
    head: HostHead,
    tip: Oid,
    tree: Oid,
    changes: Vec<Change>,
}

impl HostRepository {
    /// Merges the sandbox's branch into the operator's: files, index and branch together or
    /// not at all. Files are written from the objects' bytes; no filter or hook runs.
    pub fn merge(
        &self,
        slug: &Slug,
        mode: MergeMode,
        message: Option<&str>,
    ) -> Result<MergeOutcome, GitError> {
        let Some(plan) = self.plan_merge(slug)? else {
            return self.unchanged_outcome();
        };
        let head = plan.head.commit;
        let can_forward = self.is_or_descends_from(plan.tip, head)?;
        let commit = match mode {
            MergeMode::Auto | MergeMode::FastForward if can_forward => plan.tip,
            MergeMode::FastForward => return Err(GitError::NotFastForward(slug.branch())),
            MergeMode::Auto | MergeMode::Merge => {
                let message = message.map_or_else(
                    || format!("Merge branch '{}'\n", slug.branch()),
                    str::to_owned,
                );
                self.commit_tree(plan.tree, &message, &[head, plan.tip])?
            }
            MergeMode::Squash => {
                let message = match message {
                    Some(message) => message.to_owned(),
                    None => self.squash_message(slug)?,
                };
                self.commit_tree(plan.tree, &message, &[head])?
            }
        };
        let move_branch = || {
            let name = plan.head.branch.as_deref().unwrap_or("HEAD");
            let why = format!("palisade: merge {}", slug.branch());
            self.move_reference(name, head, commit, &why)
        };
        let paths = plan
            .changes
            .iter()
            .map(|change| change.path.clone())
            .collect();
        if self.repo().is_bare() {
            move_branch()?;
        } else {
            let goal = Goal::Reference {
                name: plan.head.branch.clone().unwrap_or("HEAD".to_owned()),
                commit: commit.to_string(),
            };
            WorktreeUpdate::prepare(self, &plan.changes, goal)?.run_with_index(move_branch)?;
        }
        Ok(MergeOutcome {
            commit,
            moved: true,
            paths,
        })
    }

    /// Applies the sandbox's changes to the worktree, uncommitted. Index and branches stay
    /// unchanged.
    pub fn apply(&self, slug: &Slug) -> Result<MergeOutcome, GitError> {
        if self.repo().is_bare() {
            return Err(GitError::Bare(self.root().to_owned()));
        }
        let Some(plan) = self.plan_merge(slug)? else {
            return self.unchanged_outcome();
        };
        let commit = plan.head.commit;
        let paths = plan
            .changes
            .iter()
            .map(|change| change.path.clone())
            .collect();
        WorktreeUpdate::prepare(self, &plan.changes, Goal::Files)?.run()?;
        Ok(MergeOutcome {
            commit,
            moved: false,
            paths,
        })
    }

    fn unchanged_outcome(&self) -> Result<MergeOutcome, GitError> {
        Ok(MergeOutcome {
            commit: self.head()?.commit,
            moved: false,
            paths: Vec::new(),
        })
    }

    /// Merges in memory. `None` if the operator's branch already contains the sandbox's branch.
    fn plan_merge(&self, slug: &Slug) -> Result<Option<MergePlan>, GitError> {
        let repo = self.repo();
        self.recover()?;
        self.refuse_repository_busy()?;
        let head = self.head()?;
        let tip = self.tip(slug)?;
        if tip == head.commit || self.is_or_descends_from(head.commit, tip)? {
            return Ok(None);
        }
        self.base(slug, tip)?;
        let failed = || git(format!("merge '{}'", slug.branch()));
        let ours = repo.find_commit(head.commit).map_err(failed())?;
        let theirs = repo.find_commit(tip).map_err(failed())?;
        let tree = if self.is_or_descends_from(tip, head.commit)? {
            theirs.tree_id()
        } else {
            let mut options = MergeOptions::new();
            options.find_renames(true).target_limit(1000);
            let mut index = repo
                .merge_commits(&ours, &theirs, Some(&options))
                .map_err(failed())?;
            if index.has_conflicts() {
                return Err(GitError::Conflicts(
                    conflicting_paths(&index).map_err(failed())?,
                ));
            }
            index.write_tree_to(repo).map_err(failed())?
        };
        let odb = repo.odb().map_err(git("open the objects"))?;
        let changes = tree::changes(&odb, Some(ours.tree_id()), Some(tree))?;
        for change in &changes {
            change.check()?;
        }
        Ok(Some(MergePlan {
            head,
            tip,
            tree,
            changes,
        }))
    }

    /// Fails while a merge, a rebase or a similar operation is in progress.
    pub(super) fn refuse_repository_busy(&self) -> Result<(), GitError> {
        match self.repo().state() {
            RepositoryState::Clean => Ok(()),
            state => Err(GitError::Busy {
                path: self.root().to_owned(),
                state: format!("{state:?}").to_lowercase(),
            }),
        }
    }

    /// Whether `commit` is `ancestor` or a descendant of it.
    pub(super) fn is_or_descends_from(&self, commit: Oid, ancestor: Oid) -> Result<bool, GitError> {
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
        let author = self.signature()?;
        let parents: Vec<_> = parents.iter().collect();
        repo.commit(None, &author, &author, message, &tree, &parents)
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

fn conflicting_paths(index: &git2::Index) -> Result<Vec<Vec<u8>>, git2::Error> {
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
