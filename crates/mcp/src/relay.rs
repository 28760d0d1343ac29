//! What every call passes, whichever way it came: lists, fingerprints, policy, and on the
//! way back policy again.

mod contexts;

use std::sync::Arc;

use decide::checks::Check;
use policy::id::RequestId;
use policy::reason::Reason;
use policy::verdict::Denial;
use serde_json::json;
use serde_json::value::RawValue;
use tokio::time::Instant;
use tracing::{Instrument, Span};

use crate::call_headers::CallHeaders;
use crate::caller::Caller;
use crate::context::{CORRELATION, Execution, PolicyDecision};
use crate::governance::{Asked, Governance, Moment, Ruling, new_request};
use crate::hold_terms::{CallApprovals, HoldTerms};
use crate::metrics::Status;
use crate::process::Gone;
use crate::rpc::{self, Fields, Message, code};
use crate::tools::Served;
use crate::trace::{self, TRACEPARENT};

/// Methods that only arrange how both sides talk. Whatever else a client asks is judged:
/// also a method that nobody here has heard of.
const ARRANGING: [&str; 9] = [
    "initialize",
    "logging/setLevel",
    "ping",
    "prompts/list",
    "resources/list",
    "resources/templates/list",
    "resources/unsubscribe",
    "server/discover",
    "tools/list",
];

/// The exit code of a process whose code is not known.
const UNKNOWN_EXIT: i32 = -1;

/// A call that may be made.
#[derive(Debug)]
pub struct Permitted {
    /// Its name in the audit log.
    pub request: RequestId,
    /// The method.
    pub method: String,
    /// What is sent.
    pub message: Message,
    begun: Instant,
    /// The decision that allowed the call; none for a method that is not judged.
    decision: Option<PolicyDecision>,
    /// What an operator approved of it, and of the calls that it continues.
    approvals: CallApprovals,
    /// What is remembered of it for an after hook, by this name.
    context: Option<String>,
    /// Whether the bridge made that entry; otherwise a before hook did.
    is_own_context: bool,
    /// Lasts as long as the call.
    span: Span,
}

impl Permitted {
    /// What an operator approved of the call, and of those that it continues.
    pub fn approvals(&self) -> &CallApprovals {
        &self.approvals
    }
}

/// Sees calls through.
#[derive(Clone, Debug)]
pub struct Relay {
    /// Who decides.
    pub governance: Governance,
    /// Whether results carry the key by which an after hook finds its call.
    pub stamps: GatewayHookProbe,
}

/// Whether a gateway's hooks are heard at the moment.
#[derive(Clone)]
pub struct GatewayHookProbe(pub Arc<dyn Fn() -> bool + Send + Sync>);

impl std::fmt::Debug for GatewayHookProbe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("GatewayHookProbe")
            .field(&(self.0)())
            .finish()
    }
}

