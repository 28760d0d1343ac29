//! The door: one request in, one tool called, one answer back.
//!
//! [`route`] is the whole list of what can be asked.

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
use crate::request::{BashRequest, Fields, Read};
use crate::tools::Tools;
use crate::tools::bash::{Event, Running, Said};

/// The largest body: a file to write, in JSON.
const MAX_BODY: usize = 64 << 20;

/// All bodies together, in KiB. Who comes after waits.
const ALL_BODIES: usize = 192 << 10;

/// How long a client may take to send one.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// What is logged of a session's name.
const LONGEST_SESSION: usize = 64;

const JSON: HeaderValue = HeaderValue::from_static("application/json; charset=utf-8");
const LINES: HeaderValue = HeaderValue::from_static("application/x-ndjson; charset=utf-8");

type Body = UnsyncBoxBody<Bytes, io::Error>;

/// Who may ask.
#[derive(Clone, Default)]
pub struct Guard {
    /// What a client must show, if it shows anything.
    pub token: Option<String>,
    /// Whether it must show it.
    pub required: bool,
}

impl std::fmt::Debug for Guard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guard")
            .field("token", &self.token.as_ref().map(|_| "…"))
            .field("required", &self.required)
            .finish()
    }
}

impl Guard {
    /// A wrong word is refused even where none is needed: who shows one means to be known.
    fn lets_in(&self, headers: &HeaderMap) -> bool {
        let Some(token) = &self.token else {
            return !self.required;
        };
        match headers.get(AUTHORIZATION) {
            None => !self.required,
            Some(shown) => {
                let expected = format!("Bearer {token}");
                aws_lc_rs::constant_time::verify_slices_are_equal(
                    shown.as_bytes(),
                    expected.as_bytes(),
                )
                .is_ok()
            }
        }
    }
}

/// A workbench as its clients see it.
#[derive(Debug)]
pub struct Door {
    tools: Tools,
    guard: Guard,
    bodies: Arc<Semaphore>,
}

impl Door {
    /// The door to `tools`.
    pub fn new(tools: Tools, guard: Guard) -> Self {
        Self {
            tools,
            guard,
            bodies: Arc::new(Semaphore::new(ALL_BODIES)),
        }
    }

    /// Answers one request.
    pub(crate) async fn answer(
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
        if !self.guard.lets_in(request.headers()) {
            return Err(Refusal::Unauthorized);
        }
        // Only browsers send it, on behalf of a page that has no business here.
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
                let asked: BashRequest = self.read(request).await?.1;
                Ok(stream(tools.bash(&asked)?))
            }
            (POST, "/read") => self.call(request, |asked| tools.read(asked)).await,
            (POST, "/write") => self.call(request, |asked| tools.write(asked)).await,
            (POST, "/edit") => self.call(request, |asked| tools.edit(asked)).await,
            (POST, "/ls") => self.call(request, |asked| tools.ls(asked)).await,
            (POST, "/find") => self.call(request, |asked| tools.find(asked)).await,
            (POST, "/grep") => self.call(request, |asked| tools.grep(asked)).await,
            (POST, _) => Err(Refusal::NotFound),
            (_, path) => Err(Refusal::Method(if path == "/health" {
                "GET"
            } else {
                "POST"
            })),
        }
    }

    async fn call<Asked: Read, Given: Serialize, Work>(
        &self,
        request: Request<Incoming>,
        tool: impl FnOnce(Asked) -> Work,
    ) -> Result<Response<Body>, Refusal>
    where
        Work: Future<Output = Result<Given, ToolError>>,
    {
        let (_room, asked) = self.read(request).await?;
        let given = tool(asked).await?;
        let answer = Answer {
            ok: true,
            result: given,
        };
        Ok(respond(StatusCode::OK, &answer))
    }

    /// Reads a body, whole. Its share of the memory for bodies is given back with what is
    /// returned.
    async fn read<Asked: Read>(
        &self,
        request: Request<Incoming>,
    ) -> Result<(impl Send + use<Asked>, Asked), Refusal> {
        let (head, body) = request.into_parts();
        // A page in a browser could send any other type without being asked about it first.
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
        let room = bodies.acquire_many_owned(share).await;
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
            let session: String = session.chars().take(LONGEST_SESSION).collect();
            tracing::info!(path = head.uri.path(), ?session, "workbench tool called");
        }
        Ok((room, Asked::read(&Fields(&fields))?))
    }
}

#[derive(Serialize)]
struct Answer<T> {
    ok: bool,
    result: T,
}

/// Why a request got no result.
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
        let (status, sentence) = match self {
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
                format!("The body is larger than {MAX_BODY} bytes"),
            ),
            Refusal::TooSlow => (
                StatusCode::REQUEST_TIMEOUT,
                "The body did not come in time".to_owned(),
            ),
            Refusal::Tool(ToolError::Internal) => (
                StatusCode::INTERNAL_SERVER_ERROR,
                ToolError::Internal.to_string(),
            ),
            Refusal::Tool(error) => (StatusCode::BAD_REQUEST, error.to_string()),
        };
        let mut response = respond(status, &json!({ "ok": false, "error": sentence }));
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

fn stream(running: Running) -> Response<Body> {
    let mut response = Response::new(Lines(running).boxed_unsync());
    response.headers_mut().insert(CONTENT_TYPE, LINES);
    response
}

/// A command as lines of JSON. When the client goes away this is dropped, and the command with
/// it.
struct Lines(Running);

impl hyper::body::Body for Lines {
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

/// One line of what a command does.
fn line(event: &Event) -> io::Result<Bytes> {
    let line = match event {
        Event::Output(stream, Said::Text(text)) => Line::Delta {
            data: text.into(),
            stream: *stream,
            base64: None,
        },
        Event::Output(stream, Said::Bytes(bytes)) => Line::Delta {
            data: String::from_utf8_lossy(bytes),
            stream: *stream,
            base64: Some(STANDARD.encode(bytes)),
        },
        Event::Done {
            exit_code,
            timed_out,
        } => Line::Done {
            exit_code: *exit_code,
            timed_out: *timed_out,
        },
        Event::Failed(message) => Line::Error {
            message: message.as_str(),
        },
    };
    let mut text = serde_json::to_vec(&line)?;
    text.push(b'\n');
    Ok(text.into())
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Line<'a> {
    Delta {
        data: std::borrow::Cow<'a, str>,
        stream: crate::tools::bash::Stream,
        /// The bytes themselves, where they are no text.
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
