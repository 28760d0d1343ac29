//! The way of a request through the gate.
//!
//! [`pass`] is that way, in its order. Each stage takes what only the one before it can
//! give, so that none can be left out, and gives the request on or refuses it. The scanner
//! and credentials each have their place in it and come with their own parts of the
//! program; until then nothing here claims to have checked for them.

use std::sync::Arc;

use http::header::EXPECT;
use http::request::Parts;
use http::{Response, StatusCode};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use policy::allowlist::Target;
use policy::audit::Kind;
use policy::breaker::Outcome;
use policy::bucket::Pass;
use policy::clock::Tick;
use policy::endpoint::Method;
use policy::github::GithubRules;
use policy::host::{Host, HostPattern};
use policy::id::SandboxId;
use policy::identity::{Identity, Lookup, identify};
use policy::override_header::OverrideHeader;
use policy::proof::{Admitted, Clearance, Cleared, Guard, Identified, Permitted};
use policy::reason::Reason;
use policy::verdict::{Denial, Detail};
use tokio::sync::OwnedSemaphorePermit;

use crate::body::Content;
use crate::flow;
use crate::forward::{self, Reply};
use crate::framing::Faults;
use crate::git::{self, answer::Aftermath};
use crate::github;
use crate::guest::Guest;
use crate::headers::{CONTAINER_ID, find_override};
use crate::internal;
use crate::leftover::Leftover;
use crate::live::Judged;
use crate::mirror::serve::{self, Visitor};
use crate::refusal::Refusal;
use crate::rego;
use crate::request::{self, Destination, Opening};
use crate::traffic::{Rules, Traffic};
use crate::trail::{Stage, Trail};
use crate::upstream;

/// How a connection says who it is.
#[derive(Clone, Debug)]
pub enum Source {
    /// By the listener it came through.
    Listener(Arc<Guest>),
    /// By its address, which may be nobody's.
    Address(Option<std::net::IpAddr>, Option<Arc<Guest>>),
}

impl Source {
    /// What is kept for whoever it is.
    pub fn guest(&self) -> Option<&Arc<Guest>> {
        match self {
            Source::Listener(guest) => Some(guest),
            Source::Address(_, guest) => guest.as_ref(),
        }
    }

    /// What the registry knows of it now. Who it is was settled when the connection was
    /// accepted: an address that changed hands since is nobody.
    pub fn look_up(&self, traffic: &Traffic) -> Lookup {
        match self {
            Source::Listener(guest) => traffic.registry().by_id(guest.id()),
            Source::Address(None, _) => Lookup::NoPeer,
            Source::Address(Some(ip), guest) => match (traffic.registry().by_ip(*ip), guest) {
                (Lookup::Found(row), Some(guest)) if row.id == *guest.id() => Lookup::Found(row),
                (Lookup::Found(_), _) => Lookup::Unknown,
                (other, _) => other,
            },
        }
    }
}

/// A request as it moves from stage to stage.
pub struct Message {
    /// Everything but the body. In a box, because it moves often.
    pub head: Box<Parts>,
    /// The body.
    pub body: Content,
    /// Where it goes.
    pub destination: Destination,
    /// What becomes of the connection if the protocol changes, and who has to know.
    pub upgrade: Option<(OnUpgrade, Option<Handover>)>,
    /// Who allowed it beyond the allowlist.
    pub judged: Judged,
    /// Whether it goes as nobody's: no credential may be added to it.
    pub anonymous: bool,
}

/// Lets the guard of an HTTP/1 connection know that what follows is no message.
#[derive(Clone, Debug)]
pub struct Handover {
    faults: Faults,
    ordinal: u64,
}

impl Handover {
    /// For the request of that number.
    pub fn new(faults: &Faults, ordinal: u64) -> Self {
        Self {
            faults: faults.clone(),
            ordinal,
        }
    }

    /// The connection was handed over.
    pub fn done(&self) {
        self.faults.upgrade(self.ordinal);
    }
}

