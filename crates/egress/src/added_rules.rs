//! Policy snapshot of one sandbox: the operator's rules, and the hosts that its tier, its presets,
//! the trusted file of its repository and grants.yaml add.
//!
//! A sandbox with added hosts has its own settings, whose allowlist contains them and the
//! operator's rules (`Settings::with_added_rules`), built once per reload. Every other sandbox
//! shares the operator's snapshot, except after one of its approvals has ended.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use config::section::egress::DomainRule;
use decide::snapshot::PolicySnapshot;
use policy::id::SandboxId;

/// Hosts that one sandbox may reach in addition to the operator's settings.
#[derive(Debug)]
pub struct AddedRules {
    sandbox: SandboxId,
    added: ArcSwapOption<Vec<DomainRule>>,
    built: ArcSwapOption<BuiltSnapshot>,
}

/// The snapshot of a sandbox, and its inputs.
#[derive(Debug)]
struct BuiltSnapshot {
    base: Arc<PolicySnapshot>,
    added: Option<Arc<Vec<DomainRule>>>,
    snapshot: Arc<PolicySnapshot>,
}

impl AddedRules {
    /// No added hosts for this sandbox.
    pub fn new(sandbox: SandboxId) -> Self {
        Self {
            sandbox,
            added: ArcSwapOption::empty(),
            built: ArcSwapOption::empty(),
        }
    }

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
        let added = self.added.load_full();
        let granted = base.settings.granted(&self.sandbox);
        if added.is_none() && granted.is_empty() {
            return base;
        }
        let built = self.built.load_full();
        let is_current = |built: &BuiltSnapshot| {
            let same_rules = match (&built.added, &added) {
                (Some(built), Some(added)) => Arc::ptr_eq(built, added),
                (None, None) => true,
                _ => false,
            };
            Arc::ptr_eq(&built.base, &base) && same_rules
        };
        if let Some(built) = built.filter(|built| is_current(built)) {
            return Arc::clone(&built.snapshot);
        }
        let all = [added.as_deref().map_or(&[][..], Vec::as_slice), granted].concat();
        let snapshot = Arc::new(base.with_added_rules(&all));
        self.built.store(Some(Arc::new(BuiltSnapshot {
            base,
            added,
            snapshot: Arc::clone(&snapshot),
        })));
        snapshot
    }
}
