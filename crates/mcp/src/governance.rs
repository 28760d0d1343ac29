//! Decisions about MCP messages: evaluates the operator's policies for a call, a result or a
//! server's question, and records the verdict. The bridge and the hooks of a gateway use it.
//!
//! Where a policy bundle is configured, a message that it cannot evaluate is refused. Where none
//! is configured, every message passes; health and the log report that.

mod call;
mod held_message;
mod input;
mod message;

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use aws_lc_rs::rand::{SecureRandom, SystemRandom};
use config::Settings;
use decide::bundles::{LoggedDecision, Notes};
use decide::checks::Check;
use decide::decision::{Cx, decide};
use decide::hold::{self, Holding, Questions};
use decide::snapshot::{CurrentPolicy, PolicySnapshot};
use decide::subject::{McpFacts, Mode, Subject};
use policy::answer::ApprovalAnswers;
use policy::audit::{AuditEvent, Kind, Times};
use policy::clock::Tick;
use policy::id::RequestId;
use policy::ports::AuditSink;
use policy::verdict::{Denial, VerdictKind};
use serde_json::value::RawValue;

pub use self::call::UnwrappedCall;
use self::held_message::{HeldCounts, HeldMessage};
use crate::caller::McpCaller;
use crate::context::{Contexts, Execution, PolicyDecision};
use crate::hold_terms::{CallApprovals, HoldTerms};
use crate::metrics::Metrics;
use crate::redaction::PatternCache;
use crate::rpc;

/// The largest message that is parsed and evaluated on the async runtime's own threads. Larger
/// ones go to the blocking pool.
const MAX_INLINE_BYTES: usize = 64 * 1024;

/// The longest text in a record that a client or a tool chose, in characters.
const MAX_RECORD_CHARS: usize = 128;

/// The `event` of the record of a call that is refused by its stored decision.
const STORED_DECISION: &str = "stored_decision";

/// The point at which a message is evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Moment {
    /// Before the call is sent to the tool.
    Before,
    /// Before the tool's answer is sent to the agent.
    After,
    /// Before a server's request is sent to the client: sampling, elicitation, roots.
    Elicitation,
}

impl Moment {
    /// The word in inputs, records and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Moment::Before => "before",
            Moment::After => "after",
            Moment::Elicitation => "elicitation",
        }
    }
}

/// A message to evaluate.
#[derive(Clone, Copy, Debug)]
pub struct GovernedMessage<'a> {
    /// The point at which the message is evaluated.
    pub moment: Moment,
    /// The request's id in the audit log.
    pub request: RequestId,
    /// The caller.
    pub caller: &'a McpCaller,
    /// The server's name in `tools`.
    pub tool: &'a str,
    /// The JSON-RPC method.
    pub method: &'a str,
    /// The params of the request.
    pub params: Option<&'a RawValue>,
    /// The result of the call.
    pub result: Option<&'a RawValue>,
    /// The error in place of a result.
    pub error: Option<&'a RawValue>,
    /// The decision on the call, if this message is its answer.
    pub call_decision: Option<&'a PolicyDecision>,
    /// The outcome of the call, if this message is its answer.
    pub execution: Option<&'a Execution>,
}

/// A ruling with the metadata and reasons of the policies that decided.
#[derive(Clone, Debug)]
pub struct MessageEvaluation {
    /// The ruling.
    pub ruling: Ruling,
    /// The `metadata` of the policies that decided.
    pub notes: Notes,
    /// The operator's approvals of the message.
    pub approvals: CallApprovals,
    /// The reason of the last policy that decided and gave one.
    reason: Option<String>,
    /// The policy bundle that decided.
    bundle: Option<String>,
}

