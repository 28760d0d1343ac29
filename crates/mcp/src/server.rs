//! HTTP entry point: authenticates the caller and routes to hooks, bridge or health.
//!
//! [`answer`] lists all routes.

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

use crate::answer::{self, BodyStreamError, McpBody, RefusalResponse};
use crate::bridge::Bridge;
use crate::call_headers::CallHeaders;
use crate::caller::McpCaller;
use crate::incoming::Incoming;
use crate::interceptor::{self, Interceptor};
use crate::request_body::LargeBodyLimit;
use crate::rpc::MAX_MESSAGE_BYTES;
use crate::{http_sse, sessionless, streamable};

/// Header with the name of the agent.
const AGENT_HEADER: HeaderName = HeaderName::from_static("x-agent-id");

/// Maximum length of an agent name, in bytes.
const MAX_AGENT_BYTES: usize = 128;

/// Which endpoints a listener serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoints {
    /// The hooks of an MCP gateway.
    pub hooks: bool,
    /// The tools (MCP servers).
    pub tools: bool,
}

/// How clients must authenticate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthConfig {
    /// SHA-256 of the token: comparing hashes does not leak the token through timing.
    token: Option<[u8; 32]>,
    enforce_agent: bool,
}

impl AuthConfig {
    /// Reads the settings.
    pub fn from_settings(settings: &Settings) -> Self {
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

/// Endpoints and authentication of one listener. Every listener has its own rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerRules {
    /// The address that the listener is bound to.
    pub address: SocketAddr,
    /// The endpoints that the listener serves.
    pub endpoints: Endpoints,
    /// How clients must authenticate.
    pub auth: AuthConfig,
}

impl ListenerRules {
    /// Whether the Host header must name a loopback host. A web page can make its own name resolve
    /// to this machine (DNS rebinding). On other listeners the token excludes such pages.
    fn checks_host(&self) -> bool {
        self.address.ip().to_canonical().is_loopback() || !self.auth.requires_token()
    }
}

/// The components that answer requests.
pub struct McpServer {
    /// Serves the stdio servers.
    pub bridge: Arc<Bridge>,
    /// Answers the hooks.
    pub hooks: Arc<Interceptor>,
    /// Renders the metrics as OpenMetrics text.
    pub render_metrics: Arc<dyn Fn() -> String + Send + Sync>,
    /// The path of the metrics.
    pub metrics_path: MetricsPath,
    /// Limits the number of large request bodies.
    pub large_bodies: LargeBodyLimit,
    /// Returns whether the gate is healthy, and the `/health` body without the tools.
    pub health: Arc<dyn Fn() -> (bool, serde_json::Value) + Send + Sync>,
}

impl std::fmt::Debug for McpServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("McpServer").finish_non_exhaustive()
    }
}

/// The path of the metrics; none if they are disabled. A reload also changes it for open
/// connections.
#[derive(Debug, Default)]
pub struct MetricsPath(ArcSwapOption<String>);

impl MetricsPath {
    /// Reads the settings.
    pub fn from_settings(settings: &Settings) -> Self {
        let path = Self::default();
        path.replace(settings);
        path
    }

    /// Applies new settings.
    pub fn replace(&self, settings: &Settings) {
        let metrics = &settings.metrics;
        let path = metrics.enabled.then(|| Arc::new(metrics.path.clone()));
        self.0.store(path);
    }

    fn matches(&self, segments: &[&str]) -> bool {
        let path = self.0.load();
        let path = path.as_deref();
        path.is_some_and(|path| segments_of(path).eq(segments.iter().copied()))
    }
}

/// Origin of a request.
#[derive(Clone, Debug)]
pub enum RequestSource {
    /// A network listener with these rules.
    Network(ListenerRules),
    /// A sandbox, through the gate's proxy.
    Sandbox(SandboxId),
}

/// Answers one request.
pub async fn answer<B>(
    mcp_server: &Arc<McpServer>,
    source: &RequestSource,
    request: Request<B>,
) -> Response<McpBody>
where
    B: Body<Data = Bytes> + Send + Unpin,
    B::Error: Into<BodyStreamError>,
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
                let why = "hooks accept POST only";
                let mut refused = refuse_hook(StatusCode::METHOD_NOT_ALLOWED, why);
                let allowed = HeaderValue::from_static("POST");
                refused.headers_mut().insert(ALLOW, allowed);
                return refused;
            }
            let Ok((body, _permit)) = mcp_server.large_bodies.read(body).await else {
                let why = "the body of the hook is incomplete or too long";
                return refuse_hook(StatusCode::PAYLOAD_TOO_LARGE, why);
            };
            let parent = CallHeaders::read(&head.headers).parent;
            let response = match *hook {
                "before" => {
                    mcp_server
                        .hooks
                        .answer_before(body, parent.as_deref())
                        .await
                }
                _ => mcp_server.hooks.answer_after(body, parent.as_deref()).await,
            };
            response.map(into_mcp_body)
        }
        _ if is_hook => {
            let why = "hooks are not served at this address, or not under this path";
            refuse_hook(StatusCode::NOT_FOUND, why)
        }
        ["health"] if matches!(source, RequestSource::Network(..)) => health(mcp_server),
        ["mcp" | "sse" | "message", ..] if endpoints.tools => {
            let caller = match identify_caller(source, &head) {
                Ok(caller) => caller,
                Err(refusal) => return *refusal,
            };
            let Ok((body, _permit)) = mcp_server.large_bodies.read(body).await else {
                return body_error();
            };
            let incoming = Incoming { head, body, caller };
            route(&mcp_server.bridge, &segments, incoming).await
        }
        // Last, so that `metrics.path` cannot hide one of the paths above.
        other
            if matches!(source, RequestSource::Network(..))
                && mcp_server.metrics_path.matches(other) =>
        {
            metrics(mcp_server)
        }
        _ => answer::error_response(StatusCode::NOT_FOUND, "Not found"),
    }
}

