//! Streamable HTTP in the revisions that have sessions: 2024-11-05 to 2025-11-25.

use std::sync::Arc;
use std::time::Duration;

use http::header::{ACCEPT, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Response, StatusCode};

use crate::answer::{self, Content, Numbering, Refusal};
use crate::bridge::Bridge;
use crate::caller::same;
use crate::event_buffer::{Heard, Said};
use crate::incoming::{Incoming, LAST_EVENT, REVISIONS, VERSION, text};
use crate::rpc::{Kind, Message, code};
use crate::session::{Expected, STANDING, Session, SessionError, Way};
use crate::tools::Served;

/// The name of a session.
pub const SESSION: HeaderName = HeaderName::from_static("mcp-session-id");

/// Since when a stream begins with an event that says nothing.
const PRIMED_SINCE: &str = "2025-11-25";

/// The one revision with batches.
const BATCHES: &str = "2025-03-26";

/// The most messages of a batch.
const MOST_IN_BATCH: usize = 100;

/// How long an answer may take and still come as one JSON text instead of a stream.
const AT_ONCE: Duration = Duration::from_millis(200);

/// How long the answer to a client waits for the end of a server that was not started.
const END_WAIT: Duration = Duration::from_secs(6);

/// Answers a request to `/mcp/<tool>` that has nothing of 2026.
pub async fn answer(
    bridge: &Arc<Bridge>,
    served: &Arc<Served>,
    incoming: Incoming,
) -> Response<Content> {
    if let Some(version) = text(&incoming.head.headers, &VERSION)
        && !REVISIONS.contains(&version)
    {
        let why = format!(
            "Bad Request: unsupported protocol version; supported are {}",
            REVISIONS.join(", ")
        );
        return answer::failure(StatusCode::BAD_REQUEST, None, code::INVALID, &why);
    }
    match incoming.head.method {
        Method::POST => post(bridge, served, incoming).await,
        Method::GET => get(bridge, served, &incoming),
        Method::DELETE => delete(bridge, served, &incoming),
        _ => answer::not_allowed("GET, POST, DELETE"),
    }
}

async fn post(bridge: &Arc<Bridge>, served: &Arc<Served>, incoming: Incoming) -> Response<Content> {
    let headers = &incoming.head.headers;
    if !accepts(headers, "application/json") && !accepts(headers, "text/event-stream") {
        let why = "Not Acceptable: accept application/json and text/event-stream";
        return answer::failure(StatusCode::NOT_ACCEPTABLE, None, code::INVALID, why);
    }
    if incoming.body.trim_ascii_start().starts_with(b"[") {
        return batch(bridge, served, &incoming).await;
    }
    let message = match Message::read_bytes(incoming.body.to_vec()) {
        Ok(message) => message,
        Err(bad) => {
            let why = bad.to_string();
            return answer::failure(StatusCode::BAD_REQUEST, None, bad.code(), &why);
        }
    };
    if message.method() == Some("initialize") && message.kind() == Kind::Request {
        return open(bridge, served, &incoming, message).await;
    }
    let session = match session(bridge, served, &incoming) {
        Ok(session) => session,
        Err(refusal) => return *refusal,
    };
    let attendance = session.attend();
    if message.kind() != Kind::Request {
        return match session.tell(message).await {
            Ok(()) => answer::bare(StatusCode::ACCEPTED),
            Err(error) => refuse(&error, None),
        };
    }
    let id = message.id().map(str::to_owned);
    match session.ask(message, incoming.call_headers()).await {
        Ok(expected) => {
            let streams = accepts(headers, "text/event-stream");
            speak(&session, expected, streams, Box::new(attendance)).await
        }
        Err(error) => refuse(&error, id.as_deref()),
    }
}

/// A new session: its server says who it is.
async fn open(
    bridge: &Arc<Bridge>,
    served: &Arc<Served>,
    incoming: &Incoming,
    message: Message,
) -> Response<Content> {
    let id = message.id().map(str::to_owned);
    let opened = bridge.open(served, &incoming.caller, Way::Streamable).await;
    let session = match opened {
        Ok(session) => session,
        Err(error) => return refuse(&error, id.as_deref()),
    };
    let attendance = session.attend();
    let expected = match session.ask(message, incoming.call_headers()).await {
        Ok(expected) => expected,
        // It ended before it read anything: it was not started.
        Err(SessionError::Gone(_) | SessionError::Write(_)) => {
            return not_started(bridge, &session, id.as_deref()).await;
        }
        Err(error) => {
            bridge.close(session.id());
            return refuse(&error, id.as_deref());
        }
    };
    // A client learns its session from the head of this answer, so it must be certain.
    let mut reader = expected.event_buffer.read(0);
    let said = loop {
        match reader.next(served.timeout()).await {
            Heard::Said(said) if said.last => break Some(said),
            Heard::Said(_) => {}
            Heard::Nothing | Heard::Over => break None,
        }
    };
    drop(attendance);
    let Some(said) = said.filter(|_| session.version().is_some()) else {
        return not_started(bridge, &session, id.as_deref()).await;
    };
    let mut response = answer::json_text(StatusCode::OK, said.text.to_string());
    if let Ok(name) = HeaderValue::from_str(session.id()) {
        response.headers_mut().insert(SESSION, name);
    }
    response
}

