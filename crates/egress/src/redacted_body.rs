//! A body in which secrets or placeholders are overwritten.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use credentials::redaction::StreamRedactor;
use hyper::body::{Body, Frame, SizeHint};

use crate::body::{BodyError, MessageBody};

/// A body that passes a redactor. Its length stays the same.
pub struct RedactedBody {
    inner: MessageBody,
    redactor: StreamRedactor,
    /// Trailers that follow the bytes that were held back.
    trailers: Option<Frame<Bytes>>,
    is_ended: bool,
}

/// Redacts `body`.
pub fn redact(body: MessageBody, redactor: StreamRedactor) -> RedactedBody {
    RedactedBody {
        inner: body,
        redactor,
        trailers: None,
        is_ended: false,
    }
}

impl Body for RedactedBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if let Some(trailers) = self.trailers.take() {
            return Poll::Ready(Some(Ok(trailers)));
        }
        while !self.is_ended {
            let frame = match ready!(Pin::new(&mut self.inner).poll_frame(cx)) {
                Some(Ok(frame)) => Some(frame),
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => None,
            };
            let out = match frame.map(Frame::into_data) {
                Some(Ok(data)) if self.inner.is_end_stream() => {
                    // The size of the body may be known: nothing may be left after its last byte.
                    let mut out = bytes::BytesMut::from(self.redactor.push(data));
                    out.extend_from_slice(&self.redactor.finish());
                    self.is_ended = true;
                    out.freeze()
                }
                Some(Ok(data)) => self.redactor.push(data),
                Some(Err(trailers)) => {
                    self.trailers = Some(trailers);
                    self.is_ended = true;
                    self.redactor.finish()
                }
                None => {
                    self.is_ended = true;
                    self.redactor.finish()
                }
            };
            if !out.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(out))));
            }
        }
        match self.trailers.take() {
            Some(trailers) => Poll::Ready(Some(Ok(trailers))),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.trailers.is_none() && (self.is_ended || self.inner.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        // Bytes that are held back are still to come.
        let inner = self.inner.size_hint();
        let held = self.redactor.held_length();
        let mut hint = SizeHint::new();
        hint.set_lower(inner.lower() + held);
        if let Some(upper) = inner.upper() {
            hint.set_upper(upper + held);
        }
        hint
    }
}

#[cfg(test)]
mod tests {
    use credentials::placeholder::PlaceholderFinder;
    use credentials::redaction::Redacted;
    use http::HeaderMap;
    use http_body_util::{BodyExt, StreamBody};

    use super::*;

    fn redacted(frames: Vec<Frame<Bytes>>) -> RedactedBody {
        let frames = frames.into_iter().map(Ok);
        let body = StreamBody::new(futures_util::stream::iter(frames)).boxed_unsync();
        let finder = PlaceholderFinder::default();
        redact(
            body,
            StreamRedactor::new(Redacted::Placeholders(Box::new(finder))),
        )
    }

    fn data(text: &'static str) -> Frame<Bytes> {
        Frame::data(Bytes::from_static(text.as_bytes()))
    }

    #[tokio::test]
    async fn placeholder_across_frames_is_overwritten_and_trailers_follow() {
        let mut trailers = HeaderMap::new();
        trailers.insert("x-sum", "1".parse().unwrap());
        let frames = vec![
            data("key ghp_PALI"),
            data("SADEABCDEFGH."),
            Frame::trailers(trailers),
        ];
        let collected = redacted(frames).collect().await.unwrap();
        assert_eq!(collected.trailers().unwrap()["x-sum"], "1");
        assert_eq!(collected.to_bytes(), "key ghp_REDACTED-BY-GATE.");
    }

    #[tokio::test]
    async fn held_bytes_are_sent_at_the_end() {
        let collected = redacted(vec![data("ends with PALISAD")])
            .collect()
            .await
            .unwrap();
        assert_eq!(collected.to_bytes(), "ends with PALISAD");
    }

    #[tokio::test]
    async fn body_of_known_size_keeps_its_size() {
        let finder = PlaceholderFinder::default();
        let redactor = StreamRedactor::new(Redacted::Placeholders(Box::new(finder)));
        let mut body = redact(crate::body::full("a PALISADEABCDEFGH b PAL"), redactor);
        assert_eq!(body.size_hint().exact(), Some(24));
        let frame = body.frame().await.unwrap().unwrap().into_data().unwrap();
        assert_eq!(frame, "a REDACTED-BY-GATE b PAL");
        assert!(body.is_end_stream());
    }
}
