//! Branches that a sandbox created through this gate and has not deleted.
//!
//! A branch counts as created only when upstream's push report lists it as updated. Every creation
//! and deletion is in the audit log, from which the set is rebuilt after a restart of the gate.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use policy::audit::AuditEvent;
use policy::id::SandboxId;
use policy::ports::AuditReader;
use tokio::sync::OnceCell;

/// Maximum number of branches per sandbox. The sandbox may push to further branches only if the
/// operator lists them.
const MAX_BRANCHES: usize = 4096;

/// Maximum number of refs in one audit record.
const MAX_REFS_PER_RECORD: usize = 32;

/// Audit event for created branches.
const CREATED_EVENT: &str = "branch_made";
/// Audit event for deleted branches.
const DELETED_EVENT: &str = "branch_gone";

/// A repository on a host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RemoteRepository {
    /// Host name.
    pub host: String,
    /// Repository as `owner/name`.
    pub repo: String,
}

/// Change of a branch by a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BranchChange {
    /// The branch was created.
    Created,
    /// The branch was deleted.
    Deleted,
}

/// The branches that one sandbox created.
#[derive(Debug, Default)]
pub struct Branches {
    loaded: OnceCell<()>,
    branches: Mutex<BTreeSet<(RemoteRepository, String)>>,
}

impl Branches {
    /// Loads the branches from the audit log, once. If loading fails, the set stays empty, which
    /// allows nothing, and the next push tries again.
    pub async fn load_once(&self, audit_log: &dyn AuditReader, sandbox: &SandboxId) {
        let load = async {
            let history = audit_log.history(sandbox).await.ok_or(())?;
            history.iter().for_each(|event| self.replay(event));
            Ok::<(), ()>(())
        };
        if self.loaded.get_or_try_init(|| load).await.is_err() {
            tracing::warn!(%sandbox, "git branch history failed to load");
        }
    }

    /// Whether the sandbox created the branch `name`.
    pub fn contains(&self, repository: &RemoteRepository, name: &str) -> bool {
        // The lookup needs an owned pair: `&(A, B)` cannot be borrowed from `(&A, &B)`.
        self.branches()
            .contains(&(repository.clone(), name.to_owned()))
    }

    /// The branches that the sandbox created in `repository`, at most `limit` of them.
    pub fn list(&self, repository: &RemoteRepository, limit: usize) -> Vec<String> {
        let branches = self.branches();
        let matching = branches
            .iter()
            .filter(|(candidate, _)| candidate == repository);
        matching.take(limit).map(|(_, name)| name.clone()).collect()
    }

    /// Applies the change of one branch.
    pub fn apply_change(&self, repository: &RemoteRepository, name: &str, change: BranchChange) {
        let branch = (repository.clone(), name.to_owned());
        let mut branches = self.branches();
        match change {
            BranchChange::Created if branches.len() < MAX_BRANCHES => branches.insert(branch),
            BranchChange::Created => false,
            BranchChange::Deleted => branches.remove(&branch),
        };
    }

    fn replay(&self, event: &AuditEvent) {
        let change = match event.event.as_deref() {
            Some(CREATED_EVENT) => BranchChange::Created,
            Some(DELETED_EVENT) => BranchChange::Deleted,
            // A later registration of the same name is another sandbox.
            Some("unregistered" | "expired") => return self.branches().clear(),
            _ => return,
        };
        let (Some(host), Some(repo)) = (event.host.clone(), event.repo.clone()) else {
            return;
        };
        let repository = RemoteRepository { host, repo };
        for name in &event.refs {
            self.apply_change(&repository, name, change);
        }
    }

    fn branches(&self) -> MutexGuard<'_, BTreeSet<(RemoteRepository, String)>> {
        self.branches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Audit records for changed branches.
pub fn audit_records(
    sandbox: &SandboxId,
    repository: &RemoteRepository,
    names: &[String],
    change: BranchChange,
) -> Vec<AuditEvent> {
    let event = match change {
        BranchChange::Created => CREATED_EVENT,
        BranchChange::Deleted => DELETED_EVENT,
    };
    let record = |names: &[String]| AuditEvent {
        host: Some(repository.host.clone()),
        repo: Some(repository.repo.clone()),
        refs: names.to_vec(),
        ..AuditEvent::lifecycle(event, Some(sandbox.clone()))
    };
    names.chunks(MAX_REFS_PER_RECORD).map(record).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repository(host: &str) -> RemoteRepository {
        RemoteRepository {
            host: host.to_owned(),
            repo: "o/r".to_owned(),
        }
    }

    fn sandbox() -> SandboxId {
        SandboxId::parse("fix-1").unwrap()
    }

    #[test]
    fn branches_are_restored_from_audit_records() {
        let names: Vec<String> = (0..70).map(|n| format!("refs/heads/{n}")).collect();
        let made = audit_records(
            &sandbox(),
            &repository("a.example"),
            &names,
            BranchChange::Created,
        );
        assert_eq!(made.len(), 3);
        let deleted = audit_records(
            &sandbox(),
            &repository("a.example"),
            &names[..1],
            BranchChange::Deleted,
        );
        let branches = Branches::default();
        made.iter()
            .chain(&deleted)
            .for_each(|event| branches.replay(event));
        assert!(!branches.contains(&repository("a.example"), "refs/heads/0"));
        assert!(branches.contains(&repository("a.example"), "refs/heads/69"));
        assert_eq!(branches.list(&repository("a.example"), 5).len(), 5);
        assert!(branches.list(&repository("b.example"), 5).is_empty());
        assert!(!branches.contains(&repository("b.example"), "refs/heads/69"));
        branches.replay(&AuditEvent::lifecycle("unregistered", Some(sandbox())));
        assert!(!branches.contains(&repository("a.example"), "refs/heads/69"));
    }

    #[test]
    fn branch_count_is_limited_per_sandbox() {
        let branches = Branches::default();
        for n in 0..=MAX_BRANCHES {
            branches.apply_change(
                &repository("a.example"),
                &n.to_string(),
                BranchChange::Created,
            );
        }
        assert_eq!(branches.branches().len(), MAX_BRANCHES);
        branches.apply_change(&repository("a.example"), "0", BranchChange::Deleted);
        branches.apply_change(&repository("a.example"), "new", BranchChange::Created);
        assert!(branches.contains(&repository("a.example"), "new"));
    }
}
