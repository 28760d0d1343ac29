//! The end of a sandbox: what may be lost by it, and what goes.

use policy::id::SandboxId;

use super::row::{Row, Stage};
use super::{Manager, ManagerError, Removed, commit_of, home_of, made_for};
use crate::contract::{Force, Sandbox, SandboxError, SandboxStatus};
use crate::git::error::GitError;
use crate::git::snapshot::Bounds;
use crate::worker::SnapshotReport;

impl Manager {
    /// Marks a sandbox for removal. Without force, one whose removal would lose something is
    /// refused. From here on it is gone, also after a crash; [`Manager::remove`] does the work.
    pub fn condemn(
        &self,
        id: &SandboxId,
        force: Force,
        bounds: &Bounds,
    ) -> Result<Row, ManagerError> {
        let row = match self.rows.read(id)? {
            // Once more: what was in the way may be gone.
            row if row.stage == Stage::Removing => return Ok(row),
            _ => self.row(id)?,
        };
        if force == Force::No {
            self.refuse_to_lose_work(&row, bounds)?;
        }
        let row = Row {
            stage: Stage::Removing,
            ..row
        };
        self.rows.write(&row)?;
        Ok(row)
    }

    /// Refuses where a command runs, where the workspace holds what cannot come to the branch,
    /// and where the branch has commits that no other has.
    fn refuse_to_lose_work(&self, row: &Row, bounds: &Bounds) -> Result<(), ManagerError> {
        let is_there = self.status(&row.id) != SandboxStatus::Missing;
        if is_there {
            self.backend.refuse_if_busy(&row.id)?;
        }
        if row.repository.is_none() {
            return self.refuse_to_lose_workspace(row);
        }
        if is_there {
            let report = self.snapshot(&row.id, "before deletion", bounds)?;
            self.refuse_to_lose_the_rest(row, &report, None)?;
        }
        match home_of(row)?.only_on(&row.name) {
            Ok(0) | Err(GitError::NoBranch(_)) => Ok(()),
            Ok(commits) => Err(ManagerError::Unmerged {
                name: row.name.clone(),
                branch: row.name.branch(),
                commits,
            }),
            Err(other) => Err(other.into()),
        }
    }

    /// Without a repository there is no branch to bring files to.
    fn refuse_to_lose_workspace(&self, row: &Row) -> Result<(), ManagerError> {
        if self.backend.has_empty_workspace(&row.id) {
            return Ok(());
        }
        let name = row.name.clone();
        Err(ManagerError::Unsaved {
            what: "its workspace has files, and it works on no repository".to_owned(),
            fix: format!(
                "fetch them with `palisade download {name} .`; `palisade delete --help` says how \
                 to discard them"
            ),
            name,
            way_out: None,
        })
    }

    /// Refuses where a snapshot could not take everything along. `way_out` is the option that
    /// does without.
    pub fn refuse_to_lose_the_rest(
        &self,
        row: &Row,
        report: &SnapshotReport,
        way_out: Option<&'static str>,
    ) -> Result<(), ManagerError> {
        let Some(what) = report.unsaved_work() else {
            return Ok(());
        };
        let name = row.name.clone();
        let mut fixes = Vec::new();
        if report.stray_count > 0 || report.import_error.is_some() {
            let resume = match self.status(&row.id) {
                SandboxStatus::Active => String::new(),
                _ => format!("`palisade resume {name}`, "),
            };
            fixes.push(format!(
                "{resume}merge inside what shall be kept (`palisade shell {name}`), and \
                 `palisade snapshot {name}`"
            ));
        }
        if report.unsaved > 0 {
            fixes.push(format!("fetch files with `palisade download {name} PATH`"));
        }
        let fix = fixes.join("; ");
        Err(ManagerError::Unsaved {
            name,
            what,
            fix,
            way_out,
        })
    }

    /// Removes what is there of a sandbox that is not kept: processes, files, branch, row.
    pub fn remove(&self, id: &SandboxId) -> Result<Removed, ManagerError> {
        let row = self.rows.read(id)?;
        match self.backend.delete(id, Force::Yes) {
            Ok(()) | Err(SandboxError::NotFound(_)) => {}
            Err(other) => return Err(other.into()),
        }
        let removed = self.remove_branch(&row)?;
        self.remove_checkpoints(id)?;
        self.rows.forget(id)?;
        Ok(removed)
    }

    fn remove_branch(&self, row: &Row) -> Result<Removed, ManagerError> {
        let (Some(_), Some(start)) = (&row.repository, &row.start) else {
            return Ok(Removed::default());
        };
        // Of one that was never whole, only what create made itself.
        let only_at = match row.stage {
            Stage::Making => Some(commit_of(start)?),
            Stage::Kept | Stage::Removing => None,
        };
        let home = match home_of(row) {
            Ok(home) => home,
            Err(ManagerError::RepositoryGone { path, .. }) => {
                return Ok(Removed {
                    tip: None,
                    kept: Some(format!("there is no repository at '{}'", path.display())),
                });
            }
            Err(other) => return Err(other),
        };
        // A crash may have come before we made it, and an equal branch be somebody else's.
        let ours = row.branch_made || home.was_made_for(&row.name, &made_for(row));
        if row.stage == Stage::Making && !ours {
            return Ok(Removed::default());
        }
        let tip = home.tip(&row.name).ok().map(|tip| tip.to_string());
        match home.delete_branch(&row.name, only_at) {
            Ok(()) => Ok(Removed { tip, kept: None }),
            Err(GitError::NoBranch(_)) => Ok(Removed::default()),
            // The operator works on it: it is theirs now.
            Err(error @ (GitError::BranchInUse(_) | GitError::Moved(_))) => Ok(Removed {
                tip: None,
                kept: Some(error.to_string()),
            }),
            Err(other) => Err(other.into()),
        }
    }
}
