//! HTTP request headers that concern the call in the body: trace parent and request id.

use http::HeaderMap;
use http::header::HeaderName;

use crate::trace::TRACEPARENT;

/// The request id of the call's before hook (see [`crate::context`]).
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The headers of a request that concern the call in its body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallHeaders {
    /// `traceparent`: the span that the call was made in.
    pub parent: Option<String>,
    /// `X-Request-ID`: the request id of the call's before hook.
    pub request_id: Option<String>,
}

impl CallHeaders {
    /// Reads the headers. A header whose value is not ASCII text is ignored.
    pub fn read(headers: &HeaderMap) -> Self {
        let text = |value: Option<&http::HeaderValue>| value?.to_str().ok().map(str::to_owned);
        Self {
            parent: text(headers.get(TRACEPARENT)),
            request_id: text(headers.get(REQUEST_ID)).filter(|id| !id.is_empty()),
        }
    }
}
