//! Services that all connections share: policy, registry, dialer, DNS, metrics, clock, and the
//! table of sandboxes.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use config::Settings;
use credentials::service::CredentialService;
use decide::decision::{Cx, decide};
use decide::hold::Questions;
use decide::snapshot::{CurrentPolicy, PolicySnapshot};
use decide::subject::{HeadFacts, MirrorFacts, Mode, PassthroughFacts, RequestFacts, Subject};
use policy::answer::ApprovalAnswers;
use policy::audit::AuditEvent;
use policy::clock::UnixMillis;
use policy::id::{RequestId, SandboxId};
use policy::identity::RegistrationLookup;
use policy::ports::{AuditReader, PackReader, Registry, SocketOwner, ToolServer};
use policy::reason::Reason;
use policy::registration::Registration;
use policy::verdict::{Denial, Verdict};
use tokio::runtime::Handle;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::task::TaskTracker;

use crate::authority::CertificateAuthority;
use crate::clock::Clock;
use crate::dialer::{BadRoots, Dialer, PreparedDialer};
use crate::dns::{DnsLimits, DnsMetrics, NamePolicy, NameServer};
use crate::ids::RequestIds;
use crate::in_flight::{Authorized, InFlight};
use crate::leaf::LeafError;
use crate::listener_checks::ListenerChecks;
use crate::metrics::TrafficMetrics;
use crate::mirror::Mirrors;
use crate::resolvers;
use crate::sandbox_state::{RecentRefusal, SandboxState};
use crate::spool::Spools;

/// How often rate buckets, breakers and connections of unregistered sandboxes are removed. The
/// end of a registration removes them at once; this finds those that expired.
const PRUNE_EVERY: Duration = Duration::from_secs(5 * 60);

/// Message of the refusal of a request in flight that would need an approval now.
const APPROVAL_ENDED: &str =
    "The operator's approval of this request has expired, or the rules now require one.";

/// The dependencies of [`Services`].
pub struct ServiceDependencies {
    /// The rules in force.
    pub policy: Arc<CurrentPolicy>,
    /// Approval requests to the operator.
    pub questions: Questions,
    /// The registered sandboxes.
    pub registry: Arc<dyn Registry>,
    /// The audit log.
    pub audit: Arc<dyn AuditReader>,
    /// Looks up the program that opened a connection.
    pub socket_owners: Arc<dyn SocketOwner>,
    /// The certificate authority.
    pub authority: Arc<ArcSwap<CertificateAuthority>>,
    /// Opens all upstream connections.
    pub dialer: Dialer,
    /// The values and placeholders of credentials.
    pub credentials: Arc<CredentialService>,
    /// Reads the objects of pushes. Without a reader, pushes that must be read are refused.
    pub pack_reader: Option<Arc<dyn PackReader>>,
    /// The directory for bodies that wait for a verdict.
    pub spool: PathBuf,
    /// Git upstreams that are served from mirrors.
    pub mirrors: Mirrors,
}

