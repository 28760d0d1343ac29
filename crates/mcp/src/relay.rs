//! Relay: decides every call by tool lists, fingerprints and policies, and decides its answer by
//! policies, for all transports.

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
use crate::caller::McpCaller;
use crate::context::{CORRELATION_KEY, Execution, PolicyDecision};
use crate::governance::{Governance, GovernedMessage, Moment, Ruling, new_request};
use crate::hold_terms::{CallApprovals, HoldTerms};
use crate::metrics::CallStatus;
use crate::process::ProcessEnded;
use crate::rpc::{self, Fields, RpcMessage, code};
use crate::tools::StdioServer;
use crate::trace::{self, TRACEPARENT};

/// Protocol methods that pass without a policy decision. Policies decide about all other methods,
/// including unknown ones.
const UNDECIDED_METHODS: [&str; 9] = [
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

/// Recorded if the exit code of a process is unknown.
const UNKNOWN_EXIT_CODE: i32 = -1;

/// A call that policies have permitted.
#[derive(Debug)]
pub struct PermittedCall {
    /// The request id in the audit log.
    pub request: RequestId,
    /// The JSON-RPC method.
    pub method: String,
    /// The message to send, including changes by policies.
    pub message: RpcMessage,
    started_at: Instant,
    /// The decision that allowed the call; none for [`UNDECIDED_METHODS`].
    decision: Option<PolicyDecision>,
    /// The operator's approvals of the call and of the calls that it continues.
    approvals: CallApprovals,
    /// Id of the stored context for the after hook.
    context: Option<String>,
    /// Whether the bridge created the context; otherwise a before hook did.
    is_own_context: bool,
    /// The tracing span of the call.
    span: Span,
}

impl PermittedCall {
    /// The operator's approvals of the call and of the calls that it continues.
    pub fn approvals(&self) -> &CallApprovals {
        &self.approvals
    }
}

/// Decides calls and delivers their answers.
#[derive(Clone, Debug)]
pub struct Relay {
    /// Evaluates the policies.
    pub governance: Governance,
    /// If a gateway calls the hooks, results contain the id by which an after hook finds its call.
    pub gateway_hooks: GatewayHookProbe,
}

/// Returns whether a gateway currently calls the hooks.
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
    /// Decides whether `caller` may send `message` to `served`. The error is the refusal to answer
    /// with. If a policy requires the operator's approval, the call waits; `terms` limit the wait.
    pub async fn permit(
        &self,
        server: &StdioServer,
        caller: &McpCaller,
        message: RpcMessage,
        headers: &CallHeaders,
        terms: &HoldTerms<'_>,
    ) -> Result<PermittedCall, String> {
        let method = message.method().unwrap_or_default().to_owned();
        if UNDECIDED_METHODS.contains(&method.as_str()) {
            return Ok(PermittedCall {
                request: new_request(),
                method,
                message,
                started_at: Instant::now(),
                decision: None,
                approvals: CallApprovals::default(),
                context: None,
                is_own_context: false,
                span: Span::none(),
            });
        }
        let request_id = headers.request_id.as_deref();
        let found = self.find_context(server, caller, &message, request_id);
        let known = found.as_ref().ok().and_then(Option::as_ref);
        let request = known.and_then(|known| known.request);
        let request = request.unwrap_or_else(new_request);
        let hook_trace = known.and_then(|known| known.trace.as_deref());
        let client_trace = message.param_text(&["_meta", TRACEPARENT]);
        let parent = headers
            .parent
            .as_deref()
            .or(hook_trace)
            .or(client_trace.as_deref());
        let span =
            tracing::info_span!("mcp.call", tool = %server.name(), method, request = %request);
        trace::continue_from(&span, parent);
        let message_to_decide = GovernedMessage {
            moment: Moment::Before,
            request,
            caller,
            tool: server.name(),
            method: &method,
            params: parse_raw(message.params()),
            result: None,
            error: None,
            call_decision: None,
            execution: None,
        };
        let id = message.id().unwrap_or("null");
        if let Err(expired) = &found {
            let denial =
                Denial::new(Reason::Internal, "mcp:context").with_message(expired.to_string());
            self.governance
                .record_refused(&message_to_decide, &denial)
                .await;
            return Err(refusal_message(id, &method, request, &denial));
        }
        // A call that the before hook refused stays refused, although the policies decide again
        // below and a reload may have changed them.
        let stored = known.and_then(|known| known.decision.as_deref());
        let stored = stored.and_then(|decision| Some((decision, decision.denial.as_ref()?)));
        let name = match (method.as_str(), unique_tool_name(&message)) {
            ("tools/call", None) if stored.is_none() => {
                let text = "params.name is missing, not a string, or not unique";
                return Err(RpcMessage::failure(id, code::INVALID_PARAMS, text, None));
            }
            ("tools/call", name) => name,
            _ => None,
        };
        let governance = &self.governance;
        let decide_head = || {
            let name = name.as_deref();
            let tool = name.map_or(Ok(()), |name| server.check_tool(name, caller));
            governance.decide_without_bundles(stored.map(|(_, denial)| denial), tool)
        };
        if let Err((denial, check)) = decide_head() {
            match stored {
                Some((decision, _)) if check == Check::StoredDecision => {
                    governance
                        .record_refused_by_stored_decision(&message_to_decide, decision, &denial)
                        .await;
                }
                _ => governance.record_refused(&message_to_decide, &denial).await,
            }
            return Err(refusal_message(id, &method, request, &denial));
        }
        // An approval at the hook is valid for one call.
        let hook_approvals = known.filter(|known| !known.approvals.is_empty());
        let hook_approvals =
            hook_approvals.map(|known| governance.contexts().take_approvals(&known.id));
        // Tool definitions may change while a call waits for the operator.
        let recheck = || decide_head().map_err(|(denial, _)| denial);
        let terms = HoldTerms {
            recheck: Some(&recheck),
            hook_approvals: hook_approvals.as_ref(),
            ..*terms
        };
        let evaluation = governance
            .evaluate(&message_to_decide, &terms)
            .instrument(span.clone());
        let evaluation = evaluation.await;
        let decision = evaluation.decision();
        let mut approvals = evaluation.approvals;
        if let Some(earlier) = terms.call_approvals {
            approvals.extend(earlier);
        }
        let message = match evaluation.ruling {
            Ruling::Pass => message,
            Ruling::Modify(params) => match RpcMessage::read(message.with_params(params.get())) {
                Ok(message) => message,
                Err(bad) => {
                    let text = format!("a policy changed the call into an invalid message: {bad}");
                    return Err(RpcMessage::failure(id, code::INTERNAL_ERROR, &text, None));
                }
            },
            Ruling::Block(denial) => return Err(refusal_message(id, &method, request, &denial)),
        };
        let own_span = trace::traceparent_of(&span);
        let message = with_traceparent(message, own_span.as_deref().or(parent));
        let context = known.map(|known| known.id.to_string());
        let is_own_context = context.is_none();
        let mut permitted = PermittedCall {
            request,
            method,
            message,
            started_at: Instant::now(),
            decision: Some(decision),
            approvals,
            context,
            is_own_context,
            span,
        };
        if is_own_context {
            permitted.context = self.store_context(server, caller, &permitted);
        }
        Ok(permitted)
    }

    /// Decides about the answer. Returns the message for `caller`, with the id of its request. If a
    /// policy requires the operator's approval, the answer waits; `terms` limit the wait.
    pub async fn deliver(
        &self,
        server: &StdioServer,
        caller: &McpCaller,
        permitted: &PermittedCall,
        answer: Result<RpcMessage, ProcessEnded>,
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
            duration: permitted.started_at.elapsed(),
        };
        let answer = match answer {
            Ok(answer) => answer,
            Err(ended) => {
                self.count_call(server, permitted, CallStatus::Error);
                execution.exit_code = ended.code.unwrap_or(UNKNOWN_EXIT_CODE);
                self.store_execution(server, caller, permitted, execution);
                return RpcMessage::failure(id, code::SERVER_ENDED, &ended.to_string(), None);
            }
        };
        let status = match answer.error() {
            Some(_) => CallStatus::Error,
            None => CallStatus::Success,
        };
        self.count_call(server, permitted, status);
        execution.failed = answer.error().is_some();
        self.store_execution(server, caller, permitted, execution);
        if method == "tools/list" {
            return with_answer_id(server.filter_tools(answer, caller), id);
        }
        if UNDECIDED_METHODS.contains(&method) {
            return answer.with_id(id);
        }
        let message_to_decide = GovernedMessage {
            moment: Moment::After,
            request: permitted.request,
            caller,
            tool: server.name(),
            method,
            params: parse_raw(permitted.message.params()),
            result: parse_raw(answer.result()),
            error: parse_raw(answer.error()),
            call_decision: permitted.decision.as_ref(),
            execution: Some(&execution),
        };
        let ruling = self
            .governance
            .decide(&message_to_decide, terms)
            .instrument(permitted.span.clone());
        let answer = match ruling.await {
            Ruling::Pass => answer.with_id(id),
            Ruling::Modify(new) if answer.result().is_some() => {
                with_answer_id(answer.with_result(new.get()), id)
            }
            Ruling::Modify(new) => with_answer_id(answer.with_error(new.get()), id),
            Ruling::Block(denial) => refusal_message(id, method, permitted.request, &denial),
        };
        if is_call && (self.gateway_hooks.0)() {
            with_correlation_id(answer, permitted.request)
        } else {
            answer
        }
    }

    /// Decides whether a server may send the request `question` to `caller`. If a policy requires
    /// the operator's approval, the question waits; `terms` limit the wait.
    pub async fn permit_question(
        &self,
        server: &StdioServer,
        caller: &McpCaller,
        question: RpcMessage,
        terms: &HoldTerms<'_>,
    ) -> Result<RpcMessage, Denial> {
        let message_to_decide = GovernedMessage {
            moment: Moment::Elicitation,
            request: new_request(),
            caller,
            tool: server.name(),
            method: question.method().unwrap_or_default(),
            params: parse_raw(question.params()),
            result: None,
            error: None,
            call_decision: None,
            execution: None,
        };
        match self.governance.decide(&message_to_decide, terms).await {
            Ruling::Pass => Ok(question),
            Ruling::Modify(params) => {
                RpcMessage::read(question.with_params(params.get())).map_err(|bad| {
                    Denial::new(Reason::RegoError, "mcp/elicitation").with_evidence(bad.to_string())
                })
            }
            Ruling::Block(denial) => Err(denial),
        }
    }

    /// Counts a call that ends without an answer of its server, and stores the failure for the
    /// after hook.
    pub fn record_unanswered(
        &self,
        server: &StdioServer,
        caller: &McpCaller,
        permitted: &PermittedCall,
        status: CallStatus,
    ) {
        self.count_call(server, permitted, status);
        self.store_abandoned(server, caller, permitted);
    }

    /// Counts the end of a tool call; other requests are not counted.
    fn count_call(&self, server: &StdioServer, permitted: &PermittedCall, status: CallStatus) {
        if permitted.method != "tools/call" {
            return;
        }
        let (metrics, runtime) = (self.governance.metrics(), server.config().runtime.kind);
        let took = permitted.started_at.elapsed();
        metrics.record_execution(server.name(), runtime, status, took);
    }
}

