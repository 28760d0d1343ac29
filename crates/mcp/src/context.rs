//! Request contexts: state of a request that its before hook, the bridge and its after hook
//! share.
//!
//! One entry per request id. An entry expires after five minutes, and the number of entries is
//! bounded: the oldest is evicted. No lock is held across an await.
//!
//! An entry that expired or was evicted leaves a tombstone, a hash of its id. Without the
//! tombstone, the after hook of that request would be evaluated like one without a before hook,
//! without method and name.

use std::collections::hash_map::RandomState as KeyedState;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::BuildHasher as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use foldhash::fast::RandomState;
use policy::id::{RequestId, SandboxId};
use policy::verdict::{Denial, VerdictKind};
use prometheus_client::metrics::gauge::Gauge;
use tokio::time::Instant;

use crate::hold_terms::CallApprovals;
use crate::metrics::Metrics;

/// The field of `_meta` with the id of an entry. A call may contain the id of its before hook.
/// The bridge adds the field to a result, and the after hook removes it.
pub const CORRELATION_KEY: &str = "palisade/request";

/// The lifetime of an entry.
pub const TTL: Duration = Duration::from_secs(5 * 60);

/// The most entries.
pub const MAX_ENTRIES: usize = 100_000;

/// The most bytes of decisions in all entries together. One decision has a few KiB at most, and
/// policies may copy what an agent sent into their metadata.
const MAX_DECISION_BYTES: usize = 64 * 1024 * 1024;

/// The least time between two warnings about evicted entries.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// The longest id, agent, session or tool name in characters. Longer ones are truncated.
const MAX_CHARS: usize = 256;

/// The number of removed entries in the queue above which the queue is compacted.
const MAX_STALE: usize = 1024;

/// The entry of the request expired or was evicted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the context of the request has expired: the request began more than five minutes ago, or too \
     many requests began since"
)]
pub struct ContextExpired;

/// The context of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestContext {
    /// The request id, as the first hook or the bridge chose it.
    pub id: Arc<str>,
    /// The id in the audit log, if there is one.
    pub request: Option<RequestId>,
    /// The agent.
    pub agent: Arc<str>,
    /// The session; empty where there is none.
    pub session: Arc<str>,
    /// The sandbox, if the agent runs in one.
    pub sandbox: Option<SandboxId>,
    /// The tool.
    pub tool: Arc<str>,
    /// The JSON-RPC method; empty if it is not known.
    pub method: Arc<str>,
    /// The name of the called tool or prompt, without the server's prefix; empty if it is not
    /// known.
    pub name: Arc<str>,
    /// The trace span in which the request began, if spans are exported.
    pub trace: Option<Arc<str>>,
    /// The time at which the request began.
    pub created: Instant,
    /// The decision of the before hook, or of the bridge where there was no hook.
    pub decision: Option<Arc<PolicyDecision>>,
    /// An operator's approvals at the before hook, until the bridge takes them.
    pub approvals: CallApprovals,
    /// The outcome of the call, once the tool has answered.
    pub execution: Option<Execution>,
}

impl RequestContext {
    /// Whether the stored decision is a refusal.
    pub fn is_refused(&self) -> bool {
        let decision = self.decision.as_ref();
        decision.is_some_and(|decision| decision.denial.is_some())
    }
}

/// The decision on a request before its call, as the bridge and the after hook read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyDecision {
    /// The verdict.
    pub verdict: VerdictKind,
    /// The policy bundle that decided; empty where none did.
    pub bundle: String,
    /// The refusal, where the verdict is one. It has no evidence.
    pub denial: Option<Denial>,
    /// The policies' sentence about the decision; empty where they have none.
    pub reason: String,
    /// The policies' `metadata` as JSON; empty where they have none. Kept as text because a tree
    /// of small values takes many times its bytes.
    pub metadata: String,
}

/// The outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Execution {
    /// Whether the server answered with an error, ended, or did not answer in time.
    pub failed: bool,
    /// The exit code of the server's process: 0 while the process runs, -1 where the code is not
    /// known.
    pub exit_code: i32,
    /// The time from the decision to the answer.
    pub duration: Duration,
}

