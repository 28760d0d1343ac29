//! Streamable HTTP of the protocol revisions with sessions: 2024-11-05 to 2025-11-25.

use std::sync::Arc;
use std::time::Duration;

use http::header::{ACCEPT, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Response, StatusCode};

use crate::answer::{self, EventIds, McpBody, RefusalResponse};
use crate::bridge::Bridge;
use crate::caller::is_same_caller;
use crate::event_buffer::{BufferedMessage, ReadOutcome};
use crate::incoming::{Incoming, LAST_EVENT_ID, PROTOCOL_VERSION, REVISIONS, header_text};
use crate::rpc::{RpcKind, RpcMessage, code};
use crate::session::{PendingResponse, STANDING_BUFFER, Session, SessionError, SessionTransport};
use crate::tools::StdioServer;

/// Header with the session id.
pub const SESSION_HEADER: HeaderName = HeaderName::from_static("mcp-session-id");

/// First revision whose streams begin with an event without data, so that a client has an id to
/// resume from.
const PRIMING_REVISION: &str = "2025-11-25";

/// The only revision with batches.
const BATCH_REVISION: &str = "2025-03-26";

/// Maximum number of messages in a batch.
const MAX_BATCH: usize = 100;

/// After this time the response becomes an event stream instead of one JSON text.
const SINGLE_REPLY_TIMEOUT: Duration = Duration::from_millis(200);

/// How long a failed `initialize` waits for the server's exit code, which the error reports.
const EXIT_CODE_TIMEOUT: Duration = Duration::from_secs(6);

/// Answers a request to `/mcp/<tool>` of a revision with sessions.
pub async fn answer(
    bridge: &Arc<Bridge>,
    server: &Arc<StdioServer>,
    incoming: Incoming,
) -> Response<McpBody> {
    if let Some(version) = header_text(&incoming.head.headers, &PROTOCOL_VERSION)
        && !REVISIONS.contains(&version)
    {
        let why = format!(
            "Bad Request: unsupported protocol version; supported are {}",
            REVISIONS.join(", ")
        );
        return answer::rpc_error(StatusCode::BAD_REQUEST, None, code::INVALID_REQUEST, &why);
    }
    match incoming.head.method {
        Method::POST => post(bridge, server, incoming).await,
        Method::GET => get(bridge, server, &incoming),
        Method::DELETE => delete(bridge, server, &incoming),
        _ => answer::method_not_allowed("GET, POST, DELETE"),
    }
}

async fn post(
    bridge: &Arc<Bridge>,
    server: &Arc<StdioServer>,
    incoming: Incoming,
) -> Response<McpBody> {
    let headers = &incoming.head.headers;
    if !accepts(headers, "application/json") && !accepts(headers, "text/event-stream") {
        let why = "Not Acceptable: accept application/json and text/event-stream";
        return answer::rpc_error(StatusCode::NOT_ACCEPTABLE, None, code::INVALID_REQUEST, why);
    }
    if incoming.body.trim_ascii_start().starts_with(b"[") {
        return batch(bridge, server, &incoming).await;
    }
    let message = match RpcMessage::read_bytes(incoming.body.to_vec()) {
        Ok(message) => message,
        Err(bad) => {
            let why = bad.to_string();
            return answer::rpc_error(StatusCode::BAD_REQUEST, None, bad.code(), &why);
        }
    };
    if message.method() == Some("initialize") && message.kind() == RpcKind::Request {
        return open(bridge, server, &incoming, message).await;
    }
    let session = match find_session(bridge, server, &incoming) {
        Ok(session) => session,
        Err(refusal) => return *refusal,
    };
    let session_use = session.begin_use();
    if message.kind() != RpcKind::Request {
        return match session.send_message(message).await {
            Ok(()) => answer::empty_response(StatusCode::ACCEPTED),
            Err(error) => session_error_response(&error, None),
        };
    }
    let id = message.id().map(str::to_owned);
    match session.send_request(message, incoming.call_headers()).await {
        Ok(response) => {
            let accepts_stream = accepts(headers, "text/event-stream");
            respond(&session, response, accepts_stream, Box::new(session_use)).await
        }
        Err(error) => session_error_response(&error, id.as_deref()),
    }
}

