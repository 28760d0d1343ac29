//! Decides about a subject by making its checks in order.
//!
//! A decision has no side effects: tokens of rate limits and tickets of breakers are taken by the
//! code that admits a request. The checks of a head are synchronous; a decision is a future only
//! where a policy bundle has to be evaluated, so that the decision about a common request does not
//! allocate or wait.

use std::pin::Pin;
use std::sync::Arc;

use http::HeaderMap;
use policy::allowlist::{Permit, Target};
use policy::answer::{ApprovalAnswer, ApprovalAnswers};
use policy::clock::Tick;
use policy::git_address;
use policy::github::GithubRules;
use policy::host::Host;
use policy::id::SandboxId;
use policy::override_header::OverrideHeader;
use policy::push;
use policy::reason::Reason;
use policy::registration::Registration;
use policy::repository::{self, RepositoryPermission};
use policy::verdict::{Denial, Grant, Question, RuleName, Verdict};
use serde_json::Value;

use crate::bundles::{BundleRun, Bundles, FixedInput};
use crate::checks::Check;
use crate::github::{self, find_override};
use crate::grants::Grants;
use crate::input::{self, RequestInput};
use crate::question::{QuestionOutcome, RaisedQuestions};
use crate::snapshot::PolicySnapshot;
use crate::subject::{
    BodyFacts, ConnectFacts, HeadFacts, McpFacts, MirrorFacts, Mode, ObjectFacts, PassthroughFacts,
    PushFacts, RecheckData, RepositoryAccess, RepositoryRequest, RequestFacts, Subject,
};

/// The setting that makes the gate ask the operator about unknown hosts.
const UNKNOWN_HOST_SETTING: &str = "egress.unknown";

/// The context of a decision.
#[derive(Clone, Copy)]
pub struct Cx<'a> {
    /// The rules in force.
    pub snapshot: &'a PolicySnapshot,
    /// The operator's answers to questions of this request.
    pub answers: &'a ApprovalAnswers,
    /// The approvals that are valid for the request's sandbox.
    pub grants: Option<&'a Grants>,
    /// The current time, on the clock of the grants.
    pub now: Tick,
}

impl Cx<'_> {
    /// The answer to `question`, from this request's answers or from the sandbox's approvals.
    pub(crate) fn answer(&self, question: &Question) -> Option<ApprovalAnswer> {
        let own = self.answers.find(question);
        let own = own.filter(|answer| answer.is_valid_at(self.now)).cloned();
        own.or_else(|| {
            let until = self.grants?.find(&question.digest, self.now)?;
            Some(ApprovalAnswer::Allow { until: Some(until) })
        })
    }
}

/// The result of a decision.
#[derive(Debug)]
pub struct DecisionOutcome {
    /// The verdict.
    pub verdict: Verdict,
    /// The check that decided.
    pub check: Check,
    /// The permit, if a request may be sent.
    pub permit: Option<Permit>,
    /// The repository and operation of a request on a git host.
    pub repository: Option<Box<RepositoryRequest>>,
    /// The data for a recheck.
    pub recorded: RecheckData,
    /// The results of the policy bundles, if any were evaluated.
    pub bundles: Option<Box<BundleRun>>,
}

impl DecisionOutcome {
    fn new(verdict: Verdict, check: Check) -> Self {
        Self {
            verdict,
            check,
            permit: None,
            repository: None,
            recorded: RecheckData::default(),
            bundles: None,
        }
    }

    fn allowed(rule: RuleName, check: Check) -> Self {
        Self::new(Verdict::Allow { rule }, check)
    }

    fn denied(denial: Denial, check: Check) -> Self {
        Self::new(denial.into(), check)
    }

    /// Converts the verdict to the rule that allows, or to a refusal. A question becomes a refusal,
    /// because the caller cannot wait for an operator's answer.
    pub fn refusal(self) -> Result<RuleName, Denial> {
        match self.verdict {
            Verdict::Allow { rule } => Ok(rule),
            Verdict::Modify(change) => Ok(change.rule),
            Verdict::Ask(question) => Err(question.unattended_denial()),
            Verdict::Deny(denial) => Err(*denial),
        }
    }
}

