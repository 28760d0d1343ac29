//! Answers over HTTP: one message, or a stream of them.

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

use crate::event_buffer::{Heard, Reader, Said};
use crate::rpc::Message;
use crate::sse::{self, Event};

/// Why a body ended before its time.
pub type Broken = Box<dyn std::error::Error + Send + Sync>;

/// What an answer carries.
pub type Content = UnsyncBoxBody<Bytes, Broken>;

/// An answer instead of what was to come.
pub type Refusal = Box<Response<Content>>;

/// How long a stream is silent before it breathes: who is not there any more is noticed by
/// what cannot be sent.
pub const BREATHE_EVERY: Duration = Duration::from_secs(15);

/// When a client whose stream broke shall come back, in milliseconds.
const RETRY: u32 = 1000;

/// No content.
pub fn bare(status: StatusCode) -> Response<Content> {
    let body = Empty::new().map_err(|never| match never {}).boxed_unsync();
    with(status, None, body)
}

/// A JSON text.
pub fn json_text(status: StatusCode, text: impl Into<Bytes>) -> Response<Content> {
    let body = Full::new(text.into()).map_err(|never| match never {});
    with(status, Some("application/json"), body.boxed_unsync())
}

/// A sentence for whoever asked wrongly.
pub fn sentence(status: StatusCode, text: &str) -> Response<Content> {
    json_text(status, json!({ "error": text }).to_string())
}

/// The method is none of `allowed`.
pub fn not_allowed(allowed: &'static str) -> Response<Content> {
    let mut response = sentence(StatusCode::METHOD_NOT_ALLOWED, "Method not allowed");
    let allowed = HeaderValue::from_static(allowed);
    response.headers_mut().insert(ALLOW, allowed);
    response
}

/// A JSON-RPC error.
pub fn failure(status: StatusCode, id: Option<&str>, code: i64, text: &str) -> Response<Content> {
    json_text(
        status,
        Message::failure(id.unwrap_or("null"), code, text, None),
    )
}

/// Server-sent events: `first`, and then what `next` comes to hear, until that is nothing.
/// What `listener` holds goes when nobody reads any more.
pub fn told<L, F>(
    first: String,
    listener: L,
    next: impl FnMut(L) -> F + Send + 'static,
) -> Response<Content>
where
    L: Send + 'static,
    F: Future<Output = Option<(String, L)>> + Send + 'static,
{
    let texts = stream::once(ready(first)).chain(stream::unfold(listener, next));
    let frames = texts.map(|text| Ok(Frame::data(Bytes::from(text))));
    let body = StreamBody::new(frames).boxed_unsync();
    let mut response = with(StatusCode::OK, Some("text/event-stream"), body);
    // Proxies that gather a stream before they pass it on make it useless.
    let headers = response.headers_mut();
    headers.insert(
        CACHE_CONTROL,
        HeaderValue::from_static("no-cache, no-transform"),
    );
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

fn with(status: StatusCode, kind: Option<&'static str>, body: Content) -> Response<Content> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    if let Some(kind) = kind {
        let kind = HeaderValue::from_static(kind);
        response.headers_mut().insert(CONTENT_TYPE, kind);
    }
    response
}

/// How the events of a stream are numbered.
#[derive(Clone, Debug)]
pub enum Numbering {
    /// `<stream>-<number>`, and what comes first says where a client may go on.
    EventBuffer {
        /// Which event buffer.
        event_buffer: u64,
        /// Whether there is such a first event; clients of older revisions take it for a
        /// message.
        primed: bool,
    },
    /// `<session>:<number>`.
    Session(Arc<str>),
}

impl Numbering {
    fn id(&self, number: u64) -> String {
        match self {
            Numbering::EventBuffer { event_buffer, .. } => format!("{event_buffer}-{number}"),
            Numbering::Session(session) => format!("{session}:{number}"),
        }
    }
}

/// What is held for as long as a stream is read.
pub type Held = Box<dyn std::any::Any + Send>;

/// The events that `reader` hears, after `first`, until there are no more.
pub fn events(
    reader: Reader,
    after: u64,
    first: Vec<Said>,
    numbering: Numbering,
    lead: Option<String>,
    held: Held,
) -> Response<Content> {
    let mut begin = lead.unwrap_or_default();
    if let Numbering::EventBuffer { primed: true, .. } = &numbering {
        let priming = Event {
            id: Some(&numbering.id(after)),
            retry: Some(RETRY),
            data: Some(""),
            ..Event::default()
        };
        begin.push_str(&priming.write());
    }
    for said in &first {
        begin.push_str(&written(&numbering, said));
    }
    if begin.is_empty() {
        // Headers alone may stay in a buffer on the way.
        begin.push_str(sse::BREATH);
    }
    let listener = Listener {
        reader,
        numbering,
        over: first.last().is_some_and(|said| said.last),
        _held: held,
    };
    told(begin, listener, hear)
}

struct Listener {
    reader: Reader,
    numbering: Numbering,
    over: bool,
    _held: Held,
}

async fn hear(mut listener: Listener) -> Option<(String, Listener)> {
    if listener.over {
        return None;
    }
    let text = match listener.reader.next(BREATHE_EVERY).await {
        Heard::Said(said) => {
            listener.over = said.last;
            written(&listener.numbering, &said)
        }
        Heard::Nothing => sse::BREATH.to_owned(),
        Heard::Over => return None,
    };
    Some((text, listener))
}

fn written(numbering: &Numbering, said: &Said) -> String {
    let id = numbering.id(said.number);
    Event {
        id: Some(&id),
        name: Some("message"),
        data: Some(&said.text),
        ..Event::default()
    }
    .write()
}
