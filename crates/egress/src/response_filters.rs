//! Filters for upstream responses.
//!
//! The idle timeout is inside the filters, counters and audit record outside. A filter may change
//! the head; after the head is sent it can only abort the body, which the record shows.

mod credential_echo;
mod git_advertisement;
pub mod git_report;

use credentials::redaction::SecretTexts;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap};
use http::{Response, StatusCode};
use http_body_util::BodyExt;
use policy::reason::Reason;
use policy::verdict::Denial;

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
    /// Overwrites the credential of the request where the upstream repeats it.
    CredentialEcho(Box<SecretTexts>),
}

impl ResponseFilters {
    /// A single filter.
    pub fn one(filter: ResponseFilter) -> Self {
        Self(vec![filter])
    }

    /// Adds a filter after the others.
    pub fn extend(&mut self, filter: Option<ResponseFilter>) {
        self.0.extend(filter);
    }

    /// Keeps only the filters that apply to this response. Refuses a response that a required
    /// filter cannot read.
    pub fn choose(
        &mut self,
        head: Response<UpstreamBody>,
    ) -> Result<Response<UpstreamBody>, Denial> {
        self.0.retain(|filter| filter.applies(&head));
        let has_echo_filter = self.0.iter().any(ResponseFilter::is_required);
        if has_echo_filter && is_encoded(head.headers()) {
            let denial = Denial::new(Reason::ConnectFailed, "credentials");
            return Err(denial.with_message(
                "The upstream sent an encoded response, although the gate had asked for an \
                 unencoded one, and the gate cannot search it for the credential.",
            ));
        }
        Ok(head)
    }

    /// Whether the response needs no filter.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Wraps the response body in the filters.
    pub fn apply(self, mut response: Response<MessageBody>) -> Response<MessageBody> {
        for filter in self.0 {
            response = match filter {
                ResponseFilter::GitAdvertisement => {
                    response.headers_mut().remove(CONTENT_LENGTH);
                    response.map(|inner| AdvertisementBody::new(inner).boxed_unsync())
                }
                ResponseFilter::GitReport(sent) => {
                    response.headers_mut().remove(CONTENT_LENGTH);
                    response.map(|inner| sent.watch(inner))
                }
                ResponseFilter::CredentialEcho(texts) => credential_echo::redact(response, *texts),
            };
        }
        response
    }
}

impl ResponseFilter {
    /// The filter that overwrites `texts`.
    pub fn credential_echo(texts: SecretTexts) -> Self {
        Self::CredentialEcho(Box::new(texts))
    }

    /// Whether a response that the filter cannot read must be refused.
    fn is_required(&self) -> bool {
        matches!(self, ResponseFilter::CredentialEcho(_))
    }

    fn applies(&self, head: &Response<UpstreamBody>) -> bool {
        let kind = match self {
            ResponseFilter::GitAdvertisement => advertisement::CONTENT_TYPE,
            ResponseFilter::GitReport(_) => report::CONTENT_TYPE,
            ResponseFilter::CredentialEcho(_) => return true,
        };
        is_unencoded_success(head, kind)
    }
}

fn is_encoded(headers: &HeaderMap) -> bool {
    let codings = headers.get_all(CONTENT_ENCODING);
    codings
        .iter()
        .any(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"identity"))
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
