//! The dialect of Docker's gateway.
//!
//! Source: docker/mcp-gateway, pkg/interceptors. Older versions post Go's own names of a
//! request's fields, with the headers of the client's request among them; what is in those
//! is never looked at.

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
use super::{Interceptor, blocked, reply, written};
use crate::caller::Caller;
use crate::context::CORRELATION;
use crate::governance::{Asked, Call, Moment, Ruling, new_request};
use crate::trace;

/// The gateway has no name for who asks.
const NOBODY: &str = "default";

/// What an unwilling before hook says about arguments it cannot change.
const NOT_HERE: &str = "a policy wants the arguments redacted, which this gateway cannot do. Serve the tool through the bridge and give the gateway its name as a prefix.";

impl Interceptor {
    pub(super) async fn docker_before(
        &self,
        envelope: Option<Envelope<'_>>,
    ) -> Response<Full<Bytes>> {
        let Some(envelope) = envelope else {
            return no("the call is missing");
        };
        if envelope.has("params") && envelope.has("Params") {
            return no("the call is there twice");
        }
        let method = match envelope.has("method") {
            true => match envelope.word("method") {
                Ok(method) => method,
                Err(_) => return no("the method is no text"),
            },
            false => "tools/call".to_owned(),
        };
        let params = envelope.raw("params").or(envelope.raw("Params"));
        if params.is_none() && !envelope.has("params") && !envelope.has("Params") {
            return no("the call is missing");
        }
        let call = params.and_then(|params| Call::of(&method, params.get()));
        let call = call.unwrap_or_default();
        let caller = Caller {
            agent: NOBODY.to_owned(),
            session: String::new(),
            sandbox: None,
        };
        let asked = Asked {
            moment: Moment::Before,
            request: new_request(),
            caller: &caller,
            tool: &call.server,
            method: &method,
            params,
            result: None,
            error: None,
            before: None,
            execution: None,
        };
        match self.evaluate(&asked).await.ruling {
            Ruling::Pass => Response::default(),
            Ruling::Block(denial) => refused(&denial),
            // The bridge judges and redacts what reaches it.
            Ruling::Modify(_) if self.governance.metrics().knows(&call.server) => {
                Response::default()
            }
            Ruling::Modify(_) => no(NOT_HERE),
        }
    }

    pub(super) async fn docker_after(&self, body: &[u8]) -> Response<Full<Bytes>> {
        let Ok(text) = std::str::from_utf8(body) else {
            return no("the result cannot be read");
        };
        let text = text.trim();
        let Ok(Correlated { request, stripped }) = Correlated::read(text) else {
            return no("the result cannot be read");
        };
        let key = request.map(|request| request.to_string());
        let contexts = self.governance.contexts();
        let known = match key.map(|key| contexts.take(&key)).transpose() {
            Ok(known) => known.flatten(),
            Err(expired) => return no(&expired.to_string()),
        };
        let (agent, session, tool, method, name) = match &known {
            Some(known) => (
                &*known.agent,
                &*known.session,
                &*known.tool,
                &*known.method,
                &*known.name,
            ),
            None => (NOBODY, "", "", "tools/call", ""),
        };
        let caller = Caller {
            agent: agent.to_owned(),
            session: session.to_owned(),
            sandbox: known.as_ref().and_then(|known| known.sandbox.clone()),
        };
        let heard = stripped.as_deref().unwrap_or(text);
        let Ok(result) = RawValue::from_string(heard.to_owned()) else {
            return no("the result cannot be read");
        };
        let params = RawValue::from_string(json!({"name": name}).to_string()).ok();
        let span = tracing::info_span!("mcp.after");
        let known = known.as_ref();
        trace::continue_from(&span, known.and_then(|known| known.trace.as_deref()));
        let asked = Asked {
            moment: Moment::After,
            request: request.unwrap_or_else(new_request),
            caller: &caller,
            tool,
            method,
            params: params.as_deref().filter(|_| !name.is_empty()),
            result: Some(&result),
            error: None,
            before: known.and_then(|known| known.decision.as_deref()),
            execution: known.and_then(|known| known.execution.as_ref()),
        };
        match self.evaluate(&asked).instrument(span).await.ruling {
            Ruling::Block(denial) => refused(&denial),
            Ruling::Modify(new) => written(StatusCode::OK, new.get().to_owned()),
            Ruling::Pass => match stripped {
                Some(stripped) => written(StatusCode::OK, stripped),
                None => Response::default(),
            },
        }
    }
}

/// A result without the key that says what it answers.
struct Correlated {
    request: Option<RequestId>,
    /// The result without the key, where it had one.
    stripped: Option<String>,
}

impl Correlated {
    fn read(text: &str) -> Result<Self, splice::NoJson> {
        let path = ["_meta", CORRELATION];
        let request = splice::find(text, &path)?
            .and_then(|raw| serde_json::from_str::<String>(raw).ok())
            .and_then(|id| RequestId::parse(&id).ok());
        let stripped = splice::remove(text, &path)?;
        Ok(Self { request, stripped })
    }
}

fn refused(denial: &Denial) -> Response<Full<Bytes>> {
    no(&denial.message)
}

fn no(why: &str) -> Response<Full<Bytes>> {
    reply(StatusCode::OK, &blocked(why))
}