/// A decision: either made already, or a future that evaluates policy bundles.
#[expect(
    clippy::large_enum_variant,
    reason = "most decisions are made at once, and a box would be an allocation for each request"
)]
pub enum DecisionFuture<'a> {
    /// The decision is made.
    Ready(DecisionOutcome),
    /// The future that makes the decision.
    Pending(Pin<Box<dyn Future<Output = DecisionOutcome> + Send + 'a>>),
}

impl DecisionFuture<'_> {
    /// Waits for the decision.
    pub async fn wait(self) -> DecisionOutcome {
        match self {
            DecisionFuture::Ready(decided) => decided,
            DecisionFuture::Pending(deciding) => deciding.await,
        }
    }

    /// The decision about a subject that skips policy bundles in the table of checks, so that the
    /// decision is made at once. A decision that is not made yet becomes a refusal.
    pub fn into_outcome(self) -> DecisionOutcome {
        match self {
            DecisionFuture::Ready(decided) => decided,
            DecisionFuture::Pending(_) => {
                let denial = Denial::new(Reason::Internal, "decide");
                DecisionOutcome::denied(
                    denial.with_evidence(
                        "the policy evaluation takes too long for an immediate decision",
                    ),
                    Check::Bundles,
                )
            }
        }
    }
}

/// Decides about `subject`.
pub fn decide<'a>(subject: Subject<'a>, mode: Mode, cx: Cx<'a>) -> DecisionFuture<'a> {
    match subject {
        Subject::Request(facts) => decide_request(facts, mode, cx),
        Subject::RequestBody(facts) => DecisionFuture::Ready(decide_request_body(&facts, cx)),
        Subject::Connect(facts) => DecisionFuture::Ready(decide_connect(&facts, cx)),
        Subject::Passthrough(facts) => decide_passthrough(facts, mode, cx),
        Subject::Mirror(facts) => DecisionFuture::Ready(decide_mirror(&facts, cx)),
        Subject::Push(facts) => decide_push(facts, cx),
        Subject::Name(sandbox, host) => DecisionFuture::Ready(decide_name(sandbox, host, cx)),
        Subject::McpCall(facts) | Subject::McpResult(facts) => {
            decide_mcp(facts, &cx.snapshot.calls, cx)
        }
        Subject::McpQuestion(facts) => decide_mcp(facts, &cx.snapshot.elicitations, cx),
    }
}

/// A request that the allowlist allows, or that needs the operator's approval.
enum Candidate {
    Permitted(Permit),
    NeedsApproval(Box<Target>),
}

impl Candidate {
    fn target(&self) -> &Target {
        match self {
            Candidate::Permitted(permit) => permit.target(),
            Candidate::NeedsApproval(target) => target,
        }
    }

    fn rule(&self) -> RuleName {
        match self {
            Candidate::Permitted(permit) => permit.rule().clone(),
            Candidate::NeedsApproval(_) => RuleName::from(UNKNOWN_HOST_SETTING),
        }
    }
}

