//! Request pipeline: the ordered stages of every proxied request.
//!
//! [`run_stages`] finds the destination of a request; [`HeldRequest`] repeats identity, admission,
//! head and content checks until the request is decided. Each stage takes a value that only the
//! stage before it can create, so that no stage can be left out.

use std::sync::Arc;

use decide::checks::Check;
use decide::decision::DecisionOutcome;
use decide::hold::{self, Attempt, HeldSubject, Holding};
use decide::subject::{BodyFacts, HeadFacts, RepositoryAccess, RequestFacts, Subject};
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, EXPECT, HeaderMap, HeaderValue};
use http::request::Parts;
use http::{Response, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use policy::allowlist::Target;
use policy::answer::{ApprovalAnswer, ApprovalAnswers};
use policy::audit::Kind;
use policy::bucket::RateLimitPass;
use policy::endpoint::Method;
use policy::github::GithubRules;
use policy::identity::Identity;
use policy::proof::{Clearance, Identified, Permitted};
use policy::reason::Reason;
use policy::refs::RefUpdate;
use policy::repository::RepositoryOperation;
use policy::verdict::{Denial, Digest, Question, Verdict};

use crate::admission::{self, Admission, admit, take_token};
use crate::body::MessageBody;
use crate::body_stream;
use crate::forward::{self, ClientResponse, Preparation, PreparedRequest};
use crate::git::receive::{self, IncomingPush, PushVerdict};
use crate::git::upstream_trees::UpstreamRepository;
use crate::git_protocol::push::PushCapabilities;
use crate::headers;
use crate::in_flight::{Authorized, InFlight};
use crate::internal;
use crate::message::{BodyPlan, BodyState, Handover, PipelineRequest};
use crate::mirror_server::smart_http::{self, MirrorRequest};
use crate::outgoing::Credentials;
use crate::refusal::RequestRefusal;
use crate::request::{self, ConnectionInfo, Destination};
use crate::request_cx::{self, RequestCx};
use crate::request_log::RequestLog;
use crate::response_filters::{ResponseFilter, ResponseFilters};
use crate::sandbox_state::SandboxState;
use crate::services::Services;
use crate::source::{self, ConnectionSource, reserve_record};
use crate::stage::Stage;
use crate::unread_body::UnreadBody;
use crate::websocket;

/// Largest request body that is read for the rules of GitHub's API.
const MAX_INSPECTED_BODY: usize = 1024 * 1024;

/// Answers one request and writes one audit record, however the request ends.
pub async fn answer(
    services: &Arc<Services>,
    source: &ConnectionSource,
    connection_info: &ConnectionInfo,
    head: Box<Parts>,
    body: Incoming,
) -> Response<MessageBody> {
    let body = unread_body(&head, body);
    let mut log = begin(services, source, connection_info).await;
    log.event.method = Some(truncated(head.method.as_str(), 32));
    let result = run_stages(services, source, connection_info, head, body, &mut log).await;
    let idle = || {
        let snapshot = services.policy().load();
        snapshot.settings.egress.timeouts.idle
    };
    match result {
        Ok((ClientResponse::Gate(response), _)) => {
            log.record_status(response.status());
            response
        }
        Ok((ClientResponse::Upstream(response, in_flight), mut filters)) => {
            log.record_status(response.status());
            let response = match filters.choose(response) {
                Ok(response) => response,
                Err(denial) => {
                    return refuse(source, log, &RequestRefusal::new(Stage::Forward, denial));
                }
            };
            if filters.is_empty() {
                return response
                    .map(|body| body_stream::response_body(body, log, in_flight, idle()));
            }
            let response = response.map(|body| body_stream::with_idle_timeout(body, idle()));
            let response = filters.apply(response);
            response.map(|body| body_stream::filtered_response_body(body, log, in_flight))
        }
        Ok((ClientResponse::Changed(response, in_flight), _)) => {
            log.record_status(response.status());
            response.map(|body| body_stream::response_body(body, log, in_flight, idle()))
        }
        Ok((ClientResponse::Upgraded(upgrade), _)) => {
            log.record_status(StatusCode::SWITCHING_PROTOCOLS);
            upgrade.begin(services, log, idle())
        }
        Err(refusal) => refuse(source, log, &refusal),
    }
}

/// Answers a message that could not be parsed as a request.
pub async fn answer_fault(
    services: &Arc<Services>,
    source: &ConnectionSource,
    connection_info: &ConnectionInfo,
    denial: Denial,
) -> Response<MessageBody> {
    let log = begin(services, source, connection_info).await;
    refuse(source, log, &RequestRefusal::new(Stage::Request, denial))
}

/// Decides whether a CONNECT tunnel is opened. `decided` returns the verdict of the rules.
pub async fn answer_tunnel(
    services: &Arc<Services>,
    source: &ConnectionSource,
    connection_info: &ConnectionInfo,
    head: &Parts,
    decided: impl FnOnce() -> Result<(), Denial>,
) -> Result<(), Response<MessageBody>> {
    let mut log = begin(services, source, connection_info).await;
    log.event.method = Some("CONNECT".to_owned());
    log.event.host = head
        .uri
        .authority()
        .map(|authority| truncated(authority.as_str(), 256));
    let decided = source
        .identify_request(services, head)
        .and_then(|_| decided().map_err(|denial| RequestRefusal::new(Stage::Policy, denial)));
    match decided {
        Ok(()) => {
            log.discard();
            Ok(())
        }
        Err(refusal) => Err(refuse(source, log, &refusal)),
    }
}

/// Disposes of an unread request body. With `Expect: 100-continue` the client has not sent it yet,
/// and reading would make hyper send the 100. Otherwise the body is drained: after an HTTP/2 reset,
/// curl (as of 7.88) does not read the response.
fn unread_body(head: &Parts, body: Incoming) -> UnreadBody {
    if head.headers.contains_key(EXPECT) {
        UnreadBody::discarded(body)
    } else {
        UnreadBody::drained(body)
    }
}

/// The first `max` bytes of a client's text, for an audit record.
fn truncated(text: &str, max: usize) -> String {
    let end = text.floor_char_boundary(max);
    text.get(..end).unwrap_or_default().to_owned()
}

async fn begin(
    services: &Arc<Services>,
    source: &ConnectionSource,
    connection_info: &ConnectionInfo,
) -> RequestLog {
    let sandbox = source.sandbox();
    let slot = reserve_record(sandbox).await;
    let mut log = RequestLog::begin(services, sandbox, Kind::Http, slot);
    connection_info.write_destination(&mut log);
    log
}

fn refuse(
    source: &ConnectionSource,
    mut log: RequestLog,
    refusal: &RequestRefusal,
) -> Response<MessageBody> {
    log.record_refusal(refusal.stage, &refusal.denial);
    if refusal.denial.reason == Reason::PlaceholderMisused {
        log.raise_alert(&refusal.denial);
    }
    let response = refusal.answer(source.sandbox().map(|sandbox| sandbox.id()), log.id);
    log.record_status(response.status());
    response
}

/// Runs the stages of the pipeline.
async fn run_stages(
    services: &Arc<Services>,
    source: &ConnectionSource,
    connection_info: &ConnectionInfo,
    mut head: Box<Parts>,
    body: UnreadBody,
    log: &mut RequestLog,
) -> Result<(ClientResponse, ResponseFilters), RequestRefusal> {
    // 1. Identity.
    let identity = source.identify_request(services, &head)?;
    let sandbox = source.sandbox().ok_or_else(source::unknown_source)?;
    let cx = RequestCx::new(services, sandbox);
    log.end_stage(Stage::Identity);

    // The destination, on which tunnel, TLS hello and request must agree.
    let destination = connection_info
        .destination(&head)
        .map_err(|denial| RequestRefusal::new(Stage::Request, denial))?;
    log.event.host = Some(destination.host.to_string());
    log.event.port = Some(destination.port);
    let target = read_target(&identity, &head, &destination)?;
    log.event.path = Some(target.path.wire().to_owned());
    let idle = cx.snapshot.settings.egress.timeouts.idle;
    let body = body_stream::request_body(body, &log.tally, idle);
    log.end_stage(Stage::Request);
    if destination.is_internal() {
        let answering = answer_internal(&cx, identity, &target, *head, body, log);
        let reply = Box::pin(answering).await?;
        return Ok((reply, ResponseFilters::default()));
    }
    let handover = head.extensions.remove::<Handover>();
    let upgrade = head.extensions.remove::<OnUpgrade>();
    let message = PipelineRequest {
        body: BodyState::Stream(body),
        head,
        destination,
        upgrade: upgrade.map(|upgrade| (upgrade, handover)),
        recorded: decide::subject::RecheckData::default(),
        credentials: Credentials::Granted,
    };

    // 2. Admission, head and content, repeated after a change of the rules or an approval.
    let mut held = HeldRequest {
        services,
        source,
        connection_info,
        sandbox,
        first: Some((cx, identity, target)),
        message: Some(message),
        earlier_pass: None,
        label_paid: false,
        push_token_taken: false,
        question_source: QuestionSource::Head(Check::Allowlist),
        waiting: None,
        log,
    };
    let holding = Holding {
        questions: services.questions(),
        policy: services.policy(),
        limit: None,
    };
    let (prepared, mut filters) = hold::settle(&mut held, holding).await?;

    // 3. Credentials and forward.
    let sent = prepared.send(log).await;
    log.end_stage(Stage::Forward);
    let (reply, echo) = sent?;
    filters.extend(echo);
    Ok((reply, filters))
}

/// Answers a request to the gate itself: mirrors, tools and the gate's own pages. Rate limits apply
/// here too, because such a request costs work, records and log lines.
async fn answer_internal(
    cx: &RequestCx,
    identity: Identity,
    target: &Target,
    head: Parts,
    body: MessageBody,
    log: &mut RequestLog,
) -> Result<ClientResponse, RequestRefusal> {
    if smart_http::is_for_mirror(target) {
        let mirror_request = MirrorRequest {
            cx,
            registration: identity.registration(),
            host: &target.host,
        };
        return smart_http::answer(&mirror_request, target, &head.headers, body, log).await;
    }
    let _pass = take_token(cx, &target.host, log)?;
    if internal::is_for_tools(target)
        && let Some(tools) = cx.services.tools()
    {
        let request = internal::for_tools(head, body);
        return Ok(ClientResponse::Gate(
            tools.answer(cx.sandbox.id(), request).await,
        ));
    }
    Ok(ClientResponse::Gate(internal::answer(cx, target).await))
}

fn read_target(
    identity: &Identity,
    head: &Parts,
    destination: &Destination,
) -> Result<Target, RequestRefusal> {
    let refused = |denial| RequestRefusal::new(Stage::Request, denial);
    let method = Method::parse(head.method.as_str()).map_err(|error| {
        refused(Denial::new(Reason::MethodDenied, "names").with_message(format!("{error}.")))
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

/// A request while it is decided, which may include waiting for an approval.
struct HeldRequest<'a> {
    services: &'a Arc<Services>,
    source: &'a ConnectionSource,
    connection_info: &'a ConnectionInfo,
    sandbox: &'a Arc<SandboxState>,
    /// Context, identity and target of the first attempt.
    first: Option<(RequestCx, Identity, Target)>,
    /// The request between two attempts.
    message: Option<PipelineRequest>,
    /// The rate limit token that the request has taken.
    earlier_pass: Option<RateLimitPass>,
    label_paid: bool,
    push_token_taken: bool,
    /// The check that asked for an approval.
    question_source: QuestionSource,
    /// The entry in the in-flight set while the request waits.
    waiting: Option<InFlight>,
    log: &'a mut RequestLog,
}

/// The check that asked for an approval. It determines the form of a refusal.
enum QuestionSource {
    Head(Check),
    Push(PushCapabilities, Vec<RefUpdate>),
}

type CheckedRequest = Permitted<PipelineRequest, Admission>;

/// Result of inspecting a request's content.
enum Inspection {
    Clear(Clearance, ResponseFilters),
    Ask(Box<Question>),
    Stale,
}

impl HeldSubject for HeldRequest<'_> {
    type Allowed = (PreparedRequest, ResponseFilters);
    type Refused = RequestRefusal;

    async fn attempt(
        &mut self,
        answers: &ApprovalAnswers,
    ) -> Result<Attempt<(PreparedRequest, ResponseFilters)>, RequestRefusal> {
        if self.waiting.take().is_some() {
            self.log.restart_stage_timer();
        }
        let message = self.message.take().ok_or_else(source::unknown_source)?;
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

        // Rate limit and circuit breaker.
        let (pass, admission) = admit(&cx, &target.host, self.earlier_pass.take(), self.log)?;
        let request = Identified::new(message, identity).admit(pass, admission);

        // Policy.
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
            Box::pin(cx.record_bundles(&decided, self.log)).await;
        }
        let permit = match self.permit_of(&mut decided, &cx, request.request())? {
            Ok(permit) => permit,
            Err(question) => {
                self.log.record_question(&question);
                let (message, pass) = request.release();
                self.put_back(message, pass);
                return Ok(Attempt::Ask(question));
            }
        };
        let sends_data = {
            let message = request.request();
            websocket::is_requested(&message.head) || !message.body.is_empty()
        };
        let read = permit.check_read(sends_data);
        read.map_err(|denial| RequestRefusal::new(Stage::of(Check::Allowlist), denial))?;
        if !self.label_paid {
            admission::take_label(&cx, &permit.target().host, permit.target().port)?;
            self.label_paid = true;
        }
        let permitted = request.permit(permit);
        let mut request =
            permitted.map_err(|misused| RequestRefusal::new(Stage::Policy, misused.denial))?;
        request.request_mut().recorded = std::mem::take(&mut decided.recorded);
        self.log.record_allow(request.permit().rule());
        self.log.end_stage(Stage::Policy);

        // Content.
        let plan = plan(&cx, &request, &decided);
        let inspected = if decided.repository.is_none() && plan == BodyPlan::Stream {
            Inspection::Clear(Clearance::nothing_configured(), ResponseFilters::default())
        } else {
            Box::pin(self.inspect(&cx, &mut request, &decided, plan, answers)).await?
        };
        match inspected {
            Inspection::Clear(clearance, filters) => {
                let prepared = match forward::prepare(cx, request.clear(clearance), answers)? {
                    Preparation::Now(prepared) => prepared,
                    Preparation::Later(preparing) => preparing.await?,
                };
                Ok(Attempt::Done((prepared, filters)))
            }
            Inspection::Ask(question) => {
                self.log.record_question(&question);
                let (message, pass) = request.release();
                self.put_back(message, pass);
                Ok(Attempt::Ask(question))
            }
            Inspection::Stale => {
                let (message, pass) = request.release();
                self.put_back(message, pass);
                Ok(Attempt::Stale)
            }
        }
    }

    fn refuse(&self, denial: Denial) -> RequestRefusal {
        match &self.question_source {
            QuestionSource::Head(check) => RequestRefusal::new(Stage::of(*check), denial),
            QuestionSource::Push(capabilities, updates) => {
                receive::push_refusal(denial, *capabilities, updates)
            }
        }
    }

    fn snapshot(&self) -> u64 {
        self.services.snapshot_for(Some(self.sandbox)).number
    }

    async fn secure(&mut self) -> Result<(), RequestRefusal> {
        let waiting = self.sandbox.in_flight.enter(Authorized::Held);
        let waiting = self.waiting.insert(waiting);
        let Some(message) = &mut self.message else {
            return Ok(());
        };
        let secured = tokio::select! {
            secured = message.body.store(self.services, self.sandbox) => secured,
            // The upload may be slow, and the sandbox may end meanwhile.
            () = waiting.revoked() => Err(request_cx::ended_denial(self.sandbox)),
        };
        secured.map_err(|denial| self.refuse(denial))
    }

    async fn ended(&mut self) -> Denial {
        match &self.waiting {
            Some(waiting) => waiting.revoked().await,
            None => std::future::pending().await,
        }
        request_cx::ended_denial(self.sandbox)
    }

    fn grant(&mut self, digest: Digest, answer: &ApprovalAnswer) {
        RequestCx::new(self.services, self.sandbox).grant(digest, answer);
    }
}

impl HeldRequest<'_> {
    /// Keeps the request and its rate limit token for the next attempt.
    fn put_back(&mut self, message: PipelineRequest, pass: RateLimitPass) {
        self.message = Some(message);
        self.earlier_pass = Some(pass);
    }

    /// The permit of the decision, or the question for an approval.
    fn permit_of(
        &mut self,
        decided: &mut DecisionOutcome,
        cx: &RequestCx,
        message: &PipelineRequest,
    ) -> Result<Result<policy::allowlist::Permit, Box<Question>>, RequestRefusal> {
        if let Some(repository) = &decided.repository {
            self.log.event.kind = Kind::Git;
            self.log.event.repo = Some(repository.address.display_name.clone());
            let operation = repository.address.operation.as_str();
            self.log.event.operation = Some(operation.to_owned());
        }
        let stage = Stage::of(decided.check);
        let permit = decided.permit.take();
        let internal = || Denial::new(Reason::Internal, "decide");
        let verdict = std::mem::replace(&mut decided.verdict, internal().into());
        match (verdict, permit) {
            (Verdict::Allow { .. } | Verdict::Modify(_), Some(permit)) => Ok(Ok(permit)),
            (Verdict::Allow { .. } | Verdict::Modify(_), None) => {
                Err(RequestRefusal::new(stage, internal()))
            }
            (Verdict::Ask(question), _) => {
                self.question_source = QuestionSource::Head(decided.check);
                Ok(Err(question))
            }
            (Verdict::Deny(denial), _) if decided.check == Check::Repository => {
                // The allowlist has allowed the request.
                if cx
                    .snapshot
                    .settings
                    .git
                    .hosts
                    .contains(&message.destination.host)
                {
                    self.log.end_stage(Stage::Git);
                }
                Err(git_refusal(*denial, decided, message))
            }
            (Verdict::Deny(denial), _) => Err(RequestRefusal::new(stage, *denial)),
        }
    }

    /// Inspects the body where a check needs its content.
    async fn inspect(
        &mut self,
        cx: &RequestCx,
        request: &mut CheckedRequest,
        decided: &DecisionOutcome,
        plan: BodyPlan,
        answers: &ApprovalAnswers,
    ) -> Result<Inspection, RequestRefusal> {
        if let BodyPlan::Buffer(max) = plan {
            read_body(request, max).await?;
            self.decide_body(cx, request)?;
            if !cx.is_current() {
                return Ok(Inspection::Stale);
            }
        }
        let Some(repository) = &decided.repository else {
            return Ok(Inspection::Clear(
                Clearance::nothing_configured(),
                ResponseFilters::default(),
            ));
        };
        // Git never upgrades the connection.
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
                    match self.receive_push(cx, request, repo, answers).await? {
                        PushStep::Allowed(filters) => filters,
                        PushStep::Ask(question) => return Ok(Inspection::Ask(question)),
                        PushStep::Stale => return Ok(Inspection::Stale),
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
        self.log.end_stage(Stage::Git);
        let rule = match repository.access {
            Some(RepositoryAccess::Registered(_)) => "git:repositories",
            Some(RepositoryAccess::Anonymous) | None => "git.read_public",
        };
        let allow = Verdict::Allow { rule: rule.into() };
        let clearance = Clearance::from_checks(&[allow]).map_err(|_| {
            // Unreachable: an allowing check always gives clearance.
            RequestRefusal::new(Stage::Git, Denial::new(Reason::Internal, "proof:clearance"))
        })?;
        Ok(Inspection::Clear(clearance, filters))
    }

    /// Applies the rules for GitHub's API to a buffered body.
    fn decide_body(
        &mut self,
        cx: &RequestCx,
        request: &mut CheckedRequest,
    ) -> Result<(), RequestRefusal> {
        let answers = ApprovalAnswers::default();
        let (permit, message) = (request.permit(), request.request());
        let body = match &message.body {
            BodyState::Buffered(bytes, _) => bytes.clone(),
            BodyState::Stream(_) | BodyState::Spooled(..) | BodyState::Pushed(_) => {
                let denial = Denial::new(Reason::Internal, "github:body");
                return Err(RequestRefusal::new(Stage::Policy, denial));
            }
        };
        let facts = BodyFacts {
            target: permit.target(),
            headers: &message.head.headers,
            body: &body,
            registration: request.identity().registration(),
        };
        let decided = cx
            .decide(Subject::RequestBody(facts), &answers)
            .into_outcome();
        let rule = decided.recorded.github.clone();
        decided
            .refusal()
            .map_err(|denial| RequestRefusal::new(Stage::Policy, denial))?;
        request.request_mut().recorded.github = rule;
        Ok(())
    }

    /// Receives a push, decides about it and stores it in the request for forwarding.
    async fn receive_push(
        &mut self,
        cx: &RequestCx,
        request: &mut CheckedRequest,
        repo: &policy::registration::Repo,
        answers: &ApprovalAnswers,
    ) -> Result<PushStep, RequestRefusal> {
        let host = request.permit().target().host.clone();
        let registration = Arc::clone(request.identity().registration());
        let upstream =
            UpstreamRepository::for_push(cx, request.permit().target(), request.request(), answers);
        let message = request.request_mut();
        let limits = &cx.snapshot.settings.policy.git.push_limits;
        let arrival = IncomingPush {
            registration: &registration,
            host: &host,
            repo: repo.name.as_str(),
            limit: policy::push::size_limit(repo, limits.hard_limit_bytes),
            upstream: upstream.as_ref(),
        };
        // The semaphore is never closed.
        let _permit = cx.sandbox.pushes.acquire().await;
        let body = std::mem::replace(&mut message.body, BodyState::empty());
        let coding = receive::push_encoding(&message.head.headers)?;
        let taken = receive::spool_push(cx, body, coding, arrival.limit).await?;
        // The body was decoded, and the response filter reads plain content.
        let headers = &mut message.head.headers;
        headers.remove(CONTENT_ENCODING);
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let log = &mut *self.log;
        let deciding = receive::decide_push(
            cx,
            &arrival,
            &taken,
            answers,
            &mut self.push_token_taken,
            log,
        );
        let verdict = deciding.await;
        request.request_mut().body = BodyState::Pushed(Box::new(taken));
        Ok(match verdict? {
            PushVerdict::Allow(_) if !cx.is_current() => PushStep::Stale,
            PushVerdict::Allow(None) => PushStep::Allowed(ResponseFilters::default()),
            PushVerdict::Allow(Some(sent)) => {
                PushStep::Allowed(ResponseFilters::one(ResponseFilter::GitReport(sent)))
            }
            PushVerdict::Ask(question, capabilities, updates) => {
                self.question_source = QuestionSource::Push(capabilities, updates);
                PushStep::Ask(question)
            }
        })
    }
}

enum PushStep {
    Allowed(ResponseFilters),
    Ask(Box<Question>),
    Stale,
}

/// Chooses how the body of a request is read.
fn plan(cx: &RequestCx, request: &CheckedRequest, decided: &DecisionOutcome) -> BodyPlan {
    let target = request.permit().target();
    if GithubRules::applies_to_host(&target.host)
        && cx.snapshot.github.wants_body(&target.method, &target.path)
    {
        return BodyPlan::Buffer(MAX_INSPECTED_BODY);
    }
    match &decided.repository {
        Some(repository) if repository.address.operation == RepositoryOperation::Push => {
            BodyPlan::Spool
        }
        Some(_) | None => BodyPlan::Stream,
    }
}

/// Reads a body into memory so that rules can inspect it.
async fn read_body(request: &mut CheckedRequest, max: usize) -> Result<(), RequestRefusal> {
    let refused = |denial| RequestRefusal::new(Stage::Policy, denial);
    let message = request.request_mut();
    if is_encoded(&message.head.headers) {
        return Err(refused(
            Denial::new(Reason::GithubRule, "github:body").with_message(
                "The rules must read the body of this request, and it is compressed. Send it \
                 without Content-Encoding.",
            ),
        ));
    }
    if matches!(message.body, BodyState::Buffered(..)) {
        return Ok(());
    }
    let body = std::mem::replace(&mut message.body, BodyState::empty());
    // The compiler cannot prove that http_body_util's future is `Send` without the box.
    let collecting: std::pin::Pin<Box<dyn Future<Output = _> + Send>> =
        Box::pin(Limited::new(body.into_content(), max).collect());
    let bytes = match collecting.await {
        Ok(collected) => collected.to_bytes(),
        Err(error) if error.is::<LengthLimitError>() => {
            return Err(refused(
                Denial::new(Reason::TooLarge, "github:body").with_message(format!(
                    "The rules must read the body of this request, which exceeds {max} bytes."
                )),
            ));
        }
        Err(error) => {
            let denial =
                Denial::new(Reason::Framing, "github:body").with_evidence(error.to_string());
            return Err(refused(denial));
        }
    };
    message.body = BodyState::Buffered(bytes, None);
    Ok(())
}

fn is_encoded(headers: &HeaderMap) -> bool {
    let mut codings = headers.get_all(CONTENT_ENCODING).iter();
    codings.any(|value| !value.as_bytes().eq_ignore_ascii_case(b"identity"))
}

/// The refusal of a repository request: git shows only plain text to its user.
fn git_refusal(
    denial: Denial,
    decided: &DecisionOutcome,
    message: &PipelineRequest,
) -> RequestRefusal {
    let refusal = RequestRefusal::new(Stage::Git, denial);
    let in_text = match &decided.repository {
        Some(repository) => matches!(
            repository.address.operation,
            RepositoryOperation::AdvertiseFetch | RepositoryOperation::AdvertisePush
        ),
        None => refusal.denial.rule.as_str() == "git.hosts" && message.head.method == "GET",
    };
    match in_text {
        true => refusal.as_plain_text(),
        false => refusal,
    }
}

#[cfg(test)]
mod tests;