/// The services that all connections share.
pub struct Services {
    policy: Arc<CurrentPolicy>,
    questions: Questions,
    registry: Arc<dyn Registry>,
    audit: Arc<dyn AuditReader>,
    programs: Arc<dyn SocketOwner>,
    authority: Arc<ArcSwap<CertificateAuthority>>,
    dialer: Dialer,
    credentials: Arc<CredentialService>,
    pack_reader: Option<Arc<dyn PackReader>>,
    spools: Spools,
    mirrors: Mirrors,
    /// The tool server, once it is set.
    tools: OnceLock<Arc<dyn ToolServer>>,
    name_server: Arc<NameServer>,
    listener_checks: Arc<ListenerChecks>,
    dns_metrics: DnsMetrics,
    traffic_metrics: TrafficMetrics,
    clock: Clock,
    ids: RequestIds,
    runtime: Handle,
    /// Tasks that outlive their connection: upgraded connections, and audit records that wait for a
    /// full queue.
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

/// The resources of new settings beside their rules, loaded and not yet in use.
pub struct PreparedServices {
    dialer: PreparedDialer,
    resolvers: Result<Vec<SocketAddr>, String>,
}

impl Services {
    /// Creates the services without sandboxes. Must be called in the runtime that runs the tasks.
    pub fn new(parts: ServiceDependencies) -> Arc<Self> {
        let clock = Clock::start();
        let sandboxes = SandboxTable::default();
        let (policy, table) = (Arc::clone(&parts.policy), Arc::clone(&sandboxes));
        let rules = Box::new(move |sandbox: Option<&SandboxId>| {
            let sandbox = sandbox.and_then(|id| lock(&table).get(id).map(Arc::clone));
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
        let names = NameServer::new(rules, questions, DnsLimits::default(), metrics.clone());
        names.set_resolvers(resolvers::read(&parts.policy.load().settings.egress.dns));
        Arc::new(Self {
            policy: parts.policy,
            questions: parts.questions,
            name_server: Arc::new(names),
            listener_checks: Arc::default(),
            dns_metrics: metrics,
            registry: parts.registry,
            audit: parts.audit,
            programs: parts.socket_owners,
            authority: parts.authority,
            dialer: parts.dialer,
            credentials: parts.credentials,
            pack_reader: parts.pack_reader,
            spools: Spools::new(&parts.spool),
            mirrors: parts.mirrors,
            tools: OnceLock::new(),
            traffic_metrics: TrafficMetrics::default(),
            clock,
            ids: RequestIds::new(rustls::crypto::aws_lc_rs::default_provider().secure_random),
            runtime: Handle::current(),
            tasks: TaskTracker::new(),
            sandboxes,
        })
    }

    /// The rules in force.
    pub fn policy(&self) -> &CurrentPolicy {
        &self.policy
    }

    /// The values and placeholders of credentials.
    pub fn credentials(&self) -> &Arc<CredentialService> {
        &self.credentials
    }

    /// Approval requests to the operator.
    pub fn questions(&self) -> &Questions {
        &self.questions
    }

    /// The rules in force for one sandbox, or without a sandbox's additions.
    pub fn snapshot_for(&self, sandbox: Option<&SandboxState>) -> Arc<PolicySnapshot> {
        let base = self.policy.load();
        match sandbox {
            Some(sandbox) => sandbox.added.rules(base),
            None => base,
        }
    }

    /// Loads the certificates and resolvers of new settings, without applying them. Blocks.
    pub fn prepare(settings: &Settings) -> Result<PreparedServices, BadRoots> {
        Ok(PreparedServices {
            dialer: Dialer::prepare(settings)?,
            resolvers: resolvers::read(&settings.egress.dns),
        })
    }

    /// Applies prepared settings, whose rules are in force already.
    pub fn apply(&self, prepared: PreparedServices) {
        self.dialer.apply(prepared.dialer);
        self.name_server.set_resolvers(prepared.resolvers);
    }

    /// Decides again about every request in flight, and ends those that are not allowed any more.
    /// Returns the number of ended requests. Blocks, because it evaluates policy bundles.
    pub fn recheck(&self) -> usize {
        let sandboxes = self.sandboxes_with_state();
        let ended = sandboxes
            .iter()
            .map(|sandbox| self.recheck_sandbox(sandbox));
        ended.sum()
    }

    /// Decides again about the requests in flight of one sandbox. Blocks.
    pub fn recheck_sandbox(&self, sandbox: &SandboxState) -> usize {
        let snapshot = self.snapshot_for(Some(sandbox));
        let row = self.registration(sandbox);
        let row = row.as_deref();
        sandbox.in_flight.recheck(|authorized| {
            let decided = self.decide_again(sandbox, &snapshot, row, authorized);
            decided.is_ok()
        })
    }

    /// Decides again about one request in flight by the rules in force, on a thread for blocking
    /// work, because policy bundles block.
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
            Err(denial.with_evidence(error.to_string()))
        })
    }

    /// The reason why a request in flight was revoked.
    pub async fn revocation_reason(
        self: &Arc<Self>,
        sandbox: &Arc<SandboxState>,
        entry: InFlight,
    ) -> Denial {
        match self.recheck_entry(sandbox, entry).await {
            Err(denial) => denial,
            // The rules allow it again: its sandbox was removed, or the rules changed twice.
            Ok(_) => Denial::new(Reason::IdentityUnknown, "identity"),
        }
    }

    /// The registration of a sandbox, if it exists.
    fn registration(&self, sandbox: &SandboxState) -> Option<Arc<Registration>> {
        match self.registry.by_id(sandbox.id()) {
            RegistrationLookup::Found(row) => Some(row),
            RegistrationLookup::Unavailable
            | RegistrationLookup::Unknown
            | RegistrationLookup::NoPeer => None,
        }
    }

