//! HTTP with SSE as of 2024-11-05: one stream to hear everything, a POST for each message.

use std::sync::Arc;

use http::header::{HeaderName, HeaderValue};
use http::{Response, StatusCode};

use crate::answer::{self, Content, Numbering};
use crate::bridge::Bridge;
use crate::caller::same;
use crate::incoming::{Incoming, LAST_EVENT, text};
use crate::rpc::{Kind, Message};
use crate::session::{Session, SessionError, Way};
use crate::sse::Event;
use crate::streamable::refuse;
use crate::tools::Served;

/// The name of a session.
const SESSION: HeaderName = HeaderName::from_static("x-session-id");

/// The stream of a session: a new one, or one that broke.
pub async fn listen(
    bridge: &Arc<Bridge>,
    served: &Arc<Served>,
    incoming: &Incoming,
) -> Response<Content> {
    let last = text(&incoming.head.headers, &LAST_EVENT).and_then(|last| {
        let (session, number) = last.split_once(':')?;
        Some((session.to_owned(), number.parse::<u64>().ok()?))
    });
    let resumed = last.and_then(|(id, number)| {
        let session = find(bridge, &id, incoming)?;
        Arc::ptr_eq(session.served(), served).then_some((session, number))
    });
    let (session, after) = match resumed {
        Some(resumed) => resumed,
        None => match bridge.open(served, &incoming.caller, Way::OneStream).await {
            Ok(session) => (session, 0),
            Err(error) => return refuse(&error, None),
        },
    };
    let path = incoming.head.uri.path();
    let message = path.rsplit_once("/sse").map_or("", |(before, _)| before);
    let endpoint = format!("{message}/message?session_id={}", session.id());
    let lead = Event {
        name: Some("endpoint"),
        data: Some(&endpoint),
        ..Event::default()
    };
    let reader = session.standing().read(after);
    let numbering = Numbering::Session(session.id().into());
    let held = Box::new(session.attend());
    let lead = Some(lead.write());
    let mut response = answer::events(reader, after, Vec::new(), numbering, lead, held);
    if let Ok(id) = HeaderValue::from_str(session.id()) {
        response.headers_mut().insert(SESSION, id);
    }
    response
}

/// One message of a client.
pub async fn take(bridge: &Arc<Bridge>, incoming: &Incoming) -> Response<Content> {
    let named = text(&incoming.head.headers, &SESSION).map(str::to_owned);
    let query = incoming.head.uri.query().unwrap_or_default();
    let named = named.or_else(|| {
        let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        let found = pairs.find(|(name, _)| matches!(*name, "session_id" | "sessionId"));
        found.map(|(_, value)| value.to_owned())
    });
    let unknown = || answer::sentence(StatusCode::NOT_FOUND, "Session not found");
    let Some(session) = named.and_then(|id| bridge.known(&id)) else {
        return unknown();
    };
    if session.way() != Way::OneStream {
        return unknown();
    }
    if !same(session.caller(), &incoming.caller) {
        return answer::sentence(StatusCode::FORBIDDEN, "The session is another agent's");
    }
    if session.is_over() {
        let why = "Child process not running";
        return answer::sentence(StatusCode::SERVICE_UNAVAILABLE, why);
    }
    let Ok(message) = Message::read_bytes(incoming.body.to_vec()) else {
        return answer::sentence(StatusCode::BAD_REQUEST, "Invalid JSON-RPC format");
    };
    let _attendance = session.attend();
    let sent = if message.kind() == Kind::Request {
        session
            .ask(message, incoming.call_headers())
            .await
            .map(drop)
    } else {
        session.tell(message).await
    };
    match sent {
        Ok(()) => answer::bare(StatusCode::ACCEPTED),
        Err(SessionError::Gone(_)) => {
            let why = "Child process not running";
            answer::sentence(StatusCode::SERVICE_UNAVAILABLE, why)
        }
        Err(error) => refuse(&error, None),
    }
}

fn find(bridge: &Arc<Bridge>, id: &str, incoming: &Incoming) -> Option<Arc<Session>> {
    bridge.session(id).filter(|session| {
        session.way() == Way::OneStream && same(session.caller(), &incoming.caller)
    })
}