fn decide_request<'a>(facts: RequestFacts<'a>, mode: Mode, cx: Cx<'a>) -> DecisionFuture<'a> {
    let RequestFacts {
        target,
        tls,
        head,
        registration,
    } = facts;
    let snapshot = cx.snapshot;
    let mut raised = RaisedQuestions::new(Grant::Request, snapshot.number);
    // The allowlist takes ownership of the target, so a question needs a copy.
    let target_copy = snapshot.asks_about_hosts().then(|| target.clone());
    let candidate = match snapshot.settings.allowlist().judge(target) {
        Ok(permit) => Candidate::Permitted(permit),
        Err(denial) => match target_copy.filter(|_| snapshot.asks_about(&denial)) {
            Some(target) => {
                raise_host_question(
                    &mut raised,
                    denial,
                    Some(&target.sandbox),
                    &target.host,
                    target.port,
                );
                Candidate::NeedsApproval(Box::new(target))
            }
            None => {
                return DecisionFuture::Ready(DecisionOutcome::denied(denial, Check::Allowlist));
            }
        },
    };
    let mut recorded = RecheckData::default();
    match check_github_head(snapshot, candidate.target(), &head, registration, mode) {
        Ok(rule) => recorded.github = rule,
        Err(denial) => {
            return DecisionFuture::Ready(DecisionOutcome::denied(denial, Check::Github));
        }
    }
    if let HeadFacts::Headers { received, .. } = &head
        && let Err(denial) = check_override(snapshot, candidate.target(), received)
    {
        return DecisionFuture::Ready(DecisionOutcome::denied(denial, Check::OverrideHeader));
    }
    let remaining = RemainingChecks {
        candidate,
        raised,
        recorded,
        registration,
        cx,
    };
    match head {
        HeadFacts::Headers { sent, .. } if !snapshot.requests.is_empty() => {
            DecisionFuture::Pending(Box::pin(remaining.evaluate(tls, sent)))
        }
        HeadFacts::Headers { .. } => DecisionFuture::Ready(remaining.finish(None)),
        HeadFacts::Recorded(recorded) => DecisionFuture::Ready(remaining.recheck(recorded)),
    }
}

/// The checks of a request that follow allowlist, GitHub rules and override headers.
struct RemainingChecks<'a> {
    candidate: Candidate,
    raised: RaisedQuestions,
    recorded: RecheckData,
    registration: Option<&'a Registration>,
    cx: Cx<'a>,
}

impl RemainingChecks<'_> {
    async fn evaluate(mut self, tls: bool, sent: Option<HeaderMap>) -> DecisionOutcome {
        let (target, rule) = (self.candidate.target(), self.candidate.rule());
        let headers = sent.unwrap_or_default();
        let input = RequestInput::request(target, &headers, tls, self.registration, &rule);
        let mut subject = FixedInput::for_request(input.document());
        self.recorded.input = Some(Arc::clone(&subject.input));
        let bundles = &self.cx.snapshot.requests;
        let (verdict, run) = bundles.run(&mut subject, rule, &mut self.raised).await;
        let run = Some(Box::new(run));
        match verdict {
            Verdict::Deny(denial) => DecisionOutcome {
                bundles: run,
                recorded: self.recorded,
                ..DecisionOutcome::denied(*denial, Check::Bundles)
            },
            Verdict::Allow { .. } | Verdict::Modify(_) | Verdict::Ask(_) => self.finish(run),
        }
    }

    fn recheck(mut self, recorded: &RecheckData) -> DecisionOutcome {
        if let Some(input) = &recorded.input
            && let Err(denial) = recheck_bundles(self.cx, input, &mut self.raised)
        {
            return DecisionOutcome::denied(denial, Check::Bundles);
        }
        self.finish(None)
    }

    fn finish(self, bundles: Option<Box<BundleRun>>) -> DecisionOutcome {
        let Self {
            candidate,
            raised,
            recorded,
            registration,
            cx,
        } = self;
        let (repository, access) = check_repository(cx.snapshot, candidate.target(), registration);
        let decided = |verdict, check, permit| DecisionOutcome {
            verdict,
            check,
            permit,
            repository,
            recorded,
            bundles,
        };
        if let Err(denial) = access {
            return decided(denial.into(), Check::Repository, None);
        }
        let check = match &candidate {
            Candidate::Permitted(_) => Check::Bundles,
            Candidate::NeedsApproval(_) => Check::Allowlist,
        };
        let permit = match (raised.settle(|question| cx.answer(question)), candidate) {
            (Some(QuestionOutcome::Open(question)), _) => {
                return decided(Verdict::Ask(question), check, None);
            }
            (Some(QuestionOutcome::Refused(denial)), _) => {
                return decided(denial.into(), check, None);
            }
            (Some(QuestionOutcome::Approved(approval)), Candidate::NeedsApproval(target)) => {
                Permit::approved(*target, approval)
            }
            (_, Candidate::Permitted(permit)) => permit,
            (None, Candidate::NeedsApproval(_)) => {
                // An unknown host always raises a question.
                let denial = Denial::new(Reason::Internal, UNKNOWN_HOST_SETTING);
                return decided(denial.into(), check, None);
            }
        };
        let rule = permit.rule().clone();
        decided(Verdict::Allow { rule }, check, Some(permit))
    }
}