/// Opens a session and answers `initialize`.
async fn open(
    bridge: &Arc<Bridge>,
    server: &Arc<StdioServer>,
    incoming: &Incoming,
    message: RpcMessage,
) -> Response<McpBody> {
    let id = message.id().map(str::to_owned);
    let opened = bridge
        .open(server, &incoming.caller, SessionTransport::Streamable)
        .await;
    let session = match opened {
        Ok(session) => session,
        Err(error) => return session_error_response(&error, id.as_deref()),
    };
    let session_use = session.begin_use();
    let response = match session.send_request(message, incoming.call_headers()).await {
        Ok(response) => response,
        // The server ended before it read the request: its start failed.
        Err(SessionError::ProcessEnded(_) | SessionError::Write(_)) => {
            return fail_start(bridge, &session, id.as_deref()).await;
        }
        Err(error) => {
            bridge.close(session.id());
            return session_error_response(&error, id.as_deref());
        }
    };
    // The response head contains the session id, so the head is sent only after the server has
    // answered.
    let mut reader = response.event_buffer.open_reader(0);
    let answer = loop {
        match reader.next(server.timeout()).await {
            ReadOutcome::Message(message) if message.last => break Some(message),
            ReadOutcome::Message(_) => {}
            ReadOutcome::TimedOut | ReadOutcome::Closed => break None,
        }
    };
    drop(session_use);
    let Some(answer) = answer.filter(|_| session.version().is_some()) else {
        return fail_start(bridge, &session, id.as_deref()).await;
    };
    let mut response = answer::json_text(StatusCode::OK, answer.text.to_string());
    if let Ok(name) = HeaderValue::from_str(session.id()) {
        response.headers_mut().insert(SESSION_HEADER, name);
    }
    response
}

/// Ends a session whose server did not complete `initialize`, and answers with the error.
async fn fail_start(bridge: &Bridge, session: &Session, id: Option<&str>) -> Response<McpBody> {
    let is_alive = session.process().is_alive();
    bridge.close(session.id());
    let ended = tokio::time::timeout(EXIT_CODE_TIMEOUT, session.process().wait_for_end()).await;
    let error = match ended {
        Ok(ended) if !is_alive => ended.to_string(),
        Ok(_) | Err(_) => "the server did not answer initialize".to_owned(),
    };
    session.report_failed_start(&error);
    let why = format!("{} failed to start: {error}", session.server().name());
    answer::rpc_error(
        StatusCode::SERVICE_UNAVAILABLE,
        id,
        code::SERVER_ENDED,
        &why,
    )
}

/// Responds with one JSON text if the answer comes soon, else with an event stream.
async fn respond(
    session: &Arc<Session>,
    response: PendingResponse,
    accepts_stream: bool,
    guard: answer::StreamGuard,
) -> Response<McpBody> {
    let mut reader = response.event_buffer.open_reader(0);
    let wait = if accepts_stream {
        SINGLE_REPLY_TIMEOUT
    } else {
        session.server().timeout()
    };
    let mut first: Vec<BufferedMessage> = Vec::new();
    match reader.next(wait).await {
        ReadOutcome::Message(message) if message.last => {
            session.remove_buffer(response.number);
            return answer::json_text(StatusCode::OK, message.text.to_string());
        }
        ReadOutcome::Message(message) => first.push(message),
        ReadOutcome::TimedOut => {}
        // The client cancelled the request: there is no answer.
        ReadOutcome::Closed => return answer::empty_response(StatusCode::ACCEPTED),
    }
    if !accepts_stream {
        // Without a stream the client can receive the answer only.
        loop {
            match reader.next(session.server().timeout()).await {
                ReadOutcome::Message(message) if message.last => {
                    return answer::json_text(StatusCode::OK, message.text.to_string());
                }
                ReadOutcome::Message(_) | ReadOutcome::TimedOut => {}
                ReadOutcome::Closed => return answer::empty_response(StatusCode::ACCEPTED),
            }
        }
    }
    let primed = session
        .version()
        .as_deref()
        .is_some_and(|version| version >= PRIMING_REVISION);
    let event_buffer = response.number;
    let event_ids = EventIds::EventBuffer {
        event_buffer,
        primed,
    };
    answer::buffered_events(reader, 0, first, event_ids, None, guard)
}

