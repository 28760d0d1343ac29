//! HTTP API of the control socket: parses each request to an [`Action`] and writes its reply.
//!
//! [`read_action`] is the routing table. The routes under `/internal` keep the formats that
//! existing programs expect; everything new is under `/v1`.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::str::FromStr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, ALLOW, CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER};
use http::{Method, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Frame, Incoming};
use policy::clock::UnixMillis;
use policy::id::{RequestId, SandboxId};
use sandbox::contract::{Force, SandboxError};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tracing::Instrument;

use crate::action::{Action, AuditQuery, FileBody, HealthDepth, ReplyMode};
use crate::gate::Gate;
use crate::openapi::ROUTES;
use crate::peer::Peer;
use crate::registration_request::{UnknownFields, read_registration};
use crate::reply::{ControlError, ControlReply};
use crate::wall_now;

/// Maximum size of a request body.
pub const MAX_BODY: usize = 256 * 1024;

/// How long a client may take to send the request body.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// Header of every response: the gate's version. A newer command line suggests a restart.
pub const VERSION_HEADER: HeaderName = HeaderName::from_static("palisade-version");

/// Media type of JSON lines. A client requests a streamed response with it in `Accept`.
pub const LINES: &str = "application/x-ndjson";

type Body = UnsyncBoxBody<Bytes, io::Error>;

/// Handles one request: checks the peer, parses the action, runs it and counts the response.
pub(crate) async fn answer(
    gate: &Arc<Gate>,
    client: &Peer,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let mut name = "unknown";
    let outcome = async {
        if !client.is_allowed() {
            return Err(ControlError::Forbidden);
        }
        let request = ApiRequest::read(request).await?;
        if request.is_registry_write() {
            client.count_write().map_err(ControlError::RateLimited)?;
        }
        let action = read_action(&request, wall_now())?;
        name = action.name();
        let span = tracing::info_span!("control", action = name);
        // The action runs in its own task: a client that disconnects must not interrupt it.
        let gate = Arc::clone(gate);
        tokio::spawn(async move { gate.dispatch(action).await }.instrument(span))
            .await
            .map_err(|error| ControlError::Failed(error.to_string()))?
            .map(|reply| add_envelope(&request, reply))
    }
    .await;
    let response = match outcome {
        Ok(reply) => respond(reply),
        Err(error) => respond_error(&error),
    };
    gate.counters.count(name, response.status());
    Ok(response)
}

/// A request, read completely.
#[derive(Debug)]
pub(crate) struct ApiRequest {
    method: Method,
    segments: Vec<String>,
    query: Vec<(String, String)>,
    body: Bytes,
    /// Whether the client accepts JSON lines.
    accepts_lines: bool,
}

impl ApiRequest {
    async fn read(request: Request<Incoming>) -> Result<Self, ControlError> {
        let (head, body) = request.into_parts();
        let accepted = head
            .headers
            .get(ACCEPT)
            .and_then(|value| value.to_str().ok());
        let accepts_lines = accepted == Some(LINES);
        let body = tokio::time::timeout(BODY_TIMEOUT, Limited::new(body, MAX_BODY).collect())
            .await
            .map_err(|_| ControlError::Bad("The request body did not arrive in time".to_owned()))?
            .map_err(|error| {
                if error.is::<LengthLimitError>() {
                    ControlError::TooLarge(MAX_BODY)
                } else {
                    ControlError::Bad(format!("The request body could not be read: {error}"))
                }
            })?;
        let request = Self::new(
            head.method,
            head.uri.path(),
            head.uri.query(),
            body.to_bytes(),
        )?;
        Ok(Self {
            accepts_lines,
            ..request
        })
    }

    fn new(
        method: Method,
        path: &str,
        query: Option<&str>,
        body: Bytes,
    ) -> Result<Self, ControlError> {
        let segments = path
            .split('/')
            .skip(1)
            .map(decode)
            .collect::<Result<Vec<String>, _>>()?;
        let query = query
            .unwrap_or_default()
            .split('&')
            .filter(|pair| !pair.is_empty())
            .map(|pair| {
                let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
                Ok((decode(name)?, decode(value)?))
            })
            .collect::<Result<_, ControlError>>()?;
        Ok(Self {
            method,
            segments,
            query,
            body,
            accepts_lines: false,
        })
    }

    fn segments(&self) -> Vec<&str> {
        self.segments.iter().map(String::as_str).collect()
    }

