//! Filter that overwrites a credential where a response repeats it.

use credentials::redaction::{Redacted, SecretTexts, StreamRedactor};
use http::Response;
use http::header::HeaderValue;
use http_body_util::BodyExt;

use crate::body::MessageBody;
use crate::redacted_body;

/// Overwrites `texts` in head and body. Lengths stay the same.
pub(super) fn redact(
    mut response: Response<MessageBody>,
    texts: SecretTexts,
) -> Response<MessageBody> {
    for value in response.headers_mut().values_mut() {
        if texts.is_in(value.as_bytes()) {
            let redacted = texts.redact(value.as_bytes());
            *value = HeaderValue::from_bytes(&redacted).unwrap_or(HeaderValue::from_static(""));
        }
    }
    let redactor = StreamRedactor::new(Redacted::Texts(texts));
    response.map(|body| redacted_body::redact(body, redactor).boxed_unsync())
}
