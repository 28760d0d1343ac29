//! The gate's traffic as a whole: what every connection needs, and what changes with the
//! settings.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use config::Settings;
use config::bundle::BadBundle;
use config::section::egress::{DomainRule, Unknown};
use config::section::policies;
use policy::allowlist::{Permit, Target};
use policy::audit::AuditEvent;
use policy::clock::UnixMillis;
use policy::github::GithubRules;
use policy::host::Host;
use policy::id::{RequestId, SandboxId};
use policy::identity::{Lookup, identify};
use policy::reason::Reason;
use policy::registration::Registration;
use policy::verdict::{Denial, RuleName, UNATTENDED};
use serde_json::Value;
use tokio::runtime::Handle;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::task::TaskTracker;

use crate::authority::Authority;
use crate::clock::Clock;
use crate::dialer::{BadRoots, Dialer, PreparedDialer};
use crate::dns::{self, DnsMetrics, Limits, Names};
use crate::git::spool::Spools;
use crate::github;
use crate::guest::{Explained, Guest};
use crate::ids::Ids;
use crate::leaf::LeafError;
use crate::listener_checks::ListenerChecks;
use crate::live::{Asked, Live};
use crate::mirror::Mirrors;
use crate::numbers::Numbers;
use crate::numbers::limits::LimitMetrics;
use crate::ports::{Ledger, Programs, PushJudge, Registry, ToolServer};
use crate::rego::Policies;
use crate::resolvers;

/// How often rate buckets, breakers and connections of unregistered sandboxes are removed. The
/// end of a registration removes them at once; this finds those that expired.
const PRUNE_EVERY: Duration = Duration::from_secs(5 * 60);

/// What the traffic is given.
pub struct Parts {
    /// The rules to begin with.
    pub rules: Rules,
    /// Who is registered.
    pub registry: Arc<dyn Registry>,
    /// Where decisions are written.
    pub ledger: Arc<dyn Ledger>,
    /// Which program opened a connection.
    pub programs: Arc<dyn Programs>,
    /// Who signs.
    pub authority: Arc<ArcSwap<Authority>>,
    /// The way out.
    pub dialer: Dialer,
    /// Who reads the objects of pushes. Without it, pushes that have to be read are refused.
    pub judge: Option<Arc<dyn PushJudge>>,
    /// Where pushes wait for their verdict.
    pub spool: PathBuf,
    /// Upstreams that are served as mirrors.
    pub mirrors: Mirrors,
}

/// The gate's traffic. Shared by every connection.
pub struct Traffic {
    rules: Arc<ArcSwap<Rules>>,
    registry: Arc<dyn Registry>,
    ledger: Arc<dyn Ledger>,
    programs: Arc<dyn Programs>,
    authority: Arc<ArcSwap<Authority>>,
    dialer: Dialer,
    judge: Option<Arc<dyn PushJudge>>,
    spools: Spools,
    mirrors: Mirrors,
    /// Who answers for tools, once somebody does.
    tools: OnceLock<Arc<dyn ToolServer>>,
    names: Arc<Names>,
    listener_checks: ListenerChecks,
    queries: DnsMetrics,
    numbers: Numbers,
    clock: Clock,
    ids: Ids,
    runtime: Handle,
    /// What outlives the connection it began on: conversations that changed their protocol,
    /// and records that wait for their place.
    tasks: TaskTracker,
    guests: Guests,
}

/// What is kept for each sandbox.
type Guests = Arc<Mutex<HashMap<SandboxId, Arc<Guest>>>>;

fn lock(
    guests: &Mutex<HashMap<SandboxId, Arc<Guest>>>,
) -> MutexGuard<'_, HashMap<SandboxId, Arc<Guest>>> {
    guests.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The rules that count for a guest while `base` counts for all.
fn rules_of(guest: Option<&Guest>, base: Arc<Rules>) -> Arc<Rules> {
    match guest {
        Some(guest) => guest.added.rules(base),
        None => base,
    }
}

/// What is worked out once per settings. A request keeps the one it began with.
#[derive(Debug)]
pub struct Rules {
    /// The settings.
    pub settings: Arc<Settings>,
    /// Whether some rule names programs, so that it is worth finding out which one asks.
    pub names_programs: bool,
    /// The rules for GitHub's API.
    pub github: GithubRules,
    /// The operator's own policies about requests.
    pub policies: Arc<Policies>,
    /// Who is asked about names, or why there is nobody.
    pub resolvers: Result<Vec<SocketAddr>, String>,
    /// The operator's own policies about pushes.
    pub pushes: Arc<Policies>,
}

/// New settings of the traffic, read and not yet in force.
pub struct PreparedTraffic {
    rules: Arc<Rules>,
    dialer: PreparedDialer,
}