/// Answers a batch of messages, which only one revision has.
async fn batch(
    bridge: &Arc<Bridge>,
    server: &Arc<StdioServer>,
    incoming: &Incoming,
) -> Response<McpBody> {
    let refuse_batch =
        |why: &str| answer::rpc_error(StatusCode::BAD_REQUEST, None, code::INVALID_REQUEST, why);
    let session = match find_session(bridge, server, incoming) {
        Ok(session) => session,
        Err(refusal) => return *refusal,
    };
    if session.version().as_deref() != Some(BATCH_REVISION) {
        return refuse_batch("Bad Request: only revision 2025-03-26 supports batches");
    }
    let parts: Vec<&serde_json::value::RawValue> = match serde_json::from_slice(&incoming.body) {
        Ok(parts) => parts,
        Err(error) => {
            let why = error.to_string();
            return answer::rpc_error(StatusCode::BAD_REQUEST, None, code::PARSE_ERROR, &why);
        }
    };
    if parts.is_empty() || parts.len() > MAX_BATCH {
        return refuse_batch("Bad Request: a batch must have 1 to 100 messages");
    }
    let mut messages = Vec::with_capacity(parts.len());
    for part in parts {
        match RpcMessage::read(part.get().to_owned()) {
            Ok(message) if message.method() == Some("initialize") => {
                return refuse_batch("Bad Request: initialize must not be part of a batch");
            }
            Ok(message) => messages.push(message),
            Err(error) => return refuse_batch(&error.to_string()),
        }
    }
    let _session_use = session.begin_use();
    let mut pending = Vec::new();
    for message in messages {
        if message.kind() == RpcKind::Request {
            let id = message.id().map(str::to_owned);
            match session.send_request(message, incoming.call_headers()).await {
                Ok(response) => pending.push(response),
                Err(error) => return session_error_response(&error, id.as_deref()),
            }
        } else if let Err(error) = session.send_message(message).await {
            return session_error_response(&error, None);
        }
    }
    if pending.is_empty() {
        return answer::empty_response(StatusCode::ACCEPTED);
    }
    let mut answers = Vec::with_capacity(pending.len());
    for response in pending {
        let mut reader = response.event_buffer.open_reader(0);
        loop {
            match reader.next(server.timeout()).await {
                ReadOutcome::Message(message) if message.last => {
                    break answers.push(message.text.to_string());
                }
                ReadOutcome::Message(message) => {
                    session
                        .standing_buffer()
                        .push(message.text.to_string())
                        .await;
                }
                // The call is still running, or waits for the operator.
                ReadOutcome::TimedOut => {}
                ReadOutcome::Closed => break,
            }
        }
    }
    answer::json_text(StatusCode::OK, format!("[{}]", answers.join(",")))
}

/// Answers a GET: the standing stream, or the rest of an interrupted stream.
fn get(bridge: &Arc<Bridge>, server: &Arc<StdioServer>, incoming: &Incoming) -> Response<McpBody> {
    let headers = &incoming.head.headers;
    if !accepts(headers, "text/event-stream") {
        let why = "Not Acceptable: accept text/event-stream";
        return answer::rpc_error(StatusCode::NOT_ACCEPTABLE, None, code::INVALID_REQUEST, why);
    }
    let session = match find_session(bridge, server, incoming) {
        Ok(session) => session,
        Err(refusal) => return *refusal,
    };
    let (number, after) = match header_text(headers, &LAST_EVENT_ID).map(parse_event_id) {
        None => (STANDING_BUFFER, None),
        Some(Some((event_buffer, after))) => (event_buffer, Some(after)),
        Some(None) => {
            let why = "Bad Request: invalid Last-Event-ID";
            return answer::rpc_error(StatusCode::BAD_REQUEST, None, code::INVALID_REQUEST, why);
        }
    };
    let Some(event_buffer) = session.event_buffer(number) else {
        // The buffer was evicted; the client has to send its request again.
        let why = "Not Found: the stream is no longer available; send the request again";
        return answer::rpc_error(StatusCode::NOT_FOUND, None, code::INVALID_REQUEST, why);
    };
    let version = session.version();
    let primed = version
        .as_deref()
        .is_some_and(|version| version >= PRIMING_REVISION);
    let after = after.unwrap_or_else(|| event_buffer.last_read());
    let reader = event_buffer.open_reader(after);
    let event_ids = EventIds::EventBuffer {
        event_buffer: number,
        primed,
    };
    let guard = Box::new(session.begin_use());
    answer::buffered_events(reader, after, Vec::new(), event_ids, None, guard)
}

