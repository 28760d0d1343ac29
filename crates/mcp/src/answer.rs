//! HTTP responses: one JSON message, or a stream of server-sent events.

use std::future::{Future, ready};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use hyper::body::Frame;
use serde_json::json;

use crate::event_buffer::{BufferedMessage, EventReader, ReadOutcome};
use crate::rpc::RpcMessage;
use crate::sse::{self, Event};

/// Why a body ended early.
pub type BodyStreamError = Box<dyn std::error::Error + Send + Sync>;

/// The body of a response.
pub type McpBody = UnsyncBoxBody<Bytes, BodyStreamError>;

/// A response that refuses the request.
pub type RefusalResponse = Box<Response<McpBody>>;

/// How long an event stream is silent before a keep-alive comment is sent. A disconnected client is
/// detected because the comment cannot be sent.
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// The `retry` field of the first event: how long a client waits before it reconnects.
const RETRY_MILLIS: u32 = 1000;

/// A response without content.
pub fn empty_response(status: StatusCode) -> Response<McpBody> {
    let body = Empty::new().map_err(|never| match never {}).boxed_unsync();
    response_with_body(status, None, body)
}

/// A response with a JSON text.
pub fn json_text(status: StatusCode, text: impl Into<Bytes>) -> Response<McpBody> {
    let body = Full::new(text.into()).map_err(|never| match never {});
    response_with_body(status, Some("application/json"), body.boxed_unsync())
}

/// A response with `{"error": text}`.
pub fn error_response(status: StatusCode, text: &str) -> Response<McpBody> {
    json_text(status, json!({ "error": text }).to_string())
}

/// 405: the method is none of `allowed`.
pub fn method_not_allowed(allowed: &'static str) -> Response<McpBody> {
    let mut response = error_response(StatusCode::METHOD_NOT_ALLOWED, "Method not allowed");
    let allowed = HeaderValue::from_static(allowed);
    response.headers_mut().insert(ALLOW, allowed);
    response
}

/// A response with a JSON-RPC error.
pub fn rpc_error(status: StatusCode, id: Option<&str>, code: i64, text: &str) -> Response<McpBody> {
    json_text(
        status,
        RpcMessage::failure(id.unwrap_or("null"), code, text, None),
    )
}

/// A response with server-sent events: `first`, and then the texts that `next` returns, until it
/// returns none. `state` is dropped when the client disconnects.
pub fn event_stream<S, F>(
    first: String,
    state: S,
    next: impl FnMut(S) -> F + Send + 'static,
) -> Response<McpBody>
where
    S: Send + 'static,
    F: Future<Output = Option<(String, S)>> + Send + 'static,
{
    let texts = stream::once(ready(first)).chain(stream::unfold(state, next));
    let frames = texts.map(|text| Ok(Frame::data(Bytes::from(text))));
    let body = StreamBody::new(frames).boxed_unsync();
    let mut response = response_with_body(StatusCode::OK, Some("text/event-stream"), body);
    // A proxy that buffers the stream would delay every event.
    let headers = response.headers_mut();
    headers.insert(
        CACHE_CONTROL,
        HeaderValue::from_static("no-cache, no-transform"),
    );
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

fn response_with_body(
    status: StatusCode,
    kind: Option<&'static str>,
    body: McpBody,
) -> Response<McpBody> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    if let Some(kind) = kind {
        let kind = HeaderValue::from_static(kind);
        response.headers_mut().insert(CONTENT_TYPE, kind);
    }
    response
}

/// The ids of the events of a stream.
#[derive(Clone, Debug)]
pub enum EventIds {
    /// `<event buffer>-<number>`, by which a client resumes the stream.
    EventBuffer {
        /// The number of the event buffer.
        event_buffer: u64,
        /// Whether the stream begins with an empty event that has an id. Clients of older
        /// revisions take that event for a message.
        primed: bool,
    },
    /// `<session>:<number>`.
    Session(Arc<str>),
}

impl EventIds {
    fn id(&self, number: u64) -> String {
        match self {
            EventIds::EventBuffer { event_buffer, .. } => format!("{event_buffer}-{number}"),
            EventIds::Session(session) => format!("{session}:{number}"),
        }
    }
}

/// A guard that is held until the stream ends or the client disconnects.
pub type StreamGuard = Box<dyn std::any::Any + Send>;

/// A response with `prefix`, the messages `first`, and then those that `reader` reads until the
/// event buffer is closed.
pub fn buffered_events(
    reader: EventReader,
    after: u64,
    first: Vec<BufferedMessage>,
    event_ids: EventIds,
    prefix: Option<String>,
    guard: StreamGuard,
) -> Response<McpBody> {
    let mut begin = prefix.unwrap_or_default();
    if let EventIds::EventBuffer { primed: true, .. } = &event_ids {
        let priming = Event {
            id: Some(&event_ids.id(after)),
            retry: Some(RETRY_MILLIS),
            data: Some(""),
            ..Event::default()
        };
        begin.push_str(&priming.write());
    }
    for message in &first {
        begin.push_str(&format_event(&event_ids, message));
    }
    if begin.is_empty() {
        // A proxy may delay a response that has headers only.
        begin.push_str(sse::KEEPALIVE);
    }
    let stream = EventStream {
        reader,
        event_ids,
        has_ended: first.last().is_some_and(|message| message.last),
        _guard: guard,
    };
    event_stream(begin, stream, next_text)
}

/// The state of a response with buffered events.
struct EventStream {
    reader: EventReader,
    event_ids: EventIds,
    has_ended: bool,
    _guard: StreamGuard,
}

async fn next_text(mut stream: EventStream) -> Option<(String, EventStream)> {
    if stream.has_ended {
        return None;
    }
    let text = match stream.reader.next(KEEPALIVE_INTERVAL).await {
        ReadOutcome::Message(message) => {
            stream.has_ended = message.last;
            format_event(&stream.event_ids, &message)
        }
        ReadOutcome::TimedOut => sse::KEEPALIVE.to_owned(),
        ReadOutcome::Closed => return None,
    };
    Some((text, stream))
}

fn format_event(event_ids: &EventIds, message: &BufferedMessage) -> String {
    let id = event_ids.id(message.number);
    Event {
        id: Some(&id),
        name: Some("message"),
        data: Some(&message.text),
        ..Event::default()
    }
    .write()
}
