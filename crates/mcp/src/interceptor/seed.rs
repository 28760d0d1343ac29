//! The seed's dialect.

use decide::bundles::Notes;
use policy::id::RequestId;
use policy::reason::Reason;
use policy::verdict::{Denial, RuleName};
use serde::Serialize;
use serde_json::json;
use serde_json::value::RawValue;
use tracing::{Instrument, Span};

use super::Interceptor;
use super::envelope::{Envelope, Wrong};
use crate::caller::Caller;
use crate::context::Origin;
use crate::governance::{Asked, Call, Moment, Ruling, new_request};
use crate::trace;

/// The version of the envelope.
const VERSION: &str = "1.0";

/// What every envelope has. `version`, `timestamp` and `session_id` may be missing: one of the
/// seed's two definitions of the request is without them.
struct Head {
    request_id: String,
    tool: String,
    caller: Caller,
}

impl Interceptor {
    pub(super) async fn seed(
        &self,
        moment: Moment,
        envelope: &Envelope<'_>,
    ) -> Result<Answer, Wrong> {
        let head = Head::read(moment, envelope)?;
        match moment {
            Moment::Before | Moment::Elicitation => self.seed_before(&head, envelope).await,
            Moment::After => self.seed_after(&head, envelope).await,
        }
    }

    async fn seed_before(&self, head: &Head, envelope: &Envelope<'_>) -> Result<Answer, Wrong> {
        let method = envelope.word("method")?;
        let params = envelope.raw("params");
        let call = params.and_then(|params| Call::of(&method, params.get()));
        let request = RequestId::parse(&head.request_id).unwrap_or_else(|_| new_request());
        let contexts = self.governance.contexts();
        contexts.create(
            &head.request_id,
            Origin {
                request: Some(request),
                agent: &head.caller.agent,
                session: &head.caller.session,
                sandbox: None,
                tool: &head.tool,
                method: &method,
                name: call.as_ref().map_or("", |call| &call.name),
                trace: trace::name_of(&Span::current()).as_deref(),
            },
        );
        let asked = Asked {
            moment: Moment::Before,
            request,
            caller: &head.caller,
            tool: &head.tool,
            method: &method,
            params,
            result: None,
            error: None,
            before: None,
            execution: None,
        };
        let mut evaluation = self.evaluate(&asked).await;
        let decision = evaluation.decision();
        let approvals = std::mem::take(&mut evaluation.approvals);
        let stored = contexts.set_decision(&head.request_id, decision).map(drop);
        let stored = match approvals.is_empty() {
            true => stored,
            false => stored.and_then(|()| contexts.set_approvals(&head.request_id, approvals)),
        };
        if let Err(expired) = stored {
            tracing::warn!(%request, %expired, "the decision of a before hook was not stored");
        }
        Ok(Answer::new(evaluation.ruling, evaluation.notes, request))
    }

    async fn seed_after(&self, head: &Head, envelope: &Envelope<'_>) -> Result<Answer, Wrong> {
        let repeated = envelope.optional("method", Envelope::word)?;
        let (result, error) = (envelope.raw("result"), envelope.raw("error"));
        let wrong = |field, what| Err(Wrong { field, what });
        match (envelope.has("result"), error) {
            (false, None) => return wrong("result", "it is missing, and so is error"),
            (true, Some(_)) if result.is_some() => {
                return wrong("error", "there is a result, too");
            }
            _ => {}
        }
        if error.is_some_and(|error| !error.get().starts_with('{')) {
            return wrong("error", "it is no object");
        }
        let contexts = self.governance.contexts();
        let known = match contexts.get(&head.request_id) {
            Ok(known) => known,
            Err(expired) => {
                let denial = Denial::new(Reason::Internal, "mcp:context");
                let denial = denial.saying(expired.to_string());
                return Ok(Answer::new(
                    Ruling::Block(denial),
                    Notes::new(),
                    new_request(),
                ));
            }
        };
        let request = known.request.unwrap_or_else(new_request);
        // What the before hook was sent comes first: an after hook need not repeat it.
        let method = match known.method.is_empty() {
            true => repeated.unwrap_or_default(),
            false => known.method.to_string(),
        };
        let named = json!({"name": &*known.name}).to_string();
        let named = RawValue::from_string(named).ok();
        let named = named.as_deref().filter(|_| !known.name.is_empty());
        let span = tracing::info_span!("mcp.after", request = %request);
        trace::continue_from(&span, known.trace.as_deref());
        let asked = Asked {
            moment: Moment::After,
            request,
            caller: &head.caller,
            tool: &head.tool,
            method: &method,
            params: named.or(envelope.raw("params")),
            result,
            error,
            before: known.decision.as_deref(),
            execution: known.execution.as_ref(),
        };
        let judged = self.evaluate(&asked).instrument(span);
        let evaluation = judged.await;
        contexts.delete(&head.request_id);
        Ok(Answer::new(evaluation.ruling, evaluation.notes, request))
    }
}

impl Head {
    fn read(moment: Moment, envelope: &Envelope<'_>) -> Result<Self, Wrong> {
        let wrong = |field, what| Err(Wrong { field, what });
        let version = envelope.optional("version", Envelope::word)?;
        if version.is_some_and(|version| version != VERSION) {
            return wrong("version", "it is not 1.0");
        }
        if envelope.word("type")? != moment.as_str() {
            return wrong("type", "it is not that of this hook");
        }
        let request_id = envelope.word("request_id")?;
        let timestamp = envelope.optional("timestamp", Envelope::word)?;
        if timestamp.is_some_and(|timestamp| !is_time(&timestamp)) {
            return wrong("timestamp", "it is no time such as 2026-01-02T03:04:05Z");
        }
        let tool = envelope.word("tool_id")?;
        let agent = envelope.word("agent_id")?;
        let session = envelope.optional("session_id", Envelope::text)?;
        let session = session.unwrap_or_default();
        let sandbox = None;
        Ok(Self {
            request_id,
            tool,
            caller: Caller {
                agent,
                session,
                sandbox,
            },
        })
    }
}

/// Whether it begins as RFC 3339 has it, and says which zone.
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

/// What a hook answers. What a policy changed is passed on as it is written.
#[derive(Debug, Serialize)]
pub(super) struct Answer {
    action: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    modified_data: Option<Box<RawValue>>,
    metadata: Metadata,
}

/// What the operator can look up.
#[derive(Debug, Serialize)]
struct Metadata {
    request: RequestId,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<Reason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<RuleName>,
    /// What the policies add.
    #[serde(flatten)]
    notes: Notes,
}

impl Answer {
    fn new(ruling: Ruling, mut notes: Notes, request: RequestId) -> Self {
        // What the operator looks up is never a policy's own word.
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
