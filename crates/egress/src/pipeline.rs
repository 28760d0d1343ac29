//! Request pipeline: the ordered stages of every proxied request.
//!
//! [`pass`] finds out where a request goes; [`HeldRequest`] is one attempt after another to have
//! it allowed: identity, admission, head, content. Each stage takes what only the one before it
//! can give, so that none can be left out.

use std::sync::Arc;

use decide::checks::Check;
use decide::decision::Decided;
use decide::hold::{self, Attempt, Held, Holding};
use decide::subject::{BodyFacts, HeadFacts, RepositoryAccess, RequestFacts, Subject};
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, EXPECT, HeaderMap, HeaderValue};
use http::request::Parts;
use http::{Response, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use policy::allowlist::Target;
use policy::answer::{Answer, Answers};
use policy::audit::Kind;
use policy::bucket::Pass;
use policy::endpoint::Method;
use policy::github::GithubRules;
use policy::identity::Identity;
use policy::proof::{Clearance, Identified, Permitted};
use policy::reason::Reason;
use policy::refs::RefUpdate;
use policy::repository::RepositoryOperation;
use policy::verdict::{Denial, Digest, Question, Verdict};

use crate::admission::{self, Admission, admit, take_token};
use crate::body::Content;
use crate::body_stream;
use crate::forward::{self, PreparedRequest, Preparing, Reply};
use crate::git::receive::{self, Arrival, PushVerdict};
use crate::git::upstream::Upstream;
use crate::git_protocol::push::Capabilities;
use crate::headers;
use crate::in_flight::{Authorized, InFlight};
use crate::internal;
use crate::message::{BodyPlan, BodyState, Handover, Message};
use crate::mirror_server::serve::{self, Visitor};
use crate::outgoing::Credentials;
use crate::refusal::Refusal;
use crate::request::{self, ConnectionInfo, Destination};
use crate::request_cx::{self, RequestCx};
use crate::request_log::RequestLog;
use crate::response_filters::{ResponseFilter, ResponseFilters};
use crate::sandbox_state::SandboxState;
use crate::services::Services;
use crate::source::{self, Source, reserve_record};
use crate::stage::Stage;
use crate::unread_body::UnreadBody;

/// The largest body that is read for the rules of GitHub's API.
const MAX_READ_BODY: usize = 1024 * 1024;

/// Answers one request. Whatever happens is recorded, once.
pub async fn answer(
    services: &Arc<Services>,
    source: &Source,
    connection_info: &ConnectionInfo,
    head: Box<Parts>,
    body: Incoming,
) -> Response<Content> {
    let body = leftover(&head, body);
    let mut trail = begin(services, source, connection_info).await;
    trail.event.method = Some(beginning(head.method.as_str(), 32));
    let passed = pass(services, source, connection_info, head, body, &mut trail).await;
    let idle = || {
        let snapshot = services.policy().load();
        snapshot.settings.egress.timeouts.idle
    };
    match passed {
        Ok((Reply::Ours(response), _)) => {
            trail.answered(response.status());
            response
        }
        Ok((Reply::Theirs(response, in_flight), mut filters)) => {
            trail.answered(response.status());
            filters.choose(&response);
            if filters.is_empty() {
                return response.map(|body| body_stream::receiving(body, trail, in_flight, idle()));
            }
            let response = response.map(|body| body_stream::arriving(body, idle()));
            let response = filters.apply(response);
            response.map(|body| body_stream::filtered(body, trail, in_flight))
        }
        Ok((Reply::Changed(response, in_flight), _)) => {
            trail.answered(response.status());
            response.map(|body| body_stream::receiving(body, trail, in_flight, idle()))
        }
        Ok((Reply::Upgraded(upgrade), _)) => {
            trail.answered(StatusCode::SWITCHING_PROTOCOLS);
            upgrade.begin(services, trail, idle())
        }
        Err(refusal) => refuse(source, trail, &refusal),
    }
}

/// Answers a message that never became a request.
pub async fn answer_fault(
    services: &Arc<Services>,
    source: &Source,
    connection_info: &ConnectionInfo,
    denial: Denial,
) -> Response<Content> {
    let trail = begin(services, source, connection_info).await;
    refuse(source, trail, &Refusal::new(Stage::Request, denial))
}

/// Decides whether a tunnel is opened. `decided` is what the rules say of it.
pub async fn answer_tunnel(
    services: &Arc<Services>,
    source: &Source,
    connection_info: &ConnectionInfo,
    head: &Parts,
    decided: impl FnOnce() -> Result<(), Denial>,
) -> Result<(), Response<Content>> {
    let mut trail = begin(services, source, connection_info).await;
    trail.event.method = Some("CONNECT".to_owned());
    trail.event.host = head
        .uri
        .authority()
        .map(|authority| beginning(authority.as_str(), 256));
    let decided = source
        .identify_request(services, head)
        .and_then(|_| decided().map_err(|denial| Refusal::new(Stage::Policy, denial)));
    match decided {
        Ok(()) => {
            trail.discard();
            Ok(())
        }
        Err(refusal) => Err(refuse(source, trail, &refusal)),
    }
}

/// Disposes of an unread request body. With `Expect: 100-continue` the client has not sent it yet,
/// and reading would make hyper send the 100. HTTP/2 has a way to stop the client, after which
/// curl (as of 7.88) does not look at the answer.
fn leftover(head: &Parts, body: Incoming) -> UnreadBody {
    if head.headers.contains_key(EXPECT) {
        UnreadBody::let_go(body)
    } else {
        UnreadBody::drained(body)
    }
}

/// As much of what a client wrote as a record needs.
fn beginning(text: &str, most: usize) -> String {
    let end = text.floor_char_boundary(most);
    text.get(..end).unwrap_or_default().to_owned()
}

async fn begin(
    services: &Arc<Services>,
    source: &Source,
    connection_info: &ConnectionInfo,
) -> RequestLog {
    let sandbox = source.sandbox();
    let slot = reserve_record(sandbox).await;
    let mut trail = RequestLog::begin(services, sandbox, Kind::Http, slot);
    connection_info.note(&mut trail);
    trail
}

fn refuse(source: &Source, mut trail: RequestLog, refusal: &Refusal) -> Response<Content> {
    trail.refused(refusal.stage, &refusal.denial);
    let response = refusal.answer(source.sandbox().map(|sandbox| sandbox.id()), trail.id);
    trail.answered(response.status());
    response
}

/// The pipeline.
async fn pass(
    services: &Arc<Services>,
    source: &Source,
    connection_info: &ConnectionInfo,
    mut head: Box<Parts>,
    body: UnreadBody,
    trail: &mut RequestLog,
) -> Result<(Reply, ResponseFilters), Refusal> {
    // 1. Who is asking?
    let identity = source.identify_request(services, &head)?;
    let sandbox = source.sandbox().ok_or_else(source::unknown)?;
    let cx = RequestCx::new(services, sandbox);
    trail.passed(Stage::Identity);

    // What is asked for, where every place that says so agrees.
    let destination = connection_info
        .destination(&head)
        .map_err(|denial| Refusal::new(Stage::Request, denial))?;
    trail.event.host = Some(destination.host.to_string());
    trail.event.port = Some(destination.port);
    let target = read_target(&identity, &head, &destination)?;
    trail.event.path = Some(target.path.wire().to_owned());
    let idle = cx.snapshot.settings.egress.timeouts.idle;
    let body = body_stream::sending(body, &trail.tally, idle);
    trail.passed(Stage::Request);
    if destination.is_internal() {
        let answering = answer_internal(&cx, identity, &target, *head, body, trail);
        let reply = Box::pin(answering).await?;
        return Ok((reply, ResponseFilters::default()));
    }
    let handover = head.extensions.remove::<Handover>();
    let upgrade = head.extensions.remove::<OnUpgrade>();
    let message = Message {
        body: BodyState::Stream(body),
        head,
        destination,
        upgrade: upgrade.map(|upgrade| (upgrade, handover)),
        recorded: decide::subject::Recorded::default(),
        credentials: Credentials::Granted,
    };

    // 2. Admission, head and content, again where the rules change or the operator is asked.
    let mut held = HeldRequest {
        services,
        source,
        connection_info,
        sandbox,
        first: Some((cx, identity, target)),
        message: Some(message),
        paid: None,
        label_paid: false,
        push_paid: false,
        asked_by: AskedBy::Head(Check::Allowlist),
        waiting: None,
        trail,
    };
    let holding = Holding {
        questions: services.questions(),
        policy: services.policy(),
        limit: None,
    };
    let (leaving, filters) = hold::settle(&mut held, holding).await?;

    // 3. Credentials are added here, and it leaves.
    let reply = leaving.send().await;
    trail.passed(Stage::Forward);
    Ok((reply?, filters))
}

/// Answers a request to the gate itself: mirrors, tools, and what it tells of itself. That costs
/// work, records and log lines as well.
async fn answer_internal(
    cx: &RequestCx,
    identity: Identity,
    target: &Target,
    head: Parts,
    body: Content,
    trail: &mut RequestLog,
) -> Result<Reply, Refusal> {
    if serve::is_for_mirror(target) {
        let visitor = Visitor {
            cx,
            registration: identity.registration(),
            host: &target.host,
        };
        return serve::answer(&visitor, target, &head.headers, body, trail).await;
    }
    let _pass = take_token(cx, &target.host, trail)?;
    if internal::is_for_tools(target)
        && let Some(tools) = cx.services.tools()
    {
        let request = internal::for_tools(head, body);
        return Ok(Reply::Ours(tools.answer(cx.sandbox.id(), request).await));
    }
    Ok(Reply::Ours(internal::answer(cx, target).await))
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

/// A request that is decided, and may have to wait in between.
struct HeldRequest<'a> {
    services: &'a Arc<Services>,
    source: &'a Source,
    connection_info: &'a ConnectionInfo,
    sandbox: &'a Arc<SandboxState>,
    /// What was found out before the first attempt.
    first: Option<(RequestCx, Identity, Target)>,
    /// The request, between two attempts.
    message: Option<Message>,
    /// The token it has paid.
    paid: Option<Pass>,
    label_paid: bool,
    push_paid: bool,
    /// Whose question it waits for.
    asked_by: AskedBy,
    /// Its entry in the in-flight set while it waits.
    waiting: Option<InFlight>,
    trail: &'a mut RequestLog,
}

/// Who raised a question: it tells how its refusal is answered.
enum AskedBy {
    Head(Check),
    Push(Capabilities, Vec<RefUpdate>),
}

type Checked = Permitted<Message, Admission>;

/// What the inspection of a request's content came to.
enum Inspected {
    Clear(Clearance, ResponseFilters),
    Ask(Box<Question>),
    Stale,
}

impl Held for HeldRequest<'_> {
    type Allowed = (PreparedRequest, ResponseFilters);
    type Refused = Refusal;

    async fn attempt(
        &mut self,
        answers: &Answers,
    ) -> Result<Attempt<(PreparedRequest, ResponseFilters)>, Refusal> {
        if self.waiting.take().is_some() {
            self.trail.resumed();
        }
        let message = self.message.take().ok_or_else(source::unknown)?;
        let (cx, identity, mut target) = match self.first.take() {
            Some(first) => first,
            None => {
                let identity = self.source.identify_request(self.services, &message.head)?;
                let target = read_target(&identity, &message.head, &message.destination)?;
                (
                    RequestCx::new(self.services, self.sandbox),
                    identity,
                    target,
                )
            }
        };

        // Too fast, or an upstream that is left alone?
        let (pass, admission) = admit(&cx, &target.host, self.paid.take(), self.trail)?;
        let request = Identified::new(message, identity).admit(pass, admission);

        // Do the rules allow it?
        if cx.snapshot.names_programs {
            target.program = Box::pin(self.connection_info.program(&cx)).await;
        }
        let (message, identity) = (request.request(), request.identity());
        let received = &message.head.headers;
        let sent = (!cx.snapshot.requests.is_empty()).then(|| headers::as_sent(received));
        let facts = RequestFacts {
            target,
            tls: message.destination.tls,
            head: HeadFacts::Headers { received, sent },
            registration: Some(identity.registration()),
        };
        let mut decided = cx.decide(Subject::Request(facts), answers).wait().await;
        if decided.bundles.is_some() {
            Box::pin(cx.record_bundles(&decided, self.trail)).await;
        }
        let permit = match self.permit_of(&mut decided, &cx, request.request())? {
            Ok(permit) => permit,
            Err(question) => {
                self.trail.asked(&question);
                let (message, pass) = request.release();
                self.put_back(message, pass);
                return Ok(Attempt::Ask(question));
            }
        };
        if !self.label_paid {
            admission::take_label(&cx, &permit.target().host, permit.target().port)?;
            self.label_paid = true;
        }
        let permitted = request.permit(permit);
        let mut request =
            permitted.map_err(|misused| Refusal::new(Stage::Policy, misused.denial))?;
        request.request_mut().recorded = std::mem::take(&mut decided.recorded);
        self.trail.allowed(request.permit().rule());
        self.trail.passed(Stage::Policy);

        // What is in it?
        let plan = plan(&cx, &request, &decided);
        let inspected = if decided.repository.is_none() && plan == BodyPlan::Stream {
            Inspected::Clear(Clearance::nothing_configured(), ResponseFilters::default())
        } else {
            Box::pin(self.inspect(&cx, &mut request, &decided, plan, answers)).await?
        };
        match inspected {
            Inspected::Clear(clearance, filters) => {
                let leaving = match forward::prepare(cx, request.clear(clearance), answers)? {
                    Preparing::Now(leaving) => leaving,
                    Preparing::Later(preparing) => preparing.await?,
                };
                Ok(Attempt::Done((leaving, filters)))
            }
            Inspected::Ask(question) => {
                self.trail.asked(&question);
                let (message, pass) = request.release();
                self.put_back(message, pass);
                Ok(Attempt::Ask(question))
            }
            Inspected::Stale => {
                let (message, pass) = request.release();
                self.put_back(message, pass);
                Ok(Attempt::Stale)
            }
        }
    }

    fn refuse(&self, denial: Denial) -> Refusal {
        match &self.asked_by {
            AskedBy::Head(check) => Refusal::new(Stage::of(*check), denial),
            AskedBy::Push(capabilities, updates) => {
                receive::refused(denial, *capabilities, updates)
            }
        }
    }

    fn snapshot(&self) -> u64 {
        self.services.snapshot_for(Some(self.sandbox)).number
    }

    async fn secure(&mut self) -> Result<(), Refusal> {
        let waiting = self.sandbox.in_flight.enter(Authorized::Held);
        let waiting = self.waiting.insert(waiting);
        let Some(message) = &mut self.message else {
            return Ok(());
        };
        let secured = tokio::select! {
            secured = message.body.secure(self.services, self.sandbox) => secured,
            // A client may take its time, and its sandbox be gone.
            () = waiting.revoked() => Err(request_cx::ended(self.sandbox)),
        };
        secured.map_err(|denial| self.refuse(denial))
    }

    async fn ended(&mut self) -> Denial {
        match &self.waiting {
            Some(waiting) => waiting.revoked().await,
            None => std::future::pending().await,
        }
        request_cx::ended(self.sandbox)
    }

    fn grant(&mut self, digest: Digest, answer: &Answer) {
        RequestCx::new(self.services, self.sandbox).grant(digest, answer);
    }
}