fn recheck_bundles(
    cx: Cx<'_>,
    input: &Arc<Value>,
    raised: &mut RaisedQuestions,
) -> Result<(), Denial> {
    let subject = FixedInput::for_recheck(Arc::clone(input));
    let checked = cx.snapshot.requests.run_blocking(&subject, raised);
    // The request is in flight and its client cannot receive a refusal, so details are dropped.
    checked.map_err(|_| Denial::new(Reason::RegoDenied, "rego"))
}

/// Applies the rules for GitHub's API that depend on the head alone. Rules that need the body are
/// applied after the body was read.
fn check_github_head(
    snapshot: &PolicySnapshot,
    target: &Target,
    head: &HeadFacts<'_>,
    registration: Option<&Registration>,
    mode: Mode,
) -> Result<Option<RuleName>, Denial> {
    if !GithubRules::applies_to_host(&target.host) {
        return Ok(None);
    }
    let received = match head {
        HeadFacts::Headers { received, .. } => received,
        HeadFacts::Recorded(recorded) => {
            let rule = recorded.github.as_ref();
            return rule
                .map_or(Ok(()), |rule| github::recheck(snapshot, target, rule))
                .map(|()| recorded.github.clone());
        }
    };
    github::check_blocked_patterns(snapshot, target)?;
    if snapshot.github.wants_body(&target.method, &target.path) {
        return match mode {
            Mode::Live | Mode::Recheck => Ok(None),
            Mode::Trial => Err(Denial::new(Reason::GithubRule, "github:body").with_message(
                "The decision depends on the request's body, which a trial does not have.",
            )),
        };
    }
    let repos = registration.map_or(&[][..], |row| row.repos.as_slice());
    github::decide(snapshot, target, received, None, repos).map(Some)
}

fn decide_request_body(facts: &BodyFacts<'_>, cx: Cx<'_>) -> DecisionOutcome {
    let BodyFacts {
        target,
        headers,
        body,
        registration,
    } = *facts;
    match github::decide(
        cx.snapshot,
        target,
        headers,
        Some(body),
        &registration.repos,
    ) {
        Ok(rule) => DecisionOutcome {
            recorded: RecheckData {
                input: None,
                github: Some(rule.clone()),
            },
            ..DecisionOutcome::allowed(rule, Check::Github)
        },
        Err(denial) => DecisionOutcome::denied(denial, Check::Github),
    }
}

/// Refuses a request with a header that makes the server use another method or path, if a rule
/// restricts methods or paths of the host: the rules were applied to the request line only.
/// [`policy::override_header`] explains why the header is not removed instead.
fn check_override(
    snapshot: &PolicySnapshot,
    target: &Target,
    headers: &HeaderMap,
) -> Result<(), Denial> {
    let Some((name, overrides)) = find_override(headers) else {
        return Ok(());
    };
    let Target { host, port, .. } = target;
    let settings = &snapshot.settings;
    let restricted = settings.allowlist().restricts_endpoints(host, *port)
        || settings.git.hosts.contains(host)
        || snapshot.requests.is_enforced();
    if !restricted {
        return Ok(());
    }
    let (reason, part) = match overrides {
        OverrideHeader::Method => (Reason::MethodDenied, "method"),
        OverrideHeader::Path => (Reason::PathDenied, "path"),
    };
    Err(Denial::new(reason, "override-header").with_message(format!(
        "The header '{name}' makes {host} use another {part} for this request, and rules restrict \
         methods or paths there. Send the request with that {part} itself, without the header."
    )))
}