/// Answers one request. Whatever happens is written down, once.
pub async fn answer(
    traffic: &Arc<Traffic>,
    source: &Source,
    opening: &Opening,
    head: Box<Parts>,
    body: Incoming,
) -> Response<Content> {
    let body = leftover(&head, body);
    let (rules, mut trail) = begin(traffic, source, opening).await;
    trail.event.method = Some(beginning(head.method.as_str(), 32));
    match pass(traffic, source, opening, &rules, head, body, &mut trail).await {
        Ok(Reply::Ours(response)) => {
            trail.answered(response.status());
            response
        }
        Ok(Reply::Theirs(response, live)) => {
            trail.answered(response.status());
            let patience = rules.settings.egress.timeouts.idle;
            response.map(|body| flow::receiving(body, trail, live, patience))
        }
        Ok(Reply::Changed(response, live)) => {
            trail.answered(response.status());
            let patience = rules.settings.egress.timeouts.idle;
            response.map(|body| flow::receiving(body, trail, live, patience))
        }
        Ok(Reply::Upgraded(upgrade)) => {
            trail.answered(StatusCode::SWITCHING_PROTOCOLS);
            upgrade.begin(traffic, trail, rules.settings.egress.timeouts.idle)
        }
        Err(refusal) => refuse(source, trail, &refusal),
    }
}

/// Answers a message that never became a request.
pub async fn answer_fault(
    traffic: &Arc<Traffic>,
    source: &Source,
    opening: &Opening,
    denial: Denial,
) -> Response<Content> {
    let (_, trail) = begin(traffic, source, opening).await;
    refuse(source, trail, &Refusal::new(Stage::Request, denial))
}

/// Decides who is asking for a tunnel, and whether it is worth opening one.
pub async fn judge_tunnel(
    traffic: &Arc<Traffic>,
    source: &Source,
    opening: &Opening,
    head: &Parts,
    judge: impl FnOnce(&Rules) -> Result<(), Denial>,
) -> Result<(), Response<Content>> {
    let (rules, mut trail) = begin(traffic, source, opening).await;
    trail.event.method = Some("CONNECT".to_owned());
    trail.event.host = head
        .uri
        .authority()
        .map(|authority| beginning(authority.as_str(), 256));
    let judged = identify_sender(traffic, source, head)
        .and_then(|_| judge(&rules).map_err(|denial| Refusal::new(Stage::Policy, denial)));
    match judged {
        Ok(()) => {
            trail.nothing_to_say();
            Ok(())
        }
        Err(refusal) => Err(refuse(source, trail, &refusal)),
    }
}

/// What becomes of a body that is not wanted. Who waits for a word to go on has sent nothing:
/// to read would be that word. HTTP/2 has a word to stop, after which curl (as of 7.88) does
/// not look at the answer.
fn leftover(head: &Parts, body: Incoming) -> Leftover {
    if head.headers.contains_key(EXPECT) {
        Leftover::let_go(body)
    } else {
        Leftover::drained(body)
    }
}

/// As much of what a client wrote as a record needs.
fn beginning(text: &str, most: usize) -> String {
    let end = text.floor_char_boundary(most);
    text.get(..end).unwrap_or_default().to_owned()
}

/// A place for a record, which the sandbox waits for if it has too many under way.
pub async fn place(guest: Option<&Arc<Guest>>) -> Option<OwnedSemaphorePermit> {
    // The semaphore is never closed.
    Arc::clone(&guest?.requests).acquire_owned().await.ok()
}

async fn begin(traffic: &Arc<Traffic>, source: &Source, opening: &Opening) -> (Arc<Rules>, Trail) {
    let guest = source.guest();
    let place = place(guest).await;
    let mut trail = Trail::begin(traffic, guest, Kind::Http, place);
    trail.came_for(opening);
    (traffic.rules_for(guest.map(Arc::as_ref)), trail)
}

fn refuse(source: &Source, mut trail: Trail, refusal: &Refusal) -> Response<Content> {
    trail.refused(refusal.stage, &refusal.denial);
    let response = refusal.answer(source.guest().map(|guest| guest.id()), trail.id);
    trail.answered(response.status());
    response
}