    /// Registry writes are rate-limited before they are parsed, so that invalid ones count,
    /// too.
    fn is_registry_write(&self) -> bool {
        matches!(self.method, Method::POST | Method::DELETE)
            && matches!(
                self.segments().as_slice(),
                ["internal", "containers", ..] | ["v1", "registrations", ..]
            )
    }

    fn reply_mode(&self) -> ReplyMode {
        if self.accepts_lines {
            ReplyMode::Stream
        } else {
            ReplyMode::Single
        }
    }

    fn is_internal_route(&self) -> bool {
        self.segments
            .first()
            .is_some_and(|first| first == "internal")
    }

    fn json<T: DeserializeOwned>(&self) -> Result<T, ControlError> {
        serde_json::from_slice(&self.body)
            .map_err(|error| ControlError::Bad(format!("Invalid JSON body: {error}")))
    }

    fn file(&self) -> Result<std::path::PathBuf, ControlError> {
        let FileBody { path } = self.json()?;
        if path.is_absolute() {
            Ok(path)
        } else {
            Err(ControlError::Bad(
                "path must be absolute: the gate has its own working directory".into(),
            ))
        }
    }

    /// Reads `?name=NAME`; refuses other parameters.
    fn name(&self) -> Result<Option<String>, ControlError> {
        let mut name = None;
        for (parameter, value) in &self.query {
            if parameter != "name" {
                return Err(unknown_parameter(parameter));
            }
            name = Some(value.clone());
        }
        Ok(name)
    }

    /// Existing programs send unknown fields; routes under `/v1` refuse them.
    fn unknown_fields(&self) -> UnknownFields {
        if self.is_internal_route() {
            UnknownFields::Ignore
        } else {
            UnknownFields::Refuse
        }
    }

    /// Reads `?checks=false`; refuses other parameters.
    fn health_depth(&self) -> Result<HealthDepth, ControlError> {
        let mut depth = HealthDepth::Checked;
        for (name, value) in &self.query {
            if name != "checks" {
                return Err(unknown_parameter(name));
            }
            depth = if parse(name, value)? {
                HealthDepth::Checked
            } else {
                HealthDepth::Known
            };
        }
        Ok(depth)
    }

    /// Reads `?force=true`; refuses other parameters.
    fn force(&self) -> Result<Force, ControlError> {
        let mut force = Force::No;
        for (name, value) in &self.query {
            if name != "force" {
                return Err(unknown_parameter(name));
            }
            if parse(name, value)? {
                force = Force::Yes;
            }
        }
        Ok(force)
    }

    fn audit_query(&self) -> Result<AuditQuery, ControlError> {
        let mut wanted = AuditQuery::default();
        for (name, value) in &self.query {
            match name.as_str() {
                "sandbox" => wanted.sandbox = Some(valid(name, SandboxId::parse(value).ok())?),
                "kind" => wanted.kind = Some(valid(name, parse_word(value))?),
                "verdict" => wanted.verdict = Some(valid(name, parse_word(value))?),
                "reason" => wanted.reason = Some(valid(name, parse_word(value))?),
                "request_id" => {
                    wanted.request_id = Some(valid(name, RequestId::parse(value).ok())?);
                }
                "since" => wanted.since = Some(parse(name, value)?),
                "until" => wanted.until = Some(parse(name, value)?),
                "after" => wanted.after = Some(parse(name, value)?),
                "limit" => wanted.limit = Some(parse(name, value)?),
                "newest_first" => wanted.newest_first = parse(name, value)?,
                _ => return Err(unknown_parameter(name)),
            }
        }
        Ok(wanted)
    }
}

fn unknown_parameter(name: &str) -> ControlError {
    ControlError::Bad(format!(
        "Unknown query parameter '{}'",
        name.escape_default()
    ))
}