impl MessageEvaluation {
    /// The decision as it is stored for the bridge and the after hook.
    pub fn decision(&self) -> PolicyDecision {
        let denial = match &self.ruling {
            Ruling::Block(denial) => Some(Denial {
                evidence: None,
                ..denial.clone()
            }),
            Ruling::Pass | Ruling::Modify(_) => None,
        };
        let message = denial.as_ref().map(|denial| denial.message.clone());
        let metadata = match self.notes.is_empty() {
            true => String::new(),
            // Maps of JSON values can always be written.
            false => serde_json::to_string(&self.notes).unwrap_or_default(),
        };
        PolicyDecision {
            verdict: self.ruling.verdict(),
            bundle: self.bundle.clone().unwrap_or_default(),
            reason: message.or_else(|| self.reason.clone()).unwrap_or_default(),
            denial,
            metadata,
        }
    }
}

/// The decision about a message.
#[derive(Clone, Debug)]
pub enum Ruling {
    /// The message passes unchanged.
    Pass,
    /// The message passes with this new JSON for the params (before, elicitation), the result
    /// (after), or the error if the message has one in place of a result.
    Modify(Box<RawValue>),
    /// The message is refused.
    Block(Denial),
}

impl Ruling {
    /// The word in metrics and in a gateway's answers.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Ruling::Pass => "pass",
            Ruling::Modify(_) => "modify",
            Ruling::Block(_) => "block",
        }
    }

    /// The verdict in records.
    pub const fn verdict(&self) -> VerdictKind {
        match self {
            Ruling::Pass => VerdictKind::Allow,
            Ruling::Modify(_) => VerdictKind::Modify,
            Ruling::Block(_) => VerdictKind::Deny,
        }
    }
}

/// Evaluates messages. Cloning is cheap.
#[derive(Clone)]
pub struct Governance(Arc<Inner>);

struct Inner {
    policy: Arc<CurrentPolicy>,
    audit: Arc<dyn AuditSink>,
    metrics: Metrics,
    contexts: Contexts,
    questions: Questions,
    held_counts: HeldCounts,
    patterns: PatternCache,
}

impl std::fmt::Debug for Governance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("Governance");
        shown
            .field("policy", &self.0.policy.load().number)
            .finish_non_exhaustive()
    }
}

impl Governance {
    /// Decides by the current policy. Questions for the operator go to `questions`.
    pub fn new(
        policy: Arc<CurrentPolicy>,
        audit: Arc<dyn AuditSink>,
        metrics: Metrics,
        contexts: Contexts,
        questions: Questions,
    ) -> Self {
        let governance = Self(Arc::new(Inner {
            policy,
            audit,
            metrics,
            contexts,
            questions,
            held_counts: HeldCounts::default(),
            patterns: PatternCache::default(),
        }));
        let snapshot = governance.0.policy.load();
        if !snapshot.governs_tools() {
            tracing::warn!("no policy bundle for mcp tool calls: all calls pass");
        }
        governance.report_tools(&snapshot.settings);
        governance
    }

    /// Applies a reloaded policy. `had_bundle` is whether the earlier policy had a bundle for tool
    /// calls.
    pub fn apply_reload(&self, had_bundle: bool) {
        let snapshot = self.0.policy.load();
        self.report_tools(&snapshot.settings);
        if had_bundle && !snapshot.governs_tools() {
            tracing::warn!("policy bundles for mcp tool calls removed: all calls pass");
        }
    }

    fn report_tools(&self, settings: &Settings) {
        let tools = settings.tools.iter();
        self.0
            .metrics
            .set_tool_names(tools.map(|tool| tool.name.clone()));
    }

    /// Whether no policy bundle is configured for tool calls.
    pub fn has_no_policy(&self) -> bool {
        !self.0.policy.load().governs_tools()
    }

    /// Bundles that are configured and were not loaded, and why.
    pub fn missing_bundles(&self) -> Vec<String> {
        self.0.policy.load().missing_tool_bundles()
    }

