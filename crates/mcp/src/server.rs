//! HTTP entry point: authenticates the caller and routes to hooks, bridge or health.
//!
//! [`answer`] is the whole list of what can be asked; read it top to bottom.

mod admission;

use std::net::SocketAddr;
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use bytes::Bytes;
use config::Settings;
use http::header::{ALLOW, HeaderName, HeaderValue};
use http::request::Parts as Head;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Body;
use policy::id::SandboxId;
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::answer::{self, Broken, Content, Refusal};
use crate::bridge::Bridge;
use crate::call_headers::CallHeaders;
use crate::caller::Caller;
use crate::incoming::Incoming;
use crate::interceptor::{self, Interceptor};
use crate::room::Room;
use crate::rpc::LONGEST;
use crate::{modern, one_stream, streamable};

/// Which agent asks.
const AGENT: HeaderName = HeaderName::from_static("x-agent-id");

/// The longest name of an agent.
const LONGEST_AGENT: usize = 128;

/// What a listener answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoints {
    /// The hooks of a gateway.
    pub hooks: bool,
    /// Tools.
    pub tools: bool,
}

/// What an operator asks of those who ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthConfig {
    /// The hash of the token; comparing hashes takes the same time whatever differs.
    token: Option<[u8; 32]>,
    enforce_agent: bool,
}

impl AuthConfig {
    /// From the settings.
    pub fn of(settings: &Settings) -> Self {
        let token = settings.server.auth_token.as_ref();
        let token = token.filter(|token| !token.is_empty());
        Self {
            token: token.map(|token| Sha256::digest(token.expose().as_bytes()).into()),
            enforce_agent: settings.server.enforce_agent_id,
        }
    }

    /// Whether clients need a token.
    pub fn requires_token(&self) -> bool {
        self.token.is_some()
    }
}

/// What one listener answers, and whom it admits. Never shared by listeners: what is open at
/// one address says nothing about another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerRules {
    /// Where it listens, as it really is.
    pub at: SocketAddr,
    /// What it answers.
    pub endpoints: Endpoints,
    /// What it asks of clients.
    pub auth: AuthConfig,
}

impl ListenerRules {
    /// Whether the Host must be a loopback name. A web page can make its own name resolve to
    /// this machine (DNS rebinding); what keeps it out elsewhere is the token.
    fn checks_host(&self) -> bool {
        self.at.ip().to_canonical().is_loopback() || !self.auth.requires_token()
    }
}

/// The parts that answer requests.
pub struct McpServer {
    /// Stdio servers.
    pub bridge: Arc<Bridge>,
    /// What the hooks answer.
    pub hooks: Arc<Interceptor>,
    /// The text of the metrics.
    pub numbers: Arc<dyn Fn() -> String + Send + Sync>,
    /// Where they are served.
    pub metrics_path: MetricsPath,
    /// Room for large bodies.
    pub room: Room,
    /// What `/health` says beside the tools, and whether all is well.
    pub health: Arc<dyn Fn() -> (bool, serde_json::Value) + Send + Sync>,
}

impl std::fmt::Debug for McpServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("McpServer").finish_non_exhaustive()
    }
}

/// The path at which metrics are served, if they are. A reload changes it for requests on open
/// connections, too.
#[derive(Debug, Default)]
pub struct MetricsPath(ArcSwapOption<String>);

impl MetricsPath {
    /// From the settings.
    pub fn of(settings: &Settings) -> Self {
        let path = Self::default();
        path.replace(settings);
        path
    }

    /// Serves metrics as `settings` say from now on.
    pub fn replace(&self, settings: &Settings) {
        let metrics = &settings.metrics;
        let path = metrics.enabled.then(|| Arc::new(metrics.path.clone()));
        self.0.store(path);
    }

    fn is(&self, segments: &[&str]) -> bool {
        let path = self.0.load();
        let path = path.as_deref();
        path.is_some_and(|path| segments_of(path).eq(segments.iter().copied()))
    }
}

/// Where a request comes from.
#[derive(Clone, Debug)]
pub enum RequestSource {
    /// A listener of ours, with these rules.
    Network(ListenerRules),
    /// A sandbox, by way of the gate.
    Sandbox(SandboxId),
}