/// The answer to a refused call. For `tools/call` it is a result: agents rarely read errors.
pub fn refusal_message(id: &str, method: &str, request: RequestId, denial: &Denial) -> String {
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
        return RpcMessage::answer(id, &result.to_string());
    }
    RpcMessage::failure(id, code::POLICY_REFUSED, &text, Some(&about.to_string()))
}

/// The error for a server whose request to the client was refused.
pub fn refused_question(id: &str, denial: &Denial) -> String {
    let about = json!({"reason": denial.reason.code(), "rule": denial.rule.as_str()});
    let text = format!("Blocked by policy: {}", denial.message);
    RpcMessage::failure(id, code::POLICY_REFUSED, &text, Some(&about.to_string()))
}

/// The name of the called tool; none if it is missing, not a string, or not unique. If there are
/// two names, the server could use a different one than the gate.
fn unique_tool_name(message: &RpcMessage) -> Option<String> {
    let fields: Fields<'_> = serde_json::from_str(message.params()?).ok()?;
    let mut names = fields.0.iter().filter(|(key, _)| key == "name");
    let (_, name) = names.next()?;
    match names.next() {
        None => serde_json::from_str(name.get()).ok(),
        Some(_) => None,
    }
}

/// The call with the traceparent of its span in `_meta`, for the tool.
fn with_traceparent(message: RpcMessage, span: Option<&str>) -> RpcMessage {
    let (Some(span), Some(params)) = (span, message.params()) else {
        return message;
    };
    let Some(params) = set_meta(params, TRACEPARENT, &rpc::quote(span)) else {
        return message;
    };
    // Replacing the parameters by another object keeps the message valid.
    RpcMessage::read(message.with_params(&params)).unwrap_or(message)
}