/// The repository of a request, and whether the sender may access it. Pushes to hosts that are not
/// in `git.hosts` are refused, because they would not be checked.
fn check_repository(
    snapshot: &PolicySnapshot,
    target: &Target,
    registration: Option<&Registration>,
) -> (Option<Box<RepositoryRequest>>, Result<(), Denial>) {
    let git = &snapshot.settings.git;
    if !git.hosts.contains(&target.host) {
        if !git_address::is_push(target) {
            return (None, Ok(()));
        }
        let denial = Denial::new(Reason::GitRepo, "git.hosts").with_message(format!(
            "Pushes to {} are not allowed: only pushes to hosts in git.hosts can be checked.",
            target.host
        ));
        return (None, Err(denial));
    }
    let Some(address) = git_address::recognise(target) else {
        let denial = Denial::new(Reason::PathDenied, "git:paths")
            .with_message("Only git requests are allowed on this host.");
        return (None, Err(denial));
    };
    let repos = registration.map_or(&[][..], |row| row.repos.as_slice());
    let (name, display_name) = (address.name.as_ref(), &address.display_name);
    let access = repository::authorise(
        repos,
        name,
        display_name,
        address.operation,
        git.read_public,
    );
    let (access, checked) = match access {
        Ok(RepositoryPermission::Registered(repo)) => {
            (Some(RepositoryAccess::Registered(repo.clone())), Ok(()))
        }
        Ok(RepositoryPermission::Anonymous) => (Some(RepositoryAccess::Anonymous), Ok(())),
        Err(denial) => (None, Err(denial)),
    };
    (
        Some(Box::new(RepositoryRequest { address, access })),
        checked,
    )
}

fn decide_connect(facts: &ConnectFacts<'_>, cx: Cx<'_>) -> DecisionOutcome {
    let &ConnectFacts {
        sandbox,
        host,
        port,
    } = facts;
    decide_host(sandbox, host, port, None, cx)
}

/// Decides by host, port and program.
fn decide_host(
    sandbox: Option<&SandboxId>,
    host: &Host,
    port: u16,
    program: Option<&str>,
    cx: Cx<'_>,
) -> DecisionOutcome {
    let permitted = cx
        .snapshot
        .settings
        .allowlist()
        .judge_unread(host, port, program);
    match permitted {
        Ok(rule) => DecisionOutcome::allowed(rule.name.clone(), Check::Allowlist),
        Err(denial) if cx.snapshot.asks_about(&denial) => {
            let mut raised = RaisedQuestions::new(Grant::Host, cx.snapshot.number);
            raise_host_question(&mut raised, denial, sandbox, host, port);
            decide_by_answers(
                raised,
                RuleName::from(UNKNOWN_HOST_SETTING),
                Check::Allowlist,
                cx,
            )
        }
        Err(denial) => DecisionOutcome::denied(denial, Check::Allowlist),
    }
}

fn decide_passthrough<'a>(
    facts: PassthroughFacts<'a>,
    mode: Mode,
    cx: Cx<'a>,
) -> DecisionFuture<'a> {
    let PassthroughFacts {
        sandbox,
        host,
        port,
        program,
        registration,
        recorded,
    } = facts;
    if !cx.snapshot.passes_unread(host) {
        let denial = Denial::new(Reason::HostDenied, "egress.passthrough");
        return DecisionFuture::Ready(DecisionOutcome::denied(denial, Check::Allowlist));
    }
    // What passes here is not inspected, so that a rule for reads cannot be enforced.
    if cx
        .snapshot
        .settings
        .allowlist()
        .allows_only_reads(host, port)
    {
        let denial = Denial::new(Reason::HostDenied, "egress.passthrough").with_message(format!(
            "Only reads of {host} are allowed, and its connections cannot be inspected. Ask the \
             operator to add it to egress.domains."
        ));
        return DecisionFuture::Ready(DecisionOutcome::denied(denial, Check::Allowlist));
    }
    let host_decision = decide_host(Some(sandbox), host, port, program, cx);
    let Verdict::Allow { rule } = &host_decision.verdict else {
        return DecisionFuture::Ready(host_decision);
    };
    if cx.snapshot.requests.is_empty() {
        return DecisionFuture::Ready(host_decision);
    }
    let rule = rule.clone();
    let mut raised = RaisedQuestions::new(Grant::Request, cx.snapshot.number);
    if let (Mode::Recheck, Some(recorded)) = (mode, recorded) {
        return DecisionFuture::Ready(match &recorded.input {
            None => host_decision,
            Some(input) => match recheck_bundles(cx, input, &mut raised) {
                Ok(()) => decide_by_answers(raised, rule, Check::Bundles, cx),
                Err(denial) => DecisionOutcome::denied(denial, Check::Bundles),
            },
        });
    }
    DecisionFuture::Pending(Box::pin(async move {
        let request = RequestInput {
            sandbox,
            host,
            port,
            tls: true,
            program,
            request: None,
            registration,
            rule: &rule,
        };
        let mut subject = FixedInput::for_request(request.document());
        let input = Arc::clone(&subject.input);
        let bundles = &cx.snapshot.requests;
        let (verdict, run) = bundles.run(&mut subject, rule.clone(), &mut raised).await;
        let decided = match verdict {
            Verdict::Deny(denial) => DecisionOutcome::denied(*denial, Check::Bundles),
            Verdict::Allow { .. } | Verdict::Modify(_) | Verdict::Ask(_) => {
                decide_by_answers(raised, rule, Check::Bundles, cx)
            }
        };
        DecisionOutcome {
            recorded: RecheckData {
                input: Some(input),
                github: None,
            },
            bundles: Some(Box::new(run)),
            ..decided
        }
    }))
}