impl PolicyDecision {
    /// The action as policies name it, under `input.before`.
    pub const fn action(&self) -> &'static str {
        match self.verdict {
            VerdictKind::Allow => "allow",
            VerdictKind::Deny => "block",
            VerdictKind::Modify => "redact",
            VerdictKind::Ask => "ask",
        }
    }

    fn size(&self) -> usize {
        let message = self
            .denial
            .as_ref()
            .map_or(0, |denial| denial.message.len());
        message + self.bundle.len() + self.reason.len() + self.metadata.len()
    }
}

/// Caller and call of a request, for a new entry.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestOrigin<'a> {
    /// The id in the audit log.
    pub request: Option<RequestId>,
    /// The agent.
    pub agent: &'a str,
    /// The session.
    pub session: &'a str,
    /// The sandbox.
    pub sandbox: Option<&'a SandboxId>,
    /// The tool.
    pub tool: &'a str,
    /// The JSON-RPC method.
    pub method: &'a str,
    /// The name of the called tool or prompt, without the server's prefix.
    pub name: &'a str,
    /// The trace span in which the request begins.
    pub trace: Option<&'a str>,
}

/// The contexts of all requests. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Contexts(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// The most entries, and the most tombstones.
    max_entries: usize,
    /// The most bytes of decisions in all entries.
    max_bytes: usize,
    active: Gauge,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    entries: HashMap<Arc<str>, (u64, RequestContext), RandomState>,
    sessions: HashMap<Arc<str>, HashSet<Arc<str>, RandomState>, RandomState>,
    /// Number and id of the entries, in the order of creation, which is that of expiry.
    queue: VecDeque<(u64, Arc<str>)>,
    tombstones: Tombstones,
    /// The number of entries created so far.
    created_count: u64,
    /// The bytes of decisions in all entries.
    decision_bytes: usize,
    evicted: u64,
    last_warning: Option<Instant>,
}

/// Hashes of ids whose entries expired or were evicted. Bounded, because clients choose the ids:
/// the oldest tombstone is dropped.
#[derive(Debug, Default)]
struct Tombstones {
    /// Keyed with random bytes, so that a client cannot choose ids whose hashes collide.
    hasher: KeyedState,
    /// By hash, the number of its newest tombstone.
    numbers: HashMap<u64, u64, RandomState>,
    /// Number and hash of the tombstones, in the order of creation. The queue still contains the
    /// tombstones of ids that are in use again.
    queue: VecDeque<(u64, u64)>,
    /// The number of entries created so far.
    created_count: u64,
}

impl Contexts {
    /// No contexts yet.
    pub fn new(metrics: &Metrics) -> Self {
        Self::with_limits(metrics, MAX_ENTRIES, MAX_DECISION_BYTES)
    }

    fn with_limits(metrics: &Metrics, max_entries: usize, max_bytes: usize) -> Self {
        Self(Arc::new(Inner {
            max_entries,
            max_bytes,
            active: metrics.contexts(),
            table: Mutex::default(),
        }))
    }

    /// Creates the entry of a request. An earlier entry with that id is replaced.
    pub fn create(&self, id: &str, origin: RequestOrigin<'_>) -> RequestContext {
        let mut table = self.table();
        let context = self.insert(&mut table, id, origin);
        self.update_gauge(&table);
        context
    }

    /// The context of a request. An empty entry is created if there was none.
    pub fn get(&self, id: &str) -> Result<RequestContext, ContextExpired> {
        let mut table = self.table();
        self.entry(&mut table, id).cloned()
    }

    /// The context of a request, if there is one.
    pub fn find(&self, id: &str) -> Option<RequestContext> {
        let table = self.table();
        let (_, found) = table.entries.get(truncated_text(id))?;
        (!is_expired(found, Instant::now())).then(|| found.clone())
    }

    /// Whether the entry of a request expired or was evicted.
    pub fn has_expired(&self, id: &str) -> bool {
        let mut table = self.table();
        let expired = table
            .check_entry(truncated_text(id), self.0.max_entries)
            .is_err();
        self.update_gauge(&table);
        expired
    }

