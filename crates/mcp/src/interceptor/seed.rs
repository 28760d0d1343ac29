//! Hook dialect of the seed specification: a versioned JSON envelope (see docs/mcp.md, "The
//! seed's envelope").

use decide::bundles::Notes;
use policy::id::RequestId;
use policy::reason::Reason;
use policy::verdict::{Denial, RuleName};
use serde::Serialize;
use serde_json::json;
use serde_json::value::RawValue;
use tracing::{Instrument, Span};

use super::Interceptor;
use super::envelope::{Envelope, FieldError};
use crate::caller::McpCaller;
use crate::context::RequestOrigin;
use crate::governance::{GovernedMessage, Moment, Ruling, UnwrappedCall, new_request};
use crate::trace;

/// The version of the envelope.
const VERSION: &str = "1.0";

/// The common fields of before and after envelopes. `version`, `timestamp` and `session_id` are
/// optional: one of the seed's two definitions of the request does not have them.
struct EnvelopeHead {
    request_id: String,
    tool: String,
    caller: McpCaller,
}

impl Interceptor {
    pub(super) async fn answer_seed(
        &self,
        moment: Moment,
        envelope: &Envelope<'_>,
    ) -> Result<HookAnswer, FieldError> {
        let head = EnvelopeHead::read(moment, envelope)?;
        match moment {
            Moment::Before | Moment::Elicitation => self.answer_seed_before(&head, envelope).await,
            Moment::After => self.answer_seed_after(&head, envelope).await,
        }
    }

    async fn answer_seed_before(
        &self,
        head: &EnvelopeHead,
        envelope: &Envelope<'_>,
    ) -> Result<HookAnswer, FieldError> {
        let method = envelope.non_empty_text("method")?;
        let params = envelope.raw("params");
        let call = params.and_then(|params| UnwrappedCall::from_params(&method, params.get()));
        let request = RequestId::parse(&head.request_id).unwrap_or_else(|_| new_request());
        let contexts = self.governance.contexts();
        contexts.create(
            &head.request_id,
            RequestOrigin {
                request: Some(request),
                agent: &head.caller.agent,
                session: &head.caller.session,
                sandbox: None,
                tool: &head.tool,
                method: &method,
                name: call.as_ref().map_or("", |call| &call.name),
                trace: trace::traceparent_of(&Span::current()).as_deref(),
            },
        );
        let message = GovernedMessage {
            moment: Moment::Before,
            request,
            caller: &head.caller,
            tool: &head.tool,
            method: &method,
            params,
            result: None,
            error: None,
            call_decision: None,
            execution: None,
        };
        let mut evaluation = self.evaluate(&message).await;
        let decision = evaluation.decision();
        let approvals = std::mem::take(&mut evaluation.approvals);
        let stored = contexts.set_decision(&head.request_id, decision).map(drop);
        let stored = match approvals.is_empty() {
            true => stored,
            false => stored.and_then(|()| contexts.set_approvals(&head.request_id, approvals)),
        };
        if let Err(expired) = stored {
            tracing::warn!(%request, %expired, "storing the decision of an mcp before hook failed");
        }
        Ok(HookAnswer::new(
            evaluation.ruling,
            evaluation.notes,
            request,
        ))
    }

