//! What every connection shares: the rules in force, the registry, the way out, metrics, time,
//! and the table of sandboxes.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use config::Settings;
use decide::decision::{Cx, decide};
use decide::hold::Questions;
use decide::snapshot::{CurrentPolicy, PolicySnapshot};
use decide::subject::{HeadFacts, MirrorFacts, Mode, PassthroughFacts, RequestFacts, Subject};
use policy::answer::Answers;
use policy::audit::AuditEvent;
use policy::clock::UnixMillis;
use policy::id::{RequestId, SandboxId};
use policy::identity::Lookup;
use policy::ports::{AuditLog, PackReader, Registry, SocketOwner, ToolServer};
use policy::reason::Reason;
use policy::registration::Registration;
use policy::verdict::{Denial, Verdict};
use tokio::runtime::Handle;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::task::TaskTracker;

use crate::authority::Authority;
use crate::clock::Clock;
use crate::dialer::{BadRoots, Dialer, PreparedDialer};
use crate::dns::{DnsMetrics, Limits, NamePolicy, Names};
use crate::ids::Ids;
use crate::in_flight::{Authorized, InFlight};
use crate::leaf::LeafError;
use crate::listener_checks::ListenerChecks;
use crate::metrics::TrafficMetrics;
use crate::mirror::Mirrors;
use crate::resolvers;
use crate::sandbox_state::{Explained, SandboxState};
use crate::spool::Spools;

/// How often rate buckets, breakers and connections of unregistered sandboxes are removed. The
/// end of a registration removes them at once; this finds those that expired.
const PRUNE_EVERY: Duration = Duration::from_secs(5 * 60);

/// The refusal of what is in flight and would be asked about now.
const APPROVAL_ENDED: &str =
    "The operator's approval of this request has ended, or the rules want one now.";

/// What the services are made of.
pub struct Parts {
    /// The rules in force.
    pub policy: Arc<CurrentPolicy>,
    /// Who answers questions.
    pub questions: Questions,
    /// Who is registered.
    pub registry: Arc<dyn Registry>,
    /// Where decisions are recorded.
    pub audit: Arc<dyn AuditLog>,
    /// Which program opened a connection.
    pub programs: Arc<dyn SocketOwner>,
    /// Who signs.
    pub authority: Arc<ArcSwap<Authority>>,
    /// The way out.
    pub dialer: Dialer,
    /// Reads the objects of pushes. Without it, pushes that have to be read are refused.
    pub pack_reader: Option<Arc<dyn PackReader>>,
    /// The directory where bodies wait for their verdict.
    pub spool: PathBuf,
    /// Upstreams that are served as mirrors.
    pub mirrors: Mirrors,
}

/// What every connection shares.
pub struct Services {
    policy: Arc<CurrentPolicy>,
    questions: Questions,
    registry: Arc<dyn Registry>,
    audit: Arc<dyn AuditLog>,
    programs: Arc<dyn SocketOwner>,
    authority: Arc<ArcSwap<Authority>>,
    dialer: Dialer,
    pack_reader: Option<Arc<dyn PackReader>>,
    spools: Spools,
    mirrors: Mirrors,
    /// Serves the tools, once it is there.
    tools: OnceLock<Arc<dyn ToolServer>>,
    names: Arc<Names>,
    listener_checks: Arc<ListenerChecks>,
    queries: DnsMetrics,
    numbers: TrafficMetrics,
    clock: Clock,
    ids: Ids,
    runtime: Handle,
    /// What outlives the connection it began on: connections that changed their protocol, and
    /// records that wait for a free slot.
    tasks: TaskTracker,
    sandboxes: SandboxTable,
}

/// The state of each sandbox.
type SandboxTable = Arc<Mutex<HashMap<SandboxId, Arc<SandboxState>>>>;

fn lock(
    table: &Mutex<HashMap<SandboxId, Arc<SandboxState>>>,
) -> MutexGuard<'_, HashMap<SandboxId, Arc<SandboxState>>> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What new settings need beside their rules, read and not yet in force.
pub struct PreparedServices {
    dialer: PreparedDialer,
    resolvers: Result<Vec<SocketAddr>, String>,
}