fn decide_mirror(facts: &MirrorFacts<'_>, cx: Cx<'_>) -> DecisionOutcome {
    let mirrors = &cx.snapshot.settings.git.mirrors;
    let denial = Denial::new(Reason::GitRepo, "git.mirrors");
    let refusal = match facts {
        MirrorFacts::Named(name) if cx.snapshot.mirror(name).is_some() => None,
        MirrorFacts::Named(name) => {
            Some(denial.with_message(format!("There is no mirror '{name}' here.")))
        }
        MirrorFacts::Configured(mirror) if mirrors.contains(mirror) => None,
        MirrorFacts::Configured(_) => Some(denial),
    };
    match refusal {
        None => DecisionOutcome::allowed(RuleName::from("git.mirrors"), Check::Mirror),
        Some(denial) => DecisionOutcome::denied(denial, Check::Mirror),
    }
}

fn decide_push<'a>(facts: PushFacts<'a>, cx: Cx<'a>) -> DecisionFuture<'a> {
    let snapshot = cx.snapshot;
    let rules = snapshot.settings.push_rules(facts.registration.auth_mode);
    let rule = RuleName::from("git:push");
    let findings = match facts.objects {
        ObjectFacts::Unread => {
            let checked = rules.judge_refs(facts.context, facts.refs);
            return DecisionFuture::Ready(match checked {
                Ok(()) => DecisionOutcome::allowed(rule, Check::Refs),
                Err(denial) => DecisionOutcome::denied(denial, Check::Refs),
            });
        }
        ObjectFacts::NotWanted => None,
        ObjectFacts::Read(findings) => Some(findings),
    };
    let mut raised = RaisedQuestions::new(Grant::Push, snapshot.number);
    match push::judge(&rules, facts.context, facts.refs, findings) {
        Ok(questions) => {
            let document = input::push_document(&facts, findings).to_string();
            for denial in questions {
                raised.raise(denial, Grant::Push, &[document.as_bytes()]);
            }
        }
        Err(denial) => {
            return DecisionFuture::Ready(DecisionOutcome::denied(denial, Check::Objects));
        }
    }
    if snapshot.pushes.is_empty() {
        return DecisionFuture::Ready(decide_by_answers(raised, rule, Check::Objects, cx));
    }
    DecisionFuture::Pending(Box::pin(async move {
        let mut subject = FixedInput::for_push(input::push_document(&facts, findings));
        let bundles = &snapshot.pushes;
        let (verdict, run) = bundles.run(&mut subject, rule.clone(), &mut raised).await;
        let decided = match verdict {
            Verdict::Deny(denial) => DecisionOutcome::denied(*denial, Check::Bundles),
            Verdict::Allow { .. } | Verdict::Modify(_) | Verdict::Ask(_) => {
                decide_by_answers(raised, rule, Check::Bundles, cx)
            }
        };
        DecisionOutcome {
            bundles: Some(Box::new(run)),
            ..decided
        }
    }))
}

