//! The hooks an MCP gateway calls before and after a tool, in two dialects that are told apart
//! by their shape.
//!
//! - The seed's: an envelope with `version`, `type`, `request_id` and so on, answered with
//!   `{action, reason?, modified_data?, metadata?}`. What is missing or wrong is a 400 that
//!   names the field, and a refusal.
//! - That of Docker's gateway: before, the bare call; after, the bare result or null. It takes
//!   no notice of our status, and any byte of an answer replaces the call or the result:
//!   nothing at all means 'pass', and whatever goes wrong has to be the result of a call
//!   that failed. An empty answer would let the call through.
//!
//! What comes of a request is decided in [`crate::governance`]; nothing of a body is logged.

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
use crate::governance::{Asked, Evaluation, Governance, Moment};
use crate::hold_terms::{HoldEnd, HoldTerms};
use crate::trace;

/// How long a gateway of Docker's is taken to be there after its last hook.
const LATELY: Duration = Duration::from_secs(5 * 60);

/// How long a hook waits for the operator's answer: gateways have time-outs of their own.
pub const MAX_HOOK_HOLD: Duration = Duration::from_secs(20);

/// Answers hooks.
#[derive(Debug)]
pub struct Interceptor {
    governance: Governance,
    stop: CancellationToken,
    docker: Mutex<Option<Instant>>,
    unread: AtomicU64,
}

/// What a hook was sent.
enum Body<'a> {
    Seed(Envelope<'a>),
    Docker(Option<Envelope<'a>>),
}

impl Interceptor {
    /// Answers by what `governance` decides. A hook that waits is refused at `stop`.
    pub fn new(governance: Governance, stop: CancellationToken) -> Self {
        Self {
            governance,
            stop,
            docker: Mutex::new(None),
            unread: AtomicU64::new(0),
        }
    }

    /// Answers `/intercept/before`.
    /// `parent` names the span that the gateway asks in.
    pub async fn before(&self, body: Bytes, parent: Option<&str>) -> Response<Full<Bytes>> {
        self.traced(Moment::Before, &body, parent).await
    }

    /// Answers `/intercept/after`.
    pub async fn after(&self, body: Bytes, parent: Option<&str>) -> Response<Full<Bytes>> {
        self.traced(Moment::After, &body, parent).await
    }

    async fn traced(
        &self,
        moment: Moment,
        body: &[u8],
        parent: Option<&str>,
    ) -> Response<Full<Bytes>> {
        let span = tracing::info_span!("mcp.intercept", moment = moment.as_str());
        trace::continue_from(&span, parent);
        self.hook(moment, body).instrument(span).await
    }

    /// Judges what a hook was sent. A caller that hangs up ends the wait for an answer.
    async fn evaluate(&self, asked: &Asked<'_>) -> Evaluation {
        let terms = HoldTerms {
            ends: &[(HoldEnd::Gate, &self.stop)],
            limit: Some(MAX_HOOK_HOLD),
            ..HoldTerms::default()
        };
        self.governance.evaluate(asked, &terms).await
    }

    /// Whether a hook in Docker's dialect came within the last five minutes. Only then
    /// is a result given a correlation key, which nobody else would take out again.
    pub fn heard_docker_lately(&self) -> bool {
        let heard = self.docker.lock().unwrap_or_else(PoisonError::into_inner);
        heard.is_some_and(|at| at.elapsed() <= LATELY)
    }

    fn hear_docker(&self) {
        let mut heard = self.docker.lock().unwrap_or_else(PoisonError::into_inner);
        *heard = Some(Instant::now());
    }

    async fn hook(&self, moment: Moment, body: &[u8]) -> Response<Full<Bytes>> {
        let Some(read) = Body::read(body) else {
            self.note("body");
            return unreadable();
        };
        match read {
            Body::Seed(envelope) => match self.seed(moment, &envelope).await {
                Ok(answer) => match serde_json::to_string(&answer) {
                    Ok(answer) => written(StatusCode::OK, answer),
                    Err(_) => reply(StatusCode::OK, &json!({"action": "block"})),
                },
                Err(wrong) => {
                    self.note(wrong.field);
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
                self.hear_docker();
                match moment {
                    Moment::Before | Moment::Elicitation => self.docker_before(envelope).await,
                    Moment::After => self.docker_after(body).await,
                }
            }
        }
    }

    /// Anybody who reaches the hooks can send nonsense as often as they like.
    fn note(&self, field: &'static str) {
        let unread = self.unread.fetch_add(1, Ordering::Relaxed) + 1;
        if unread.is_power_of_two() {
            tracing::warn!(field, unread, "a hook was sent what cannot be read");
        }
    }
}

impl<'a> Body<'a> {
    fn read(body: &'a [u8]) -> Option<Self> {
        let read: Option<Envelope<'a>> = serde_json::from_slice(body).ok()?;
        let Some(envelope) = read else {
            return Some(Body::Docker(None));
        };
        // A result of a tool has none of the first, and the envelope none of the second.
        let marks = ["version", "type", "request_id", "tool_id", "agent_id"];
        let is_seed = marks.iter().any(|mark| envelope.has(mark))
            && !["content", "structuredContent", "Params"]
                .iter()
                .any(|field| envelope.has(field));
        Some(match is_seed {
            true => Body::Seed(envelope),
            false => Body::Docker(Some(envelope)),
        })
    }
}

/// A refusal in the form of both dialects, for a request whose dialect is not known because its
/// body is not read, or cannot be. Docker's gateway takes an empty answer for a pass, and any
/// other answer for the result of the call, whatever the status.
pub fn refusal(status: StatusCode, why: &str) -> Response<Full<Bytes>> {
    reply(status, &refusal_body(why))
}

fn refusal_body(why: &str) -> Value {
    let mut body = blocked(why);
    if let Some(fields) = body.as_object_mut() {
        fields.insert("action".to_owned(), json!("block"));
        fields.insert("reason".to_owned(), json!(why));
        fields.insert("error".to_owned(), json!(why));
    }
    body
}

/// The result of a call that was refused, as Docker's gateway passes it on.
fn blocked(why: &str) -> Value {
    let text = format!("Blocked by policy: {why}");
    json!({"content": [{"type": "text", "text": text}], "isError": true})
}

/// An answer with a body.
fn reply(status: StatusCode, body: &Value) -> Response<Full<Bytes>> {
    written(status, body.to_string())
}

fn written(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
}

fn unreadable() -> Response<Full<Bytes>> {
    let mut answer = refusal_body("the body is no JSON object");
    if let Some(fields) = answer.as_object_mut() {
        fields.insert("field".to_owned(), json!("body"));
    }
    reply(StatusCode::BAD_REQUEST, &answer)
}

#[cfg(test)]
mod tests;