impl Relay {
    /// Whether `caller` may ask this of `served`. A refusal is the answer to give. Where a policy
    /// leaves that to the operator, the call waits on `terms`.
    pub async fn permit(
        &self,
        served: &Served,
        caller: &Caller,
        message: Message,
        headers: &CallHeaders,
        terms: &HoldTerms<'_>,
    ) -> Result<Permitted, String> {
        let method = message.method().unwrap_or_default().to_owned();
        if ARRANGING.contains(&method.as_str()) {
            return Ok(Permitted {
                request: new_request(),
                method,
                message,
                begun: Instant::now(),
                decision: None,
                approvals: CallApprovals::default(),
                context: None,
                is_own_context: false,
                span: Span::none(),
            });
        }
        let request_id = headers.request_id.as_deref();
        let found = self.find_context(served, caller, &message, request_id);
        let known = found.as_ref().ok().and_then(Option::as_ref);
        let request = known.and_then(|known| known.request);
        let request = request.unwrap_or_else(new_request);
        let begun_in = known.and_then(|known| known.trace.as_deref());
        let said = message.param_text(&["_meta", TRACEPARENT]);
        let parent = headers.parent.as_deref().or(begun_in).or(said.as_deref());
        let span =
            tracing::info_span!("mcp.call", tool = %served.name(), method, request = %request);
        trace::continue_from(&span, parent);
        let asked = Asked {
            moment: Moment::Before,
            request,
            caller,
            tool: served.name(),
            method: &method,
            params: raw(message.params()),
            result: None,
            error: None,
            before: None,
            execution: None,
        };
        let id = message.id().unwrap_or("null");
        if let Err(expired) = &found {
            let denial = Denial::new(Reason::Internal, "mcp:context").saying(expired.to_string());
            self.governance.refused(&asked, &denial).await;
            return Err(refusal(id, &method, request, &denial));
        }
        // The policies are asked again below, but a reload may have changed them, and what the
        // before hook refused stays refused.
        let stored = known.and_then(|known| known.decision.as_deref());
        let stored = stored.and_then(|decision| Some((decision, decision.denial.as_ref()?)));
        let name = match (method.as_str(), only_name(&message)) {
            ("tools/call", None) if stored.is_none() => {
                let text = "params.name is missing, no text, or there twice";
                return Err(Message::failure(id, code::PARAMS, text, None));
            }
            ("tools/call", name) => name,
            _ => None,
        };
        let governance = &self.governance;
        let decide_head = || {
            let name = name.as_deref();
            let tool = name.map_or(Ok(()), |name| served.judge(name, caller));
            governance.decide_head(stored.map(|(_, denial)| denial), tool)
        };
        if let Err((denial, check)) = decide_head() {
            match stored {
                Some((decision, _)) if check == Check::StoredDecision => {
                    governance.refused_by(&asked, decision, &denial).await;
                }
                _ => governance.refused(&asked, &denial).await,
            }
            return Err(refusal(id, &method, request, &denial));
        }
        // An approval at the hook counts for one call.
        let hooked = known.filter(|known| !known.approvals.is_empty());
        let hooked = hooked.map(|known| governance.contexts().take_approvals(&known.id));
        // Definitions of tools may change while a call waits.
        let head = || decide_head().map_err(|(denial, _)| denial);
        let terms = HoldTerms {
            head: Some(&head),
            hooked: hooked.as_ref(),
            ..*terms
        };
        let judged = governance.evaluate(&asked, &terms).instrument(span.clone());
        let judged = judged.await;
        let decision = judged.decision();
        let mut approvals = judged.approvals;
        if let Some(earlier) = terms.continued {
            approvals.extend(earlier);
        }
        let message = match judged.ruling {
            Ruling::Pass => message,
            Ruling::Modify(params) => match Message::read(message.with_params(params.get())) {
                Ok(message) => message,
                Err(bad) => {
                    let text = format!("a policy's change cannot be sent: {bad}");
                    return Err(Message::failure(id, code::INTERNAL, &text, None));
                }
            },
            Ruling::Block(denial) => return Err(refusal(id, &method, request, &denial)),
        };
        let own = trace::name_of(&span);
        let message = told_trace(message, own.as_deref().or(parent));
        let context = known.map(|known| known.id.to_string());
        let is_own_context = context.is_none();
        let mut permitted = Permitted {
            request,
            method,
            message,
            begun: Instant::now(),
            decision: Some(decision),
            approvals,
            context,
            is_own_context,
            span,
        };
        if is_own_context {
            permitted.context = self.remember(served, caller, &permitted);
        }
        Ok(permitted)
    }

