//! HTTP service of the workbench: authenticates a request and routes it to a tool.
//!
//! [`WorkbenchService::route`] lists every route.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{ALLOW, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, ORIGIN};
use http::header::{CONTENT_LENGTH, WWW_AUTHENTICATE};
use http::{Method, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Frame, Incoming};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::error::ToolError;
use crate::request::{BashRequest, Fields, FromFields};
use crate::tools::WorkspaceTools;
use crate::tools::bash::{CommandEvent, OutputChunk, RunningShell};

/// Maximum size of a request body in bytes: a file to write, in JSON.
const MAX_BODY: usize = 64 << 20;

/// Maximum size of all request bodies together, in KiB. Further requests wait.
const MAX_BODIES_KIB: usize = 192 << 10;

/// Timeout of reading a request body.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum number of logged characters of a session id.
const MAX_SESSION_LOGGED: usize = 64;

const JSON: HeaderValue = HeaderValue::from_static("application/json; charset=utf-8");
const NDJSON: HeaderValue = HeaderValue::from_static("application/x-ndjson; charset=utf-8");

type Body = UnsyncBoxBody<Bytes, io::Error>;

/// Authentication by bearer token.
#[derive(Clone, Default)]
pub struct BearerAuth {
    /// The token; a request with another token is rejected.
    pub token: Option<String>,
    /// Whether a request without a token is rejected.
    pub required: bool,
}

impl std::fmt::Debug for BearerAuth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BearerAuth")
            .field("token", &self.token.as_ref().map(|_| "…"))
            .field("required", &self.required)
            .finish()
    }
}

impl BearerAuth {
    /// Whether a request with these headers is authenticated. A wrong token is rejected even if no
    /// token is required, because the client expects to be authenticated.
    fn accepts(&self, headers: &HeaderMap) -> bool {
        let Some(token) = &self.token else {
            return !self.required;
        };
        match headers.get(AUTHORIZATION) {
            None => !self.required,
            Some(header) => {
                let expected = format!("Bearer {token}");
                aws_lc_rs::constant_time::verify_slices_are_equal(
                    header.as_bytes(),
                    expected.as_bytes(),
                )
                .is_ok()
            }
        }
    }
}

/// The tools of one workspace as an HTTP service.
#[derive(Debug)]
pub struct WorkbenchService {
    tools: WorkspaceTools,
    auth: BearerAuth,
    /// The memory limit of all request bodies together, in KiB.
    bodies: Arc<Semaphore>,
}

impl WorkbenchService {
    /// A service for `tools`.
    pub fn new(tools: WorkspaceTools, auth: BearerAuth) -> Self {
        Self {
            tools,
            auth,
            bodies: Arc::new(Semaphore::new(MAX_BODIES_KIB)),
        }
    }

    /// Handles one request.
    pub(crate) async fn respond_to(
        &self,
        request: Request<Incoming>,
    ) -> Result<Response<Body>, Infallible> {
        let outcome = match self.admit(&request) {
            Ok(()) => self.route(request).await,
            Err(refusal) => Err(refusal),
        };
        Ok(match outcome {
            Ok(response) => response,
            Err(refusal) => refusal.respond(),
        })
    }

    fn admit(&self, request: &Request<Incoming>) -> Result<(), Refusal> {
        if !self.auth.accepts(request.headers()) {
            return Err(Refusal::Unauthorized);
        }
        // Only browsers send Origin, and no web page may use the tools.
        if request.headers().contains_key(ORIGIN) {
            return Err(Refusal::Forbidden);
        }
        Ok(())
    }

