//! Decisions about MCP messages: evaluates the operator's policies for a call, a result or a
//! server's question, and records the verdict. The bridge and the hooks of a gateway use it.
//!
//! A message that something was configured to judge and that cannot be judged does not pass.
//! Where nothing is configured, everything passes; health and the log say so.

mod call;
mod input;
mod rules;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use aws_lc_rs::rand::{SecureRandom, SystemRandom};
use policy::audit::{AuditEvent, Kind, Times};
use policy::id::RequestId;
use policy::rego::Decision;
use policy::rego::judge::Judge;
use policy::verdict::{Denial, Word};
use serde_json::value::RawValue;

pub use self::call::Call;
use self::input::{Parts, Subject};
pub use self::rules::Rules;
use crate::caller::Caller;
use crate::context::{Contexts, Execution, PolicyDecision};
use crate::metrics::Metrics;
use crate::ports::Ledger;
use crate::redaction::{self, Patterns};
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

/// What policies want whoever asked to know (`metadata` of their decisions).
pub type Notes = serde_json::Map<String, serde_json::Value>;

/// A ruling with the deciding policies' own words about it.
#[derive(Clone, Debug)]
pub struct Evaluation {
    /// The ruling.
    pub ruling: Ruling,
    /// The `metadata` of the policies that decided.
    pub notes: Notes,
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

/// What the policies that decided say beside their decisions.
#[derive(Debug, Default)]
struct PolicyWords {
    notes: Notes,
    reason: Option<String>,
}

/// Judges messages. Cloning is cheap.
#[derive(Clone)]
pub struct Governance(Arc<Inner>);

struct Inner {
    rules: ArcSwap<Rules>,
    ledger: Arc<dyn Ledger>,
    metrics: Metrics,
    contexts: Contexts,
    patterns: Patterns,
}

impl std::fmt::Debug for Governance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut said = f.debug_struct("Governance");
        said.field("rules", &self.0.rules.load())
            .finish_non_exhaustive()
    }
}

impl Governance {
    /// Judges by `rules`.
    pub fn new(
        rules: Rules,
        ledger: Arc<dyn Ledger>,
        metrics: Metrics,
        contexts: Contexts,
    ) -> Self {
        let governance = Self(Arc::new(Inner {
            rules: ArcSwap::from_pointee(Rules::default()),
            ledger,
            metrics,
            contexts,
            patterns: Patterns::default(),
        }));
        if rules.is_empty() {
            tracing::warn!("no policy bundle judges tool calls: they all pass");
        }
        governance.replace(rules);
        governance
    }

    /// From now on these are the rules. What is being judged is judged by the old ones.
    pub fn replace(&self, rules: Rules) {
        self.0.metrics.know(rules.tools().iter().cloned());
        let old = self.0.rules.swap(Arc::new(rules));
        if !old.is_empty() && self.is_idle() {
            tracing::warn!("no policy bundle judges tool calls any more: they all pass");
        }
    }

    /// Whether no bundle judges tool calls at all.
    pub fn is_idle(&self) -> bool {
        self.0.rules.load().is_empty()
    }

    /// Bundles that are configured and not in force, and why.
    pub fn missing_bundles(&self) -> Vec<String> {
        self.0.rules.load().missing().to_vec()
    }

    /// The numbers.
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// What is remembered of requests.
    pub fn contexts(&self) -> &Contexts {
        &self.0.contexts
    }

    /// Judges a message, and writes down what came of it.
    pub async fn judge(&self, asked: &Asked<'_>) -> Ruling {
        self.evaluate(asked).await.ruling
    }

