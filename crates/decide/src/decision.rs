//! The decision about a subject: its checks, in their order.
//!
//! A decision has no side effects: tokens of rate limits and tickets of breakers are taken by the
//! code that admits a request. The checks of a head are synchronous; a decision is a future only
//! where a policy bundle has to be evaluated, so that the common request neither allocates nor
//! waits for it.

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
    PushFacts, Recorded, RepositoryAccess, RepositoryRequest, RequestFacts, Subject,
};

/// The name of the setting that asks about unknown hosts.
const UNKNOWN: &str = "egress.unknown";

/// The context of a decision.
#[derive(Clone, Copy)]
pub struct Cx<'a> {
    /// The rules.
    pub snapshot: &'a PolicySnapshot,
    /// The operator's answers to questions of this request.
    pub answers: &'a ApprovalAnswers,
    /// The approvals that hold for its sandbox.
    pub grants: Option<&'a Grants>,
    /// The current time, on the clock of the grants.
    pub now: Tick,
}

impl Cx<'_> {
    /// The answer to `question`, of this request or of its sandbox.
    pub(crate) fn answer(&self, question: &Question) -> Option<ApprovalAnswer> {
        let own = self.answers.find(question);
        let own = own.filter(|answer| answer.holds_at(self.now)).cloned();
        own.or_else(|| {
            let until = self.grants?.find(&question.digest, self.now)?;
            Some(ApprovalAnswer::Allow { until: Some(until) })
        })
    }
}

/// The result of a decision.
#[derive(Debug)]
pub struct Decided {
    /// The verdict.
    pub verdict: Verdict,
    /// The check that decided.
    pub check: Check,
    /// The permit, if a request may be sent.
    pub permit: Option<Permit>,
    /// The repository and operation of a request on a git host.
    pub repository: Option<Box<RepositoryRequest>>,
    /// The data for a recheck.
    pub recorded: Recorded,
    /// The results of the policy bundles.
    pub bundles: Option<Box<BundleRun>>,
}

impl Decided {
    fn new(verdict: Verdict, check: Check) -> Self {
        Self {
            verdict,
            check,
            permit: None,
            repository: None,
            recorded: Recorded::default(),
            bundles: None,
        }
    }

    fn allowed(rule: RuleName, check: Check) -> Self {
        Self::new(Verdict::Allow { rule }, check)
    }

    fn denied(denial: Denial, check: Check) -> Self {
        Self::new(denial.into(), check)
    }

    /// The rule that allows, or the refusal; a question is refused as unattended.
    pub fn refusal(self) -> Result<RuleName, Denial> {
        match self.verdict {
            Verdict::Allow { rule } => Ok(rule),
            Verdict::Modify(change) => Ok(change.rule),
            Verdict::Ask(question) => Err(question.unattended()),
            Verdict::Deny(denial) => Err(*denial),
        }
    }
}

/// A decision that is made, or one that waits for a policy bundle.
#[expect(
    clippy::large_enum_variant,
    reason = "most decisions are made at once, and a box would be an allocation for each request"
)]
pub enum Deciding<'a> {
    /// The decision is made.
    Now(Decided),
    /// The decision is made by this future.
    Later(Pin<Box<dyn Future<Output = Decided> + Send + 'a>>),
}

impl Deciding<'_> {
    /// Waits for the decision.
    pub async fn wait(self) -> Decided {
        match self {
            Deciding::Now(decided) => decided,
            Deciding::Later(deciding) => deciding.await,
        }
    }

    /// The decision about a subject without policy bundles in the table of checks, which never
    /// waits. If it would wait nevertheless, the subject is refused.
    pub fn now(self) -> Decided {
        match self {
            Deciding::Now(decided) => decided,
            Deciding::Later(_) => {
                let denial = Denial::new(Reason::Internal, "decide");
                Decided::denied(denial.with_evidence("the decision waits"), Check::Bundles)
            }
        }
    }
}