    /// What `caller` may hear of the answer, under the id that it gave its request. Where a
    /// policy leaves that to the operator, the answer waits on `terms`.
    pub async fn deliver(
        &self,
        served: &Served,
        caller: &Caller,
        permitted: &Permitted,
        answer: Result<Message, Gone>,
        terms: &HoldTerms<'_>,
    ) -> String {
        let (id, method) = (
            permitted.message.id().unwrap_or("null"),
            permitted.method.as_str(),
        );
        let is_call = method == "tools/call";
        let mut execution = Execution {
            failed: true,
            exit_code: 0,
            duration: permitted.begun.elapsed(),
        };
        let answer = match answer {
            Ok(answer) => answer,
            Err(gone) => {
                self.count(served, permitted, Status::Error);
                execution.exit_code = gone.code.unwrap_or(UNKNOWN_EXIT);
                self.store_execution(served, caller, permitted, execution);
                return Message::failure(id, code::GONE, &gone.to_string(), None);
            }
        };
        let status = match answer.error() {
            Some(_) => Status::Error,
            None => Status::Success,
        };
        self.count(served, permitted, status);
        execution.failed = answer.error().is_some();
        self.store_execution(served, caller, permitted, execution);
        if method == "tools/list" {
            return readdressed(served.listed(answer, caller), id);
        }
        if ARRANGING.contains(&method) {
            return answer.with_id(id);
        }
        let asked = Asked {
            moment: Moment::After,
            request: permitted.request,
            caller,
            tool: served.name(),
            method,
            params: raw(permitted.message.params()),
            result: raw(answer.result()),
            error: raw(answer.error()),
            before: permitted.decision.as_ref(),
            execution: Some(&execution),
        };
        let judged = self
            .governance
            .judge(&asked, terms)
            .instrument(permitted.span.clone());
        let answer = match judged.await {
            Ruling::Pass => answer.with_id(id),
            Ruling::Modify(new) if answer.result().is_some() => {
                readdressed(answer.with_result(new.get()), id)
            }
            Ruling::Modify(new) => readdressed(answer.with_error(new.get()), id),
            Ruling::Block(denial) => refusal(id, method, permitted.request, &denial),
        };
        if is_call && (self.stamps.0)() {
            stamped(answer, permitted.request)
        } else {
            answer
        }
    }

    /// Whether a server may ask this of `caller`. Where a policy leaves that to the operator, the
    /// question waits on `terms`.
    pub async fn permit_question(
        &self,
        served: &Served,
        caller: &Caller,
        question: Message,
        terms: &HoldTerms<'_>,
    ) -> Result<Message, Denial> {
        let asked = Asked {
            moment: Moment::Elicitation,
            request: new_request(),
            caller,
            tool: served.name(),
            method: question.method().unwrap_or_default(),
            params: raw(question.params()),
            result: None,
            error: None,
            before: None,
            execution: None,
        };
        match self.governance.judge(&asked, terms).await {
            Ruling::Pass => Ok(question),
            Ruling::Modify(params) => {
                Message::read(question.with_params(params.get())).map_err(|bad| {
                    Denial::new(Reason::RegoError, "mcp/elicitation").because(bad.to_string())
                })
            }
            Ruling::Block(denial) => Err(denial),
        }
    }

    /// Counts a call that ends without an answer of its server, and stores for the after hook
    /// that it failed.
    pub fn note_unanswered(
        &self,
        served: &Served,
        caller: &Caller,
        permitted: &Permitted,
        status: Status,
    ) {
        self.count(served, permitted, status);
        self.store_abandoned(served, caller, permitted);
    }

    /// Counts the end of a tool's call; other requests are not counted.
    fn count(&self, served: &Served, permitted: &Permitted, status: Status) {
        if permitted.method != "tools/call" {
            return;
        }
        let (metrics, runtime) = (self.governance.metrics(), served.config().runtime.kind);
        let took = permitted.begun.elapsed();
        metrics.tool_executed(served.name(), runtime, status, took);
    }
}

/// The answer that says no. An agent reads the result of a call, and seldom an error.
pub fn refusal(id: &str, method: &str, request: RequestId, denial: &Denial) -> String {
    let about = json!({
        "reason": denial.reason.code(),
        "rule": denial.rule.as_str(),
        "request_id": request,
    });
    let text = format!("Blocked by policy: {} ({request})", denial.message);
    if method == "tools/call" {
        let result = json!({
            "content": [{"type": "text", "text": text}],
            "isError": true,
            "_meta": {"palisade/refusal": about},
        });
        return Message::answer(id, &result.to_string());
    }
    Message::failure(id, code::REFUSED, &text, Some(&about.to_string()))
}