    /// Stores the decision on a request. If all decisions together are too large, the oldest
    /// entries are evicted.
    pub fn set_decision(
        &self,
        id: &str,
        decision: PolicyDecision,
    ) -> Result<RequestContext, ContextExpired> {
        let mut table = self.table();
        let context = self.entry(&mut table, id)?;
        let new = decision.size();
        let old = context.decision.replace(Arc::new(decision));
        let context = context.clone();
        table.decision_bytes += new;
        table.decision_bytes -= old.map_or(0, |old| old.size());
        while table.decision_bytes > self.0.max_bytes && table.entries.len() > 1 {
            table.evict(self.0.max_entries);
        }
        self.update_gauge(&table);
        Ok(context)
    }

    /// Stores an operator's approvals of a request.
    pub fn set_approvals(&self, id: &str, approvals: CallApprovals) -> Result<(), ContextExpired> {
        let mut table = self.table();
        self.entry(&mut table, id)?.approvals = approvals;
        Ok(())
    }

    /// Removes and returns an operator's approvals of a request: they are valid for one call.
    pub fn take_approvals(&self, id: &str) -> CallApprovals {
        let mut table = self.table();
        let entry = table.entries.get_mut(truncated_text(id));
        entry.map_or_else(CallApprovals::default, |(_, context)| {
            std::mem::take(&mut context.approvals)
        })
    }

    /// Stores the outcome of a call.
    pub fn set_result(
        &self,
        id: &str,
        execution: Execution,
    ) -> Result<RequestContext, ContextExpired> {
        let mut table = self.table();
        let context = self.entry(&mut table, id)?;
        context.execution = Some(execution);
        Ok(context.clone())
    }

    /// Removes the entry of a request.
    pub fn delete(&self, id: &str) -> Option<RequestContext> {
        let mut table = self.table();
        let removed = table.remove(truncated_text(id));
        self.update_gauge(&table);
        removed
    }

    /// Removes the entry of a request and returns it; none if there never was one.
    pub fn take(&self, id: &str) -> Result<Option<RequestContext>, ContextExpired> {
        let mut table = self.table();
        let known = table.check_entry(truncated_text(id), self.0.max_entries);
        let removed = known.map(|_| table.remove(truncated_text(id)));
        self.update_gauge(&table);
        removed
    }

    /// Removes the entries of a session.
    pub fn delete_session(&self, session: &str) {
        let mut table = self.table();
        let ids = table
            .sessions
            .remove(truncated_text(session))
            .unwrap_or_default();
        for id in ids {
            table.remove(&id);
        }
        self.update_gauge(&table);
    }

    /// Removes expired entries.
    pub fn cleanup(&self) {
        let mut table = self.table();
        let now = Instant::now();
        while let Some((number, id)) = table.queue.front() {
            let current = table.entries.get(id).filter(|(made, _)| made == number);
            match current {
                Some((_, context)) if !is_expired(context, now) => break,
                Some(_) => {
                    let id = Arc::clone(id);
                    table.remove_with_tombstone(&id, self.0.max_entries);
                }
                None => {}
            }
            table.queue.pop_front();
        }
        self.update_gauge(&table);
    }

    /// The number of entries.
    pub fn len(&self) -> usize {
        self.table().entries.len()
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update_gauge(&self, table: &Table) {
        let active = i64::try_from(table.entries.len()).unwrap_or(i64::MAX);
        self.0.active.set(active);
    }

    /// The entry of a request. An empty one is created if there was none.
    fn entry<'a>(
        &self,
        table: &'a mut Table,
        id: &str,
    ) -> Result<&'a mut RequestContext, ContextExpired> {
        let known = table.check_entry(truncated_text(id), self.0.max_entries);
        if known == Ok(false) {
            tracing::debug!("mcp request context not found; created");
            self.insert(table, id, RequestOrigin::default());
        }
        self.update_gauge(table);
        known?;
        match table.entries.get_mut(truncated_text(id)) {
            Some((_, context)) => Ok(context),
            // Unreachable: the entry exists or was inserted above.
            None => Err(ContextExpired),
        }
    }

    fn insert(&self, table: &mut Table, id: &str, origin: RequestOrigin<'_>) -> RequestContext {
        table.remove(truncated_text(id));
        table.tombstones.remove(truncated_text(id));
        while table.entries.len() >= self.0.max_entries.max(1) {
            table.evict(self.0.max_entries);
        }
        let text = |text: &str| -> Arc<str> { truncated_text(text).into() };
        let context = RequestContext {
            id: text(id),
            request: origin.request,
            agent: text(origin.agent),
            session: text(origin.session),
            sandbox: origin.sandbox.cloned(),
            tool: text(origin.tool),
            method: text(origin.method),
            name: text(origin.name),
            trace: origin.trace.map(text),
            created: Instant::now(),
            decision: None,
            approvals: CallApprovals::default(),
            execution: None,
        };
        table.created_count += 1;
        let (number, id) = (table.created_count, Arc::clone(&context.id));
        table.queue.push_back((number, Arc::clone(&id)));
        if !context.session.is_empty() {
            let session = Arc::clone(&context.session);
            let ids = table.sessions.entry(session).or_default();
            ids.insert(Arc::clone(&id));
        }
        table.entries.insert(id, (number, context.clone()));
        table.compact_queue();
        context
    }
}