impl Services {
    /// Services without any sandbox yet. Call it in the runtime that shall do the work.
    pub fn new(parts: Parts) -> Arc<Self> {
        let clock = Clock::start();
        let sandboxes = SandboxTable::default();
        let (policy, known) = (Arc::clone(&parts.policy), Arc::clone(&sandboxes));
        let rules = Box::new(move |sandbox: Option<&SandboxId>| {
            let sandbox = sandbox.and_then(|id| lock(&known).get(id).map(Arc::clone));
            let base = policy.load();
            NamePolicy {
                snapshot: match &sandbox {
                    Some(sandbox) => sandbox.added.rules(base),
                    None => base,
                },
                grants: sandbox.map(|sandbox| Arc::clone(&sandbox.grants)),
                now: clock.tick(),
            }
        });
        let metrics = DnsMetrics::default();
        let questions = parts.questions.clone();
        let names = Names::new(rules, questions, Limits::default(), metrics.clone());
        names.follow(resolvers::read(&parts.policy.load().settings.egress.dns));
        Arc::new(Self {
            policy: parts.policy,
            questions: parts.questions,
            names: Arc::new(names),
            listener_checks: Arc::default(),
            queries: metrics,
            registry: parts.registry,
            audit: parts.audit,
            programs: parts.programs,
            authority: parts.authority,
            dialer: parts.dialer,
            pack_reader: parts.pack_reader,
            spools: Spools::new(&parts.spool),
            mirrors: parts.mirrors,
            tools: OnceLock::new(),
            numbers: TrafficMetrics::default(),
            clock,
            ids: Ids::new(rustls::crypto::aws_lc_rs::default_provider().secure_random),
            runtime: Handle::current(),
            tasks: TaskTracker::new(),
            sandboxes,
        })
    }

    /// The rules in force.
    pub fn policy(&self) -> &CurrentPolicy {
        &self.policy
    }

    /// Who answers questions.
    pub fn questions(&self) -> &Questions {
        &self.questions
    }

    /// The current rules for one sandbox, or those without additions.
    pub fn snapshot_for(&self, sandbox: Option<&SandboxState>) -> Arc<PolicySnapshot> {
        let base = self.policy.load();
        match sandbox {
            Some(sandbox) => sandbox.added.rules(base),
            None => base,
        }
    }

    /// Reads what new settings need beside their rules: certificates and resolvers, so it blocks.
    /// Nothing changes yet.
    pub fn prepare(settings: &Settings) -> Result<PreparedServices, BadRoots> {
        Ok(PreparedServices {
            dialer: Dialer::prepare(settings)?,
            resolvers: resolvers::read(&settings.egress.dns),
        })
    }

    /// Applies prepared settings, whose rules are in force already.
    pub fn apply(&self, prepared: PreparedServices) {
        self.dialer.apply(prepared.dialer);
        self.names.follow(prepared.resolvers);
    }

    /// Decides again about everything in flight, and ends what is not allowed any more. Returns
    /// how many requests that were. Evaluates policy bundles, so it blocks.
    pub fn recheck(&self) -> usize {
        let sandboxes = self.known();
        let ended = sandboxes
            .iter()
            .map(|sandbox| self.recheck_sandbox(sandbox));
        ended.sum()
    }

    /// Decides again about everything that one sandbox has in flight. Blocks.
    pub fn recheck_sandbox(&self, sandbox: &SandboxState) -> usize {
        let snapshot = self.snapshot_for(Some(sandbox));
        let row = self.registration(sandbox);
        let row = row.as_deref();
        sandbox.in_flight.recheck(|authorized| {
            let decided = self.decide_again(sandbox, &snapshot, row, authorized);
            decided.is_ok()
        })
    }

    /// Decides again about one request in flight, by the rules in force, on a thread that policy
    /// bundles may block.
    pub async fn recheck_entry(
        self: &Arc<Self>,
        sandbox: &Arc<SandboxState>,
        entry: InFlight,
    ) -> Result<InFlight, Denial> {
        let (services, sandbox) = (Arc::clone(self), Arc::clone(sandbox));
        let rechecking = move || {
            let snapshot = services.snapshot_for(Some(&sandbox));
            let row = services.registration(&sandbox);
            let authorized = entry.authorized();
            services.decide_again(&sandbox, &snapshot, row.as_deref(), authorized)?;
            Ok(entry)
        };
        let rechecked = tokio::task::spawn_blocking(rechecking).await;
        rechecked.unwrap_or_else(|error| {
            let denial = Denial::new(Reason::Internal, "recheck");
            Err(denial.because(error.to_string()))
        })
    }

