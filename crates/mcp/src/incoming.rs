//! An authenticated HTTP request to a tool with its whole body, and the headers that several
//! transports read.

use bytes::Bytes;
use http::header::{HeaderMap, HeaderName};
use http::request::Parts as Head;

use crate::call_headers::CallHeaders;
use crate::caller::McpCaller;

/// The protocol revision of the client.
pub const PROTOCOL_VERSION: HeaderName = HeaderName::from_static("mcp-protocol-version");

/// The id of the last event that a client received, from which it resumes the stream.
pub const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// The revisions with sessions, the newest first.
pub const REVISIONS: [&str; 4] = ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"];

/// A request of an authenticated caller, with its whole body.
#[derive(Debug)]
pub struct Incoming {
    /// The head of the request.
    pub head: Head,
    /// The body.
    pub body: Bytes,
    /// The authenticated caller.
    pub caller: McpCaller,
}

impl Incoming {
    /// The headers that concern the call in the body.
    pub fn call_headers(&self) -> CallHeaders {
        CallHeaders::read(&self.head.headers)
    }
}

/// A header's value; empty if it is not ASCII text.
pub fn header_text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers
        .get(name)
        .map(|value| value.to_str().unwrap_or_default())
}
