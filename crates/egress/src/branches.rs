//! Which branches a sandbox made, through this gate, and still has.
//!
//! What counts is upstream's own word: a ref that upstream did not report as made was not.
//! Each is in the audit log before it is forgotten here, so that a gate that starts knows
//! them again.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use policy::audit::AuditEvent;
use policy::id::SandboxId;
use policy::ports::AuditLog;
use tokio::sync::OnceCell;

/// Branches that are remembered. Others have to be listed by the operator.
const MOST_BRANCHES: usize = 4096;

/// Refs in one record: as many as a record keeps.
const MOST_IN_RECORD: usize = 32;

const MADE: &str = "branch_made";
const GONE: &str = "branch_gone";

/// A repository on a host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The host.
    pub host: String,
    /// `owner/name`.
    pub repo: String,
}

/// What a push did to a ref.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed {
    /// It is new.
    Made,
    /// It is no more.
    Gone,
}

/// The branches of one sandbox.
#[derive(Debug, Default)]
pub struct Branches {
    read: OnceCell<()>,
    known: Mutex<BTreeSet<(Place, String)>>,
}

impl Branches {
    /// Reads what is on record, once. Where that fails nothing is known, which opens
    /// nothing, and the next push tries again.
    pub async fn recall(&self, ledger: &dyn AuditLog, sandbox: &SandboxId) {
        let read = async {
            let history = ledger.history(sandbox).await.ok_or(())?;
            history.iter().for_each(|event| self.replay(event));
            Ok::<(), ()>(())
        };
        if self.read.get_or_try_init(|| read).await.is_err() {
            tracing::warn!(%sandbox, "which branches a sandbox made is not known");
        }
    }

    /// Whether the sandbox made it.
    pub fn has(&self, place: &Place, name: &str) -> bool {
        // A pair of references is no reference to a pair.
        self.known().contains(&(place.clone(), name.to_owned()))
    }

    /// The branches it made there, at most so many.
    pub fn of(&self, place: &Place, most: usize) -> Vec<String> {
        let known = self.known();
        let there = known.iter().filter(|(known, _)| known == place);
        there.take(most).map(|(_, name)| name.clone()).collect()
    }

    /// Notes what became of a ref.
    pub fn note(&self, place: &Place, name: &str, deed: Deed) {
        let one = (place.clone(), name.to_owned());
        let mut known = self.known();
        match deed {
            Deed::Made if known.len() < MOST_BRANCHES => known.insert(one),
            Deed::Made => false,
            Deed::Gone => known.remove(&one),
        };
    }

    fn replay(&self, event: &AuditEvent) {
        let deed = match event.event.as_deref() {
            Some(MADE) => Deed::Made,
            Some(GONE) => Deed::Gone,
            // Whoever comes back under the same name is somebody else.
            Some("unregistered" | "expired") => return self.known().clear(),
            _ => return,
        };
        let (Some(host), Some(repo)) = (event.host.clone(), event.repo.clone()) else {
            return;
        };
        let place = Place { host, repo };
        for name in &event.refs {
            self.note(&place, name, deed);
        }
    }

    fn known(&self) -> MutexGuard<'_, BTreeSet<(Place, String)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The records of what became of refs.
pub fn records(
    sandbox: &SandboxId,
    place: &Place,
    names: &[String],
    deed: Deed,
) -> Vec<AuditEvent> {
    let word = match deed {
        Deed::Made => MADE,
        Deed::Gone => GONE,
    };
    let record = |names: &[String]| AuditEvent {
        host: Some(place.host.clone()),
        repo: Some(place.repo.clone()),
        refs: names.to_vec(),
        ..AuditEvent::lifecycle(word, Some(sandbox.clone()))
    };
    names.chunks(MOST_IN_RECORD).map(record).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(host: &str) -> Place {
        Place {
            host: host.to_owned(),
            repo: "o/r".to_owned(),
        }
    }

    fn sandbox() -> SandboxId {
        SandboxId::parse("fix-1").unwrap()
    }

    #[test]
    fn what_was_recorded_is_known_again() {
        let names: Vec<String> = (0..70).map(|n| format!("refs/heads/{n}")).collect();
        let made = records(&sandbox(), &place("a.example"), &names, Deed::Made);
        assert_eq!(made.len(), 3);
        let gone = records(&sandbox(), &place("a.example"), &names[..1], Deed::Gone);
        let branches = Branches::default();
        made.iter()
            .chain(&gone)
            .for_each(|event| branches.replay(event));
        assert!(!branches.has(&place("a.example"), "refs/heads/0"));
        assert!(branches.has(&place("a.example"), "refs/heads/69"));
        assert_eq!(branches.of(&place("a.example"), 5).len(), 5);
        assert!(branches.of(&place("b.example"), 5).is_empty());
        assert!(!branches.has(&place("b.example"), "refs/heads/69"));
        branches.replay(&AuditEvent::lifecycle("unregistered", Some(sandbox())));
        assert!(!branches.has(&place("a.example"), "refs/heads/69"));
    }

    #[test]
    fn only_so_many_are_remembered() {
        let branches = Branches::default();
        for n in 0..=MOST_BRANCHES {
            branches.note(&place("a.example"), &n.to_string(), Deed::Made);
        }
        assert_eq!(branches.known().len(), MOST_BRANCHES);
        branches.note(&place("a.example"), "0", Deed::Gone);
        branches.note(&place("a.example"), "new", Deed::Made);
        assert!(branches.has(&place("a.example"), "new"));
    }
}