    async fn route(&self, request: Request<Incoming>) -> Result<Response<Body>, Refusal> {
        const GET: &Method = &Method::GET;
        const POST: &Method = &Method::POST;
        let path = request.uri().path().to_owned();
        let tools = &self.tools;
        match (request.method(), path.as_str()) {
            (GET, "/health") => {
                let health = json!({ "ok": true, "version": env!("CARGO_PKG_VERSION") });
                Ok(respond(StatusCode::OK, &health))
            }
            (POST, "/bash") => {
                let tool_request: BashRequest = self.read(request).await?.1;
                Ok(stream(tools.bash(&tool_request)?))
            }
            (POST, "/read") => {
                self.call(request, |tool_request| tools.read(tool_request))
                    .await
            }
            (POST, "/write") => {
                self.call(request, |tool_request| tools.write(tool_request))
                    .await
            }
            (POST, "/edit") => {
                self.call(request, |tool_request| tools.edit(tool_request))
                    .await
            }
            (POST, "/ls") => {
                self.call(request, |tool_request| tools.ls(tool_request))
                    .await
            }
            (POST, "/find") => {
                self.call(request, |tool_request| tools.find(tool_request))
                    .await
            }
            (POST, "/grep") => {
                self.call(request, |tool_request| tools.grep(tool_request))
                    .await
            }
            (POST, _) => Err(Refusal::NotFound),
            (_, path) => Err(Refusal::Method(if path == "/health" {
                "GET"
            } else {
                "POST"
            })),
        }
    }

    async fn call<Req: FromFields, Res: Serialize, Work>(
        &self,
        request: Request<Incoming>,
        tool: impl FnOnce(Req) -> Work,
    ) -> Result<Response<Body>, Refusal>
    where
        Work: Future<Output = Result<Res, ToolError>>,
    {
        let (_memory_share, tool_request) = self.read(request).await?;
        let result = tool(tool_request).await?;
        let body = SuccessBody { ok: true, result };
        Ok(respond(StatusCode::OK, &body))
    }

    /// Reads and parses a whole body. The first returned value holds the body's share of the
    /// memory limit until it is dropped.
    async fn read<Req: FromFields>(
        &self,
        request: Request<Incoming>,
    ) -> Result<(impl Send + use<Req>, Req), Refusal> {
        let (head, body) = request.into_parts();
        // A web page can send other content types without a CORS preflight.
        let is_json = head
            .headers
            .get(CONTENT_TYPE)
            .and_then(|value| value.to_str().ok())
            .is_some_and(|value| value.to_ascii_lowercase().contains("application/json"));
        if !is_json {
            return Err(Refusal::NotJson);
        }
        let length = head
            .headers
            .get(CONTENT_LENGTH)
            .and_then(|value| value.to_str().ok()?.parse::<usize>().ok())
            .unwrap_or(MAX_BODY);
        if length > MAX_BODY {
            return Err(Refusal::TooLarge);
        }
        let share = u32::try_from(length / 1024 + 1).unwrap_or(u32::MAX);
        let bodies = Arc::clone(&self.bodies);
        let memory_share = bodies.acquire_many_owned(share).await;
        let body = tokio::time::timeout(BODY_TIMEOUT, Limited::new(body, MAX_BODY).collect())
            .await
            .map_err(|_| Refusal::TooSlow)?
            .map_err(|error| {
                if error.is::<LengthLimitError>() {
                    Refusal::TooLarge
                } else {
                    Refusal::NotJson
                }
            })?
            .to_bytes();
        let body = if body.trim_ascii().is_empty() {
            b"{}".as_slice()
        } else {
            &body
        };
        let Ok(Value::Object(fields)) = serde_json::from_slice(body) else {
            return Err(Refusal::NotJson);
        };
        if let Some(session) = fields.get("sessionId").and_then(Value::as_str) {
            let session: String = session.chars().take(MAX_SESSION_LOGGED).collect();
            tracing::info!(path = head.uri.path(), ?session, "workbench tool called");
        }
        Ok((memory_share, Req::from_fields(&Fields(&fields))?))
    }
}

#[derive(Serialize)]
struct SuccessBody<T> {
    ok: bool,
    result: T,
}