/// Parses a request to its action. No other code interprets paths.
pub(crate) fn read_action(request: &ApiRequest, now: UnixMillis) -> Result<Action, ControlError> {
    const GET: &Method = &Method::GET;
    const POST: &Method = &Method::POST;
    const DELETE: &Method = &Method::DELETE;
    let segments = request.segments();
    Ok(match (&request.method, segments.as_slice()) {
        (GET, ["v1" | "internal", "health"]) => Action::Health(request.health_depth()?),
        (GET, ["v1" | "internal", "metrics"]) => Action::Metrics,
        (GET, ["v1", "openapi.json"]) => Action::Describe,

        (GET, ["v1", "registrations"] | ["internal", "containers"]) => Action::ListRegistrations,
        (POST, ["v1", "registrations"] | ["internal", "containers"]) => {
            let unknown = request.unknown_fields();
            Action::Register(Box::new(read_registration(&request.body, now, unknown)?))
        }
        (GET, ["v1", "registrations", id] | ["internal", "containers", id]) => {
            Action::GetRegistration(known_id(id)?)
        }
        (DELETE, ["v1", "registrations", id] | ["internal", "containers", id]) => {
            Action::Unregister(known_id(id)?)
        }

        (GET, ["v1", "sandboxes"]) => Action::ListSandboxes(request.name()?),
        (POST, ["v1", "sandboxes"]) => {
            Action::CreateSandbox(Box::new(request.json()?), request.reply_mode())
        }
        (GET, ["v1", "sandboxes", id]) => Action::ShowSandbox(known_sandbox(id)?),
        (DELETE, ["v1", "sandboxes", id]) => {
            Action::DeleteSandbox(known_sandbox(id)?, request.force()?)
        }
        (POST, ["v1", "sandboxes", id, "pause"]) => Action::PauseSandbox(known_sandbox(id)?),
        (POST, ["v1", "sandboxes", id, "resume"]) => Action::ResumeSandbox(known_sandbox(id)?),
        (POST, ["v1", "sandboxes", id, "session"]) => {
            Action::EnterSandbox(known_sandbox(id)?, request.json()?)
        }
        (POST, ["v1", "sandboxes", id, "snapshot"]) => {
            Action::SnapshotSandbox(known_sandbox(id)?, request.json()?)
        }
        (GET, ["v1", "sandboxes", id, "checkpoints"]) => {
            Action::ListCheckpoints(known_sandbox(id)?)
        }
        (POST, ["v1", "sandboxes", id, "checkpoints"]) => {
            Action::MakeCheckpoint(known_sandbox(id)?, request.json()?)
        }
        (POST, ["v1", "sandboxes", id, "restore"]) => {
            Action::RestoreCheckpoint(known_sandbox(id)?, request.json()?)
        }
        (POST, ["v1", "sandboxes", id, "fork"]) => {
            Action::ForkSandbox(known_sandbox(id)?, request.json()?)
        }
        (GET, ["v1", "sandboxes", id, "ports"]) => Action::ListPorts(known_sandbox(id)?),
        (POST, ["v1", "sandboxes", id, "ports"]) => {
            Action::PublishPort(known_sandbox(id)?, request.json()?)
        }

        (GET, ["v1", "audit"]) => Action::QueryAudit(request.audit_query()?),
        (GET, ["v1", "audit", "export"]) => Action::ExportAudit(request.audit_query()?),
        (GET, ["v1", "audit", "tail"]) => Action::TailAudit(request.audit_query()?),
        (POST, ["v1", "audit", "verify"]) => Action::VerifyAudit,

        (GET, ["v1", "config"]) => Action::ShowConfig,
        (POST, ["v1", "config", "reload"]) => Action::ReloadConfig,

        (POST, ["v1", "registry", "backup"]) => Action::BackupRegistry(request.file()?),
        (POST, ["v1", "registry", "restore"]) => Action::RestoreRegistry(request.file()?),
        (POST, ["v1", "registry", "reset"]) => Action::ResetRegistry,

        (GET, ["v1", "ca"]) => Action::ShowAuthority,
        (POST, ["v1", "ca", "rotate"]) => Action::RotateAuthority,
        (GET, ["v1", "requests", id]) => {
            Action::ExplainRequest(valid("request id", RequestId::parse(id).ok())?)
        }
        (POST, ["v1", "policy", "try"]) => Action::TryPolicy(request.json()?),

        (GET, ["v1", "credentials"]) => Action::ListCredentials,
        (POST, ["v1", "credentials", "variables"]) => Action::OfferVariables(request.json()?),
        (POST, ["v1", "credentials", name, "test"]) => Action::TestCredential((*name).to_owned()),
        (POST, ["v1", "registrations", id, "credentials"]) => {
            Action::ChangeCredentials(known_id(id)?, request.json()?)
        }

        (GET, ["v1", "tools"]) => Action::ListTools,
        (POST, ["v1", "tools", "accept"]) => Action::AcceptTools(request.json()?),

        (POST, ["v1", "shutdown"]) => Action::Shutdown,

        (method, path) => return Err(no_such_route(method, path)),
    })
}

/// Parses the id of a registration. The error for an invalid id is that for an unknown id.
fn known_id(text: &str) -> Result<SandboxId, ControlError> {
    SandboxId::parse(text).map_err(|_| ControlError::container_not_found())
}

