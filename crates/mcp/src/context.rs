//! What is remembered of a request between its hooks: before, the bridge, after.
//!
//! One entry per request id. It lives for five minutes at most, and there are so many at
//! most: the oldest makes room. No lock is held while anything is waited for.
//!
//! An entry that expired or made room leaves a tombstone, a hash of its id: without it the
//! after hook of that request would be judged like one that had no before hook, without
//! method and name.

use std::collections::hash_map::RandomState as KeyedState;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::BuildHasher as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use foldhash::fast::RandomState;
use policy::id::{RequestId, SandboxId};
use policy::verdict::{Denial, Word};
use prometheus_client::metrics::gauge::Gauge;
use tokio::time::Instant;

use crate::hold_terms::CallApprovals;
use crate::metrics::Metrics;

/// The field of `_meta` that names an entry. A call may name that of its before hook; into a
/// result the bridge puts it, and the after hook takes it out.
pub const CORRELATION: &str = "palisade/request";

/// How long an entry lives.
pub const TTL: Duration = Duration::from_secs(5 * 60);

/// The most entries.
pub const MOST: usize = 100_000;

/// The most bytes of decisions in all entries together. One decision has a few KiB at most, and
/// policies may copy what an agent sent into their metadata.
const MAX_DECISION_BYTES: usize = 64 * 1024 * 1024;

/// Between two warnings that entries make room.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// The longest id, agent, session or tool name that is kept whole.
const LONGEST: usize = 256;

/// Entries that were removed and still stand in the queue, before it is swept.
const MOST_STALE: usize = 1024;

/// A request whose entry expired, or made room for others.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the request is not remembered any more: it began more than five minutes ago, or too many \
     began since"
)]
pub struct Expired;

/// What is remembered of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestContext {
    /// Its id, as whoever asked first put it.
    pub id: Arc<str>,
    /// The name it has in the audit log, where it has one.
    pub request: Option<RequestId>,
    /// The agent.
    pub agent: Arc<str>,
    /// The session; empty where there is none.
    pub session: Arc<str>,
    /// The sandbox, where the agent is in one.
    pub sandbox: Option<SandboxId>,
    /// The tool.
    pub tool: Arc<str>,
    /// The JSON-RPC method; empty where it is not known.
    pub method: Arc<str>,
    /// The tool's own name of what was called; empty where it is not known.
    pub name: Arc<str>,
    /// The span it began in, where somebody collects spans.
    pub trace: Option<Arc<str>>,
    /// When it began.
    pub created: Instant,
    /// The decision of the before hook, or of the bridge where there was no hook.
    pub decision: Option<Arc<PolicyDecision>>,
    /// What an operator approved at the before hook, until the bridge takes it.
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

/// The decision on a request before its call, as the bridge and the after hook find it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyDecision {
    /// The verdict.
    pub verdict: Word,
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
    /// The action in a policy's own words, as a policy finds it under `input.before`.
    pub const fn action(&self) -> &'static str {
        match self.verdict {
            Word::Allow => "allow",
            Word::Deny => "block",
            Word::Modify => "redact",
            Word::Ask => "ask",
        }
    }

    fn bytes(&self) -> usize {
        let message = self
            .denial
            .as_ref()
            .map_or(0, |denial| denial.message.len());
        message + self.bundle.len() + self.reason.len() + self.metadata.len()
    }
}

/// Who asks for what, for a new entry.
#[derive(Clone, Copy, Debug, Default)]
pub struct Origin<'a> {
    /// The name in the audit log.
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
    /// What is called, in the tool's own words.
    pub name: &'a str,
    /// The span it begins in.
    pub trace: Option<&'a str>,
}

/// Every request that is remembered. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Contexts(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    most: usize,
    /// Of the decisions in all entries.
    max_bytes: usize,
    active: Gauge,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    entries: HashMap<Arc<str>, (u64, RequestContext), RandomState>,
    sessions: HashMap<Arc<str>, HashSet<Arc<str>, RandomState>, RandomState>,
    /// In the order they were made, which is the order they expire in.
    queue: VecDeque<(u64, Arc<str>)>,
    tombstones: Tombstones,
    made: u64,
    /// Of the decisions in all entries.
    decision_bytes: usize,
    evicted: u64,
    warned: Option<Instant>,
}