/// The pipeline.
async fn pass(
    traffic: &Arc<Traffic>,
    source: &Source,
    opening: &Opening,
    rules: &Arc<Rules>,
    mut head: Box<Parts>,
    body: Leftover,
    trail: &mut Trail,
) -> Result<Reply, Refusal> {
    // 1. Who is asking?
    let identity = identify_sender(traffic, source, &head)?;
    let guest = source.guest().ok_or_else(nobody)?;
    trail.passed(Stage::Identity);

    // What is asked for, where every place that says so agrees.
    let destination = opening
        .destination(&head)
        .map_err(|denial| Refusal::new(Stage::Request, denial))?;
    trail.event.host = Some(destination.host.to_string());
    trail.event.port = Some(destination.port);
    let target = read_target(&identity, &head, &destination)?;
    trail.event.path = Some(target.path.wire().to_owned());
    if destination.is_internal() && serve::is_for_mirror(&target) {
        trail.passed(Stage::Request);
        let visitor = Visitor {
            traffic,
            guest,
            rules,
            registration: identity.registration(),
            host: &target.host,
        };
        let patience = rules.settings.egress.timeouts.idle;
        let body = flow::sending(body, &trail.tally, patience);
        let answering = serve::answer(&visitor, &target, &head.headers, body, trail);
        return Box::pin(answering).await;
    }
    if destination.is_internal() {
        trail.passed(Stage::Request);
        // The gate's own answers cost work, records and log lines as well.
        let now = traffic.clock().tick();
        let _pass = take_token(guest, rules, &target.host, now)?;
        trail.passed(Stage::Rate);
    }
    if destination.is_internal()
        && internal::is_for_tools(&target)
        && let Some(tools) = traffic.tools()
    {
        let patience = rules.settings.egress.timeouts.idle;
        let body = flow::sending(body, &trail.tally, patience);
        let request = internal::for_tools(*head, body);
        return Ok(Reply::Ours(tools.answer(guest.id(), request).await));
    }
    if destination.is_internal() {
        let answering = Box::pin(internal::answer(traffic, guest, rules, &target));
        return Ok(Reply::Ours(answering.await));
    }
    let handover = head.extensions.remove::<Handover>();
    let upgrade = head.extensions.remove::<OnUpgrade>();
    let upgrade = upgrade.map(|upgrade| (upgrade, handover));
    let patience = rules.settings.egress.timeouts.idle;
    let message = Message {
        body: flow::sending(body, &trail.tally, patience),
        head,
        destination,
        upgrade,
        judged: Judged::default(),
        anonymous: false,
    };
    let request = Identified::new(message, identity);
    trail.passed(Stage::Request);

    // 2. and 3. Too fast, or an upstream that is left alone?
    let request = admit(traffic, guest, rules, &target.host, request, trail)?;

    // 4. Do the rules allow it?
    let request = permit(traffic, guest, rules, opening, request, target, trail).await?;
    trail.allowed(request.permit().rule());
    trail.passed(Stage::Policy);

    // 5. Git, and 6. the scanner here, say what they make of the content.
    let (request, aftermath) = inspect(traffic, guest, rules, request, trail).await?;

    // 7. Credentials are added here, and 8. it leaves.
    let leaving = forward::prepare(traffic, guest, rules, request)?;
    let reply = leaving.send().await;
    trail.passed(Stage::Forward);
    reply.map(|reply| aftermath.apply(reply))
}

fn identify_sender(traffic: &Traffic, source: &Source, head: &Parts) -> Result<Identity, Refusal> {
    let mut claims = head.headers.get_all(CONTAINER_ID).iter();
    // Bytes that are no text are no registered id either, and two claims are none.
    let claimed = match (claims.next(), claims.next()) {
        (None, _) => None,
        (Some(one), None) => Some(one.to_str().unwrap_or_default()),
        (Some(_), Some(_)) => Some(""),
    };
    identify_source(traffic, source, claimed)
}

/// Decides who is asking, now.
pub fn identify_source(
    traffic: &Traffic,
    source: &Source,
    claimed: Option<&str>,
) -> Result<Identity, Refusal> {
    let lookup = source.look_up(traffic);
    let row = match &lookup {
        Lookup::Found(row) => Some(Arc::clone(row)),
        Lookup::Unavailable | Lookup::NoPeer | Lookup::Unknown => None,
    };
    identify(lookup, claimed, traffic.clock().wall()).map_err(|denial| {
        if let (Reason::IdentityExpired, Some(row)) = (denial.reason, row) {
            traffic.registry().expired(&row.id);
        }
        Refusal::new(Stage::Identity, denial)
    })
}

