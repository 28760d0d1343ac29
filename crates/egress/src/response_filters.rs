//! Filters for upstream responses.
//!
//! The idle timeout is inside the filters, counters and audit record outside. A filter may change
//! the head; after the head is sent it can only abort the body, which the record shows.

mod git_advertisement;
pub mod git_report;

use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap};
use http::{Response, StatusCode};
use http_body_util::BodyExt;

use self::git_advertisement::AdvertisementBody;
use self::git_report::ForwardedPush;
use crate::body::MessageBody;
use crate::dialer::UpstreamBody;
use crate::git_protocol::{advertisement, report};

/// The filters of one response, in order.
#[derive(Default)]
pub struct ResponseFilters(Vec<ResponseFilter>);

/// A response filter.
pub enum ResponseFilter {
    /// Adds a capability to a push advertisement.
    GitAdvertisement,
    /// Reads from the response to a push which refs the upstream accepted.
    GitReport(Box<ForwardedPush>),
}

impl ResponseFilters {
    /// A single filter.
    pub fn one(filter: ResponseFilter) -> Self {
        Self(vec![filter])
    }

    /// Keeps only the filters that apply to this response.
    pub fn choose(&mut self, head: &Response<UpstreamBody>) {
        self.0.retain(|filter| filter.applies(head));
    }

    /// Whether the response needs no filter.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Wraps the response body in the filters.
    pub fn apply(self, mut response: Response<MessageBody>) -> Response<MessageBody> {
        for filter in self.0 {
            response.headers_mut().remove(CONTENT_LENGTH);
            response = response.map(|inner| match filter {
                ResponseFilter::GitAdvertisement => AdvertisementBody::new(inner).boxed_unsync(),
                ResponseFilter::GitReport(sent) => sent.watch(inner),
            });
        }
        response
    }
}

impl ResponseFilter {
    fn applies(&self, head: &Response<UpstreamBody>) -> bool {
        let kind = match self {
            ResponseFilter::GitAdvertisement => advertisement::CONTENT_TYPE,
            ResponseFilter::GitReport(_) => report::CONTENT_TYPE,
        };
        is_unencoded_success(head, kind)
    }
}

/// Whether a response is a 200 with this content type and no content encoding.
fn is_unencoded_success(response: &Response<UpstreamBody>, kind: &str) -> bool {
    let headers: &HeaderMap = response.headers();
    let content_type = headers.get(CONTENT_TYPE);
    response.status() == StatusCode::OK
        && content_type.is_some_and(|content_type| {
            content_type
                .as_bytes()
                .eq_ignore_ascii_case(kind.as_bytes())
        })
        && !headers.contains_key(CONTENT_ENCODING)
}
