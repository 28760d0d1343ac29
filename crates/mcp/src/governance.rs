//! Decisions about MCP messages: evaluates the operator's policies for a call, a result or a
//! server's question, and records the verdict. The bridge and the hooks of a gateway use it.
//!
//! A message that something was configured to judge and that cannot be judged does not pass.
//! Where nothing is configured, everything passes; health and the log say so.

mod call;
mod held;
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
use policy::answer::Answers;
use policy::audit::{AuditEvent, Kind, Times};
use policy::clock::Tick;
use policy::id::RequestId;
use policy::ports::AuditSink;
use policy::verdict::{Denial, Word};
use serde_json::value::RawValue;

pub use self::call::Call;
use self::held::{HeldCounts, HeldMessage};
use crate::caller::Caller;
use crate::context::{Contexts, Execution, PolicyDecision};
use crate::hold_terms::{CallApprovals, HoldTerms};
use crate::metrics::Metrics;
use crate::redaction::Patterns;
use crate::rpc;

/// A message of more bytes is read and judged where it keeps nobody waiting.
const LARGE: usize = 64 * 1024;

/// The longest text of somebody else's choice in a record.
const LONGEST: usize = 128;

/// The `event` of a record about a call that its stored decision refuses.
const STORED_DECISION: &str = "stored_decision";

/// When a message is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Moment {
    /// Before a tool hears it.
    Before,
    /// Before the agent hears what the tool answered.
    After,
    /// A server asks the client: sampling, elicitation, roots.
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

/// A message to judge.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// When.
    pub moment: Moment,
    /// Its name in the audit log.
    pub request: RequestId,
    /// Who asks.
    pub caller: &'a Caller,
    /// The server's name in `tools`.
    pub tool: &'a str,
    /// The JSON-RPC method.
    pub method: &'a str,
    /// What is asked.
    pub params: Option<&'a RawValue>,
    /// What was answered.
    pub result: Option<&'a RawValue>,
    /// What went wrong instead.
    pub error: Option<&'a RawValue>,
    /// The decision on the call, where this is its answer.
    pub before: Option<&'a PolicyDecision>,
    /// The outcome of the call, where this is its answer.
    pub execution: Option<&'a Execution>,
}

/// A ruling with the deciding policies' own words about it.
#[derive(Clone, Debug)]
pub struct Evaluation {
    /// The ruling.
    pub ruling: Ruling,
    /// The `metadata` of the policies that decided.
    pub notes: Notes,
    /// What an operator approved of it.
    pub approvals: CallApprovals,
    /// The sentence of the last policy that decided and has one.
    reason: Option<String>,
    /// The policy bundle that decided.
    bundle: Option<String>,
}

impl Evaluation {
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
            verdict: self.ruling.word(),
            bundle: self.bundle.clone().unwrap_or_default(),
            reason: message.or_else(|| self.reason.clone()).unwrap_or_default(),
            denial,
            metadata,
        }
    }
}

/// What becomes of a message.
#[derive(Clone, Debug)]
pub enum Ruling {
    /// It passes as it is.
    Pass,
    /// It passes with this in it: the params (before, elicitation), the result (after) or,
    /// where there was one instead of a result, the error. Whole.
    Modify(Box<RawValue>),
    /// It does not pass.
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

    /// The word in records.
    pub const fn word(&self) -> Word {
        match self {
            Ruling::Pass => Word::Allow,
            Ruling::Modify(_) => Word::Modify,
            Ruling::Block(_) => Word::Deny,
        }
    }
}

/// Judges messages. Cloning is cheap.
#[derive(Clone)]
pub struct Governance(Arc<Inner>);

struct Inner {
    policy: Arc<CurrentPolicy>,
    audit: Arc<dyn AuditSink>,
    metrics: Metrics,
    contexts: Contexts,
    questions: Questions,
    held: HeldCounts,
    patterns: Patterns,
}

impl std::fmt::Debug for Governance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut said = f.debug_struct("Governance");
        said.field("policy", &self.0.policy.load().number)
            .finish_non_exhaustive()
    }
}