/// Hashes of ids whose entries expired or were evicted. Bounded, because clients choose the
/// ids: the oldest tombstone makes room.
#[derive(Debug, Default)]
struct Tombstones {
    /// Keyed with random bytes, so that a client cannot choose ids whose hashes collide.
    hasher: KeyedState,
    /// By hash, the number of the newest tombstone with it.
    numbers: HashMap<u64, u64, RandomState>,
    /// In the order they were made. Those of ids that were used again are still in it.
    queue: VecDeque<(u64, u64)>,
    made: u64,
}

impl Contexts {
    /// Nothing is remembered yet.
    pub fn new(metrics: &Metrics) -> Self {
        Self::with_room(metrics, MOST, MAX_DECISION_BYTES)
    }

    fn with_room(metrics: &Metrics, most: usize, max_bytes: usize) -> Self {
        Self(Arc::new(Inner {
            most,
            max_bytes,
            active: metrics.contexts(),
            table: Mutex::default(),
        }))
    }

    /// Begins to remember a request. What was known under that id is forgotten.
    pub fn create(&self, id: &str, origin: Origin<'_>) -> RequestContext {
        let mut table = self.table();
        let made = self.insert(&mut table, id, origin);
        self.count(&table);
        made
    }

    /// What is known of a request. One that was never known is remembered from now on.
    pub fn get(&self, id: &str) -> Result<RequestContext, Expired> {
        let mut table = self.table();
        self.entry(&mut table, id).cloned()
    }

    /// What is known of a request; nothing where nothing is.
    pub fn find(&self, id: &str) -> Option<RequestContext> {
        let table = self.table();
        let (_, found) = table.entries.get(bounded(id))?;
        (!is_old(found, Instant::now())).then(|| found.clone())
    }

    /// Whether the entry of a request expired or made room for others.
    pub fn has_expired(&self, id: &str) -> bool {
        let mut table = self.table();
        let expired = table.current(bounded(id), self.0.most).is_err();
        self.count(&table);
        expired
    }

    /// Stores the decision on a request. Where all decisions together are too large, the oldest
    /// entries make room.
    pub fn set_decision(
        &self,
        id: &str,
        decision: PolicyDecision,
    ) -> Result<RequestContext, Expired> {
        let mut table = self.table();
        let context = self.entry(&mut table, id)?;
        let new = decision.bytes();
        let old = context.decision.replace(Arc::new(decision));
        let context = context.clone();
        table.decision_bytes += new;
        table.decision_bytes -= old.map_or(0, |old| old.bytes());
        while table.decision_bytes > self.0.max_bytes && table.entries.len() > 1 {
            table.evict(self.0.most);
        }
        self.count(&table);
        Ok(context)
    }

    /// Stores what an operator approved of a request.
    pub fn set_approvals(&self, id: &str, approvals: CallApprovals) -> Result<(), Expired> {
        let mut table = self.table();
        self.entry(&mut table, id)?.approvals = approvals;
        Ok(())
    }

    /// What an operator approved of a request. It counts for one call.
    pub fn take_approvals(&self, id: &str) -> CallApprovals {
        let mut table = self.table();
        let entry = table.entries.get_mut(bounded(id));
        entry.map_or_else(CallApprovals::default, |(_, context)| {
            std::mem::take(&mut context.approvals)
        })
    }

    /// Stores the outcome of a call.
    pub fn set_result(&self, id: &str, execution: Execution) -> Result<RequestContext, Expired> {
        let mut table = self.table();
        let context = self.entry(&mut table, id)?;
        context.execution = Some(execution);
        Ok(context.clone())
    }

    /// Forgets a request.
    pub fn delete(&self, id: &str) -> Option<RequestContext> {
        let mut table = self.table();
        let removed = table.remove(bounded(id));
        self.count(&table);
        removed
    }

    /// Forgets a request, and gives what was known of it; nothing where nothing ever was.
    pub fn take(&self, id: &str) -> Result<Option<RequestContext>, Expired> {
        let mut table = self.table();
        let known = table.current(bounded(id), self.0.most);
        let removed = known.map(|_| table.remove(bounded(id)));
        self.count(&table);
        removed
    }

    /// Forgets every request of a session.
    pub fn delete_session(&self, session: &str) {
        let mut table = self.table();
        let ids = table.sessions.remove(bounded(session)).unwrap_or_default();
        for id in ids {
            table.remove(&id);
        }
        self.count(&table);
    }