impl HeldRequest<'_> {
    /// Keeps the request for the next attempt, with the token it has paid.
    fn put_back(&mut self, message: Message, pass: Pass) {
        self.message = Some(message);
        self.paid = Some(pass);
    }

    /// The permit that the decision gives, or the question it raises.
    fn permit_of(
        &mut self,
        decided: &mut Decided,
        cx: &RequestCx,
        message: &Message,
    ) -> Result<Result<policy::allowlist::Permit, Box<Question>>, Refusal> {
        if let Some(repository) = &decided.repository {
            self.trail.event.kind = Kind::Git;
            self.trail.event.repo = Some(repository.address.shown.clone());
            let operation = repository.address.operation.as_str();
            self.trail.event.operation = Some(operation.to_owned());
        }
        let stage = Stage::of(decided.check);
        let permit = decided.permit.take();
        let internal = || Denial::new(Reason::Internal, "decide");
        let verdict = std::mem::replace(&mut decided.verdict, internal().into());
        match (verdict, permit) {
            (Verdict::Allow { .. } | Verdict::Modify(_), Some(permit)) => Ok(Ok(permit)),
            (Verdict::Allow { .. } | Verdict::Modify(_), None) => {
                Err(Refusal::new(stage, internal()))
            }
            (Verdict::Ask(question), _) => {
                self.asked_by = AskedBy::Head(decided.check);
                Ok(Err(question))
            }
            (Verdict::Deny(denial), _) if decided.check == Check::Repository => {
                // The rules of the allowlist have let it pass.
                if cx
                    .snapshot
                    .settings
                    .git
                    .hosts
                    .contains(&message.destination.host)
                {
                    self.trail.passed(Stage::Git);
                }
                Err(git_refusal(*denial, decided, message))
            }
            (Verdict::Deny(denial), _) => Err(Refusal::new(stage, *denial)),
        }
    }

    /// Takes the body once, and gives it to whatever has to read it.
    async fn inspect(
        &mut self,
        cx: &RequestCx,
        request: &mut Checked,
        decided: &Decided,
        plan: BodyPlan,
        answers: &Answers,
    ) -> Result<Inspected, Refusal> {
        if let BodyPlan::Buffer(most) = plan {
            read_body(request, most).await?;
            self.decide_body(cx, request)?;
            if !cx.is_current() {
                return Ok(Inspected::Stale);
            }
        }
        let Some(repository) = &decided.repository else {
            return Ok(Inspected::Clear(
                Clearance::nothing_configured(),
                ResponseFilters::default(),
            ));
        };
        // Nothing of git changes its protocol.
        request.request_mut().upgrade = None;
        let filters = match &repository.access {
            Some(RepositoryAccess::Registered(repo)) => match repository.address.operation {
                RepositoryOperation::AdvertisePush => {
                    let identity = HeaderValue::from_static("identity");
                    let headers = &mut request.request_mut().head.headers;
                    headers.insert(ACCEPT_ENCODING, identity);
                    ResponseFilters::one(ResponseFilter::GitAdvertisement)
                }
                RepositoryOperation::Push => {
                    match self.take_push(cx, request, repo, answers).await? {
                        PushStep::Passed(filters) => filters,
                        PushStep::Ask(question) => return Ok(Inspected::Ask(question)),
                        PushStep::Stale => return Ok(Inspected::Stale),
                    }
                }
                RepositoryOperation::AdvertiseFetch
                | RepositoryOperation::Fetch
                | RepositoryOperation::Lfs
                | RepositoryOperation::Download => ResponseFilters::default(),
            },
            Some(RepositoryAccess::Anonymous) | None => {
                let message = request.request_mut();
                headers::make_anonymous(&mut message.head.headers);
                message.credentials = Credentials::Anonymous;
                ResponseFilters::default()
            }
        };
        self.trail.passed(Stage::Git);
        let rule = match repository.access {
            Some(RepositoryAccess::Registered(_)) => "git:repositories",
            Some(RepositoryAccess::Anonymous) | None => "git.read_public",
        };
        let allow = Verdict::Allow { rule: rule.into() };
        let clearance = Clearance::from_checks(&[allow]).map_err(|_| {
            // An allowing check clears, always.
            Refusal::new(Stage::Git, Denial::new(Reason::Internal, "proof:clearance"))
        })?;
        Ok(Inspected::Clear(clearance, filters))
    }

    /// Has the rules for GitHub's API decide about a body that was read.
    fn decide_body(&mut self, cx: &RequestCx, request: &mut Checked) -> Result<(), Refusal> {
        let answers = Answers::default();
        let (permit, message) = (request.permit(), request.request());
        let body = match &message.body {
            BodyState::Buffered(bytes, _) => bytes.clone(),
            BodyState::Stream(_) | BodyState::Spooled(..) | BodyState::Pushed(_) => {
                let denial = Denial::new(Reason::Internal, "github:body");
                return Err(Refusal::new(Stage::Policy, denial));
            }
        };
        let facts = BodyFacts {
            target: permit.target(),
            headers: &message.head.headers,
            body: &body,
            registration: request.identity().registration(),
        };
        let decided = cx.decide(Subject::RequestBody(facts), &answers).now();
        let rule = decided.recorded.github.clone();
        decided
            .refusal()
            .map_err(|denial| Refusal::new(Stage::Policy, denial))?;
        request.request_mut().recorded.github = rule;
        Ok(())
    }

    /// Takes a push in, has it judged, and puts it back to be sent.
    async fn take_push(
        &mut self,
        cx: &RequestCx,
        request: &mut Checked,
        repo: &policy::registration::Repo,
        answers: &Answers,
    ) -> Result<PushStep, Refusal> {
        let host = request.permit().target().host.clone();
        let registration = Arc::clone(request.identity().registration());
        let upstream = Upstream::of(cx, request.permit().target(), request.request(), answers);
        let message = request.request_mut();
        let limits = &cx.snapshot.settings.policy.git.push_limits;
        let arrival = Arrival {
            registration: &registration,
            host: &host,
            repo: repo.name.as_str(),
            limit: policy::push::size_limit(repo, limits.hard_limit_bytes),
            upstream: upstream.as_ref(),
        };
        // The semaphore is never closed.
        let _turn = cx.sandbox.pushes.acquire().await;
        let body = std::mem::replace(&mut message.body, BodyState::empty());
        let coding = receive::coding_of(&message.head.headers)?;
        let taken = receive::take_in(cx, body, coding, arrival.limit).await?;
        // It was decoded; and the answer is read, too.
        let headers = &mut message.head.headers;
        headers.remove(CONTENT_ENCODING);
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let trail = &mut *self.trail;
        let judged = receive::judge(cx, &arrival, &taken, answers, &mut self.push_paid, trail);
        let judged = judged.await;
        request.request_mut().body = BodyState::Pushed(Box::new(taken));
        Ok(match judged? {
            PushVerdict::Allow(_) if !cx.is_current() => PushStep::Stale,
            PushVerdict::Allow(None) => PushStep::Passed(ResponseFilters::default()),
            PushVerdict::Allow(Some(sent)) => {
                PushStep::Passed(ResponseFilters::one(ResponseFilter::GitReport(sent)))
            }
            PushVerdict::Ask(question, capabilities, updates) => {
                self.asked_by = AskedBy::Push(capabilities, updates);
                PushStep::Ask(question)
            }
        })
    }
}

