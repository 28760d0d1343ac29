//! The runtime state of one sandbox in the gate: limits, pools, grants, requests in flight. The
//! state is never visible to another sandbox.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use decide::grants::Grants;
use policy::audit::AuditEvent;
use policy::bucket::{RateLimitPass, RateLimitWait, TokenBucket};
use policy::clock::Tick;
use policy::id::{RequestId, SandboxId};
use policy::push::PUSH_RATE;
use policy::reason::Reason;
use policy::verdict::{Denial, RuleName, VerdictKind};
use tokio::sync::Semaphore;

use crate::added_rules::AddedRules;
use crate::authority::CertificateAuthority;
use crate::branches::Branches;
use crate::in_flight::InFlightSet;
use crate::leaf::{CertificateCache, LeafError};
use crate::rate_limits::UpstreamLimits;
use crate::spool::SpoolQuota;
use crate::stage::Stage;

/// Connections at a time. Further ones wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 4096;

/// Requests in flight, including their pending audit records. Further ones wait.
const MAX_REQUESTS: usize = 8192;

/// Program lookups at a time. Further ones wait, so that the sandbox's init can do other work in
/// between.
const MAX_PROGRAM_LOOKUPS: usize = 2;

/// Pushes that are received or checked at a time. Further ones wait.
const MAX_PUSHES: usize = 4;

/// Fetches from mirrors at a time, each of which is a process. Further ones wait.
const MAX_FETCHES: usize = 4;

/// Recent refusals that are kept in memory for explanations.
const MAX_RECENT_REFUSALS: usize = 256;

/// The runtime state of one sandbox.
#[derive(Debug)]
pub struct SandboxState {
    id: SandboxId,
    /// TLS configurations for the hosts that the sandbox connects to.
    pub certificates: CertificateCache,
    /// Rate limits and circuit breakers per upstream.
    pub upstreams: UpstreamLimits,
    /// Requests in flight.
    pub in_flight: Arc<InFlightSet>,
    /// The operator's temporary approvals.
    pub grants: Arc<Grants>,
    /// Connection slots.
    pub connections: Arc<Semaphore>,
    /// Request slots.
    pub requests: Arc<Semaphore>,
    /// Slots for program lookups.
    pub program_lookups: Arc<Semaphore>,
    /// Push slots.
    pub pushes: Semaphore,
    /// Slots for fetches from mirrors.
    pub fetches: Arc<Semaphore>,
    /// Quota of spooled bodies that wait for a verdict.
    pub spooled: Arc<SpoolQuota>,
    /// The branches that the sandbox created.
    pub branches: Branches,
    /// Hosts that this sandbox may reach in addition to those of all sandboxes.
    pub added: AddedRules,
    push_bucket: Mutex<TokenBucket>,
    recent_refusals: Mutex<VecDeque<RecentRefusal>>,
}

/// A recent refusal or upstream failure, with the details for the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecentRefusal {
    /// The id of the request.
    pub id: RequestId,
    /// The stage at which the request ended.
    pub stage: Stage,
    /// The verdict of the rules; `None` if they were not evaluated.
    pub verdict: Option<VerdictKind>,
    /// The reason code.
    pub reason: Reason,
    /// The rule that decided.
    pub rule: RuleName,
    /// The message to the agent.
    pub message: String,
    /// Details for the operator only.
    pub evidence: Option<String>,
    /// The destination host.
    pub host: Option<String>,
    /// The HTTP method.
    pub method: Option<String>,
    /// The path, without its query.
    pub path: Option<String>,
}

impl SandboxState {
    /// Creates the state of a new sandbox.
    pub fn new(
        id: SandboxId,
        authority: Arc<ArcSwap<CertificateAuthority>>,
    ) -> Result<Self, LeafError> {
        Ok(Self {
            added: AddedRules::new(id.clone()),
            id,
            certificates: CertificateCache::new(authority)?,
            upstreams: UpstreamLimits::default(),
            in_flight: Arc::default(),
            grants: Arc::default(),
            connections: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
            requests: Arc::new(Semaphore::new(MAX_REQUESTS)),
            program_lookups: Arc::new(Semaphore::new(MAX_PROGRAM_LOOKUPS)),
            pushes: Semaphore::new(MAX_PUSHES),
            fetches: Arc::new(Semaphore::new(MAX_FETCHES)),
            spooled: SpoolQuota::for_sandbox(),
            branches: Branches::default(),
            push_bucket: Mutex::default(),
            recent_refusals: Mutex::default(),
        })
    }

    /// The id of the sandbox.
    pub fn id(&self) -> &SandboxId {
        &self.id
    }

    /// Takes a push token of the rate limit.
    pub fn take_push(&self, now: Tick) -> Result<RateLimitPass, RateLimitWait> {
        let bucket = &mut self
            .push_bucket
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        bucket.take(&PUSH_RATE, now)
    }

    /// Stores a refusal for later explanations.
    pub fn record_refusal(&self, id: RequestId, stage: Stage, denial: &Denial, event: &AuditEvent) {
        let refusal = RecentRefusal {
            id,
            stage,
            verdict: event.verdict,
            reason: denial.reason,
            rule: denial.rule.clone(),
            message: denial.message.clone(),
            evidence: denial.evidence.clone(),
            host: event.host.clone(),
            method: event.method.clone(),
            path: event.path.clone(),
        };
        let mut recent_refusals = self
            .recent_refusals
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if recent_refusals.len() >= MAX_RECENT_REFUSALS {
            recent_refusals.pop_front();
        }
        recent_refusals.push_back(refusal);
    }

    /// Returns a recent refusal of this sandbox.
    pub fn explain(&self, id: RequestId) -> Option<RecentRefusal> {
        let recent_refusals = self
            .recent_refusals
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        recent_refusals
            .iter()
            .rev()
            .find(|refusal| refusal.id == id)
            .cloned()
    }
}