    /// Decides about a call without policy bundles: by the refusal that a before hook stored, the
    /// lists of allowed tools, and the tools' fingerprints.
    pub fn decide_without_bundles(
        &self,
        stored: Option<&Denial>,
        tool: Result<(), Denial>,
    ) -> Result<(), (Denial, Check)> {
        let snapshot = self.0.policy.load();
        let answers = ApprovalAnswers::default();
        let facts = McpFacts {
            stored,
            tool,
            message: None,
        };
        let decided =
            decide(Subject::McpCall(facts), Mode::Live, cx(&snapshot, &answers)).into_outcome();
        let check = decided.check;
        decided
            .refusal()
            .map(drop)
            .map_err(|denial| (denial, check))
    }

    /// The metrics.
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// The contexts of requests.
    pub fn contexts(&self) -> &Contexts {
        &self.0.contexts
    }

    /// Decides about a message and records the decision. If a policy requires the operator's
    /// approval, the message waits; `terms` limit the wait.
    pub async fn decide(&self, message: &GovernedMessage<'_>, terms: &HoldTerms<'_>) -> Ruling {
        self.evaluate(message, terms).await.ruling
    }

    /// As [`Governance::decide`], with the metadata and reasons of the policies that decided.
    pub async fn evaluate(
        &self,
        message: &GovernedMessage<'_>,
        terms: &HoldTerms<'_>,
    ) -> MessageEvaluation {
        let began = Instant::now();
        let mut event = Box::new(new_record(message));
        let mut held = HeldMessage::new(self, message, terms);
        let holding = Holding {
            questions: &self.0.questions,
            policy: &self.0.policy,
            // The limit of `terms` covers all questions of the message together.
            limit: None,
        };
        let settled = hold::settle(&mut held, holding).await;
        let ruling = settled.unwrap_or_else(Ruling::Block);
        let waited = held.finish();
        let took = began.elapsed().saturating_sub(waited.unwrap_or_default());
        let run = std::mem::take(&mut held.run);
        event.operation = held.operation.take().or(event.operation.take());
        for logged in &run.logged {
            self.log(logged, &event).await;
        }
        if let Some((bundle, rule)) = &run.decided_by {
            event.bundle = Some(bundle.clone());
            event.rule = Some(rule.clone());
        }
        event.ms.insert("policy", took.as_secs_f64() * 1000.0);
        if let Some(waited) = waited {
            add_hold(&mut event, waited);
        }
        match &ruling {
            Ruling::Block(denial) => add_denial(&mut event, denial),
            Ruling::Pass | Ruling::Modify(_) => event.verdict = Some(ruling.verdict()),
        }
        let (metrics, moment) = (&self.0.metrics, message.moment.as_str());
        metrics.record_intercept(moment, ruling.as_str(), tool_label(&event), took);
        let bundle = event.bundle.clone();
        self.0.audit.record(event).await;
        MessageEvaluation {
            ruling,
            notes: run.notes,
            approvals: std::mem::take(&mut held.approvals),
            reason: run.reason,
            bundle,
        }
    }

    /// Records that a message was refused before any policy was evaluated.
    pub async fn record_refused(&self, message: &GovernedMessage<'_>, denial: &Denial) {
        self.record_refusal(new_record(message), message, denial)
            .await;
    }

    /// Records that a call was refused because its stored decision is a refusal. The record has
    /// the request, bundle, rule and reason of that decision.
    pub async fn record_refused_by_stored_decision(
        &self,
        message: &GovernedMessage<'_>,
        decision: &PolicyDecision,
        denial: &Denial,
    ) {
        let event = AuditEvent {
            bundle: Some(decision.bundle.clone()).filter(|bundle| !bundle.is_empty()),
            event: Some(STORED_DECISION.to_owned()),
            ..new_record(message)
        };
        self.record_refusal(event, message, denial).await;
    }

    async fn record_refusal(
        &self,
        mut event: AuditEvent,
        message: &GovernedMessage<'_>,
        denial: &Denial,
    ) {
        add_denial(&mut event, denial);
        let (metrics, moment) = (&self.0.metrics, message.moment.as_str());
        metrics.record_intercept(moment, "block", tool_label(&event), Duration::ZERO);
        self.0.audit.record(Box::new(event)).await;
    }

