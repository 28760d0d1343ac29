//! A request to a tool that was read whole, and the headers that several transports read.

use bytes::Bytes;
use http::header::{HeaderMap, HeaderName};
use http::request::Parts as Head;

use crate::call_headers::CallHeaders;
use crate::caller::Caller;

/// The revision that a client speaks.
pub const VERSION: HeaderName = HeaderName::from_static("mcp-protocol-version");

/// Where a client wants to go on.
pub const LAST_EVENT: HeaderName = HeaderName::from_static("last-event-id");

/// The revisions with sessions, the newest first.
pub const REVISIONS: [&str; 4] = ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"];

/// A request that was read whole, from somebody who may ask.
#[derive(Debug)]
pub struct Incoming {
    /// Its head.
    pub head: Head,
    /// Its body.
    pub body: Bytes,
    /// Whose it is.
    pub caller: Caller,
}

impl Incoming {
    /// What its headers say about the call in it.
    pub fn call_headers(&self) -> CallHeaders {
        CallHeaders::read(&self.head.headers)
    }
}

/// A header's text.
pub fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers
        .get(name)
        .map(|value| value.to_str().unwrap_or_default())
}