    /// Why something in flight has to end.
    pub async fn why_revoked(
        self: &Arc<Self>,
        sandbox: &Arc<SandboxState>,
        entry: InFlight,
    ) -> Denial {
        match self.recheck_entry(sandbox, entry).await {
            Err(denial) => denial,
            // The rules would still allow it: the sandbox is gone, or they changed twice.
            Ok(_) => Denial::new(Reason::IdentityUnknown, "identity"),
        }
    }

    /// The registration of a sandbox, where it is known.
    fn registration(&self, sandbox: &SandboxState) -> Option<Arc<Registration>> {
        match self.registry.by_id(sandbox.id()) {
            Lookup::Found(row) => Some(row),
            Lookup::Unavailable | Lookup::Unknown | Lookup::NoPeer => None,
        }
    }

    fn decide_again(
        &self,
        sandbox: &SandboxState,
        snapshot: &PolicySnapshot,
        registration: Option<&Registration>,
        authorized: &Authorized,
    ) -> Result<(), Denial> {
        let none = Answers::default();
        let (subject, answers) = match authorized {
            Authorized::Request(request) => (
                Subject::Request(RequestFacts {
                    target: request.target.clone(),
                    tls: request.tls,
                    head: HeadFacts::Recorded(&request.recorded),
                    registration,
                }),
                &request.answers,
            ),
            Authorized::Passthrough(connection) => (
                Subject::Passthrough(PassthroughFacts {
                    sandbox: sandbox.id(),
                    host: &connection.host,
                    port: connection.port,
                    program: connection.program.as_deref(),
                    registration,
                    recorded: Some(&connection.recorded),
                }),
                &connection.answers,
            ),
            Authorized::Mirror(mirror) => (Subject::Mirror(MirrorFacts::Configured(mirror)), &none),
            // The task that waits decides anew.
            Authorized::Held => return Ok(()),
        };
        let cx = Cx {
            snapshot,
            answers,
            grants: Some(&sandbox.grants),
            now: self.clock.tick(),
        };
        let decided = decide(subject, Mode::Recheck, cx).now();
        match &decided.verdict {
            // What is in flight cannot wait for an answer.
            Verdict::Ask(question) if self.questions.is_attended() => {
                let denial = question.refused(Reason::AskTimeout);
                Err(denial.saying(APPROVAL_ENDED))
            }
            _ => decided.refusal().map(drop),
        }
    }

    /// Who is registered.
    pub fn registry(&self) -> &Arc<dyn Registry> {
        &self.registry
    }

    /// Which program opened a connection.
    pub fn programs(&self) -> &Arc<dyn SocketOwner> {
        &self.programs
    }

    /// Where decisions are recorded.
    pub fn audit(&self) -> &Arc<dyn AuditLog> {
        &self.audit
    }

    /// The way out.
    pub fn dialer(&self) -> &Dialer {
        &self.dialer
    }

    /// Reads the objects of pushes.
    pub fn pack_reader(&self) -> Option<&Arc<dyn PackReader>> {
        self.pack_reader.as_ref()
    }

    /// Where bodies wait for their verdict.
    pub fn spools(&self) -> &Spools {
        &self.spools
    }

    /// Upstreams that are served as mirrors.
    pub fn mirrors(&self) -> &Mirrors {
        &self.mirrors
    }

    /// Answers DNS queries.
    pub fn names(&self) -> &Arc<Names> {
        &self.names
    }

    /// The checks of the listeners on shared networks.
    pub fn listener_checks(&self) -> &Arc<ListenerChecks> {
        &self.listener_checks
    }

    /// Makes the metrics of DNS and of requests visible in `registry`.
    pub fn register(&self, registry: &mut prometheus_client::registry::Registry) {
        self.numbers.register(registry);
        self.queries.register(registry);
    }