/// Ends a session whose server did not introduce itself.
async fn not_started(bridge: &Bridge, session: &Session, id: Option<&str>) -> Response<Content> {
    let is_alive = session.process().is_alive();
    bridge.close(session.id());
    let ended = tokio::time::timeout(END_WAIT, session.process().ended()).await;
    let error = match ended {
        Ok(gone) if !is_alive => gone.to_string(),
        Ok(_) | Err(_) => "the server did not introduce itself".to_owned(),
    };
    session.report_failed_start(&error);
    let why = format!("{} was not started: {error}", session.served().name());
    answer::failure(StatusCode::SERVICE_UNAVAILABLE, id, code::GONE, &why)
}

/// The answer, at once where it comes at once, else as a stream.
async fn speak(
    session: &Arc<Session>,
    expected: Expected,
    streams: bool,
    held: answer::Held,
) -> Response<Content> {
    let mut reader = expected.event_buffer.read(0);
    let patience = if streams {
        AT_ONCE
    } else {
        session.served().timeout()
    };
    let mut first: Vec<Said> = Vec::new();
    match reader.next(patience).await {
        Heard::Said(said) if said.last => {
            session.forget(expected.number);
            return answer::json_text(StatusCode::OK, said.text.to_string());
        }
        Heard::Said(said) => first.push(said),
        Heard::Nothing => {}
        // It was cancelled: there is nothing to say.
        Heard::Over => return answer::bare(StatusCode::ACCEPTED),
    }
    if !streams {
        // Such a client cannot hear of anything but the answer.
        loop {
            match reader.next(session.served().timeout()).await {
                Heard::Said(said) if said.last => {
                    return answer::json_text(StatusCode::OK, said.text.to_string());
                }
                Heard::Said(_) | Heard::Nothing => {}
                Heard::Over => return answer::bare(StatusCode::ACCEPTED),
            }
        }
    }
    let primed = session
        .version()
        .as_deref()
        .is_some_and(|version| version >= PRIMED_SINCE);
    let event_buffer = expected.number;
    let numbering = Numbering::EventBuffer {
        event_buffer,
        primed,
    };
    answer::events(reader, 0, first, numbering, None, held)
}

/// Several messages at once, which one revision has.
async fn batch(
    bridge: &Arc<Bridge>,
    served: &Arc<Served>,
    incoming: &Incoming,
) -> Response<Content> {
    let bad = |why: &str| answer::failure(StatusCode::BAD_REQUEST, None, code::INVALID, why);
    let session = match session(bridge, served, incoming) {
        Ok(session) => session,
        Err(refusal) => return *refusal,
    };
    if session.version().as_deref() != Some(BATCHES) {
        return bad("Bad Request: batches exist in revision 2025-03-26 only");
    }
    let parts: Vec<&serde_json::value::RawValue> = match serde_json::from_slice(&incoming.body) {
        Ok(parts) => parts,
        Err(error) => {
            let why = error.to_string();
            return answer::failure(StatusCode::BAD_REQUEST, None, code::PARSE, &why);
        }
    };
    if parts.is_empty() || parts.len() > MOST_IN_BATCH {
        return bad("Bad Request: a batch has 1 to 100 messages");
    }
    let mut messages = Vec::with_capacity(parts.len());
    for part in parts {
        match Message::read(part.get().to_owned()) {
            Ok(message) if message.method() == Some("initialize") => {
                return bad("Bad Request: initialize must stand alone");
            }
            Ok(message) => messages.push(message),
            Err(error) => return bad(&error.to_string()),
        }
    }
    let _attendance = session.attend();
    let mut awaited = Vec::new();
    for message in messages {
        if message.kind() == Kind::Request {
            let id = message.id().map(str::to_owned);
            match session.ask(message, incoming.call_headers()).await {
                Ok(expected) => awaited.push(expected),
                Err(error) => return refuse(&error, id.as_deref()),
            }
        } else if let Err(error) = session.tell(message).await {
            return refuse(&error, None);
        }
    }
    if awaited.is_empty() {
        return answer::bare(StatusCode::ACCEPTED);
    }
    let mut answers = Vec::with_capacity(awaited.len());
    for expected in awaited {
        let mut reader = expected.event_buffer.read(0);
        loop {
            match reader.next(served.timeout()).await {
                Heard::Said(said) if said.last => break answers.push(said.text.to_string()),
                Heard::Said(said) => session.standing().push(said.text.to_string()).await,
                // It takes its time, or waits for an operator's answer.
                Heard::Nothing => {}
                Heard::Over => break,
            }
        }
    }
    answer::json_text(StatusCode::OK, format!("[{}]", answers.join(",")))
}