    async fn answer_seed_after(
        &self,
        head: &EnvelopeHead,
        envelope: &Envelope<'_>,
    ) -> Result<HookAnswer, FieldError> {
        let repeated = envelope.optional("method", Envelope::non_empty_text)?;
        let (result, error) = (envelope.raw("result"), envelope.raw("error"));
        let field_error = |field, what| Err(FieldError { field, what });
        match (envelope.has("result"), error) {
            (false, None) => return field_error("result", "missing, as is error"),
            (true, Some(_)) if result.is_some() => {
                return field_error("error", "must not be combined with result");
            }
            _ => {}
        }
        if error.is_some_and(|error| !error.get().starts_with('{')) {
            return field_error("error", "must be an object");
        }
        let contexts = self.governance.contexts();
        let known = match contexts.get(&head.request_id) {
            Ok(known) => known,
            Err(expired) => {
                let denial = Denial::new(Reason::Internal, "mcp:context");
                let denial = denial.with_message(expired.to_string());
                return Ok(HookAnswer::new(
                    Ruling::Block(denial),
                    Notes::new(),
                    new_request(),
                ));
            }
        };
        let request = known.request.unwrap_or_else(new_request);
        // The method of the before hook takes precedence: an after hook need not repeat it.
        let method = match known.method.is_empty() {
            true => repeated.unwrap_or_default(),
            false => known.method.to_string(),
        };
        let named = json!({"name": &*known.name}).to_string();
        let named = RawValue::from_string(named).ok();
        let named = named.as_deref().filter(|_| !known.name.is_empty());
        let span = tracing::info_span!("mcp.after", request = %request);
        trace::continue_from(&span, known.trace.as_deref());
        let message = GovernedMessage {
            moment: Moment::After,
            request,
            caller: &head.caller,
            tool: &head.tool,
            method: &method,
            params: named.or(envelope.raw("params")),
            result,
            error,
            call_decision: known.decision.as_deref(),
            execution: known.execution.as_ref(),
        };
        let evaluation = self.evaluate(&message).instrument(span).await;
        contexts.delete(&head.request_id);
        Ok(HookAnswer::new(
            evaluation.ruling,
            evaluation.notes,
            request,
        ))
    }
}

impl EnvelopeHead {
    fn read(moment: Moment, envelope: &Envelope<'_>) -> Result<Self, FieldError> {
        let field_error = |field, what| Err(FieldError { field, what });
        let version = envelope.optional("version", Envelope::non_empty_text)?;
        if version.is_some_and(|version| version != VERSION) {
            return field_error("version", "must be 1.0");
        }
        if envelope.non_empty_text("type")? != moment.as_str() {
            return field_error("type", "does not match this hook");
        }
        let request_id = envelope.non_empty_text("request_id")?;
        let timestamp = envelope.optional("timestamp", Envelope::non_empty_text)?;
        if timestamp.is_some_and(|timestamp| !is_time(&timestamp)) {
            return field_error(
                "timestamp",
                "must be an RFC 3339 time such as 2026-01-02T03:04:05Z",
            );
        }
        let tool = envelope.non_empty_text("tool_id")?;
        let agent = envelope.non_empty_text("agent_id")?;
        let session = envelope.optional("session_id", Envelope::text)?;
        let session = session.unwrap_or_default();
        let sandbox = None;
        Ok(Self {
            request_id,
            tool,
            caller: McpCaller {
                agent,
                session,
                sandbox,
            },
        })
    }
}

/// Whether `text` begins with an RFC 3339 date and time and has a zone.
fn is_time(text: &str) -> bool {
    let shape = b"0000-00-00T00:00:00";
    let begins = text.len() > shape.len()
        && text.bytes().zip(shape).all(|(byte, wanted)| match wanted {
            b'0' => byte.is_ascii_digit(),
            b'T' => byte.eq_ignore_ascii_case(&b'T'),
            other => byte == *other,
        });
    let zone = text.trim_end_matches(|c: char| c.is_ascii_digit() || c == ':');
    begins && (text.ends_with(['Z', 'z']) || zone.ends_with(['+', '-']) && zone.len() >= 20)
}

/// The answer of a hook. Data that a policy changed is inserted as raw JSON.
#[derive(Debug, Serialize)]
pub(super) struct HookAnswer {
    action: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    modified_data: Option<Box<RawValue>>,
    metadata: Metadata,
}

/// References for the operator: audit id, reason code and rule.
#[derive(Debug, Serialize)]
struct Metadata {
    request: RequestId,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<Reason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<RuleName>,
    /// The metadata of the policies.
    #[serde(flatten)]
    notes: Notes,
}

impl HookAnswer {
    fn new(ruling: Ruling, mut notes: Notes, request: RequestId) -> Self {
        // A policy cannot set these fields.
        notes.retain(|key, _| !["request", "code", "rule"].contains(&key.as_str()));
        let mut answer = Self {
            action: ruling.as_str(),
            reason: None,
            modified_data: None,
            metadata: Metadata {
                request,
                code: None,
                rule: None,
                notes,
            },
        };
        match ruling {
            Ruling::Pass => {}
            Ruling::Modify(data) => answer.modified_data = Some(data),
            Ruling::Block(denial) => {
                answer.reason = Some(denial.message);
                answer.metadata.code = Some(denial.reason);
                answer.metadata.rule = Some(denial.rule);
            }
        }
        answer
    }
}