/// Decides about `subject`.
pub fn decide<'a>(subject: Subject<'a>, mode: Mode, cx: Cx<'a>) -> Deciding<'a> {
    match subject {
        Subject::Request(facts) => request(facts, mode, cx),
        Subject::RequestBody(facts) => Deciding::Now(request_body(&facts, cx)),
        Subject::Connect(facts) => Deciding::Now(connect(&facts, cx)),
        Subject::Passthrough(facts) => passthrough(facts, mode, cx),
        Subject::Mirror(facts) => Deciding::Now(mirror(&facts, cx)),
        Subject::Push(facts) => push(facts, cx),
        Subject::Name(sandbox, host) => Deciding::Now(name(sandbox, host, cx)),
        Subject::McpCall(facts) | Subject::McpResult(facts) => mcp(facts, &cx.snapshot.calls, cx),
        Subject::McpQuestion(facts) => mcp(facts, &cx.snapshot.elicitations, cx),
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
            Candidate::NeedsApproval(_) => RuleName::from(UNKNOWN),
        }
    }
}

fn request<'a>(facts: RequestFacts<'a>, mode: Mode, cx: Cx<'a>) -> Deciding<'a> {
    let RequestFacts {
        target,
        tls,
        head,
        registration,
    } = facts;
    let snapshot = cx.snapshot;
    let mut raised = RaisedQuestions::new(Grant::Request, snapshot.number);
    // The allowlist keeps the target, which a question needs as well.
    let spare = snapshot.asks_about_hosts().then(|| target.clone());
    let candidate = match snapshot.settings.allowlist().judge(target) {
        Ok(permit) => Candidate::Permitted(permit),
        Err(denial) => match spare.filter(|_| snapshot.asks_about(&denial)) {
            Some(target) => {
                raise_host(
                    &mut raised,
                    denial,
                    Some(&target.sandbox),
                    &target.host,
                    target.port,
                );
                Candidate::NeedsApproval(Box::new(target))
            }
            None => return Deciding::Now(Decided::denied(denial, Check::Allowlist)),
        },
    };
    let mut recorded = Recorded::default();
    match github_head(snapshot, candidate.target(), &head, registration, mode) {
        Ok(rule) => recorded.github = rule,
        Err(denial) => return Deciding::Now(Decided::denied(denial, Check::Github)),
    }
    if let HeadFacts::Headers { received, .. } = &head
        && let Err(denial) = check_override(snapshot, candidate.target(), received)
    {
        return Deciding::Now(Decided::denied(denial, Check::OverrideHeader));
    }
    let rest = RestOfRequest {
        candidate,
        raised,
        recorded,
        registration,
        cx,
    };
    match head {
        HeadFacts::Headers { sent, .. } if !snapshot.requests.is_empty() => {
            Deciding::Later(Box::pin(rest.evaluate(tls, sent)))
        }
        HeadFacts::Headers { .. } => Deciding::Now(rest.finish(None)),
        HeadFacts::Recorded(known) => Deciding::Now(rest.recheck(known)),
    }
}

/// The checks of a request after the allowlist.
struct RestOfRequest<'a> {
    candidate: Candidate,
    raised: RaisedQuestions,
    recorded: Recorded,
    registration: Option<&'a Registration>,
    cx: Cx<'a>,
}