/// The answer with the client's id.
fn with_answer_id(answer: String, id: &str) -> String {
    match RpcMessage::read(answer) {
        Ok(answer) => answer.with_id(id),
        Err(bad) => RpcMessage::failure(id, code::INTERNAL_ERROR, &bad.to_string(), None),
    }
}

/// Puts the request id into the result, where the after hook finds it.
fn with_correlation_id(answer: String, request: RequestId) -> String {
    let Ok(answer) = RpcMessage::read(answer) else {
        return RpcMessage::failure(
            "null",
            code::INTERNAL_ERROR,
            "the answer is not a JSON-RPC message",
            None,
        );
    };
    let Some(result) = answer.result() else {
        return answer.into_text();
    };
    match set_meta(result, CORRELATION_KEY, &rpc::quote(&request.to_string())) {
        Some(result) => answer.with_result(&result),
        None => answer.into_text(),
    }
}

/// Sets `_meta[key]` of a JSON object to `value`. None if `object` is not a JSON object.
pub fn set_meta(object: &str, key: &str, value: &str) -> Option<String> {
    let whole = 0..object.len();
    if let Some(range) = rpc::find(object, whole.clone(), &["_meta", key]) {
        return Some(rpc::splice(object, range, value));
    }
    let entry = format!("{}:{value}", rpc::quote(key));
    match rpc::find(object, whole, &["_meta"]) {
        Some(range) => {
            let meta = object.get(range.clone())?;
            Some(rpc::splice(object, range, &add_entry(meta, &entry)?))
        }
        None => add_entry(object, &format!(r#""_meta":{{{entry}}}"#)),
    }
}

/// Inserts an entry at the front of a JSON object. None if `object` is not a JSON object.
pub fn add_entry(object: &str, entry: &str) -> Option<String> {
    let inner = object.strip_prefix('{')?;
    let comma = if inner.trim_start().starts_with('}') {
        ""
    } else {
        ","
    };
    Some(format!("{{{entry}{comma}{inner}"))
}

/// A part of a message as raw JSON for the policies. It was parsed before.
fn parse_raw(part: Option<&str>) -> Option<&RawValue> {
    part.and_then(|part| serde_json::from_str(part).ok())
}

/// Cryptographically secure random bytes.
pub fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    if aws_lc_rs::rand::fill(&mut bytes).is_err() {
        // The system's random source does not fail once it has worked. Without it, ids would be
        // guessable.
        tracing::error!("mcp random source failed");
        std::process::abort();
    }
    bytes
}

/// Bytes as lower-case hexadecimal text.
pub fn to_hex<const N: usize>(bytes: [u8; N]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