/// Answers one request.
pub async fn answer<B>(
    mcp_server: &Arc<McpServer>,
    source: &RequestSource,
    request: Request<B>,
) -> Response<Content>
where
    B: Body<Data = Bytes> + Send + Unpin,
    B::Error: Into<Broken>,
{
    let (head, body) = request.into_parts();
    let path = head.uri.path().to_owned();
    let segments: Vec<&str> = segments_of(&path).collect();
    let is_hook = segments.first() == Some(&"intercept");
    if let Err(refused) = admission::admit(source, &head) {
        return refused.response(is_hook);
    }
    let endpoints = match source {
        RequestSource::Network(rules) => rules.endpoints,
        RequestSource::Sandbox(_) => Endpoints {
            hooks: false,
            tools: true,
        },
    };
    let is_post = head.method == Method::POST;
    match segments.as_slice() {
        ["intercept", hook @ ("before" | "after")] if endpoints.hooks => {
            if !is_post {
                let why = "a hook is called by POST";
                let mut refused = refuse_hook(StatusCode::METHOD_NOT_ALLOWED, why);
                let allowed = HeaderValue::from_static("POST");
                refused.headers_mut().insert(ALLOW, allowed);
                return refused;
            }
            let Ok((body, _place)) = mcp_server.room.read(body).await else {
                let why = "the body of the hook is incomplete or too long";
                return refuse_hook(StatusCode::PAYLOAD_TOO_LARGE, why);
            };
            let parent = CallHeaders::read(&head.headers).parent;
            let answered = match *hook {
                "before" => mcp_server.hooks.before(body, parent.as_deref()).await,
                _ => mcp_server.hooks.after(body, parent.as_deref()).await,
            };
            answered.map(content)
        }
        _ if is_hook => {
            let why = "hooks are not served at this address, or not under this path";
            refuse_hook(StatusCode::NOT_FOUND, why)
        }
        ["health"] if matches!(source, RequestSource::Network(..)) => health(mcp_server),
        ["mcp" | "sse" | "message", ..] if endpoints.tools => {
            let caller = match caller(source, &head) {
                Ok(caller) => caller,
                Err(refusal) => return *refusal,
            };
            let Ok((body, _place)) = mcp_server.room.read(body).await else {
                return unread();
            };
            let incoming = Incoming { head, body, caller };
            route(&mcp_server.bridge, &segments, incoming).await
        }
        // Last: `metrics.path` is never one of the paths above.
        other
            if matches!(source, RequestSource::Network(..))
                && mcp_server.metrics_path.is(other) =>
        {
            numbers(mcp_server)
        }
        _ => answer::sentence(StatusCode::NOT_FOUND, "Not found"),
    }
}

/// A refusal that both dialects of the hooks take for one.
fn refuse_hook(status: StatusCode, why: &str) -> Response<Content> {
    interceptor::refusal(status, why).map(content)
}

fn content(body: Full<Bytes>) -> Content {
    body.map_err(|never| match never {}).boxed_unsync()
}

/// The parts of a path between its slashes.
fn segments_of(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|part| !part.is_empty())
}

/// The tool that is meant, and the way in which it is spoken to.
async fn route(bridge: &Arc<Bridge>, segments: &[&str], incoming: Incoming) -> Response<Content> {
    let named = |index: usize| segments.get(index).copied();
    let is_get = incoming.head.method == Method::GET;
    let is_post = incoming.head.method == Method::POST;
    let (name, way) = match segments {
        ["message"] | ["mcp", "message"] | ["mcp", _, "message"] => {
            if !is_post {
                return answer::not_allowed("POST");
            }
            return one_stream::take(bridge, &incoming).await;
        }
        ["sse"] | ["mcp", "sse"] => (None, Way::OneStream),
        ["sse", _] => (named(1), Way::OneStream),
        ["mcp", _, "sse"] => (named(1), Way::OneStream),
        ["mcp"] => (None, Way::Streamable),
        ["mcp", _] => (named(1), Way::Streamable),
        _ => return answer::sentence(StatusCode::NOT_FOUND, "Not found"),
    };
    let asked = query(&incoming.head, "tool");
    let name = name.map(str::to_owned).or(asked);
    let served = match bridge.tool(name.as_deref(), &incoming.caller) {
        Ok(served) => served,
        Err(why) => {
            let sandbox = incoming.caller.sandbox.as_ref().map(SandboxId::as_str);
            tracing::warn!(sandbox, %why, "a tool was asked for that is not there");
            return answer::sentence(StatusCode::NOT_FOUND, &why);
        }
    };
    match way {
        Way::OneStream if is_get => one_stream::listen(bridge, &served, &incoming).await,
        Way::OneStream => answer::not_allowed("GET"),
        Way::Streamable => {
            let headers = &incoming.head.headers;
            if modern::is_modern(headers, &incoming.body) {
                modern::answer(bridge.sessionless(), &served, incoming).await
            } else {
                streamable::answer(bridge, &served, incoming).await
            }
        }
    }
}