impl RestOfRequest<'_> {
    async fn evaluate(mut self, tls: bool, sent: Option<HeaderMap>) -> Decided {
        let (target, rule) = (self.candidate.target(), self.candidate.rule());
        let headers = sent.unwrap_or_default();
        let read = RequestInput::request(target, &headers, tls, self.registration, &rule);
        let mut subject = FixedInput::request(read.document());
        self.recorded.input = Some(Arc::clone(&subject.input));
        let bundles = &self.cx.snapshot.requests;
        let (verdict, run) = bundles.run(&mut subject, rule, &mut self.raised).await;
        let run = Some(Box::new(run));
        match verdict {
            Verdict::Deny(denial) => Decided {
                bundles: run,
                recorded: self.recorded,
                ..Decided::denied(*denial, Check::Bundles)
            },
            Verdict::Allow { .. } | Verdict::Modify(_) | Verdict::Ask(_) => self.finish(run),
        }
    }

    fn recheck(mut self, known: &Recorded) -> Decided {
        if let Some(input) = &known.input
            && let Err(denial) = recheck_bundles(self.cx, input, &mut self.raised)
        {
            return Decided::denied(denial, Check::Bundles);
        }
        self.finish(None)
    }

    fn finish(self, bundles: Option<Box<BundleRun>>) -> Decided {
        let Self {
            candidate,
            raised,
            recorded,
            registration,
            cx,
        } = self;
        let (repository, access) = check_repository(cx.snapshot, candidate.target(), registration);
        let decided = |verdict, check, permit| Decided {
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
                let denial = Denial::new(Reason::Internal, UNKNOWN);
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
    let subject = FixedInput::request_again(Arc::clone(input));
    let checked = cx.snapshot.requests.run_blocking(&subject, raised);
    // The client cannot read a refusal in the middle of a download, so details are dropped.
    checked.map_err(|_| Denial::new(Reason::RegoDenied, "rego"))
}

/// Applies the rules for GitHub's API that depend on the head alone. If they need the body, they
/// are applied when it was read.
fn github_head(
    snapshot: &PolicySnapshot,
    target: &Target,
    head: &HeadFacts<'_>,
    registration: Option<&Registration>,
    mode: Mode,
) -> Result<Option<RuleName>, Denial> {
    if !GithubRules::speaks_for(&target.host) {
        return Ok(None);
    }
    let received = match head {
        HeadFacts::Headers { received, .. } => received,
        HeadFacts::Recorded(known) => {
            let again = known.github.as_ref();
            return again
                .map_or(Ok(()), |rule| github::recheck(snapshot, target, rule))
                .map(|()| known.github.clone());
        }
    };
    github::blocked_pattern(snapshot, target)?;
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

fn request_body(facts: &BodyFacts<'_>, cx: Cx<'_>) -> Decided {
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
        Ok(rule) => Decided {
            recorded: Recorded {
                input: None,
                github: Some(rule.clone()),
            },
            ..Decided::allowed(rule, Check::Github)
        },
        Err(denial) => Decided::denied(denial, Check::Github),
    }
}

/// Refuses a request with a header that asks the server for another method or path, where a
/// rule restricts either: the rules have judged the request line. Why it is refused and not
/// sent without the header: [`policy::override_header`].
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
    let (reason, what) = match overrides {
        OverrideHeader::Method => (Reason::MethodDenied, "method"),
        OverrideHeader::Path => (Reason::PathDenied, "path"),
    };
    Err(Denial::new(reason, "override-header").with_message(format!(
        "The header '{name}' makes {host} use another {what} for this request, and rules restrict \
         methods or paths there. Send the request with that {what} itself, without the header."
    )))
}

/// The repository of a request, and whether the sender may access it. On hosts that are not in
/// `git.hosts` pushes are refused, because they would pass unchecked.
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
    let (name, shown) = (address.name.as_ref(), &address.display_name);
    let access = repository::authorise(repos, name, shown, address.operation, git.read_public);
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

fn connect(facts: &ConnectFacts<'_>, cx: Cx<'_>) -> Decided {
    let &ConnectFacts {
        sandbox,
        host,
        port,
    } = facts;
    host_alone(sandbox, host, port, None, cx)
}

/// Decides by host, port and program.
fn host_alone(
    sandbox: Option<&SandboxId>,
    host: &Host,
    port: u16,
    program: Option<&str>,
    cx: Cx<'_>,
) -> Decided {
    let judged = cx
        .snapshot
        .settings
        .allowlist()
        .judge_unread(host, port, program);
    match judged {
        Ok(rule) => Decided::allowed(rule.name.clone(), Check::Allowlist),
        Err(denial) if cx.snapshot.asks_about(&denial) => {
            let mut raised = RaisedQuestions::new(Grant::Host, cx.snapshot.number);
            raise_host(&mut raised, denial, sandbox, host, port);
            settled(raised, RuleName::from(UNKNOWN), Check::Allowlist, cx)
        }
        Err(denial) => Decided::denied(denial, Check::Allowlist),
    }
}