/// A refusal that both hook formats understand.
fn refuse_hook(status: StatusCode, why: &str) -> Response<McpBody> {
    interceptor::refusal(status, why).map(into_mcp_body)
}

fn into_mcp_body(body: Full<Bytes>) -> McpBody {
    body.map_err(|never| match never {}).boxed_unsync()
}

/// The non-empty segments of a path.
fn segments_of(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|part| !part.is_empty())
}

/// Routes a request to the tool and the transport that its path names.
async fn route(bridge: &Arc<Bridge>, segments: &[&str], incoming: Incoming) -> Response<McpBody> {
    let segment = |index: usize| segments.get(index).copied();
    let is_get = incoming.head.method == Method::GET;
    let is_post = incoming.head.method == Method::POST;
    let (name, transport) = match segments {
        ["message"] | ["mcp", "message"] | ["mcp", _, "message"] => {
            if !is_post {
                return answer::method_not_allowed("POST");
            }
            return http_sse::receive(bridge, &incoming).await;
        }
        ["sse"] | ["mcp", "sse"] => (None, RouteTransport::HttpSse),
        ["sse", _] => (segment(1), RouteTransport::HttpSse),
        ["mcp", _, "sse"] => (segment(1), RouteTransport::HttpSse),
        ["mcp"] => (None, RouteTransport::Streamable),
        ["mcp", _] => (segment(1), RouteTransport::Streamable),
        _ => return answer::error_response(StatusCode::NOT_FOUND, "Not found"),
    };
    let query_name = query_parameter(&incoming.head, "tool");
    let name = name.map(str::to_owned).or(query_name);
    let server = match bridge.tool(name.as_deref(), &incoming.caller) {
        Ok(server) => server,
        Err(why) => {
            let sandbox = incoming.caller.sandbox.as_ref().map(SandboxId::as_str);
            tracing::warn!(sandbox, %why, "mcp request for unknown tool");
            return answer::error_response(StatusCode::NOT_FOUND, &why);
        }
    };
    match transport {
        RouteTransport::HttpSse if is_get => http_sse::listen(bridge, &server, &incoming).await,
        RouteTransport::HttpSse => answer::method_not_allowed("GET"),
        RouteTransport::Streamable => {
            let headers = &incoming.head.headers;
            if sessionless::is_sessionless(headers, &incoming.body) {
                sessionless::answer(bridge.sessionless(), &server, incoming).await
            } else {
                streamable::answer(bridge, &server, incoming).await
            }
        }
    }
}

/// Transport that a path selects.
enum RouteTransport {
    HttpSse,
    Streamable,
}

/// Identifies the caller. For a sandbox it is the sandbox itself; request headers are ignored.
fn identify_caller(source: &RequestSource, head: &Head) -> Result<McpCaller, RefusalResponse> {
    let refuse = |status, why: &str| Err(Box::new(answer::error_response(status, why)));
    let (agent, sandbox) = match source {
        RequestSource::Sandbox(id) => (id.as_str().to_owned(), Some(id.clone())),
        RequestSource::Network(rules) => {
            let header = head.headers.get(&AGENT_HEADER);
            let name = match header.map(|header| header.to_str()) {
                Some(Ok(agent)) => Some(agent.to_owned()),
                Some(Err(_)) => return refuse(StatusCode::BAD_REQUEST, "Invalid X-Agent-ID"),
                None => query_parameter(head, "agent_id"),
            };
            let name = name.filter(|agent| !agent.is_empty());
            if name.is_none() && rules.auth.enforce_agent {
                return refuse(StatusCode::UNAUTHORIZED, "The X-Agent-ID header is missing");
            }
            (name.unwrap_or_else(|| "default".to_owned()), None)
        }
    };
    let is_valid = agent.len() <= MAX_AGENT_BYTES && agent.bytes().all(|b| b.is_ascii_graphic());
    if !is_valid {
        return refuse(StatusCode::BAD_REQUEST, "Invalid X-Agent-ID");
    }
    Ok(McpCaller {
        agent,
        session: String::new(),
        sandbox,
    })
}

/// The value of a query parameter without percent-decoding: names of agents and tools need no
/// escapes.
fn query_parameter(head: &Head, wanted: &str) -> Option<String> {
    let pairs = head.uri.query()?.split('&');
    let mut pairs = pairs.filter_map(|pair| pair.split_once('='));
    let found = pairs.find(|(name, _)| *name == wanted);
    found.map(|(_, value)| value.to_owned())
}

fn body_error() -> Response<McpBody> {
    let why = format!("The body is incomplete, late or larger than {MAX_MESSAGE_BYTES} bytes");
    answer::error_response(StatusCode::PAYLOAD_TOO_LARGE, &why)
}

/// Answers `/health` with the state of all components; the same at every listener.
fn health(mcp_server: &McpServer) -> Response<McpBody> {
    let (is_healthy, mut body) = (mcp_server.health)();
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
    if let Some(fields) = body.as_object_mut() {
        fields.insert("tools".to_owned(), tools.into());
    }
    let status = if is_healthy {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    answer::json_text(status, body.to_string())
}

fn metrics(mcp_server: &McpServer) -> Response<McpBody> {
    let mut response = answer::json_text(StatusCode::OK, (mcp_server.render_metrics)());
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let kind = HeaderValue::from_static(kind);
    response
        .headers_mut()
        .insert(http::header::CONTENT_TYPE, kind);
    response
}

#[cfg(test)]
mod tests;