/// A source without a guest was refused as unknown before it gets here.
fn nobody() -> Refusal {
    let denial = Denial::new(Reason::IdentityUnknown, "identity");
    Refusal::new(Stage::Identity, denial)
}

fn read_target(
    identity: &Identity,
    head: &Parts,
    destination: &Destination,
) -> Result<Target, Refusal> {
    let refused = |denial| Refusal::new(Stage::Request, denial);
    let method = Method::parse(head.method.as_str()).map_err(|error| {
        refused(Denial::new(Reason::MethodDenied, "names").saying(format!("{error}.")))
    })?;
    Ok(Target {
        sandbox: identity.sandbox().clone(),
        method,
        host: destination.host.clone(),
        port: destination.port,
        path: request::path_of(head).map_err(refused)?,
        program: None,
    })
}

/// Takes a token from the bucket of `host`, or refuses with the time until the next one.
pub fn take_token(guest: &Guest, rules: &Rules, host: &Host, now: Tick) -> Result<Pass, Refusal> {
    let taken = guest.upstreams.take(&rules.settings, host, now);
    taken.map_err(|(wait, rule)| {
        let denial = Denial::new(Reason::RateLimited, rule);
        Refusal::new(Stage::Rate, denial.with(retry(host, wait.seconds())))
    })
}

fn retry(host: &Host, after: u64) -> Detail {
    let upstream = host.to_string();
    Detail::Retry { upstream, after }
}

/// Takes a token and asks the breaker.
pub fn admit<R>(
    traffic: &Traffic,
    guest: &Guest,
    rules: &Rules,
    host: &Host,
    request: Identified<R>,
    trail: &mut Trail,
) -> Result<Admitted<R>, Refusal> {
    let now = traffic.clock().tick();
    let pass = take_token(guest, rules, host, now)?;
    trail.passed(Stage::Rate);
    let ticket = guest
        .upstreams
        .admit(&rules.settings, host, now)
        .map_err(|open| {
            let denial = Denial::new(Reason::CircuitOpen, "circuit_breakers");
            Refusal::new(Stage::Breaker, denial.with(retry(host, open.seconds())))
        })?;
    trail.passed(Stage::Breaker);
    Ok(request.admit(pass, Guard::Ticket(ticket)))
}

async fn permit(
    traffic: &Traffic,
    guest: &Guest,
    rules: &Rules,
    opening: &Opening,
    request: Admitted<Message>,
    mut target: Target,
    trail: &mut Trail,
) -> Result<Permitted<Message>, Refusal> {
    if rules.names_programs {
        target.program = Box::pin(opening.program(traffic, guest, rules)).await;
    }
    permit_target(traffic, guest, rules, request, target, trail).await
}

/// Decides about a target of which everything is known.
pub(crate) async fn permit_target(
    traffic: &Traffic,
    guest: &Guest,
    rules: &Rules,
    request: Admitted<Message>,
    target: Target,
    trail: &mut Trail,
) -> Result<Permitted<Message>, Refusal> {
    let judged = rules.judge(target).and_then(|permit| {
        let target = permit.target();
        within_labels(traffic, rules, &target.sandbox, &target.host, target.port)?;
        Ok(permit)
    });
    let (denial, (message, guard)) = match judged {
        Ok(permit) => match request.permit(permit) {
            Ok(mut permitted) => match check(traffic, rules, &mut permitted, trail).await {
                Ok(()) => return Ok(permitted),
                Err(denial) => (denial, permitted.refuse()),
            },
            Err(misused) => (misused.denial, misused.request.refuse()),
        },
        Err(denial) => (denial, request.refuse()),
    };
    settle(
        traffic,
        guest,
        rules,
        &message.destination,
        guard,
        Outcome::Abandoned,
    );
    Err(Refusal::new(Stage::Policy, denial))
}