    /// From now on `tools` serves the tools at `palisade.internal`. The first one counts.
    pub fn serve_tools(&self, tools: Arc<dyn ToolServer>) {
        if self.tools.set(tools).is_err() {
            tracing::error!("somebody answers for the tools already");
        }
    }

    /// Serves the tools, if they are served.
    pub fn tools(&self) -> Option<&Arc<dyn ToolServer>> {
        self.tools.get()
    }

    /// Who signs.
    pub fn authority(&self) -> &Arc<ArcSwap<Authority>> {
        &self.authority
    }

    /// The metrics of requests.
    pub fn metrics(&self) -> &TrafficMetrics {
        &self.numbers
    }

    /// The time.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// A new id of a request.
    pub fn new_id(&self) -> RequestId {
        self.ids.next(self.clock.wall())
    }

    /// The state of a sandbox, made when it is asked for first.
    pub fn sandbox(&self, id: &SandboxId) -> Result<Arc<SandboxState>, LeafError> {
        let mut sandboxes = lock(&self.sandboxes);
        if let Some(sandbox) = sandboxes.get(id) {
            return Ok(Arc::clone(sandbox));
        }
        let state = SandboxState::new(id.clone(), Arc::clone(&self.authority))?;
        let sandbox = Arc::new(state);
        sandboxes.insert(id.clone(), Arc::clone(&sandbox));
        Ok(sandbox)
    }

    /// Forgets a sandbox, and ends what it has in flight.
    pub fn dismiss(&self, id: &SandboxId) {
        let sandbox = lock(&self.sandboxes).remove(id);
        if let Some(sandbox) = sandbox {
            sandbox.in_flight.end();
        }
        self.dialer.forget(id);
        self.names.forget(id);
    }

    /// Removes the state of sandboxes that are not registered any more, every five minutes.
    pub async fn prune_regularly(&self) {
        loop {
            tokio::time::sleep(PRUNE_EVERY).await;
            self.prune(self.clock.wall());
        }
    }

    /// Forgets those who are not registered any more.
    pub fn prune(&self, now: UnixMillis) {
        let live = |row: &Arc<Registration>| row.is_live(now);
        let gone = |id: &SandboxId| match self.registry.by_id(id) {
            Lookup::Found(row) => !live(&row),
            Lookup::Unknown => true,
            Lookup::Unavailable | Lookup::NoPeer => false,
        };
        let ids: Vec<SandboxId> = lock(&self.sandboxes).keys().cloned().collect();
        for id in ids.iter().filter(|id| gone(id)) {
            self.dismiss(id);
        }
        self.names.prune(gone);
    }

    /// A refusal that is not long ago, of any sandbox.
    pub fn explain(&self, id: RequestId) -> Option<(SandboxId, Explained)> {
        let sandboxes = self.known();
        let mut sandboxes = sandboxes.iter();
        sandboxes.find_map(|sandbox| Some((sandbox.id().clone(), sandbox.explain(id)?)))
    }

    /// Every sandbox that has a state.
    pub fn known(&self) -> Vec<Arc<SandboxState>> {
        lock(&self.sandboxes).values().cloned().collect()
    }

    /// Records an event. Where its sandbox's queue is full, a task waits for it, and holds the
    /// request's slot meanwhile: there are only so many.
    pub(crate) fn write(&self, event: Box<AuditEvent>, slot: Option<OwnedSemaphorePermit>) {
        if let Err(event) = self.audit.try_record(event) {
            let audit = Arc::clone(&self.audit);
            self.spawn(async move {
                audit.record(event).await;
                drop(slot);
            });
        }
    }

    /// Runs something that outlives the connection it began on.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn_on(work, &self.runtime);
    }

    /// Ends everything in flight, and returns when all of it is recorded. Call it when no
    /// connection is served any more.
    pub async fn finish(&self) {
        self.close();
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Ends everything in flight, and whatever comes later.
    pub fn close(&self) {
        for sandbox in self.known() {
            sandbox.in_flight.close();
        }
    }
}

impl std::fmt::Debug for Services {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Services").finish_non_exhaustive()
    }
}
