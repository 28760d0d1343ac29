//! HTTP with SSE of revision 2024-11-05: one event stream for all messages to the client, and a
//! POST for each message of the client.

use std::sync::Arc;

use http::header::{HeaderName, HeaderValue};
use http::{Response, StatusCode};

use crate::answer::{self, EventIds, McpBody};
use crate::bridge::Bridge;
use crate::caller::is_same_caller;
use crate::incoming::{Incoming, LAST_EVENT_ID, header_text};
use crate::rpc::{RpcKind, RpcMessage};
use crate::session::{Session, SessionError, SessionTransport};
use crate::sse::Event;
use crate::streamable::session_error_response;
use crate::tools::StdioServer;

/// Header with the session id.
const SESSION_HEADER: HeaderName = HeaderName::from_static("x-session-id");

/// Answers with the event stream of a new session, or resumes that of an existing one.
pub async fn listen(
    bridge: &Arc<Bridge>,
    server: &Arc<StdioServer>,
    incoming: &Incoming,
) -> Response<McpBody> {
    let last = header_text(&incoming.head.headers, &LAST_EVENT_ID).and_then(|last| {
        let (session, number) = last.split_once(':')?;
        Some((session.to_owned(), number.parse::<u64>().ok()?))
    });
    let resumed = last.and_then(|(id, number)| {
        let session = find_session(bridge, &id, incoming)?;
        Arc::ptr_eq(session.server(), server).then_some((session, number))
    });
    let (session, after) = match resumed {
        Some(resumed) => resumed,
        None => match bridge
            .open(server, &incoming.caller, SessionTransport::HttpSse)
            .await
        {
            Ok(session) => (session, 0),
            Err(error) => return session_error_response(&error, None),
        },
    };
    let path = incoming.head.uri.path();
    let message = path.rsplit_once("/sse").map_or("", |(before, _)| before);
    let endpoint = format!("{message}/message?session_id={}", session.id());
    let first = Event {
        name: Some("endpoint"),
        data: Some(&endpoint),
        ..Event::default()
    };
    let reader = session.standing_buffer().open_reader(after);
    let event_ids = EventIds::Session(session.id().into());
    let guard = Box::new(session.begin_use());
    let first = Some(first.write());
    let mut response = answer::buffered_events(reader, after, Vec::new(), event_ids, first, guard);
    if let Ok(id) = HeaderValue::from_str(session.id()) {
        response.headers_mut().insert(SESSION_HEADER, id);
    }
    response
}

/// Handles one message of a client.
pub async fn receive(bridge: &Arc<Bridge>, incoming: &Incoming) -> Response<McpBody> {
    let session_id = header_text(&incoming.head.headers, &SESSION_HEADER).map(str::to_owned);
    let query = incoming.head.uri.query().unwrap_or_default();
    let session_id = session_id.or_else(|| {
        let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        let found = pairs.find(|(name, _)| matches!(*name, "session_id" | "sessionId"));
        found.map(|(_, value)| value.to_owned())
    });
    let not_found = || answer::error_response(StatusCode::NOT_FOUND, "Session not found");
    let Some(session) = session_id.and_then(|id| bridge.find_session(&id)) else {
        return not_found();
    };
    if session.transport() != SessionTransport::HttpSse {
        return not_found();
    }
    if !is_same_caller(session.caller(), &incoming.caller) {
        return answer::error_response(
            StatusCode::FORBIDDEN,
            "The session belongs to another agent",
        );
    }
    if session.has_ended() {
        let why = "Child process not running";
        return answer::error_response(StatusCode::SERVICE_UNAVAILABLE, why);
    }
    let Ok(message) = RpcMessage::read_bytes(incoming.body.to_vec()) else {
        return answer::error_response(StatusCode::BAD_REQUEST, "Invalid JSON-RPC format");
    };
    let _session_use = session.begin_use();
    let sent = if message.kind() == RpcKind::Request {
        session
            .send_request(message, incoming.call_headers())
            .await
            .map(drop)
    } else {
        session.send_message(message).await
    };
    match sent {
        Ok(()) => answer::empty_response(StatusCode::ACCEPTED),
        Err(SessionError::ProcessEnded(_)) => {
            let why = "Child process not running";
            answer::error_response(StatusCode::SERVICE_UNAVAILABLE, why)
        }
        Err(error) => session_error_response(&error, None),
    }
}

fn find_session(bridge: &Arc<Bridge>, id: &str, incoming: &Incoming) -> Option<Arc<Session>> {
    bridge.find_open_session(id).filter(|session| {
        session.transport() == SessionTransport::HttpSse
            && is_same_caller(session.caller(), &incoming.caller)
    })
}