/// The event buffer and the message number of an event id.
fn parse_event_id(id: &str) -> Option<(u64, u64)> {
    let (event_buffer, number) = id.split_once('-')?;
    Some((event_buffer.parse().ok()?, number.parse().ok()?))
}

fn delete(
    bridge: &Arc<Bridge>,
    server: &Arc<StdioServer>,
    incoming: &Incoming,
) -> Response<McpBody> {
    match find_session(bridge, server, incoming) {
        Ok(session) => {
            bridge.close(session.id());
            answer::empty_response(StatusCode::NO_CONTENT)
        }
        Err(refusal) => *refusal,
    }
}

/// The session that a request names. A session of another caller counts as not found.
fn find_session(
    bridge: &Arc<Bridge>,
    server: &Arc<StdioServer>,
    incoming: &Incoming,
) -> Result<Arc<Session>, RefusalResponse> {
    let Some(name) = header_text(&incoming.head.headers, &SESSION_HEADER) else {
        let why = "Bad Request: the Mcp-Session-Id header is missing";
        let refusal = answer::rpc_error(StatusCode::BAD_REQUEST, None, code::INVALID_REQUEST, why);
        return Err(Box::new(refusal));
    };
    let session = bridge.find_open_session(name).filter(|session| {
        session.transport() == SessionTransport::Streamable
            && session.server().name() == server.name()
            && is_same_caller(session.caller(), &incoming.caller)
    });
    session.ok_or_else(|| {
        let why = "Session not found";
        Box::new(answer::rpc_error(
            StatusCode::NOT_FOUND,
            None,
            code::SERVER_ENDED,
            why,
        ))
    })
}

/// The HTTP response for a session error.
pub fn session_error_response(error: &SessionError, id: Option<&str>) -> Response<McpBody> {
    let (status, code) = match error {
        SessionError::ProcessEnded(_) => (StatusCode::NOT_FOUND, code::SERVER_ENDED),
        SessionError::Write(_) => (StatusCode::INTERNAL_SERVER_ERROR, code::INTERNAL_ERROR),
        SessionError::TooManyRequests => (StatusCode::TOO_MANY_REQUESTS, code::INTERNAL_ERROR),
        SessionError::TooManySessions => (StatusCode::SERVICE_UNAVAILABLE, code::INTERNAL_ERROR),
        SessionError::DuplicateId | SessionError::NotNotification => {
            (StatusCode::BAD_REQUEST, code::INVALID_REQUEST)
        }
        SessionError::Launch(error) => (error.status(), code::INTERNAL_ERROR),
    };
    let mut response = answer::rpc_error(status, id, code, &error.to_string());
    if let SessionError::Launch(crate::launch::LaunchError::Waiting { wait, .. }) = error {
        let seconds = wait.as_secs() + 1;
        let headers = response.headers_mut();
        headers.insert(http::header::RETRY_AFTER, seconds.into());
    }
    response
}

/// Whether the client accepts the media type `kind`. Without an Accept header it accepts all.
pub fn accepts(headers: &HeaderMap, kind: &str) -> bool {
    let mut all = headers.get_all(ACCEPT).iter().peekable();
    if all.peek().is_none() {
        return true;
    }
    let group = kind.split('/').next().unwrap_or_default();
    all.filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|range| range.split(';').next())
        .map(str::trim)
        .any(|range| {
            range.eq_ignore_ascii_case(kind)
                || range == "*/*"
                || range.strip_suffix("/*") == Some(group)
        })
}