    /// Records a message whose sender cancelled it or disconnected.
    fn record_later(&self, event: AuditEvent, moment: Moment) {
        let metrics = &self.0.metrics;
        metrics.record_intercept(moment.as_str(), "block", tool_label(&event), Duration::ZERO);
        let Err(event) = self.0.audit.try_record(Box::new(event)) else {
            return;
        };
        // Without a runtime the process is exiting.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let audit = Arc::clone(&self.0.audit);
            runtime.spawn(async move { audit.record(event).await });
        }
    }

    /// Records the decision of a bundle in log mode, which is not enforced.
    async fn log(&self, logged: &LoggedDecision, event: &AuditEvent) {
        let record = AuditEvent {
            bundle: Some(logged.bundle.clone()),
            event: Some("policy_logged".to_owned()),
            ms: Times::default(),
            reason: logged.reason,
            rule: Some(logged.rule.clone()),
            verdict: Some(logged.verdict),
            ..event.clone()
        };
        self.0.audit.record(Box::new(record)).await;
    }
}

fn cx<'a>(snapshot: &'a PolicySnapshot, answers: &'a ApprovalAnswers) -> Cx<'a> {
    Cx {
        snapshot,
        answers,
        grants: None,
        now: Tick::default(),
    }
}

/// A new request id.
pub fn new_request() -> RequestId {
    let mut bytes = [0; 16];
    // If randomness fails, the id is less unique, which is no reason to refuse the request.
    let _ = SystemRandom::new().fill(&mut bytes);
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let millis = u64::try_from(since.as_millis()).unwrap_or_default();
    RequestId::new(millis, u128::from_ne_bytes(bytes))
}

/// The name of the requested tool or prompt.
fn requested_name(message: &GovernedMessage<'_>) -> Option<String> {
    if !matches!(message.method, "tools/call" | "prompts/get") {
        return None;
    }
    let params = message.params?.get();
    let range = rpc::find(params, 0..params.len(), &["name"])?;
    let name: String = serde_json::from_str(params.get(range)?).ok()?;
    Some(sanitise(&name)).filter(|name| !name.is_empty())
}

/// The record of a message. Of the message's content it has only the name of the tool or prompt.
fn new_record(message: &GovernedMessage<'_>) -> AuditEvent {
    let caller = message.caller;
    let agent = caller.sandbox.is_none().then(|| sanitise(&caller.agent));
    AuditEvent {
        agent: agent.filter(|agent| !agent.is_empty()),
        host: Some(sanitise(message.tool)).filter(|tool| !tool.is_empty()),
        method: Some(sanitise(message.method)),
        operation: requested_name(message),
        request_id: Some(message.request),
        sandbox: caller.sandbox.clone(),
        stage: Some(message.moment.as_str().to_owned()),
        ..AuditEvent::new(Kind::Mcp)
    }
}

/// Adds a refusal to a record. A message that its sender cancelled has no verdict.
fn add_denial(event: &mut AuditEvent, denial: &Denial) {
    event.reason = Some(denial.reason);
    event.rule = Some(denial.rule.clone());
    event.verdict = (!denial.reason.is_failure()).then_some(VerdictKind::Deny);
}

/// Adds to a record how long the message waited for the operator.
fn add_hold(event: &mut AuditEvent, waited: Duration) {
    event.ms.insert("hold", waited.as_secs_f64() * 1000.0);
}

/// The tool label of the metrics: the server, or the name of the called tool if a gateway does
/// not send the server.
fn tool_label(event: &AuditEvent) -> &str {
    let tool = event.host.as_deref().or(event.operation.as_deref());
    tool.unwrap_or_default()
}

/// A text that a client or a tool chose, without control characters and truncated, for a record.
fn sanitise(text: &str) -> String {
    let shown = text
        .chars()
        .filter(|c| !c.is_control())
        .take(MAX_RECORD_CHARS);
    shown.collect()
}

#[cfg(test)]
pub(crate) mod tests;