fn passthrough<'a>(facts: PassthroughFacts<'a>, mode: Mode, cx: Cx<'a>) -> Deciding<'a> {
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
        return Deciding::Now(Decided::denied(denial, Check::Allowlist));
    }
    let by_host = host_alone(Some(sandbox), host, port, program, cx);
    let Verdict::Allow { rule } = &by_host.verdict else {
        return Deciding::Now(by_host);
    };
    if cx.snapshot.requests.is_empty() {
        return Deciding::Now(by_host);
    }
    let rule = rule.clone();
    let mut raised = RaisedQuestions::new(Grant::Request, cx.snapshot.number);
    if let (Mode::Recheck, Some(recorded)) = (mode, recorded) {
        return Deciding::Now(match &recorded.input {
            None => by_host,
            Some(input) => match recheck_bundles(cx, input, &mut raised) {
                Ok(()) => settled(raised, rule, Check::Bundles, cx),
                Err(denial) => Decided::denied(denial, Check::Bundles),
            },
        });
    }
    Deciding::Later(Box::pin(async move {
        let read = RequestInput {
            sandbox,
            host,
            port,
            tls: true,
            program,
            request: None,
            registration,
            rule: &rule,
        };
        let mut subject = FixedInput::request(read.document());
        let input = Arc::clone(&subject.input);
        let bundles = &cx.snapshot.requests;
        let (verdict, run) = bundles.run(&mut subject, rule.clone(), &mut raised).await;
        let decided = match verdict {
            Verdict::Deny(denial) => Decided::denied(*denial, Check::Bundles),
            Verdict::Allow { .. } | Verdict::Modify(_) | Verdict::Ask(_) => {
                settled(raised, rule, Check::Bundles, cx)
            }
        };
        Decided {
            recorded: Recorded {
                input: Some(input),
                github: None,
            },
            bundles: Some(Box::new(run)),
            ..decided
        }
    }))
}

fn mirror(facts: &MirrorFacts<'_>, cx: Cx<'_>) -> Decided {
    let mirrors = &cx.snapshot.settings.git.mirrors;
    let denial = Denial::new(Reason::GitRepo, "git.mirrors");
    let refused = match facts {
        MirrorFacts::Named(name) if cx.snapshot.mirror(name).is_some() => None,
        MirrorFacts::Named(name) => {
            Some(denial.with_message(format!("There is no mirror '{name}' here.")))
        }
        MirrorFacts::Configured(mirror) if mirrors.contains(mirror) => None,
        MirrorFacts::Configured(_) => Some(denial),
    };
    match refused {
        None => Decided::allowed(RuleName::from("git.mirrors"), Check::Mirror),
        Some(denial) => Decided::denied(denial, Check::Mirror),
    }
}

fn push<'a>(facts: PushFacts<'a>, cx: Cx<'a>) -> Deciding<'a> {
    let snapshot = cx.snapshot;
    let rules = snapshot.settings.push_rules(facts.registration.auth_mode);
    let rule = RuleName::from("git:push");
    let findings = match facts.objects {
        ObjectFacts::Unread => {
            let judged = rules.judge_refs(facts.case, facts.refs);
            return Deciding::Now(match judged {
                Ok(()) => Decided::allowed(rule, Check::Refs),
                Err(denial) => Decided::denied(denial, Check::Refs),
            });
        }
        ObjectFacts::NotWanted => None,
        ObjectFacts::Read(findings) => Some(findings),
    };
    let mut raised = RaisedQuestions::new(Grant::Push, snapshot.number);
    match push::judge(&rules, facts.case, facts.refs, findings) {
        Ok(questions) => {
            let document = input::push(&facts, findings).to_string();
            for denial in questions {
                raised.raise(denial, Grant::Push, &[document.as_bytes()]);
            }
        }
        Err(denial) => return Deciding::Now(Decided::denied(denial, Check::Objects)),
    }
    if snapshot.pushes.is_empty() {
        return Deciding::Now(settled(raised, rule, Check::Objects, cx));
    }
    Deciding::Later(Box::pin(async move {
        let mut subject = FixedInput::whole(input::push(&facts, findings));
        let bundles = &snapshot.pushes;
        let (verdict, run) = bundles.run(&mut subject, rule.clone(), &mut raised).await;
        let decided = match verdict {
            Verdict::Deny(denial) => Decided::denied(*denial, Check::Bundles),
            Verdict::Allow { .. } | Verdict::Modify(_) | Verdict::Ask(_) => {
                settled(raised, rule, Check::Bundles, cx)
            }
        };
        Decided {
            bundles: Some(Box::new(run)),
            ..decided
        }
    }))
}

