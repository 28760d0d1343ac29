//! Hook dialect of Docker's MCP gateway.
//!
//! Source: docker/mcp-gateway, pkg/interceptors. Older versions send the fields of a request
//! under their Go names, with the headers of the client's request among them; those are never
//! read.

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body_util::Full;
use policy::id::RequestId;
use policy::splice;
use policy::verdict::Denial;
use serde_json::json;
use serde_json::value::RawValue;
use tracing::Instrument;

use super::envelope::Envelope;
use super::{Interceptor, blocked_result, json_response, reply};
use crate::caller::McpCaller;
use crate::context::CORRELATION_KEY;
use crate::governance::{GovernedMessage, Moment, Ruling, UnwrappedCall, new_request};
use crate::trace;

/// The agent of every call: the gateway does not send one.
const DEFAULT_AGENT: &str = "default";

/// The refusal of a before hook whose arguments a policy redacts.
const REDACTION_UNSUPPORTED: &str = "a policy requires redacted arguments, which this gateway does not support. Serve the tool through the bridge and give the gateway its name as a prefix.";

impl Interceptor {
    pub(super) async fn answer_docker_before(
        &self,
        envelope: Option<Envelope<'_>>,
    ) -> Response<Full<Bytes>> {
        let Some(envelope) = envelope else {
            return block("the call is missing");
        };
        if envelope.has("params") && envelope.has("Params") {
            return block("the call has both params and Params");
        }
        let method = match envelope.has("method") {
            true => match envelope.non_empty_text("method") {
                Ok(method) => method,
                Err(_) => return block("the method is not a string"),
            },
            false => "tools/call".to_owned(),
        };
        let params = envelope.raw("params").or(envelope.raw("Params"));
        if params.is_none() && !envelope.has("params") && !envelope.has("Params") {
            return block("the call is missing");
        }
        let call = params.and_then(|params| UnwrappedCall::from_params(&method, params.get()));
        let call = call.unwrap_or_default();
        let caller = McpCaller {
            agent: DEFAULT_AGENT.to_owned(),
            session: String::new(),
            sandbox: None,
        };
        let message = GovernedMessage {
            moment: Moment::Before,
            request: new_request(),
            caller: &caller,
            tool: &call.server,
            method: &method,
            params,
            result: None,
            error: None,
            call_decision: None,
            execution: None,
        };
        match self.evaluate(&message).await.ruling {
            Ruling::Pass => Response::default(),
            Ruling::Block(denial) => denied(&denial),
            // The bridge evaluates the call again and redacts the arguments.
            Ruling::Modify(_) if self.governance.metrics().has_tool(&call.server) => {
                Response::default()
            }
            Ruling::Modify(_) => block(REDACTION_UNSUPPORTED),
        }
    }

    pub(super) async fn answer_docker_after(&self, body: &[u8]) -> Response<Full<Bytes>> {
        let Ok(text) = std::str::from_utf8(body) else {
            return block("the result is not valid JSON");
        };
        let text = text.trim();
        let Ok(CorrelatedResult { request, stripped }) = CorrelatedResult::read(text) else {
            return block("the result is not valid JSON");
        };
        let key = request.map(|request| request.to_string());
        let contexts = self.governance.contexts();
        let known = match key.map(|key| contexts.take(&key)).transpose() {
            Ok(known) => known.flatten(),
            Err(expired) => return block(&expired.to_string()),
        };
        let (agent, session, tool, method, name) = match &known {
            Some(known) => (
                &*known.agent,
                &*known.session,
                &*known.tool,
                &*known.method,
                &*known.name,
            ),
            None => (DEFAULT_AGENT, "", "", "tools/call", ""),
        };
        let caller = McpCaller {
            agent: agent.to_owned(),
            session: session.to_owned(),
            sandbox: known.as_ref().and_then(|known| known.sandbox.clone()),
        };
        let shown = stripped.as_deref().unwrap_or(text);
        let Ok(result) = RawValue::from_string(shown.to_owned()) else {
            return block("the result is not valid JSON");
        };
        let params = RawValue::from_string(json!({"name": name}).to_string()).ok();
        let span = tracing::info_span!("mcp.after");
        let known = known.as_ref();
        trace::continue_from(&span, known.and_then(|known| known.trace.as_deref()));
        let message = GovernedMessage {
            moment: Moment::After,
            request: request.unwrap_or_else(new_request),
            caller: &caller,
            tool,
            method,
            params: params.as_deref().filter(|_| !name.is_empty()),
            result: Some(&result),
            error: None,
            call_decision: known.and_then(|known| known.decision.as_deref()),
            execution: known.and_then(|known| known.execution.as_ref()),
        };
        match self.evaluate(&message).instrument(span).await.ruling {
            Ruling::Block(denial) => denied(&denial),
            Ruling::Modify(new) => json_response(StatusCode::OK, new.get().to_owned()),
            Ruling::Pass => match stripped {
                Some(stripped) => json_response(StatusCode::OK, stripped),
                None => Response::default(),
            },
        }
    }
}

/// A tool result and the correlation key that was in it.
struct CorrelatedResult {
    /// The request that the correlation key identifies.
    request: Option<RequestId>,
    /// The result without the key, if it had one.
    stripped: Option<String>,
}

impl CorrelatedResult {
    fn read(text: &str) -> Result<Self, splice::InvalidJson> {
        let path = ["_meta", CORRELATION_KEY];
        let request = splice::find(text, &path)?
            .and_then(|raw| serde_json::from_str::<String>(raw).ok())
            .and_then(|id| RequestId::parse(&id).ok());
        let stripped = splice::remove(text, &path)?;
        Ok(Self { request, stripped })
    }
}

fn denied(denial: &Denial) -> Response<Full<Bytes>> {
    block(&denial.message)
}

fn block(why: &str) -> Response<Full<Bytes>> {
    reply(StatusCode::OK, &blocked_result(why))
}