enum PushStep {
    Passed(ResponseFilters),
    Ask(Box<Question>),
    Stale,
}

/// How the body of a request is taken.
fn plan(cx: &RequestCx, request: &Checked, decided: &Decided) -> BodyPlan {
    let target = request.permit().target();
    if GithubRules::speaks_for(&target.host)
        && cx.snapshot.github.wants_body(&target.method, &target.path)
    {
        return BodyPlan::Buffer(MAX_READ_BODY);
    }
    match &decided.repository {
        Some(repository) if repository.address.operation == RepositoryOperation::Push => {
            BodyPlan::Spool
        }
        Some(_) | None => BodyPlan::Stream,
    }
}

/// Reads a body into memory, so that rules can decide about it.
async fn read_body(request: &mut Checked, most: usize) -> Result<(), Refusal> {
    let refused = |denial| Refusal::new(Stage::Policy, denial);
    let message = request.request_mut();
    if is_coded(&message.head.headers) {
        return Err(refused(
            Denial::new(Reason::GithubRule, "github:body").saying(
                "The body of this request is compressed, and must be read. Send it as it is.",
            ),
        ));
    }
    if matches!(message.body, BodyState::Buffered(..)) {
        return Ok(());
    }
    let body = std::mem::replace(&mut message.body, BodyState::empty());
    // The compiler finds the library's future to be `Send` only behind a pointer.
    let collecting: std::pin::Pin<Box<dyn Future<Output = _> + Send>> =
        Box::pin(Limited::new(body.into_content(), most).collect());
    let bytes = match collecting.await {
        Ok(collected) => collected.to_bytes(),
        Err(error) if error.is::<LengthLimitError>() => {
            return Err(refused(
                Denial::new(Reason::TooLarge, "github:body").saying(format!(
                    "The body of this request must be read, and is larger than {most} bytes."
                )),
            ));
        }
        Err(error) => {
            let denial = Denial::new(Reason::Framing, "github:body").because(error.to_string());
            return Err(refused(denial));
        }
    };
    message.body = BodyState::Buffered(bytes, None);
    Ok(())
}

fn is_coded(headers: &HeaderMap) -> bool {
    let mut codings = headers.get_all(CONTENT_ENCODING).iter();
    codings.any(|value| !value.as_bytes().eq_ignore_ascii_case(b"identity"))
}

/// The refusal of a request about a repository: git shows a person plain text only.
fn git_refusal(denial: Denial, decided: &Decided, message: &Message) -> Refusal {
    let refusal = Refusal::new(Stage::Git, denial);
    let in_text = match &decided.repository {
        Some(repository) => matches!(
            repository.address.operation,
            RepositoryOperation::AdvertiseFetch | RepositoryOperation::AdvertisePush
        ),
        None => refusal.denial.rule.as_str() == "git.hosts" && message.head.method == "GET",
    };
    match in_text {
        true => refusal.in_text(),
        false => refusal,
    }
}

#[cfg(test)]
mod tests;