    /// Forgets what is too old.
    pub fn cleanup(&self) {
        let mut table = self.table();
        let now = Instant::now();
        while let Some((number, id)) = table.queue.front() {
            let current = table.entries.get(id).filter(|(made, _)| made == number);
            match current {
                Some((_, context)) if !is_old(context, now) => break,
                Some(_) => {
                    let id = Arc::clone(id);
                    table.bury(&id, self.0.most);
                }
                None => {}
            }
            table.queue.pop_front();
        }
        self.count(&table);
    }

    /// How many are remembered.
    pub fn len(&self) -> usize {
        self.table().entries.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, table: &Table) {
        let active = i64::try_from(table.entries.len()).unwrap_or(i64::MAX);
        self.0.active.set(active);
    }

    /// The entry of a request. One that was never known is made.
    fn entry<'a>(&self, table: &'a mut Table, id: &str) -> Result<&'a mut RequestContext, Expired> {
        let known = table.current(bounded(id), self.0.most);
        if known == Ok(false) {
            tracing::debug!("a request is not known and is remembered from now on");
            self.insert(table, id, Origin::default());
        }
        self.count(table);
        known?;
        match table.entries.get_mut(bounded(id)) {
            Some((_, context)) => Ok(context),
            // There is room for one at least, and it was put in above.
            None => Err(Expired),
        }
    }

    fn insert(&self, table: &mut Table, id: &str, origin: Origin<'_>) -> RequestContext {
        table.remove(bounded(id));
        table.tombstones.remove(bounded(id));
        while table.entries.len() >= self.0.most.max(1) {
            table.evict(self.0.most);
        }
        let text = |text: &str| -> Arc<str> { bounded(text).into() };
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
        table.made += 1;
        let (number, id) = (table.made, Arc::clone(&context.id));
        table.queue.push_back((number, Arc::clone(&id)));
        if !context.session.is_empty() {
            let session = Arc::clone(&context.session);
            let ids = table.sessions.entry(session).or_default();
            ids.insert(Arc::clone(&id));
        }
        table.entries.insert(id, (number, context.clone()));
        table.sweep();
        context
    }
}

impl Table {
    /// Whether there is an entry of `id`. One that is too old is removed here.
    fn current(&mut self, id: &str, most: usize) -> Result<bool, Expired> {
        match self.entries.get(id) {
            Some((_, context)) if is_old(context, Instant::now()) => {
                self.bury(id, most);
                Err(Expired)
            }
            Some(_) => Ok(true),
            None if self.tombstones.contains(id) => Err(Expired),
            None => Ok(false),
        }
    }

    /// Removes an entry and leaves a tombstone, of which there are `most` at most.
    fn bury(&mut self, id: &str, most: usize) {
        self.remove(id);
        self.tombstones.insert(id, most);
    }

    fn remove(&mut self, id: &str) -> Option<RequestContext> {
        let (_, context) = self.entries.remove(id)?;
        self.decision_bytes -= context.decision.as_ref().map_or(0, |one| one.bytes());
        if let Some(ids) = self.sessions.get_mut(&context.session) {
            ids.remove(id);
            if ids.is_empty() {
                self.sessions.remove(&context.session);
            }
        }
        Some(context)
    }

    /// Removes the oldest entry.
    fn evict(&mut self, most: usize) {
        while let Some((number, id)) = self.queue.pop_front() {
            let current = self.entries.get(&id).map(|(made, _)| *made);
            if current == Some(number) {
                self.bury(&id, most);
                break;
            }
        }
        self.evicted += 1;
        let now = Instant::now();
        if self.warned.is_none_or(|at| now - at >= WARN_EVERY) {
            self.warned = Some(now);
            let evicted = self.evicted;
            tracing::warn!(
                evicted,
                "too many requests are remembered: the oldest make room"
            );
        }
    }

    /// Takes out of the queue what is no entry any more, once that is most of it.
    fn sweep(&mut self) {
        if self.queue.len() > 2 * self.entries.len() + MOST_STALE {
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

    fn insert(&mut self, id: &str, most: usize) {
        let hash = self.hasher.hash_one(id);
        self.made += 1;
        self.numbers.insert(hash, self.made);
        self.queue.push_back((self.made, hash));
        while self.queue.len() > most.max(1)
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

fn is_old(context: &RequestContext, now: Instant) -> bool {
    now - context.created > TTL
}

/// What others choose has an end.
fn bounded(text: &str) -> &str {
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => text.get(..end).unwrap_or_default(),
        None => text,
    }
}

#[cfg(test)]
mod tests;