/// The standing stream, or one that broke.
fn get(bridge: &Arc<Bridge>, served: &Arc<Served>, incoming: &Incoming) -> Response<Content> {
    let headers = &incoming.head.headers;
    if !accepts(headers, "text/event-stream") {
        let why = "Not Acceptable: accept text/event-stream";
        return answer::failure(StatusCode::NOT_ACCEPTABLE, None, code::INVALID, why);
    }
    let session = match session(bridge, served, incoming) {
        Ok(session) => session,
        Err(refusal) => return *refusal,
    };
    let (number, after) = match text(headers, &LAST_EVENT).map(read_event) {
        None => (STANDING, None),
        Some(Some((event_buffer, after))) => (event_buffer, Some(after)),
        Some(None) => {
            let why = "Bad Request: Last-Event-ID is none of ours";
            return answer::failure(StatusCode::BAD_REQUEST, None, code::INVALID, why);
        }
    };
    let Some(event_buffer) = session.event_buffer(number) else {
        // What was said there is forgotten; the client asks again.
        let why = "Not Found: nothing is kept of that stream";
        return answer::failure(StatusCode::NOT_FOUND, None, code::INVALID, why);
    };
    let version = session.version();
    let primed = version
        .as_deref()
        .is_some_and(|version| version >= PRIMED_SINCE);
    let after = after.unwrap_or_else(|| event_buffer.heard());
    let reader = event_buffer.read(after);
    let numbering = Numbering::EventBuffer {
        event_buffer: number,
        primed,
    };
    let held = Box::new(session.attend());
    answer::events(reader, after, Vec::new(), numbering, None, held)
}

fn read_event(id: &str) -> Option<(u64, u64)> {
    let (event_buffer, number) = id.split_once('-')?;
    Some((event_buffer.parse().ok()?, number.parse().ok()?))
}

fn delete(bridge: &Arc<Bridge>, served: &Arc<Served>, incoming: &Incoming) -> Response<Content> {
    match session(bridge, served, incoming) {
        Ok(session) => {
            bridge.close(session.id());
            answer::bare(StatusCode::NO_CONTENT)
        }
        Err(refusal) => *refusal,
    }
}

/// The session that a request names. Somebody else's is as unknown as none.
fn session(
    bridge: &Arc<Bridge>,
    served: &Arc<Served>,
    incoming: &Incoming,
) -> Result<Arc<Session>, Refusal> {
    let Some(name) = text(&incoming.head.headers, &SESSION) else {
        let why = "Bad Request: the Mcp-Session-Id header is missing";
        let refusal = answer::failure(StatusCode::BAD_REQUEST, None, code::INVALID, why);
        return Err(Box::new(refusal));
    };
    let session = bridge.session(name).filter(|session| {
        session.way() == Way::Streamable
            && session.served().name() == served.name()
            && same(session.caller(), &incoming.caller)
    });
    session.ok_or_else(|| {
        let why = "Session not found";
        Box::new(answer::failure(
            StatusCode::NOT_FOUND,
            None,
            code::GONE,
            why,
        ))
    })
}

/// What a session's refusal is in HTTP.
pub fn refuse(error: &SessionError, id: Option<&str>) -> Response<Content> {
    let (status, code) = match error {
        SessionError::Gone(_) => (StatusCode::NOT_FOUND, code::GONE),
        SessionError::Write(_) => (StatusCode::INTERNAL_SERVER_ERROR, code::INTERNAL),
        SessionError::Busy => (StatusCode::TOO_MANY_REQUESTS, code::INTERNAL),
        SessionError::Full => (StatusCode::SERVICE_UNAVAILABLE, code::INTERNAL),
        SessionError::Twice | SessionError::NoNotice => (StatusCode::BAD_REQUEST, code::INVALID),
        SessionError::Launch(error) => (error.status(), code::INTERNAL),
    };
    let mut response = answer::failure(status, id, code, &error.to_string());
    if let SessionError::Launch(crate::launch::LaunchError::Waiting { wait, .. }) = error {
        let seconds = wait.as_secs() + 1;
        let headers = response.headers_mut();
        headers.insert(http::header::RETRY_AFTER, seconds.into());
    }
    response
}

/// Whether the client takes `kind`. Who says nothing takes everything.
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
