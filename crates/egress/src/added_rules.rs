//! Rules for one sandbox: the operator's, and hosts that the trusted file of its repository adds.
//!
//! A sandbox with such hosts has settings of its own, whose allowlist holds them beside the
//! operator's rules (`Settings::allowing`). They are built once for each reload; every other
//! sandbox shares the operator's. One with an approval that ended has a snapshot of its own, too.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use config::section::egress::DomainRule;
use decide::snapshot::PolicySnapshot;

/// Hosts that one sandbox may reach beside those of the operator's settings.
#[derive(Debug, Default)]
pub struct AddedRules {
    added: ArcSwapOption<Vec<DomainRule>>,
    built: ArcSwapOption<Built>,
}

/// The rules of a sandbox, and what they were built from.
#[derive(Debug)]
struct Built {
    base: Arc<PolicySnapshot>,
    added: Arc<Vec<DomainRule>>,
    rules: Arc<PolicySnapshot>,
}

impl AddedRules {
    /// From now on the sandbox may reach these, and none that were added before.
    pub fn set(&self, added: Vec<DomainRule>) {
        let added = (!added.is_empty()).then(|| Arc::new(added));
        self.added.store(added);
    }

    /// From now on the same rules are another snapshot: what was decided by the earlier one, and is
    /// not in flight yet, counts as decided before a reload.
    pub fn renew(&self) {
        self.added.rcu(|added| {
            let added = added.as_deref().cloned();
            Some(Arc::new(added.unwrap_or_default()))
        });
    }

    /// The rules that count for the sandbox while `base` counts for all. The same as long as
    /// neither changes.
    pub fn rules(&self, base: Arc<PolicySnapshot>) -> Arc<PolicySnapshot> {
        let Some(added) = self.added.load_full() else {
            return base;
        };
        let built = self.built.load_full();
        let is_current =
            |built: &Built| Arc::ptr_eq(&built.base, &base) && Arc::ptr_eq(&built.added, &added);
        if let Some(built) = built.filter(|built| is_current(built)) {
            return Arc::clone(&built.rules);
        }
        let rules = Arc::new(base.allowing(&added));
        self.built.store(Some(Arc::new(Built {
            base,
            added,
            rules: Arc::clone(&rules),
        })));
        rules
    }
}