enum Way {
    OneStream,
    Streamable,
}

/// Who asks. In a sandbox that is the sandbox, whatever the request says.
fn caller(source: &RequestSource, head: &Head) -> Result<Caller, Refusal> {
    let bad = |status, why: &str| Err(Box::new(answer::sentence(status, why)));
    let (agent, sandbox) = match source {
        RequestSource::Sandbox(id) => (id.as_str().to_owned(), Some(id.clone())),
        RequestSource::Network(rules) => {
            let header = head.headers.get(&AGENT);
            let said = match header.map(|header| header.to_str()) {
                Some(Ok(agent)) => Some(agent.to_owned()),
                Some(Err(_)) => return bad(StatusCode::BAD_REQUEST, "Invalid X-Agent-ID"),
                None => query(head, "agent_id"),
            };
            let said = said.filter(|agent| !agent.is_empty());
            if said.is_none() && rules.auth.enforce_agent {
                return bad(StatusCode::UNAUTHORIZED, "The X-Agent-ID header is missing");
            }
            (said.unwrap_or_else(|| "default".to_owned()), None)
        }
    };
    let fits = agent.len() <= LONGEST_AGENT && agent.bytes().all(|b| b.is_ascii_graphic());
    if !fits {
        return bad(StatusCode::BAD_REQUEST, "Invalid X-Agent-ID");
    }
    Ok(Caller {
        agent,
        session: String::new(),
        sandbox,
    })
}

/// The value of a name in the query, as it stands there: names of agents and tools need no
/// escapes.
fn query(head: &Head, wanted: &str) -> Option<String> {
    let pairs = head.uri.query()?.split('&');
    let mut pairs = pairs.filter_map(|pair| pair.split_once('='));
    let found = pairs.find(|(name, _)| *name == wanted);
    found.map(|(_, value)| value.to_owned())
}

fn unread() -> Response<Content> {
    let why = format!("The body did not come, or has more than {LONGEST} bytes");
    answer::sentence(StatusCode::PAYLOAD_TOO_LARGE, &why)
}

/// Every part in one answer, at whichever port it is asked for.
fn health(mcp_server: &McpServer) -> Response<Content> {
    let (well, mut said) = (mcp_server.health)();
    let tools = mcp_server.bridge.report();
    let tools: serde_json::Map<_, _> = tools
        .into_iter()
        .map(|tool| {
            let mut state = json!({
                "status": if tool.unavailable.is_none() { "ok" } else { "unavailable" },
                "description": tool.description,
                "runtime": tool.runtime,
                "sessions": tool.sessions,
                "failures": tool.failures(),
            });
            if let (Some(state), Some(why)) = (state.as_object_mut(), tool.unavailable) {
                state.insert("error".to_owned(), why.error.into());
            }
            (tool.name, state)
        })
        .collect();
    if let Some(said) = said.as_object_mut() {
        said.insert("tools".to_owned(), tools.into());
    }
    let status = if well {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    answer::json_text(status, said.to_string())
}

fn numbers(mcp_server: &McpServer) -> Response<Content> {
    let mut response = answer::json_text(StatusCode::OK, (mcp_server.numbers)());
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let kind = HeaderValue::from_static(kind);
    response
        .headers_mut()
        .insert(http::header::CONTENT_TYPE, kind);
    response
}

#[cfg(test)]
mod tests;