    fn decide_again(
        &self,
        sandbox: &SandboxState,
        snapshot: &PolicySnapshot,
        registration: Option<&Registration>,
        authorized: &Authorized,
    ) -> Result<(), Denial> {
        let none = ApprovalAnswers::default();
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
            // The waiting task itself decides again.
            Authorized::Held => return Ok(()),
        };
        let cx = Cx {
            snapshot,
            answers,
            grants: Some(&sandbox.grants),
            now: self.clock.tick(),
        };
        let decided = decide(subject, Mode::Recheck, cx).into_outcome();
        match &decided.verdict {
            // A request in flight cannot wait for an approval.
            Verdict::Ask(question) if self.questions.is_attended() => {
                let denial = question.denial(Reason::AskTimeout);
                Err(denial.with_message(APPROVAL_ENDED))
            }
            _ => decided.refusal().map(drop),
        }
    }

    /// The registered sandboxes.
    pub fn registry(&self) -> &Arc<dyn Registry> {
        &self.registry
    }

    /// Looks up the program that opened a connection.
    pub fn socket_owners(&self) -> &Arc<dyn SocketOwner> {
        &self.programs
    }

    /// The audit log.
    pub fn audit(&self) -> &Arc<dyn AuditReader> {
        &self.audit
    }

    /// Opens all upstream connections.
    pub fn dialer(&self) -> &Dialer {
        &self.dialer
    }

    /// Reads the objects of pushes, if a reader is available.
    pub fn pack_reader(&self) -> Option<&Arc<dyn PackReader>> {
        self.pack_reader.as_ref()
    }

    /// The spool for bodies that wait for a verdict.
    pub fn spools(&self) -> &Spools {
        &self.spools
    }

    /// Git upstreams that are served from mirrors.
    pub fn mirrors(&self) -> &Mirrors {
        &self.mirrors
    }

    /// The DNS server.
    pub fn name_server(&self) -> &Arc<NameServer> {
        &self.name_server
    }

    /// The checks of the listeners on shared networks.
    pub fn listener_checks(&self) -> &Arc<ListenerChecks> {
        &self.listener_checks
    }

    /// Registers the metrics of DNS and of requests in `registry`.
    pub fn register(&self, registry: &mut prometheus_client::registry::Registry) {
        self.traffic_metrics.register(registry);
        self.dns_metrics.register(registry);
    }

    /// Sets the tool server at `palisade.internal`. Only the first call has an effect.
    pub fn serve_tools(&self, tools: Arc<dyn ToolServer>) {
        if self.tools.set(tools).is_err() {
            tracing::error!("tool server is already set");
        }
    }

    /// The tool server, if it is set.
    pub fn tools(&self) -> Option<&Arc<dyn ToolServer>> {
        self.tools.get()
    }

    /// The certificate authority.
    pub fn authority(&self) -> &Arc<ArcSwap<CertificateAuthority>> {
        &self.authority
    }

    /// The metrics of requests.
    pub fn metrics(&self) -> &TrafficMetrics {
        &self.traffic_metrics
    }

    /// The clock.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// Generates a request id.
    pub fn new_id(&self) -> RequestId {
        self.ids.next(self.clock.wall())
    }

    /// The state of a sandbox, which is created at the first call.
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

    /// Removes the state of a sandbox, and ends its requests in flight.
    pub fn remove_sandbox(&self, id: &SandboxId) {
        let sandbox = lock(&self.sandboxes).remove(id);
        if let Some(sandbox) = sandbox {
            sandbox.in_flight.end();
        }
        self.dialer.forget(id);
        self.name_server.forget(id);
    }

    /// Removes the state of sandboxes that are not registered any more, every five minutes.
    pub async fn prune_regularly(&self) {
        loop {
            tokio::time::sleep(PRUNE_EVERY).await;
            self.prune(self.clock.wall());
        }
    }

    /// Removes the state of sandboxes that are not registered any more.
    pub fn prune(&self, now: UnixMillis) {
        let live = |row: &Arc<Registration>| row.is_live(now);
        let gone = |id: &SandboxId| match self.registry.by_id(id) {
            RegistrationLookup::Found(row) => !live(&row),
            RegistrationLookup::Unknown => true,
            RegistrationLookup::Unavailable | RegistrationLookup::NoPeer => false,
        };
        let ids: Vec<SandboxId> = lock(&self.sandboxes).keys().cloned().collect();
        for id in ids.iter().filter(|id| gone(id)) {
            self.remove_sandbox(id);
        }
        self.name_server.prune(gone);
    }

    /// Returns a recent refusal of any sandbox.
    pub fn explain(&self, id: RequestId) -> Option<(SandboxId, RecentRefusal)> {
        let sandboxes = self.sandboxes_with_state();
        let mut sandboxes = sandboxes.iter();
        sandboxes.find_map(|sandbox| Some((sandbox.id().clone(), sandbox.explain(id)?)))
    }

    /// Every sandbox that has a state.
    pub fn sandboxes_with_state(&self) -> Vec<Arc<SandboxState>> {
        lock(&self.sandboxes).values().cloned().collect()
    }

    /// Records an event. If the sandbox's queue is full, a task waits, and holds the request's slot
    /// meanwhile, which limits the number of such tasks.
    pub(crate) fn write(&self, event: Box<AuditEvent>, slot: Option<OwnedSemaphorePermit>) {
        if let Err(event) = self.audit.try_record(event) {
            let audit = Arc::clone(&self.audit);
            self.spawn(async move {
                audit.record(event).await;
                drop(slot);
            });
        }
    }

    /// Spawns a task that may outlive its connection.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn_on(work, &self.runtime);
    }

    /// Ends every request in flight, and returns when all are recorded. Call it after the last
    /// connection has ended.
    pub async fn finish(&self) {
        self.close();
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Ends every request in flight, and every later one.
    pub fn close(&self) {
        for sandbox in self.sandboxes_with_state() {
            sandbox.in_flight.close();
        }
    }
}

impl std::fmt::Debug for Services {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Services").finish_non_exhaustive()
    }
}
