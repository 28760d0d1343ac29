//! Interceptor: answers the hooks that an MCP gateway calls before and after a tool call. There
//! are two dialects, distinguished by the shape of the body (see docs/mcp.md).
//!
//! - The seed's envelope: an object with `version`, `type`, `request_id` and so on, answered with
//!   `{action, reason?, modified_data?, metadata?}`. A missing or invalid field is answered with
//!   400, a refusal that names the field.
//! - Docker's gateway: the before hook sends the bare call, the after hook the bare result or
//!   null. The gateway ignores the HTTP status, and any body of the response replaces the call or
//!   the result: an empty body means 'pass', so every refusal and every failure is the result of
//!   a failed call.
//!
//! [`crate::governance`] decides about the request; nothing of a body is logged.

mod docker;
mod envelope;
mod seed;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};
use http_body_util::Full;
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use self::envelope::Envelope;
use crate::governance::{Governance, GovernedMessage, MessageEvaluation, Moment};
use crate::hold_terms::{HoldEnd, HoldTerms};
use crate::trace;

/// How long after its last hook a gateway of Docker's is assumed to be present.
const DOCKER_GATEWAY_TTL: Duration = Duration::from_secs(5 * 60);

/// How long a hook waits for the operator's answer at most: gateways have timeouts of their own.
pub const MAX_HOOK_HOLD: Duration = Duration::from_secs(20);

/// Answers hooks.
#[derive(Debug)]
pub struct Interceptor {
    governance: Governance,
    stop: CancellationToken,
    /// The time of the last hook of Docker's gateway.
    last_docker_hook: Mutex<Option<Instant>>,
    /// The number of malformed hook bodies.
    malformed_bodies: AtomicU64,
}