impl Governance {
    /// Decides by the rules in force. What a policy leaves to the operator goes to `questions`.
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
            held: HeldCounts::default(),
            patterns: Patterns::default(),
        }));
        let snapshot = governance.0.policy.load();
        if !snapshot.governs_tools() {
            tracing::warn!("no policy bundle judges tool calls: they all pass");
        }
        governance.know_tools(&snapshot.settings);
        governance
    }

    /// Follows the rules that came in force. `governed` is whether a policy bundle decided about
    /// tool calls under the rules before.
    pub fn follow(&self, governed: bool) {
        let snapshot = self.0.policy.load();
        self.know_tools(&snapshot.settings);
        if governed && !snapshot.governs_tools() {
            tracing::warn!("no policy bundle judges tool calls any more: they all pass");
        }
    }

    fn know_tools(&self, settings: &Settings) {
        let tools = settings.tools.iter();
        self.0.metrics.know(tools.map(|tool| tool.name.clone()));
    }

    /// Whether no bundle judges tool calls at all.
    pub fn is_idle(&self) -> bool {
        !self.0.policy.load().governs_tools()
    }

    /// Bundles that are configured and not in force, and why.
    pub fn missing_bundles(&self) -> Vec<String> {
        self.0.policy.load().missing_tool_bundles()
    }

    /// Decides about a call as far as no policy has to be evaluated: the refusal that a before
    /// hook stored, and what the lists of tools and their fingerprints say.
    pub fn decide_head(
        &self,
        stored: Option<&Denial>,
        tool: Result<(), Denial>,
    ) -> Result<(), (Denial, Check)> {
        let snapshot = self.0.policy.load();
        let answers = Answers::default();
        let facts = McpFacts {
            stored,
            tool,
            message: None,
        };
        let decided = decide(Subject::McpCall(facts), Mode::Live, cx(&snapshot, &answers)).now();
        let check = decided.check;
        decided
            .refusal()
            .map(drop)
            .map_err(|denial| (denial, check))
    }

    /// The numbers.
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// What is remembered of requests.
    pub fn contexts(&self) -> &Contexts {
        &self.0.contexts
    }

    /// Judges a message, and writes down what came of it. Where a policy leaves that to the
    /// operator, the message waits on `terms`.
    pub async fn judge(&self, asked: &Asked<'_>, terms: &HoldTerms<'_>) -> Ruling {
        self.evaluate(asked, terms).await.ruling
    }

    /// The same, with the words of the policies that decided.
    pub async fn evaluate(&self, asked: &Asked<'_>, terms: &HoldTerms<'_>) -> Evaluation {
        let began = Instant::now();
        let mut event = Box::new(record(asked));
        let mut held = HeldMessage::new(self, asked, terms);
        let holding = Holding {
            questions: &self.0.questions,
            policy: &self.0.policy,
            // The limit of the terms is one for all questions of the message.
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
            note_hold(&mut event, waited);
        }
        match &ruling {
            Ruling::Block(denial) => note_denial(&mut event, denial),
            Ruling::Pass | Ruling::Modify(_) => event.verdict = Some(ruling.word()),
        }
        let (metrics, moment) = (&self.0.metrics, asked.moment.as_str());
        metrics.judged(moment, ruling.as_str(), tool_of(&event), took);
        let bundle = event.bundle.clone();
        self.0.audit.record(event).await;
        Evaluation {
            ruling,
            notes: run.notes,
            approvals: std::mem::take(&mut held.approvals),
            reason: run.reason,
            bundle,
        }
    }

    /// Writes down that a message was refused before any policy was asked.
    pub async fn refused(&self, asked: &Asked<'_>, denial: &Denial) {
        self.record_refusal(record(asked), asked, denial).await;
    }

    /// Writes down that a call was refused because its stored decision is a refusal. The record
    /// names that decision: its request, bundle, rule and reason.
    pub async fn refused_by(&self, asked: &Asked<'_>, decision: &PolicyDecision, denial: &Denial) {
        let event = AuditEvent {
            bundle: Some(decision.bundle.clone()).filter(|bundle| !bundle.is_empty()),
            event: Some(STORED_DECISION.to_owned()),
            ..record(asked)
        };
        self.record_refusal(event, asked, denial).await;
    }

    async fn record_refusal(&self, mut event: AuditEvent, asked: &Asked<'_>, denial: &Denial) {
        note_denial(&mut event, denial);
        let (metrics, moment) = (&self.0.metrics, asked.moment.as_str());
        metrics.judged(moment, "block", tool_of(&event), Duration::ZERO);
        self.0.audit.record(Box::new(event)).await;
    }

    /// Writes down what became of a message whose sender does not wait any more.
    fn record_later(&self, event: AuditEvent, moment: Moment) {
        let metrics = &self.0.metrics;
        metrics.judged(moment.as_str(), "block", tool_of(&event), Duration::ZERO);
        let Err(event) = self.0.audit.try_record(Box::new(event)) else {
            return;
        };
        // Without a runtime the process is at its end.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let audit = Arc::clone(&self.0.audit);
            runtime.spawn(async move { audit.record(event).await });
        }
    }

    /// Records a decision that does not count.
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