impl Table {
    /// Whether there is an entry for `id`. An expired entry is removed.
    fn check_entry(&mut self, id: &str, max_tombstones: usize) -> Result<bool, ContextExpired> {
        match self.entries.get(id) {
            Some((_, context)) if is_expired(context, Instant::now()) => {
                self.remove_with_tombstone(id, max_tombstones);
                Err(ContextExpired)
            }
            Some(_) => Ok(true),
            None if self.tombstones.contains(id) => Err(ContextExpired),
            None => Ok(false),
        }
    }

    /// Removes an entry and leaves a tombstone, of which `max_tombstones` are kept.
    fn remove_with_tombstone(&mut self, id: &str, max_tombstones: usize) {
        self.remove(id);
        self.tombstones.insert(id, max_tombstones);
    }

    fn remove(&mut self, id: &str) -> Option<RequestContext> {
        let (_, context) = self.entries.remove(id)?;
        self.decision_bytes -= context.decision.as_ref().map_or(0, |one| one.size());
        if let Some(ids) = self.sessions.get_mut(&context.session) {
            ids.remove(id);
            if ids.is_empty() {
                self.sessions.remove(&context.session);
            }
        }
        Some(context)
    }

    /// Removes the oldest entry.
    fn evict(&mut self, max_tombstones: usize) {
        while let Some((number, id)) = self.queue.pop_front() {
            let current = self.entries.get(&id).map(|(made, _)| *made);
            if current == Some(number) {
                self.remove_with_tombstone(&id, max_tombstones);
                break;
            }
        }
        self.evicted += 1;
        let now = Instant::now();
        if self.last_warning.is_none_or(|at| now - at >= WARN_INTERVAL) {
            self.last_warning = Some(now);
            let evicted = self.evicted;
            tracing::warn!(
                evicted,
                "mcp request contexts at their limit: oldest evicted"
            );
        }
    }

    /// Drops removed entries from the queue, once they are the greater part of it.
    fn compact_queue(&mut self) {
        if self.queue.len() > 2 * self.entries.len() + MAX_STALE {
            let entries = &self.entries;
            self.queue
                .retain(|(number, id)| entries.get(id).map(|(made, _)| *made) == Some(*number));
        }
    }
}

impl Tombstones {
    fn contains(&self, id: &str) -> bool {
        self.numbers.contains_key(&self.hasher.hash_one(id))
    }

    fn insert(&mut self, id: &str, max_tombstones: usize) {
        let hash = self.hasher.hash_one(id);
        self.created_count += 1;
        self.numbers.insert(hash, self.created_count);
        self.queue.push_back((self.created_count, hash));
        while self.queue.len() > max_tombstones.max(1)
            && let Some((number, hash)) = self.queue.pop_front()
        {
            if self.numbers.get(&hash) == Some(&number) {
                self.numbers.remove(&hash);
            }
        }
    }

    fn remove(&mut self, id: &str) {
        self.numbers.remove(&self.hasher.hash_one(id));
    }
}

fn is_expired(context: &RequestContext, now: Instant) -> bool {
    now - context.created > TTL
}

/// The first [`MAX_CHARS`] characters of a text that a client chose.
fn truncated_text(text: &str) -> &str {
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => text.get(..end).unwrap_or_default(),
        None => text,
    }
}

#[cfg(test)]
mod tests;