/// The body of a hook.
enum Body<'a> {
    Seed(Envelope<'a>),
    Docker(Option<Envelope<'a>>),
}

impl Interceptor {
    /// Answers with the decisions of `governance`. A hook that waits is refused when `stop` is
    /// cancelled.
    pub fn new(governance: Governance, stop: CancellationToken) -> Self {
        Self {
            governance,
            stop,
            last_docker_hook: Mutex::new(None),
            malformed_bodies: AtomicU64::new(0),
        }
    }

    /// Answers `/intercept/before`. `parent` is the gateway's trace span.
    pub async fn answer_before(&self, body: Bytes, parent: Option<&str>) -> Response<Full<Bytes>> {
        self.answer_in_span(Moment::Before, &body, parent).await
    }

    /// Answers `/intercept/after`. `parent` is the gateway's trace span.
    pub async fn answer_after(&self, body: Bytes, parent: Option<&str>) -> Response<Full<Bytes>> {
        self.answer_in_span(Moment::After, &body, parent).await
    }

    async fn answer_in_span(
        &self,
        moment: Moment,
        body: &[u8],
        parent: Option<&str>,
    ) -> Response<Full<Bytes>> {
        let span = tracing::info_span!("mcp.intercept", moment = moment.as_str());
        trace::continue_from(&span, parent);
        self.answer_hook(moment, body).instrument(span).await
    }

    /// Evaluates the message of a hook. The wait for an operator's answer ends when the caller
    /// disconnects.
    async fn evaluate(&self, message: &GovernedMessage<'_>) -> MessageEvaluation {
        let terms = HoldTerms {
            ends: &[(HoldEnd::Gate, &self.stop)],
            limit: Some(MAX_HOOK_HOLD),
            ..HoldTerms::default()
        };
        self.governance.evaluate(message, &terms).await
    }

    /// Whether a hook of Docker's gateway was received within the last five minutes. Only then
    /// does the bridge add a correlation key to results: only that gateway's after hook removes
    /// it.
    pub fn has_recent_docker_hook(&self) -> bool {
        let last_hook = self
            .last_docker_hook
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        last_hook.is_some_and(|at| at.elapsed() <= DOCKER_GATEWAY_TTL)
    }

    fn record_docker_hook(&self) {
        let mut last_hook = self
            .last_docker_hook
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *last_hook = Some(Instant::now());
    }

    async fn answer_hook(&self, moment: Moment, body: &[u8]) -> Response<Full<Bytes>> {
        let Some(parsed) = Body::read(body) else {
            self.count_malformed("body");
            return malformed_response();
        };
        match parsed {
            Body::Seed(envelope) => match self.answer_seed(moment, &envelope).await {
                Ok(answer) => match serde_json::to_string(&answer) {
                    Ok(answer) => json_response(StatusCode::OK, answer),
                    Err(_) => reply(StatusCode::OK, &json!({"action": "block"})),
                },
                Err(wrong) => {
                    self.count_malformed(wrong.field);
                    let message = wrong.to_string();
                    let answer = json!({
                        "action": "block",
                        "reason": message,
                        "error": message,
                        "field": wrong.field,
                    });
                    reply(StatusCode::BAD_REQUEST, &answer)
                }
            },
            Body::Docker(envelope) => {
                self.record_docker_hook();
                match moment {
                    Moment::Before | Moment::Elicitation => {
                        self.answer_docker_before(envelope).await
                    }
                    Moment::After => self.answer_docker_after(body).await,
                }
            }
        }
    }

    /// Counts a malformed body. Only counts that are a power of two are logged: clients can send
    /// malformed bodies without limit.
    fn count_malformed(&self, field: &'static str) {
        let malformed_bodies = self.malformed_bodies.fetch_add(1, Ordering::Relaxed) + 1;
        if malformed_bodies.is_power_of_two() {
            tracing::warn!(field, malformed_bodies, "mcp hook body malformed");
        }
    }
}

impl<'a> Body<'a> {
    fn read(body: &'a [u8]) -> Option<Self> {
        let parsed: Option<Envelope<'a>> = serde_json::from_slice(body).ok()?;
        let Some(envelope) = parsed else {
            return Some(Body::Docker(None));
        };
        // A tool's result has none of the first fields, the seed's envelope none of the second.
        let fields = ["version", "type", "request_id", "tool_id", "agent_id"];
        let is_seed = fields.iter().any(|field| envelope.has(field))
            && !["content", "structuredContent", "Params"]
                .iter()
                .any(|field| envelope.has(field));
        Some(match is_seed {
            true => Body::Seed(envelope),
            false => Body::Docker(Some(envelope)),
        })
    }
}

/// A refusal in the form of both dialects, for a request whose dialect is unknown because its body
/// was not read or is malformed. Docker's gateway takes an empty body for a pass, and any other
/// body for the result of the call, whatever the status.
pub fn refusal(status: StatusCode, why: &str) -> Response<Full<Bytes>> {
    reply(status, &refusal_body(why))
}

fn refusal_body(why: &str) -> Value {
    let mut body = blocked_result(why);
    if let Some(fields) = body.as_object_mut() {
        fields.insert("action".to_owned(), json!("block"));
        fields.insert("reason".to_owned(), json!(why));
        fields.insert("error".to_owned(), json!(why));
    }
    body
}

/// The result of a refused call, which Docker's gateway returns to its client.
fn blocked_result(why: &str) -> Value {
    let text = format!("Blocked by policy: {why}");
    json!({"content": [{"type": "text", "text": text}], "isError": true})
}

/// A response with a JSON body.
fn reply(status: StatusCode, body: &Value) -> Response<Full<Bytes>> {
    json_response(status, body.to_string())
}

fn json_response(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
}

fn malformed_response() -> Response<Full<Bytes>> {
    let mut body = refusal_body("the body is not a JSON object");
    if let Some(fields) = body.as_object_mut() {
        fields.insert("field".to_owned(), json!("body"));
    }
    reply(StatusCode::BAD_REQUEST, &body)
}

#[cfg(test)]
mod tests;