fn cx<'a>(snapshot: &'a PolicySnapshot, answers: &'a Answers) -> Cx<'a> {
    Cx {
        snapshot,
        answers,
        grants: None,
        now: Tick::default(),
    }
}

/// A name for a request.
pub fn new_request() -> RequestId {
    let mut bytes = [0; 16];
    // Without randomness ids are no longer told apart by it, and requests go on.
    let _ = SystemRandom::new().fill(&mut bytes);
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let millis = u64::try_from(since.as_millis()).unwrap_or_default();
    RequestId::new(millis, u128::from_ne_bytes(bytes))
}

/// Which tool or prompt of a server is asked for.
fn named(asked: &Asked<'_>) -> Option<String> {
    if !matches!(asked.method, "tools/call" | "prompts/get") {
        return None;
    }
    let params = asked.params?.get();
    let place = rpc::find(params, 0..params.len(), &["name"])?;
    let name: String = serde_json::from_str(params.get(place)?).ok()?;
    Some(clean(&name)).filter(|name| !name.is_empty())
}

/// What is written down of a message: never what is in it but a name.
fn record(asked: &Asked<'_>) -> AuditEvent {
    let caller = asked.caller;
    let agent = caller.sandbox.is_none().then(|| clean(&caller.agent));
    AuditEvent {
        agent: agent.filter(|agent| !agent.is_empty()),
        host: Some(clean(asked.tool)).filter(|tool| !tool.is_empty()),
        method: Some(clean(asked.method)),
        operation: named(asked),
        request_id: Some(asked.request),
        sandbox: caller.sandbox.clone(),
        stage: Some(asked.moment.as_str().to_owned()),
        ..AuditEvent::new(Kind::Mcp)
    }
}

/// Notes a refusal. A message that its sender withdrew was not refused.
fn note_denial(event: &mut AuditEvent, denial: &Denial) {
    event.reason = Some(denial.reason);
    event.rule = Some(denial.rule.clone());
    event.verdict = (!denial.reason.is_failure()).then_some(Word::Deny);
}

/// Notes how long a message waited for the operator.
fn note_hold(event: &mut AuditEvent, waited: Duration) {
    event.ms.insert("hold", waited.as_secs_f64() * 1000.0);
}

/// The tool that a message is counted under: the server, or the name of the call where a gateway
/// does not tell the server.
fn tool_of(event: &AuditEvent) -> &str {
    let tool = event.host.as_deref().or(event.operation.as_deref());
    tool.unwrap_or_default()
}

/// Text that others chose, fit for a record.
fn clean(text: &str) -> String {
    let seen = text.chars().filter(|c| !c.is_control()).take(LONGEST);
    seen.collect()
}

#[cfg(test)]
pub(crate) mod tests;