fn decide_name(sandbox: &SandboxId, host: &Host, cx: Cx<'_>) -> DecisionOutcome {
    match cx.snapshot.settings.allowlist().judge_host(host) {
        Ok(rules) => {
            let rule = rules.first().map(|rule| rule.name.clone());
            let rule = rule.unwrap_or_else(|| RuleName::from("allowlist"));
            DecisionOutcome::allowed(rule, Check::Allowlist)
        }
        Err(denial) if cx.snapshot.asks_about(&denial) => {
            let mut raised = RaisedQuestions::new(Grant::Host, cx.snapshot.number);
            let denial = Denial {
                rule: UNKNOWN_HOST_SETTING.into(),
                ..denial
            };
            let identity = [sandbox.as_str(), &host.to_string()].map(str::to_owned);
            raised.raise(
                denial,
                Grant::Host,
                &identity.each_ref().map(|part| part.as_bytes()),
            );
            decide_by_answers(
                raised,
                RuleName::from(UNKNOWN_HOST_SETTING),
                Check::Allowlist,
                cx,
            )
        }
        Err(denial) => DecisionOutcome::denied(denial, Check::Allowlist),
    }
}

fn decide_mcp<'a>(facts: McpFacts<'a>, bundles: &'a Bundles, cx: Cx<'a>) -> DecisionFuture<'a> {
    let McpFacts {
        stored,
        tool,
        message,
    } = facts;
    if let Some(denial) = stored {
        return DecisionFuture::Ready(DecisionOutcome::denied(
            denial.clone(),
            Check::StoredDecision,
        ));
    }
    if let Err(denial) = tool {
        return DecisionFuture::Ready(DecisionOutcome::denied(denial, Check::ToolList));
    }
    let rule = RuleName::from("mcp");
    let Some(message) = message else {
        return DecisionFuture::Ready(DecisionOutcome::allowed(rule, Check::Bundles));
    };
    DecisionFuture::Pending(Box::pin(async move {
        let mut raised = RaisedQuestions::new(Grant::Message, cx.snapshot.number);
        let (verdict, run) = bundles.run(message, rule, &mut raised).await;
        let verdict = match (verdict, raised.settle(|question| cx.answer(question))) {
            (Verdict::Deny(denial), _) => Verdict::Deny(denial),
            (_, Some(QuestionOutcome::Open(question))) => Verdict::Ask(question),
            (_, Some(QuestionOutcome::Refused(denial))) => denial.into(),
            (verdict, Some(QuestionOutcome::Approved(_)) | None) => verdict,
        };
        DecisionOutcome {
            bundles: Some(Box::new(run)),
            ..DecisionOutcome::new(verdict, Check::Bundles)
        }
    }))
}

/// Raises the question whether a sandbox may reach a host that is in no rule.
fn raise_host_question(
    raised: &mut RaisedQuestions,
    denial: Denial,
    sandbox: Option<&SandboxId>,
    host: &Host,
    port: u16,
) {
    let denial = Denial {
        rule: UNKNOWN_HOST_SETTING.into(),
        ..denial
    };
    let sandbox = sandbox.map_or("", SandboxId::as_str);
    let (host, port) = (host.to_string(), port.to_string());
    let identity = [sandbox.as_bytes(), host.as_bytes(), port.as_bytes()];
    raised.raise(denial, Grant::Host, &identity);
}

/// Allows by `rule`, unless a question is open or was answered with a refusal.
fn decide_by_answers(
    raised: RaisedQuestions,
    rule: RuleName,
    check: Check,
    cx: Cx<'_>,
) -> DecisionOutcome {
    match raised.settle(|question| cx.answer(question)) {
        None | Some(QuestionOutcome::Approved(_)) => DecisionOutcome::allowed(rule, check),
        Some(QuestionOutcome::Refused(denial)) => DecisionOutcome::denied(denial, check),
        Some(QuestionOutcome::Open(question)) => {
            DecisionOutcome::new(Verdict::Ask(question), check)
        }
    }
}