fn name(sandbox: &SandboxId, host: &Host, cx: Cx<'_>) -> Decided {
    match cx.snapshot.settings.allowlist().judge_host(host) {
        Ok(rules) => {
            let rule = rules.first().map(|rule| rule.name.clone());
            let rule = rule.unwrap_or_else(|| RuleName::from("allowlist"));
            Decided::allowed(rule, Check::Allowlist)
        }
        Err(denial) if cx.snapshot.asks_about(&denial) => {
            let mut raised = RaisedQuestions::new(Grant::Host, cx.snapshot.number);
            let denial = Denial {
                rule: UNKNOWN.into(),
                ..denial
            };
            let facts = [sandbox.as_str(), &host.to_string()].map(str::to_owned);
            raised.raise(
                denial,
                Grant::Host,
                &facts.each_ref().map(|part| part.as_bytes()),
            );
            settled(raised, RuleName::from(UNKNOWN), Check::Allowlist, cx)
        }
        Err(denial) => Decided::denied(denial, Check::Allowlist),
    }
}

fn mcp<'a>(facts: McpFacts<'a>, bundles: &'a Bundles, cx: Cx<'a>) -> Deciding<'a> {
    let McpFacts {
        stored,
        tool,
        message,
    } = facts;
    if let Some(denial) = stored {
        return Deciding::Now(Decided::denied(denial.clone(), Check::StoredDecision));
    }
    if let Err(denial) = tool {
        return Deciding::Now(Decided::denied(denial, Check::ToolList));
    }
    let rule = RuleName::from("mcp");
    let Some(message) = message else {
        return Deciding::Now(Decided::allowed(rule, Check::Bundles));
    };
    Deciding::Later(Box::pin(async move {
        let mut raised = RaisedQuestions::new(Grant::Message, cx.snapshot.number);
        let (verdict, run) = bundles.run(message, rule, &mut raised).await;
        let verdict = match (verdict, raised.settle(|question| cx.answer(question))) {
            (Verdict::Deny(denial), _) => Verdict::Deny(denial),
            (_, Some(QuestionOutcome::Open(question))) => Verdict::Ask(question),
            (_, Some(QuestionOutcome::Refused(denial))) => denial.into(),
            (verdict, Some(QuestionOutcome::Approved(_)) | None) => verdict,
        };
        Decided {
            bundles: Some(Box::new(run)),
            ..Decided::new(verdict, Check::Bundles)
        }
    }))
}

/// Raises the question whether a sandbox may reach a host that no rule names.
fn raise_host(
    raised: &mut RaisedQuestions,
    denial: Denial,
    sandbox: Option<&SandboxId>,
    host: &Host,
    port: u16,
) {
    let denial = Denial {
        rule: UNKNOWN.into(),
        ..denial
    };
    let sandbox = sandbox.map_or("", SandboxId::as_str);
    let (host, port) = (host.to_string(), port.to_string());
    let facts = [sandbox.as_bytes(), host.as_bytes(), port.as_bytes()];
    raised.raise(denial, Grant::Host, &facts);
}

/// Allows by `rule`, unless a question is open or was answered with a refusal.
fn settled(raised: RaisedQuestions, rule: RuleName, check: Check, cx: Cx<'_>) -> Decided {
    match raised.settle(|question| cx.answer(question)) {
        None | Some(QuestionOutcome::Approved(_)) => Decided::allowed(rule, check),
        Some(QuestionOutcome::Refused(denial)) => Decided::denied(denial, check),
        Some(QuestionOutcome::Open(question)) => Decided::new(Verdict::Ask(question), check),
    }
}
