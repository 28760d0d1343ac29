//! The end of a sandbox: what may be lost by it, and what goes.

use policy::id::SandboxId;

use super::row::{Row, Stage};
use super::{Manager, ManagerError, Removed, commit_of, home_of, made_for};
use crate::contract::{Force, Sandbox, SandboxError, SandboxStatus};
use crate::git::error::GitError;
use crate::worker::SnapshotReport;

impl Manager {
    /// Marks a sandbox for removal, unless it is active or its branch holds work that is
    /// nowhere else and nobody said by force. From here on it is gone, also after a crash;
    /// [`Manager::remove`] does the work.
    pub fn condemn(&self, id: &SandboxId, force: Force) -> Result<Row, ManagerError> {
        let row = match self.rows.read(id)? {
            // Once more: what was in the way may be gone.
            row if row.stage == Stage::Removing => return Ok(row),
            _ => self.row(id)?,
        };
        if force == Force::No {
            if self.status(id) == SandboxStatus::Active {
                return Err(SandboxError::Active.into());
            }
            self.refuse_to_lose_work(&row)?;
        }
        let row = Row {
            stage: Stage::Removing,
            ..row
        };
        self.rows.write(&row)?;
        Ok(row)
    }

    fn refuse_to_lose_work(&self, row: &Row) -> Result<(), ManagerError> {
        let home = match home_of(row) {
            Ok(home) => home,
            Err(ManagerError::NoRepository(_)) => return Ok(()),
            Err(other) => return Err(other),
        };
        match home.only_on(&row.name) {
            Ok(0) | Err(GitError::NoBranch(_)) => Ok(()),
            Ok(commits) => Err(ManagerError::Unmerged {
                branch: row.name.branch(),
                commits,
            }),
            Err(other) => Err(other.into()),
        }
    }

    /// Refuses where a snapshot could not take everything along.
    pub fn refuse_to_lose_the_rest(
        &self,
        row: &Row,
        report: &SnapshotReport,
        way_out: &'static str,
    ) -> Result<(), ManagerError> {
        let Some(what) = report.unsaved_work() else {
            return Ok(());
        };
        let name = row.name.clone();
        let mut fixes = Vec::new();
        if report.stray_count > 0 || report.import_error.is_some() {
            fixes.push(format!(
                "`palisade resume {name}`, merge inside what shall be kept, and `palisade \
                 snapshot {name}`"
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
