//! What the checks of one request need: the services, its sandbox, and the rules by which it is
//! decided.

use std::pin::Pin;
use std::sync::Arc;

use decide::decision::{Cx, Decided, Deciding, decide};
use decide::snapshot::PolicySnapshot;
use decide::subject::{Mode, Subject};
use policy::answer::{Answer, Answers};
use policy::audit::{AuditEvent, Times};
use policy::identity::identify;
use policy::reason::Reason;
use policy::verdict::{Denial, Digest};

use crate::in_flight::{Authorized, InFlight};
use crate::request_log::RequestLog;
use crate::sandbox_state::SandboxState;
use crate::services::Services;

/// See the module. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct RequestCx {
    /// What every connection shares.
    pub services: Arc<Services>,
    /// The sandbox that asks.
    pub sandbox: Arc<SandboxState>,
    /// The rules of this attempt.
    pub snapshot: Arc<PolicySnapshot>,
}

impl RequestCx {
    /// A request of `sandbox` under the rules in force.
    pub fn new(services: &Arc<Services>, sandbox: &Arc<SandboxState>) -> Self {
        Self {
            snapshot: services.snapshot_for(Some(sandbox)),
            services: Arc::clone(services),
            sandbox: Arc::clone(sandbox),
        }
    }

    /// The same under the rules in force now.
    #[must_use]
    pub fn renewed(&self) -> Self {
        Self::new(&self.services, &self.sandbox)
    }

    /// Whether the rules of this attempt are still in force.
    pub fn is_current(&self) -> bool {
        let now = self.services.snapshot_for(Some(&self.sandbox));
        Arc::ptr_eq(&now, &self.snapshot)
    }

    /// Decides about `subject`, for something that happens if it is allowed.
    pub fn decide<'a>(&'a self, subject: Subject<'a>, answers: &'a Answers) -> Deciding<'a> {
        let cx = Cx {
            snapshot: &self.snapshot,
            answers,
            grants: Some(&self.sandbox.grants),
            now: self.services.clock().tick(),
        };
        decide(subject, Mode::Live, cx)
    }

    /// Records what policy bundles said beside their decision.
    pub async fn record_bundles(&self, decided: &Decided, trail: &mut RequestLog) {
        let Some(run) = &decided.bundles else { return };
        let failed = run.evaluations.iter().filter(|one| one.failure.is_some());
        for _ in failed {
            self.services.metrics().undecided();
        }
        if let Some((bundle, _)) = &run.decided_by {
            trail.event.bundle = Some(bundle.clone());
        }
        for logged in &run.logged {
            let event = AuditEvent {
                bundle: Some(logged.bundle.clone()),
                event: Some("policy_logged".to_owned()),
                ms: Times::default(),
                reason: logged.reason,
                rule: Some(logged.rule.clone()),
                verdict: Some(logged.verdict),
                ..(*trail.event).clone()
            };
            self.services.audit().record(Box::new(event)).await;
        }
    }

    /// Notes that what was decided is in flight. A reload and a removal end what they find in
    /// flight, so both are looked at once more now that it can be found.
    pub fn enter(&self, authorized: Authorized) -> Entering {
        let entry = self.sandbox.in_flight.enter(authorized);
        if self.is_current() {
            return Entering::Now(self.identify_again(entry));
        }
        let cx = self.clone();
        Entering::Later(Box::pin(async move {
            let entry = cx.services.recheck_entry(&cx.sandbox, entry).await?;
            cx.identify_again(entry)
        }))
    }

    fn identify_again(&self, entry: InFlight) -> Result<InFlight, Denial> {
        let (registry, now) = (self.services.registry(), self.services.clock().wall());
        // By the function of the first stage, so that the refusal reads the same.
        let _identity = identify(registry.by_id(self.sandbox.id()), None, now)?;
        Ok(entry)
    }

    /// Keeps an answer that holds for the sandbox for a while. When it ends, what it allowed is
    /// decided about again as after a reload, also where it is not in flight yet.
    pub fn grant(&self, digest: Digest, answer: &Answer) {
        let Answer::Allow { until: Some(until) } = *answer else {
            return;
        };
        let now = self.services.clock().tick();
        self.sandbox.grants.add(digest, until, now);
        let services = Arc::downgrade(&self.services);
        let sandbox = Arc::downgrade(&self.sandbox);
        let left = until.since(now);
        // Nothing waits for its end: a gate that stops has ended what the answer allowed.
        tokio::spawn(async move {
            tokio::time::sleep(left).await;
            let (Some(services), Some(sandbox)) = (services.upgrade(), sandbox.upgrade()) else {
                return;
            };
            sandbox.added.renew();
            let rechecking = move || services.recheck_sandbox(&sandbox);
            if let Err(error) = tokio::task::spawn_blocking(rechecking).await {
                tracing::error!(%error, "checking requests in flight again failed");
            }
        });
    }
}

/// An entry in the in-flight set that is made, or one that is decided about again because the rules
/// changed at that moment: policy bundles block, so that happens on another thread.
pub enum Entering {
    /// It is made.
    Now(Result<InFlight, Denial>),
    /// It is made by this future.
    Later(Pin<Box<dyn Future<Output = Result<InFlight, Denial>> + Send>>),
}

impl Entering {
    /// Waits for the entry.
    pub async fn wait(self) -> Result<InFlight, Denial> {
        match self {
            Entering::Now(entered) => entered,
            Entering::Later(entering) => entering.await,
        }
    }
}

/// The refusal of a request that waited when its sandbox went away or the gate stopped.
pub fn ended(sandbox: &SandboxState) -> Denial {
    if sandbox.in_flight.is_closed() {
        return Denial::new(Reason::Internal, "gate").saying("The gate is stopping. Try again.");
    }
    Denial::new(Reason::IdentityUnknown, "identity")
}