/// Checks the label budget of a host that the rules allow. The agent chooses the names below
/// a wildcard, and resolving one sends it to the domain's name servers, so a sandbox has only
/// so many of them. Every way to the dialer checks this: requests, and connections that pass
/// unread.
pub fn within_labels(
    traffic: &Traffic,
    rules: &Rules,
    sandbox: &SandboxId,
    host: &Host,
    port: u16,
) -> Result<(), Denial> {
    let Some(name) = host.as_name() else {
        return Ok(());
    };
    let allowlist = rules.settings.allowlist();
    let matched = allowlist.lookup(host).and_then(|rules| rules.first());
    let chosen = matched.is_some_and(|rule| matches!(rule.pattern, HostPattern::Below(_)));
    let fixed = rules.settings.egress.resolve.get(host, port);
    if chosen && fixed.is_none() {
        traffic.names().labels().admit(sandbox, name)?;
    }
    Ok(())
}

/// What is asked beyond the allowlist.
async fn check(
    traffic: &Traffic,
    rules: &Rules,
    request: &mut Permitted<Message>,
    trail: &mut Trail,
) -> Result<(), Denial> {
    if GithubRules::speaks_for(&request.permit().target().host) {
        let rule = Box::pin(github::check(rules, request)).await?;
        request.request_mut().judged.github = rule;
    }
    check_override(rules, request)?;
    if !rules.policies.is_empty() {
        Box::pin(rego::check(traffic, rules, request, trail)).await?;
    }
    Ok(())
}

/// Refuses a request with a header that asks the server for another method or path, where a
/// rule restricts either: the rules have judged the request line. Why it is refused and not
/// sent without the header: [`policy::override_header`].
fn check_override(rules: &Rules, request: &Permitted<Message>) -> Result<(), Denial> {
    let Some((name, overrides)) = find_override(&request.request().head.headers) else {
        return Ok(());
    };
    let Target { host, port, .. } = request.permit().target();
    let settings = &rules.settings;
    let restricted = settings.allowlist().restricts_endpoints(host, *port)
        || settings.git.hosts.contains(host)
        || rules.policies.decide();
    if !restricted {
        return Ok(());
    }
    let (reason, what) = match overrides {
        OverrideHeader::Method => (Reason::MethodDenied, "method"),
        OverrideHeader::Path => (Reason::PathDenied, "path"),
    };
    Err(Denial::new(reason, "override-header").saying(format!(
        "The header '{name}' asks {host} to take this request for one of another {what}, and \
         rules restrict what may be done there. Send the request with that {what} itself, \
         without the header."
    )))
}

/// What is asked about the content.
async fn inspect(
    traffic: &Arc<Traffic>,
    guest: &Arc<Guest>,
    rules: &Rules,
    mut request: Permitted<Message>,
    trail: &mut Trail,
) -> Result<(Cleared<Message>, Aftermath), Refusal> {
    let target = request.permit().target();
    let checked = if rules.settings.git.hosts.contains(&target.host) {
        let checked = Box::pin(git::check(traffic, guest, rules, &mut request, trail)).await;
        trail.passed(Stage::Git);
        checked
    } else {
        let elsewhere = git::judge_elsewhere(target);
        elsewhere.map(|()| (Clearance::nothing_configured(), Aftermath::None))
    };
    match checked {
        Ok((clearance, aftermath)) => Ok((request.clear(clearance), aftermath)),
        Err(refusal) => {
            let (message, guard) = request.refuse();
            let destination = &message.destination;
            settle(
                traffic,
                guest,
                rules,
                destination,
                guard,
                Outcome::Abandoned,
            );
            Err(refusal)
        }
    }
}

/// Gives the breaker its ticket back.
pub fn settle(
    traffic: &Traffic,
    guest: &Guest,
    rules: &Rules,
    destination: &Destination,
    guard: Guard,
    outcome: Outcome,
) {
    let Guard::Ticket(ticket) = guard else { return };
    let host = &destination.host;
    if outcome == Outcome::Failure {
        let label = upstream::label(&rules.settings, host);
        traffic.numbers().failed(label);
    }
    let now = traffic.clock().tick();
    let opened = guest
        .upstreams
        .settle(&rules.settings, host, ticket, outcome, now);
    if opened {
        tracing::warn!(sandbox = %guest.id(), %host, "circuit breaker opened");
    }
}
