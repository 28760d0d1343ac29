//! Policy snapshot of one sandbox: the operator's rules, and the hosts that the trusted file of its
//! repository adds.
//!
//! A sandbox with added hosts has its own settings, whose allowlist contains them and the
//! operator's rules (`Settings::with_added_rules`), built once per reload. Every other sandbox
//! shares the operator's snapshot, except after one of its approvals has ended.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use config::section::egress::DomainRule;
use decide::snapshot::PolicySnapshot;

/// Hosts that one sandbox may reach in addition to the operator's settings.
#[derive(Debug, Default)]
pub struct AddedRules {
    added: ArcSwapOption<Vec<DomainRule>>,
    built: ArcSwapOption<BuiltSnapshot>,
}

/// The snapshot of a sandbox, and its inputs.
#[derive(Debug)]
struct BuiltSnapshot {
    base: Arc<PolicySnapshot>,
    added: Arc<Vec<DomainRule>>,
    snapshot: Arc<PolicySnapshot>,
}

impl AddedRules {
    /// Replaces the added hosts.
    pub fn set(&self, added: Vec<DomainRule>) {
        let added = (!added.is_empty()).then(|| Arc::new(added));
        self.added.store(added);
    }

    /// Replaces the snapshot by a new snapshot with the same rules. Requests that were decided by
    /// the old snapshot and are not in flight yet are then decided again.
    pub fn renew(&self) {
        self.added.rcu(|added| {
            let added = added.as_deref().cloned();
            Some(Arc::new(added.unwrap_or_default()))
        });
    }

    /// The snapshot of the sandbox for the shared snapshot `base`. Cached until either changes.
    pub fn rules(&self, base: Arc<PolicySnapshot>) -> Arc<PolicySnapshot> {
        let Some(added) = self.added.load_full() else {
            return base;
        };
        let built = self.built.load_full();
        let is_current = |built: &BuiltSnapshot| {
            Arc::ptr_eq(&built.base, &base) && Arc::ptr_eq(&built.added, &added)
        };
        if let Some(built) = built.filter(|built| is_current(built)) {
            return Arc::clone(&built.snapshot);
        }
        let snapshot = Arc::new(base.with_added_rules(&added));
        self.built.store(Some(Arc::new(BuiltSnapshot {
            base,
            added,
            snapshot: Arc::clone(&snapshot),
        })));
        snapshot
    }
}
