//! The runtime state of one sandbox in the gate: limits, pools, grants, requests in flight.
//! Nothing of it is ever shown to another.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use decide::grants::Grants;
use policy::audit::AuditEvent;
use policy::bucket::{Pass, TokenBucket, Wait};
use policy::clock::Tick;
use policy::id::{RequestId, SandboxId};
use policy::push::PUSH_RATE;
use policy::reason::Reason;
use policy::verdict::{Denial, RuleName, Word};
use tokio::sync::Semaphore;

use crate::added_rules::AddedRules;
use crate::authority::Authority;
use crate::branches::Branches;
use crate::in_flight::InFlightSet;
use crate::leaf::{LeafError, Leaves};
use crate::rate_limits::UpstreamLimits;
use crate::spool::SpoolQuota;
use crate::stage::Stage;

/// Connections at a time. More wait in the kernel's queue.
const MOST_CONNECTIONS: usize = 4096;

/// Requests under way at a time, their records included. More wait.
const MOST_REQUESTS: usize = 8192;

/// Questions about its programs under way at a time. More wait, and its init has time for
/// others in between.
const MOST_QUESTIONS: usize = 2;

/// Pushes that are taken in or judged at a time. More wait.
const MOST_PUSHES: usize = 4;

/// Fetches from mirrors at a time, each of which is a process. More wait.
const MOST_FETCHES: usize = 4;

/// Refusals that can be explained without looking into the log.
const MOST_EXPLAINED: usize = 256;

/// One sandbox, as the gate's traffic knows it.
#[derive(Debug)]
pub struct SandboxState {
    id: SandboxId,
    /// The certificates it is shown.
    pub leaves: Leaves,
    /// Its buckets and breakers.
    pub upstreams: UpstreamLimits,
    /// Its requests in flight.
    pub in_flight: Arc<InFlightSet>,
    /// What the operator allowed it for a while.
    pub grants: Arc<Grants>,
    /// Places for connections.
    pub connections: Arc<Semaphore>,
    /// Places for requests.
    pub requests: Arc<Semaphore>,
    /// Places for questions about its programs.
    pub questions: Arc<Semaphore>,
    /// Places for pushes.
    pub pushes: Semaphore,
    /// Places for fetches from mirrors.
    pub fetches: Arc<Semaphore>,
    /// How much of its pushes waits for a verdict.
    pub spooled: Arc<SpoolQuota>,
    /// The branches it made.
    pub branches: Branches,
    /// Hosts that it may reach beside those of all.
    pub added: AddedRules,
    push_bucket: Mutex<TokenBucket>,
    explained: Mutex<VecDeque<Explained>>,
}

/// A refusal, or a failure of the other side, with what an operator wants to know of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explained {
    /// The request.
    pub id: RequestId,
    /// Where it ended.
    pub stage: Stage,
    /// What the rules decided; none where they were not asked.
    pub verdict: Option<Word>,
    /// The code.
    pub reason: Reason,
    /// The rule that decided.
    pub rule: RuleName,
    /// What the agent was told.
    pub message: String,
    /// What only the operator is told.
    pub evidence: Option<String>,
    /// The host that was meant.
    pub host: Option<String>,
    /// The method.
    pub method: Option<String>,
    /// The path, without its query.
    pub path: Option<String>,
}

impl SandboxState {
    /// A sandbox nothing is known of yet.
    pub fn new(id: SandboxId, authority: Arc<ArcSwap<Authority>>) -> Result<Self, LeafError> {
        Ok(Self {
            id,
            leaves: Leaves::new(authority)?,
            upstreams: UpstreamLimits::default(),
            in_flight: Arc::default(),
            grants: Arc::default(),
            connections: Arc::new(Semaphore::new(MOST_CONNECTIONS)),
            requests: Arc::new(Semaphore::new(MOST_REQUESTS)),
            questions: Arc::new(Semaphore::new(MOST_QUESTIONS)),
            pushes: Semaphore::new(MOST_PUSHES),
            fetches: Arc::new(Semaphore::new(MOST_FETCHES)),
            spooled: SpoolQuota::of_one(),
            branches: Branches::default(),
            added: AddedRules::default(),
            push_bucket: Mutex::default(),
            explained: Mutex::default(),
        })
    }

    /// Who it is.
    pub fn id(&self) -> &SandboxId {
        &self.id
    }

    /// Takes a token for a push.
    pub fn take_push(&self, now: Tick) -> Result<Pass, Wait> {
        let bucket = &mut self
            .push_bucket
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        bucket.take(&PUSH_RATE, now)
    }

    /// Keeps a refusal, so that it can be explained.
    pub fn remember(&self, id: RequestId, stage: Stage, denial: &Denial, event: &AuditEvent) {
        let one = Explained {
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
        let mut explained = self
            .explained
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if explained.len() >= MOST_EXPLAINED {
            explained.pop_front();
        }
        explained.push_back(one);
    }

    /// A refusal of this sandbox that is not long ago.
    pub fn explain(&self, id: RequestId) -> Option<Explained> {
        let explained = self
            .explained
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        explained.iter().rev().find(|one| one.id == id).cloned()
    }
}
