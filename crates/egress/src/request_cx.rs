//! Context of one request: the services, its sandbox, and the policy snapshot that decides it.

use std::pin::Pin;
use std::sync::Arc;

use decide::decision::{Cx, DecisionFuture, DecisionOutcome, decide};
use decide::snapshot::PolicySnapshot;
use decide::subject::{Mode, Subject};
use policy::answer::{ApprovalAnswer, ApprovalAnswers};
use policy::audit::{AuditEvent, Times};
use policy::identity::identify;
use policy::reason::Reason;
use policy::verdict::{Denial, Digest};

use crate::in_flight::{Authorized, InFlight};
use crate::request_log::RequestLog;
use crate::sandbox_state::SandboxState;
use crate::services::Services;

/// The context of one request. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct RequestCx {
    /// The services that all connections share.
    pub services: Arc<Services>,
    /// The sandbox that sends the request.
    pub sandbox: Arc<SandboxState>,
    /// The rules that decide this attempt.
    pub snapshot: Arc<PolicySnapshot>,
}

impl RequestCx {
    /// Creates the context of a request of `sandbox` under the rules in force.
    pub fn new(services: &Arc<Services>, sandbox: &Arc<SandboxState>) -> Self {
        Self {
            snapshot: services.snapshot_for(Some(sandbox)),
            services: Arc::clone(services),
            sandbox: Arc::clone(sandbox),
        }
    }

    /// A copy of the context with the rules in force now.
    #[must_use]
    pub fn renewed(&self) -> Self {
        Self::new(&self.services, &self.sandbox)
    }

    /// Whether the rules of this attempt are still in force.
    pub fn is_current(&self) -> bool {
        let now = self.services.snapshot_for(Some(&self.sandbox));
        Arc::ptr_eq(&now, &self.snapshot)
    }

    /// Decides about `subject` in live mode: an allowed action is performed.
    pub fn decide<'a>(
        &'a self,
        subject: Subject<'a>,
        answers: &'a ApprovalAnswers,
    ) -> DecisionFuture<'a> {
        let cx = Cx {
            snapshot: &self.snapshot,
            answers,
            grants: Some(&self.sandbox.grants),
            now: self.services.clock().tick(),
        };
        decide(subject, Mode::Live, cx)
    }

    /// Records the log entries and failures of policy bundles.
    pub async fn record_bundles(&self, decided: &DecisionOutcome, log: &mut RequestLog) {
        let Some(run) = &decided.bundles else { return };
        let failed = run
            .evaluations
            .iter()
            .filter(|evaluation| evaluation.failure.is_some());
        for _ in failed {
            self.services.metrics().count_undecided();
        }
        if let Some((bundle, _)) = &run.decided_by {
            log.event.bundle = Some(bundle.clone());
        }
        for logged in &run.logged {
            let event = AuditEvent {
                bundle: Some(logged.bundle.clone()),
                event: Some("policy_logged".to_owned()),
                ms: Times::default(),
                reason: logged.reason,
                rule: Some(logged.rule.clone()),
                verdict: Some(logged.verdict),
                ..(*log.event).clone()
            };
            self.services.audit().record(Box::new(event)).await;
        }
    }

    /// Adds an allowed request to the in-flight set. A reload or a removal of the sandbox ends only
    /// the requests in the set, so both are checked once more after the entry is added.
    pub fn enter(&self, authorized: Authorized) -> PendingEntry {
        let entry = self.sandbox.in_flight.enter(authorized);
        if self.is_current() {
            return PendingEntry::Now(self.identify_again(entry));
        }
        let cx = self.clone();
        PendingEntry::Later(Box::pin(async move {
            let entry = cx.services.recheck_entry(&cx.sandbox, entry).await?;
            cx.identify_again(entry)
        }))
    }

    fn identify_again(&self, entry: InFlight) -> Result<InFlight, Denial> {
        let (registry, now) = (self.services.registry(), self.services.clock().wall());
        // The same function as in the identity stage, so that the refusal is the same.
        let _identity = identify(registry.by_id(self.sandbox.id()), None, now)?;
        Ok(entry)
    }

    /// Stores a temporary approval for the sandbox. When the approval expires, the requests that it
    /// allowed are decided again as after a reload, including those that are not in flight yet.
    pub fn grant(&self, digest: Digest, answer: &ApprovalAnswer) {
        let ApprovalAnswer::Allow { until: Some(until) } = *answer else {
            return;
        };
        let now = self.services.clock().tick();
        self.sandbox.grants.add(digest, until, now);
        let services = Arc::downgrade(&self.services);
        let sandbox = Arc::downgrade(&self.sandbox);
        let left = until.since(now);
        // Not awaited: a stopping gate has ended the requests that the approval allowed.
        tokio::spawn(async move {
            tokio::time::sleep(left).await;
            let (Some(services), Some(sandbox)) = (services.upgrade(), sandbox.upgrade()) else {
                return;
            };
            sandbox.added.renew();
            let rechecking = move || services.recheck_sandbox(&sandbox);
            if let Err(error) = tokio::task::spawn_blocking(rechecking).await {
                tracing::error!(%error, "rechecking requests in flight failed");
            }
        });
    }
}

/// A new entry in the in-flight set, or a future of it if the rules changed meanwhile: the request
/// is then decided again on another thread, because policy bundles block.
pub enum PendingEntry {
    /// The entry is ready.
    Now(Result<InFlight, Denial>),
    /// The request is being decided again.
    Later(Pin<Box<dyn Future<Output = Result<InFlight, Denial>> + Send>>),
}

impl PendingEntry {
    /// Waits for the entry.
    pub async fn wait(self) -> Result<InFlight, Denial> {
        match self {
            PendingEntry::Now(entered) => entered,
            PendingEntry::Later(entering) => entering.await,
        }
    }
}

/// The refusal of a waiting request when its sandbox is removed or the gate stops.
pub fn ended_denial(sandbox: &SandboxState) -> Denial {
    if sandbox.in_flight.is_closed() {
        return Denial::new(Reason::Internal, "gate")
            .with_message("The gate is stopping. Try again.");
    }
    Denial::new(Reason::IdentityUnknown, "identity")
}