/// The answer to a server whose question nobody may hear.
pub fn refused_question(id: &str, denial: &Denial) -> String {
    let about = json!({"reason": denial.reason.code(), "rule": denial.rule.as_str()});
    let text = format!("Blocked by policy: {}", denial.message);
    Message::failure(id, code::REFUSED, &text, Some(&about.to_string()))
}

/// The name of the tool that is called, where everybody reads the same.
fn only_name(message: &Message) -> Option<String> {
    let fields: Fields<'_> = serde_json::from_str(message.params()?).ok()?;
    let mut names = fields.0.iter().filter(|(key, _)| key == "name");
    let (_, name) = names.next()?;
    match names.next() {
        None => serde_json::from_str(name.get()).ok(),
        Some(_) => None,
    }
}

/// The call with the name of its span, where the tool finds it.
fn told_trace(message: Message, span: Option<&str>) -> Message {
    let (Some(span), Some(params)) = (span, message.params()) else {
        return message;
    };
    let Some(params) = set_meta(params, TRACEPARENT, &rpc::quote(span)) else {
        return message;
    };
    // What was a message is one with another object in its place.
    Message::read(message.with_params(&params)).unwrap_or(message)
}

/// The same answer under another id.
fn readdressed(answer: String, id: &str) -> String {
    match Message::read(answer) {
        Ok(answer) => answer.with_id(id),
        Err(bad) => Message::failure(id, code::INTERNAL, &bad.to_string(), None),
    }
}

/// Puts the request's name into a result, where an after hook finds it.
fn stamped(answer: String, request: RequestId) -> String {
    let Ok(answer) = Message::read(answer) else {
        return Message::failure("null", code::INTERNAL, "the answer is no message", None);
    };
    let Some(result) = answer.result() else {
        return answer.into_text();
    };
    match set_meta(result, CORRELATION, &rpc::quote(&request.to_string())) {
        Some(result) => answer.with_result(&result),
        None => answer.into_text(),
    }
}

/// An object whose `_meta` says `value` under `key`, whatever it said before. Nothing for
/// what is no object.
pub fn set_meta(object: &str, key: &str, value: &str) -> Option<String> {
    let whole = 0..object.len();
    if let Some(place) = rpc::find(object, whole.clone(), &["_meta", key]) {
        return Some(rpc::splice(object, place, value));
    }
    let entry = format!("{}:{value}", rpc::quote(key));
    match rpc::find(object, whole, &["_meta"]) {
        Some(place) => {
            let meta = object.get(place.clone())?;
            Some(rpc::splice(object, place, &add_entry(meta, &entry)?))
        }
        None => add_entry(object, &format!(r#""_meta":{{{entry}}}"#)),
    }
}

/// An object with one more entry in front. Nothing for what is no object.
pub fn add_entry(object: &str, entry: &str) -> Option<String> {
    let inner = object.strip_prefix('{')?;
    let comma = if inner.trim_start().starts_with('}') {
        ""
    } else {
        ","
    };
    Some(format!("{{{entry}{comma}{inner}"))
}

/// A part of a message, as the judges take it. It was read as JSON before.
fn raw(part: Option<&str>) -> Option<&RawValue> {
    part.and_then(|part| serde_json::from_str(part).ok())
}

/// Bytes that nobody can guess.
pub fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    if aws_lc_rs::rand::fill(&mut bytes).is_err() {
        // The system's source does not fail once it has worked; without it nothing here
        // can be kept apart.
        tracing::error!("there is no randomness");
        std::process::abort();
    }
    bytes
}

/// Bytes as text.
pub fn hex<const N: usize>(bytes: [u8; N]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