    /// The same, with the words of the policies that decided.
    pub async fn evaluate(&self, asked: &Asked<'_>) -> Evaluation {
        let began = Instant::now();
        let mut event = Box::new(record(asked));
        let mut words = PolicyWords::default();
        let ruling = match self.ask(asked, &mut event, &mut words).await {
            Ok(None) => Ruling::Pass,
            Ok(Some(new)) => Ruling::Modify(new),
            Err(denial) => Ruling::Block(denial),
        };
        let took = began.elapsed();
        event.verdict = Some(ruling.word());
        event.ms.insert("policy", took.as_secs_f64() * 1000.0);
        if let Ruling::Block(denial) = &ruling {
            event.reason = Some(denial.reason);
            event.rule = Some(denial.rule.clone());
        }
        let (metrics, moment) = (&self.0.metrics, asked.moment.as_str());
        metrics.judged(moment, ruling.as_str(), tool_of(&event), took);
        let bundle = event.bundle.clone();
        self.0.ledger.record(event).await;
        Evaluation {
            ruling,
            notes: words.notes,
            reason: words.reason,
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

    async fn record_refusal(&self, event: AuditEvent, asked: &Asked<'_>, denial: &Denial) {
        let event = AuditEvent {
            reason: Some(denial.reason),
            rule: Some(denial.rule.clone()),
            verdict: Some(Word::Deny),
            ..event
        };
        let (metrics, moment) = (&self.0.metrics, asked.moment.as_str());
        metrics.judged(moment, "block", tool_of(&event), Duration::ZERO);
        self.0.ledger.record(Box::new(event)).await;
    }

    /// Puts a message to each bundle in the order of the settings, each seeing what those
    /// before it made of it. The first that does not allow it decides.
    async fn ask(
        &self,
        asked: &Asked<'_>,
        event: &mut AuditEvent,
        words: &mut PolicyWords,
    ) -> Result<Option<Box<RawValue>>, Denial> {
        let rules = self.0.rules.load_full();
        let judges = rules.judges(asked.moment);
        if judges.is_empty() {
            return Ok(None);
        }
        let mut subject = Subject::read(asked, Parts::of(asked)).await?;
        event.operation = Some(clean(&subject.call.name)).filter(|name| !name.is_empty());
        for judge in judges {
            let asked_at = Instant::now();
            let decision = rules.ask(judge, &subject).await;
            let action = rules::action(&decision);
            let metrics = &self.0.metrics;
            metrics.decided(judge.id(), action, asked_at.elapsed());
            if let Decision::Failed(failure) = &decision {
                metrics.failed(judge.id(), rules::kind_of(failure));
            }
            let noted = decision.metadata().cloned();
            let reason = decision.message().map(str::to_owned);
            let outcome = match rules::understand(judge, decision) {
                Ok(None) => Ok(None),
                Ok(Some(outputs)) => {
                    let (target, wrappings) = subject.target(asked.moment);
                    redaction::apply(&self.0.patterns, outputs, target, wrappings)
                        .await
                        .map_err(|fault| rules::cannot_redact(judge, &fault))
                }
                Err(denial) => Err(denial),
            };
            if !judge.decides(&outcome) {
                self.log(judge, &outcome, event).await;
                continue;
            }
            words.notes.extend(noted.into_iter().flatten());
            words.reason = reason.or(words.reason.take());
            event.bundle = Some(judge.id().to_owned());
            event.rule = Some(judge.rule_name());
            if let Some(new) = outcome? {
                let parts = subject.parts.with(asked.moment, Cow::Owned(new));
                subject = Subject::read(asked, parts).await?;
            }
        }
        let old = Parts::of(asked).into_target(asked.moment);
        match subject.parts.into_target(asked.moment) {
            // Also where one bundle takes back what another has changed.
            new if new == old => Ok(None),
            Some(text) => match RawValue::from_string(text.into_owned()) {
                Ok(raw) => Ok(Some(raw)),
                Err(error) => Err(input::unreadable(&error.to_string())),
            },
            None => Err(input::unreadable("nothing is left of it")),
        }
    }

    /// Writes down what a bundle says that does not decide.
    async fn log(
        &self,
        judge: &Judge,
        outcome: &Result<Option<String>, Denial>,
        event: &AuditEvent,
    ) {
        let (verdict, reason) = match outcome {
            Ok(None) => return,
            Ok(Some(_)) => (Word::Modify, None),
            Err(denial) => (Word::Deny, Some(denial.reason)),
        };
        let logged = AuditEvent {
            bundle: Some(judge.id().to_owned()),
            event: Some("policy_logged".to_owned()),
            ms: Times::default(),
            reason,
            rule: Some(judge.rule_name()),
            verdict: Some(verdict),
            ..event.clone()
        };
        self.0.ledger.record(Box::new(logged)).await;
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