/// Why a request failed.
#[derive(Debug)]
enum Refusal {
    Unauthorized,
    Forbidden,
    NotFound,
    Method(&'static str),
    NotJson,
    TooLarge,
    TooSlow,
    Tool(ToolError),
}

impl From<ToolError> for Refusal {
    fn from(error: ToolError) -> Self {
        Self::Tool(error)
    }
}

impl Refusal {
    fn respond(&self) -> Response<Body> {
        let (status, message) = match self {
            Refusal::Unauthorized => (StatusCode::UNAUTHORIZED, "Unauthorized".to_owned()),
            Refusal::Forbidden => (StatusCode::FORBIDDEN, "Forbidden".to_owned()),
            Refusal::NotFound => (StatusCode::NOT_FOUND, "Not found".to_owned()),
            Refusal::Method(_) => (
                StatusCode::METHOD_NOT_ALLOWED,
                "Method not allowed".to_owned(),
            ),
            Refusal::NotJson => (StatusCode::BAD_REQUEST, "Invalid JSON body".to_owned()),
            Refusal::TooLarge => (
                StatusCode::PAYLOAD_TOO_LARGE,
                format!("The request body is larger than {MAX_BODY} bytes"),
            ),
            Refusal::TooSlow => (
                StatusCode::REQUEST_TIMEOUT,
                "The request body did not arrive in time".to_owned(),
            ),
            Refusal::Tool(ToolError::Internal) => (
                StatusCode::INTERNAL_SERVER_ERROR,
                ToolError::Internal.to_string(),
            ),
            Refusal::Tool(error) => (StatusCode::BAD_REQUEST, error.to_string()),
        };
        let mut response = respond(status, &json!({ "ok": false, "error": message }));
        match self {
            Refusal::Method(allowed) => {
                let allowed = HeaderValue::from_static(allowed);
                response.headers_mut().insert(ALLOW, allowed);
            }
            Refusal::Unauthorized => {
                let bearer = HeaderValue::from_static("Bearer");
                response.headers_mut().insert(WWW_AUTHENTICATE, bearer);
            }
            _ => {}
        }
        response
    }
}

fn respond(status: StatusCode, value: &impl Serialize) -> Response<Body> {
    let (status, text) = match serde_json::to_vec(value) {
        Ok(text) => (status, text),
        Err(_) => (
            StatusCode::INTERNAL_SERVER_ERROR,
            br#"{"ok":false,"error":"Internal server error"}"#.to_vec(),
        ),
    };
    let body = Full::new(Bytes::from(text)).map_err(|never| match never {});
    let mut response = Response::new(body.boxed_unsync());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, JSON);
    response
}

fn stream(running: RunningShell) -> Response<Body> {
    let mut response = Response::new(EventStream(running).boxed_unsync());
    response.headers_mut().insert(CONTENT_TYPE, NDJSON);
    response
}

/// The events of a command as newline-delimited JSON. hyper drops the body when the client
/// disconnects, which ends the command.
struct EventStream(RunningShell);

impl hyper::body::Body for EventStream {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        self.0
            .poll_next(context)
            .map(|event| Some(line(&event?).map(Frame::data)))
    }
}

/// One event as a line of JSON.
fn line(event: &CommandEvent) -> io::Result<Bytes> {
    let line = match event {
        CommandEvent::Output(stream, OutputChunk::Text(text)) => EventLine::Delta {
            data: text.into(),
            stream: *stream,
            base64: None,
        },
        CommandEvent::Output(stream, OutputChunk::Bytes(bytes)) => EventLine::Delta {
            data: String::from_utf8_lossy(bytes),
            stream: *stream,
            base64: Some(STANDARD.encode(bytes)),
        },
        CommandEvent::Done {
            exit_code,
            timed_out,
        } => EventLine::Done {
            exit_code: *exit_code,
            timed_out: *timed_out,
        },
        CommandEvent::Failed(message) => EventLine::Error {
            message: message.as_str(),
        },
    };
    let mut text = serde_json::to_vec(&line)?;
    text.push(b'\n');
    Ok(text.into())
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum EventLine<'a> {
    Delta {
        data: std::borrow::Cow<'a, str>,
        stream: crate::tools::bash::CommandStream,
        /// The raw bytes, if they are not UTF-8.
        #[serde(skip_serializing_if = "Option::is_none")]
        base64: Option<String>,
    },
    #[serde(rename_all = "camelCase")]
    Done {
        exit_code: i32,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        timed_out: bool,
    },
    Error {
        message: &'a str,
    },
}
