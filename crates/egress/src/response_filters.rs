//! What is done with upstream's answer before the client reads it.
//!
//! The filters stand between the idle timeout, which is inside, and counting and the record,
//! which are outside. A filter may change the head; once the status has gone out it can only cut
//! the body, and the record says so.

mod git_advertisement;
pub mod git_report;

use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap};
use http::{Response, StatusCode};
use http_body_util::BodyExt;

use self::git_advertisement::Rewritten;
use self::git_report::Sent;
use crate::body::Content;
use crate::dialer::Arriving;
use crate::git_protocol::{advertisement, report};

/// The filters of one answer, in their order.
#[derive(Default)]
pub struct ResponseFilters(Vec<ResponseFilter>);

/// A filter.
pub enum ResponseFilter {
    /// An advertisement for a push gains a capability.
    GitAdvertisement,
    /// The answer to a push reports which refs were taken.
    GitReport(Box<Sent>),
}

impl ResponseFilters {
    /// This filter alone.
    pub fn one(filter: ResponseFilter) -> Self {
        Self(vec![filter])
    }

    /// Leaves the filters that apply to this answer.
    pub fn choose(&mut self, head: &Response<Arriving>) {
        self.0.retain(|filter| filter.applies(head));
    }

    /// Whether the answer passes as it is.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Puts the filters around an answer.
    pub fn apply(self, mut response: Response<Content>) -> Response<Content> {
        for filter in self.0 {
            response.headers_mut().remove(CONTENT_LENGTH);
            response = response.map(|inner| match filter {
                ResponseFilter::GitAdvertisement => Rewritten::new(inner).boxed_unsync(),
                ResponseFilter::GitReport(sent) => sent.watch(inner),
            });
        }
        response
    }
}

impl ResponseFilter {
    fn applies(&self, head: &Response<Arriving>) -> bool {
        let kind = match self {
            ResponseFilter::GitAdvertisement => advertisement::CONTENT_TYPE,
            ResponseFilter::GitReport(_) => report::CONTENT_TYPE,
        };
        is_plain(head, kind)
    }
}

/// Whether an answer is what it should be, and readable.
fn is_plain(response: &Response<Arriving>, kind: &str) -> bool {
    let headers: &HeaderMap = response.headers();
    let said = headers.get(CONTENT_TYPE);
    response.status() == StatusCode::OK
        && said.is_some_and(|said| said.as_bytes().eq_ignore_ascii_case(kind.as_bytes()))
        && !headers.contains_key(CONTENT_ENCODING)
}
