//! Removal of sandboxes, and the checks against losing work.

use policy::id::SandboxId;

use super::row::{RowStage, SandboxRow};
use super::{BranchRemoval, Manager, ManagerError, creation_reason, parse_commit, repository_of};
use crate::contract::{Force, SandboxBackend, SandboxError, SandboxStatus};
use crate::git::error::GitError;
use crate::git::snapshot::SnapshotBounds;
use crate::worker::SnapshotReport;

impl Manager {
    /// Marks a sandbox for removal. Without force, fails if the removal would lose work. After this
    /// call the sandbox counts as removed, even after a crash; [`Manager::remove`] does the work.
    pub fn mark_for_removal(
        &self,
        id: &SandboxId,
        force: Force,
        bounds: &SnapshotBounds,
    ) -> Result<SandboxRow, ManagerError> {
        let row = match self.rows.read(id)? {
            // The earlier removal failed; try again.
            row if row.stage == RowStage::Removing => return Ok(row),
            _ => self.row(id)?,
        };
        if force == Force::No {
            self.refuse_losing_work(&row, bounds)?;
        }
        let row = SandboxRow {
            stage: RowStage::Removing,
            ..row
        };
        self.rows.write(&row)?;
        Ok(row)
    }

    /// Fails if a command is running, if the workspace has files that cannot be committed, or if
    /// the branch has unmerged commits.
    fn refuse_losing_work(
        &self,
        row: &SandboxRow,
        bounds: &SnapshotBounds,
    ) -> Result<(), ManagerError> {
        let exists = self.status(&row.id) != SandboxStatus::Missing;
        if exists {
            self.backend.refuse_if_busy(&row.id)?;
        }
        if row.repository.is_none() {
            return self.refuse_losing_workspace(row);
        }
        if exists {
            let report = self.snapshot(&row.id, "before deletion", bounds)?;
            self.refuse_losing_unsaved(row, &report, None)?;
        }
        match repository_of(row)?.unmerged_commits(&row.name) {
            Ok(0) | Err(GitError::NoBranch(_)) => Ok(()),
            Ok(commits) => Err(ManagerError::Unmerged {
                name: row.name.clone(),
                branch: row.name.branch(),
                commits,
            }),
            Err(other) => Err(other.into()),
        }
    }

    /// Fails if a sandbox without a repository has files in its workspace.
    fn refuse_losing_workspace(&self, row: &SandboxRow) -> Result<(), ManagerError> {
        if self.backend.has_empty_workspace(&row.id) {
            return Ok(());
        }
        let name = row.name.clone();
        Err(ManagerError::Unsaved {
            what: "its workspace has files, and it has no repository".to_owned(),
            fix: format!(
                "download them with `palisade download {name} .`; `palisade delete --help` shows how \
                 to discard them"
            ),
            name,
            discard_option: None,
        })
    }

    /// Fails if a snapshot could not save everything. `discard_option` is the option to proceed
    /// anyway.
    pub fn refuse_losing_unsaved(
        &self,
        row: &SandboxRow,
        report: &SnapshotReport,
        discard_option: Option<&'static str>,
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
                "{resume}merge the commits to keep inside the sandbox (`palisade shell {name}`), then \
                 `palisade snapshot {name}`"
            ));
        }
        if report.unsaved > 0 {
            fixes.push(format!(
                "download files with `palisade download {name} PATH`"
            ));
        }
        let fix = fixes.join("; ");
        Err(ManagerError::Unsaved {
            name,
            what,
            fix,
            discard_option,
        })
    }

    /// Removes the processes, files, branch and row of a sandbox that is incomplete or marked for
    /// removal.
    pub fn remove(&self, id: &SandboxId) -> Result<BranchRemoval, ManagerError> {
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

    fn remove_branch(&self, row: &SandboxRow) -> Result<BranchRemoval, ManagerError> {
        let (Some(_), Some(start)) = (&row.repository, &row.start) else {
            return Ok(BranchRemoval::default());
        };
        // An incomplete sandbox's branch is removed only if it is still at its first commit.
        let only_at = match row.stage {
            RowStage::Creating => Some(parse_commit(start)?),
            RowStage::Complete | RowStage::Removing => None,
        };
        let host_repository = match repository_of(row) {
            Ok(host_repository) => host_repository,
            Err(ManagerError::RepositoryGone { path, .. }) => {
                return Ok(BranchRemoval {
                    tip: None,
                    kept: Some(format!("no repository at '{}'", path.display())),
                });
            }
            Err(other) => return Err(other),
        };
        // If a crash prevented the creation of the branch, a branch of this name belongs to the
        // operator.
        let created_here =
            row.branch_made || host_repository.was_created_for(&row.name, &creation_reason(row));
        if row.stage == RowStage::Creating && !created_here {
            return Ok(BranchRemoval::default());
        }
        let tip = host_repository
            .tip(&row.name)
            .ok()
            .map(|tip| tip.to_string());
        match host_repository.delete_branch(&row.name, only_at) {
            Ok(()) => Ok(BranchRemoval { tip, kept: None }),
            Err(GitError::NoBranch(_)) => Ok(BranchRemoval::default()),
            // The operator uses the branch, so it is kept.
            Err(error @ (GitError::BranchInUse(_) | GitError::Moved(_))) => Ok(BranchRemoval {
                tip: None,
                kept: Some(error.to_string()),
            }),
            Err(other) => Err(other.into()),
        }
    }
}
