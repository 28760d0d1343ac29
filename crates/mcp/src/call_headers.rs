//! Headers of an HTTP request that are about the call in its body.

use http::HeaderMap;
use http::header::HeaderName;

use crate::trace::TRACEPARENT;

/// The request whose before hook was answered (see [`crate::context`]).
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// What the headers of a request say about the call in its body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallHeaders {
    /// `traceparent`: the span that the call was made in.
    pub parent: Option<String>,
    /// `X-Request-ID`: the request id of the call's before hook.
    pub request_id: Option<String>,
}

impl CallHeaders {
    /// Reads them. A header that is no text says nothing.
    pub fn read(headers: &HeaderMap) -> Self {
        let text = |value: Option<&http::HeaderValue>| value?.to_str().ok().map(str::to_owned);
        Self {
            parent: text(headers.get(TRACEPARENT)),
            request_id: text(headers.get(REQUEST_ID)).filter(|id| !id.is_empty()),
        }
    }
}