/// Settings that cannot be put in force.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// Certificates.
    #[error(transparent)]
    Roots(#[from] BadRoots),
    /// A policy bundle.
    #[error(transparent)]
    Bundle(#[from] BadBundle),
}

impl Rules {
    /// Works out `settings`. Reads policy bundles and the system's resolvers, so it blocks.
    pub fn load(settings: Arc<Settings>) -> Result<Self, BadBundle> {
        let names_programs = settings
            .allowlist()
            .rules()
            .any(|rule| !rule.programs.is_empty());
        // Names of rules that do not exist were refused when the file was read.
        let github = GithubRules::new(&settings.egress.github.allow, settings.git.read_public);
        Ok(Self {
            github: github.unwrap_or_default(),
            resolvers: resolvers::read(&settings.egress.dns),
            policies: Arc::new(Policies::load(&settings, policies::REQUESTS)?),
            pushes: Arc::new(Policies::load(&settings, policies::PUSHES)?),
            settings,
            names_programs,
        })
    }

    /// The same rules for a sandbox that may reach `added`, too.
    pub(crate) fn allowing(&self, added: &[DomainRule]) -> Self {
        let names_programs = added.iter().any(|rule| !rule.programs.is_empty());
        Self {
            settings: Arc::new(self.settings.allowing(added)),
            names_programs: self.names_programs || names_programs,
            github: self.github.clone(),
            policies: Arc::clone(&self.policies),
            resolvers: self.resolvers.clone(),
            pushes: Arc::clone(&self.pushes),
        }
    }

    /// Decides about a request, as far as its head says.
    pub fn judge(&self, target: Target) -> Result<Permit, Denial> {
        let judged = self.settings.allowlist().judge(target);
        judged.map_err(|denial| self.or_ask(denial))
    }

    /// Decides about a connection of which nobody sees more than host, port and, where it is
    /// certain, program.
    pub fn judge_tunnel(
        &self,
        host: &Host,
        port: u16,
        program: Option<&str>,
    ) -> Result<RuleName, Denial> {
        let judged = self.settings.allowlist().judge_unread(host, port, program);
        judged
            .map(|rule| rule.name.clone())
            .map_err(|denial| self.or_ask(denial))
    }

    /// Whether TLS to `host` is passed on unread.
    pub fn passes_unread(&self, host: &Host) -> bool {
        let unread = &self.settings.egress.passthrough;
        unread.iter().any(|pattern| pattern.matches(host))
    }

    /// Where the operator wants to be asked about unknown hosts, and cannot be yet, the
    /// refusal says so.
    fn or_ask(&self, denial: Denial) -> Denial {
        let unknown = matches!(denial.reason, Reason::HostDenied | Reason::IpLiteral);
        if unknown && self.settings.egress.unknown == Unknown::Ask {
            let Denial { message, .. } = denial;
            return Denial::new(Reason::AskUnattended, "egress.unknown")
                .saying(format!("{message} {UNATTENDED}"));
        }
        denial
    }

    /// Whether what was allowed is allowed still.
    fn judge_again(&self, asked: &Asked) -> Result<(), Denial> {
        match asked {
            Asked::Request(target, judged) => {
                self.judge(target.as_ref().clone()).map(drop)?;
                if let Some(rule) = &judged.github {
                    github::judge_again(self, target, rule)?;
                }
                match &judged.policies {
                    Some(input) => self.ask_again(input),
                    None => Ok(()),
                }
            }
            Asked::Tunnel(host, port, program, judged) if self.passes_unread(host) => {
                self.judge_tunnel(host, *port, program.as_deref())?;
                self.ask_again(judged)
            }
            Asked::Mirror(mirror) if self.settings.git.mirrors.contains(mirror) => Ok(()),
            Asked::Mirror(_) => Err(Denial::new(Reason::GitRepo, "git.mirrors")),
            Asked::Tunnel(..) => Err(Denial::new(Reason::HostDenied, "egress.passthrough")),
        }
    }

    /// Whether the operator's policies allow still what they were told of.
    fn ask_again(&self, input: &Value) -> Result<(), Denial> {
        if self.policies.allows(input) {
            Ok(())
        } else {
            Err(Denial::new(Reason::RegoDenied, "rego"))
        }
    }
}

impl Traffic {
    /// Traffic that nobody has yet. Call it in the runtime that shall do the work.
    pub fn new(parts: Parts) -> Arc<Self> {
        let resolvers = parts.rules.resolvers.clone();
        let rules = Arc::new(ArcSwap::from_pointee(parts.rules));
        let guests = Guests::default();
        let (now, known) = (Arc::clone(&rules), Arc::clone(&guests));
        let settings = Box::new(move |sandbox: Option<&SandboxId>| {
            let guest = sandbox.and_then(|id| lock(&known).get(id).map(Arc::clone));
            Arc::clone(&rules_of(guest.as_deref(), now.load_full()).settings)
        });
        let metrics = DnsMetrics::default();
        let names = Names::new(settings, Limits::default(), metrics.clone());
        names.follow(resolvers);
        Arc::new(Self {
            rules,
            names: Arc::new(names),
            listener_checks: ListenerChecks::default(),
            queries: metrics,
            registry: parts.registry,
            ledger: parts.ledger,
            programs: parts.programs,
            authority: parts.authority,
            dialer: parts.dialer,
            judge: parts.judge,
            spools: Spools::new(&parts.spool),
            mirrors: parts.mirrors,
            tools: OnceLock::new(),
            numbers: Numbers::default(),
            clock: Clock::start(),
            ids: Ids::new(rustls::crypto::aws_lc_rs::default_provider().secure_random),
            runtime: Handle::current(),
            tasks: TaskTracker::new(),
            guests,
        })
    }

    /// The rules of now.
    pub fn rules(&self) -> Arc<Rules> {
        self.rules.load_full()
    }

    /// The current rules for one sandbox, or those without additions.
    pub fn rules_for(&self, guest: Option<&Guest>) -> Arc<Rules> {
        rules_of(guest, self.rules())
    }

    /// Reads what new settings need, for [`Traffic::apply`]: certificates and bundles, so it
    /// blocks. Nothing changes yet.
    pub fn prepare(settings: Arc<Settings>) -> Result<PreparedTraffic, Refused> {
        let dialer = Dialer::prepare(&settings)?;
        let rules = Arc::new(Rules::load(settings)?);
        Ok(PreparedTraffic { rules, dialer })
    }

    /// Puts new settings in force, and ends what they do not allow any more. Returns how many
    /// conversations that were. Evaluates the operator's policies, so it blocks.
    pub fn apply(&self, PreparedTraffic { rules, dialer }: PreparedTraffic) -> usize {
        self.dialer.apply(dialer);
        self.names.follow(rules.resolvers.clone());
        self.rules.store(Arc::clone(&rules));
        let guests: Vec<Arc<Guest>> = self.guests().values().cloned().collect();
        let ended = guests.iter().map(|guest| {
            let rules = self.rules_for(Some(guest));
            let still = |asked: &Asked| rules.judge_again(asked).is_ok();
            guest.underway.judge_again(still)
        });
        ended.sum()
    }

    /// [`Traffic::prepare`] and [`Traffic::apply`] in one: where the settings cannot be used,
    /// nothing changes.
    pub fn reload(&self, settings: Arc<Settings>) -> Result<usize, Refused> {
        Ok(self.apply(Self::prepare(settings)?))
    }

    /// Notes that what `rules` allowed is under way. It may have been held back since, by
    /// its own body, and what a reload or a removal ends is what they find under way: so it
    /// is looked at once more, now that it can be found.
    pub fn enter(&self, guest: &Guest, rules: &Rules, asked: Asked) -> Result<Live, Denial> {
        let live = guest.underway.enter(asked);
        let now = self.rules_for(Some(guest));
        if !std::ptr::eq(Arc::as_ptr(&now), rules) {
            now.judge_again(live.asked())?;
            // What was read of its body is not there any more to be judged again.
            if let Asked::Request(_, judged) = live.asked()
                && judged.github.is_some()
                && now.github != rules.github
            {
                return Err(github::changed());
            }
        }
        // By the function of the first stage, so that the refusal reads the same.
        let _identity = identify(self.registry.by_id(guest.id()), None, self.clock.wall())?;
        Ok(live)
    }

    /// Why what was under way has to end.
    pub fn why_revoked(&self, guest: &Guest, live: &Live) -> Denial {
        match self.rules_for(Some(guest)).judge_again(live.asked()) {
            Err(denial) => denial,
            // The rules would still allow it: the sandbox is gone, or they changed twice.
            Ok(()) => Denial::new(Reason::IdentityUnknown, "identity"),
        }
    }

    /// Who is registered.
    pub fn registry(&self) -> &dyn Registry {
        self.registry.as_ref()
    }

    /// Which program opened a connection.
    pub fn programs(&self) -> &Arc<dyn Programs> {
        &self.programs
    }

    /// Where decisions are written.
    pub fn ledger(&self) -> &dyn Ledger {
        self.ledger.as_ref()
    }

    /// The way out.
    pub fn dialer(&self) -> &Dialer {
        &self.dialer
    }

    /// Who reads the objects of pushes.
    pub fn judge(&self) -> Option<&Arc<dyn PushJudge>> {
        self.judge.as_ref()
    }

    /// Where pushes wait for their verdict.
    pub fn spools(&self) -> &Spools {
        &self.spools
    }

    /// Upstreams that are served as mirrors.
    pub fn mirrors(&self) -> &Mirrors {
        &self.mirrors
    }

    /// Who answers queries.
    pub fn names(&self) -> &Arc<Names> {
        &self.names
    }

    /// The checks of the listeners on shared networks.
    pub fn listener_checks(&self) -> &ListenerChecks {
        &self.listener_checks
    }

    /// Makes every number visible in `registry`.
    pub fn register(self: &Arc<Self>, registry: &mut prometheus_client::registry::Registry) {
        self.numbers.register(registry);
        self.queries.register(registry);
        registry.register_collector(Box::new(LimitMetrics(Arc::clone(self))));
    }

    /// From now on `tools` answers for the tools at `palisade.internal`. The first one counts.
    pub fn serve_tools(&self, tools: Arc<dyn ToolServer>) {
        if self.tools.set(tools).is_err() {
            tracing::error!("somebody answers for the tools already");
        }
    }

    /// Who answers for the tools, if anybody does.
    pub fn tools(&self) -> Option<&Arc<dyn ToolServer>> {
        self.tools.get()
    }

    /// Who signs.
    pub fn authority(&self) -> &Arc<ArcSwap<Authority>> {
        &self.authority
    }

    /// The numbers.
    pub fn numbers(&self) -> &Numbers {
        &self.numbers
    }

    /// The time.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// A name for a request.
    pub fn new_id(&self) -> RequestId {
        self.ids.next(self.clock.wall())
    }

    /// What is kept for a sandbox; made when it is asked for first.
    pub fn guest(&self, id: &SandboxId) -> Result<Arc<Guest>, LeafError> {
        let mut guests = self.guests();
        if let Some(guest) = guests.get(id) {
            return Ok(Arc::clone(guest));
        }
        let guest = Arc::new(Guest::new(id.clone(), Arc::clone(&self.authority))?);
        guests.insert(id.clone(), Arc::clone(&guest));
        Ok(guest)
    }

    /// Forgets a sandbox, and ends what it has under way.
    pub fn dismiss(&self, id: &SandboxId) {
        if let Some(guest) = self.guests().remove(id) {
            guest.underway.end();
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
        let ids: Vec<SandboxId> = self.guests().keys().cloned().collect();
        for id in ids.iter().filter(|id| gone(id)) {
            self.dismiss(id);
        }
        self.names.prune(gone);
    }

    /// A refusal that is not long ago, of whoever it was.
    pub fn explain(&self, id: RequestId) -> Option<(SandboxId, Explained)> {
        let guests: Vec<Arc<Guest>> = self.guests().values().cloned().collect();
        guests
            .iter()
            .find_map(|guest| Some((guest.id().clone(), guest.explain(id)?)))
    }

    /// Every sandbox there is something kept for.
    pub fn known(&self) -> Vec<Arc<Guest>> {
        self.guests().values().cloned().collect()
    }

    /// Writes a record. Where its sandbox's queue is full, a task waits for it, and holds
    /// the request's place meanwhile: there are only so many.
    pub(crate) fn write(&self, event: Box<AuditEvent>, place: Option<OwnedSemaphorePermit>) {
        if let Err(event) = self.ledger.try_record(event) {
            let ledger = Arc::clone(&self.ledger);
            self.spawn(async move {
                ledger.record(event).await;
                drop(place);
            });
        }
    }

    /// Does something that outlives the connection it began on.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn_on(work, &self.runtime);
    }

    /// Ends everything that is under way, and returns when all of it is written down. Call
    /// it when nobody is served any more.
    pub async fn finish(&self) {
        for guest in self.known() {
            guest.underway.end();
        }
        self.tasks.close();
        self.tasks.wait().await;
    }

    fn guests(&self) -> MutexGuard<'_, HashMap<SandboxId, Arc<Guest>>> {
        lock(&self.guests)
    }
}

impl std::fmt::Debug for Traffic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Traffic").finish_non_exhaustive()
    }
}

impl dns::Registry for Traffic {
    fn who(&self, ip: IpAddr) -> Lookup {
        self.registry.by_ip(ip)
    }

    fn is_listener_check(&self, peer: SocketAddr) -> bool {
        self.listener_checks.is_check(peer)
    }
}

#[async_trait::async_trait]
impl dns::Journal for Traffic {
    fn try_record(&self, event: Box<AuditEvent>) -> Result<(), Box<AuditEvent>> {
        self.ledger.try_record(event)
    }

    async fn record(&self, event: Box<AuditEvent>) {
        self.ledger.record(event).await;
    }
}