/// Parses the id of a sandbox. The error for an invalid id is that for an unknown id.
fn known_sandbox(text: &str) -> Result<SandboxId, ControlError> {
    SandboxId::parse(text)
        .map_err(|_| ControlError::Sandbox(SandboxError::NotFound(text.to_owned()).into()))
}

fn no_such_route(method: &Method, path: &[&str]) -> ControlError {
    let methods: Vec<&str> = ROUTES
        .iter()
        .filter(|route| route.matches(path))
        .map(|route| route.method)
        .collect();
    if methods.is_empty() || methods.contains(&method.as_str()) {
        ControlError::NotFound("Not found".to_owned())
    } else {
        ControlError::Method(methods.join(", "))
    }
}

/// Puts lists and rows of the `/internal` routes into the envelope that their clients expect.
fn add_envelope(request: &ApiRequest, reply: ControlReply) -> ControlReply {
    if !request.is_internal_route() {
        return reply;
    }
    match reply {
        ControlReply::Json(StatusCode::OK, Value::Array(rows)) => {
            ControlReply::ok(json!({ "status": "ok", "count": rows.len(), "containers": rows }))
        }
        ControlReply::Json(StatusCode::OK, row) if row.get("container_ip").is_some() => {
            ControlReply::ok(json!({ "status": "found", "container": row }))
        }
        other => other,
    }
}

fn respond(reply: ControlReply) -> Response<Body> {
    match reply {
        ControlReply::Json(status, value) => json_response(status, &value),
        ControlReply::Text(content_type, text) => {
            let mut response = Response::new(full(text));
            response
                .headers_mut()
                .insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
            with_version(response)
        }
        ControlReply::Lines(lines) => {
            let mut response = Response::new(LineBody(lines).boxed_unsync());
            response
                .headers_mut()
                .insert(CONTENT_TYPE, HeaderValue::from_static(LINES));
            with_version(response)
        }
    }
}

/// A response body of JSON lines that are sent as they are produced.
struct LineBody(mpsc::Receiver<Result<Bytes, io::Error>>);

impl hyper::body::Body for LineBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        self.0
            .poll_recv(context)
            .map(|line| line.map(|line| line.map(Frame::data)))
    }
}

fn respond_error(error: &ControlError) -> Response<Body> {
    let (status, body) = error.respond();
    if status.is_server_error() {
        tracing::warn!(%error, "control request failed");
    }
    let mut response = json_response(status, &body);
    match error {
        ControlError::RateLimited(wait) => {
            let seconds = wait.as_secs() + 1;
            response
                .headers_mut()
                .insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        ControlError::Method(allowed) => {
            if let Ok(allowed) = HeaderValue::from_str(allowed) {
                response.headers_mut().insert(ALLOW, allowed);
            }
        }
        _ => {}
    }
    response
}

fn json_response(status: StatusCode, value: &Value) -> Response<Body> {
    let mut response = Response::new(full(format!("{value}\n")));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    with_version(response)
}

fn with_version(mut response: Response<Body>) -> Response<Body> {
    let version = HeaderValue::from_static(env!("CARGO_PKG_VERSION"));
    response.headers_mut().insert(VERSION_HEADER, version);
    response
}

fn full(text: String) -> Body {
    Full::new(Bytes::from(text))
        .map_err(|never| match never {})
        .boxed_unsync()
}

/// Percent-decodes one segment or query part, once.
fn decode(text: &str) -> Result<String, ControlError> {
    let bad = || ControlError::Bad("The request path is not valid percent-encoded UTF-8".into());
    let mut decoded = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte == b'%' {
            let mut digit = || bytes.next().and_then(|b| char::from(b).to_digit(16));
            let (high, low) = (digit().ok_or_else(bad)?, digit().ok_or_else(bad)?);
            decoded.push(u8::try_from(high * 16 + low).map_err(|_| bad())?);
        } else {
            decoded.push(byte);
        }
    }
    String::from_utf8(decoded).map_err(|_| bad())
}

/// The value of the parameter `name`; an error if its text could not be parsed.
fn valid<T>(name: &str, value: Option<T>) -> Result<T, ControlError> {
    value.ok_or_else(|| ControlError::Bad(format!("Invalid value for '{name}'")))
}

/// Parses an enum value from its name in JSON.
fn parse_word<T: DeserializeOwned>(value: &str) -> Option<T> {
    serde_json::from_value(Value::String(value.to_owned())).ok()
}

fn parse<T: FromStr>(name: &str, value: &str) -> Result<T, ControlError> {
    value
        .parse()
        .map_err(|_| ControlError::Bad(format!("Invalid value for '{name}'")))
}

#[cfg(test)]
mod tests;
