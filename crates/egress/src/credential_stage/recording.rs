//! Records a request body while it is sent, so that the request can be sent again.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http::Request;
use http::request::Parts;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, SizeHint};

use crate::body::{self, BodyError, MessageBody};

/// Largest body that is kept.
const MAX_RECORDED: usize = 1024 * 1024;

/// Head and body of a request that was sent.
pub struct RequestCopy {
    head: Parts,
    recording: Arc<Mutex<BodyRecording>>,
}

/// The part of a body that was sent so far.
#[derive(Default)]
struct BodyRecording {
    chunks: Vec<Bytes>,
    size: usize,
    /// Whether the body was sent as a whole.
    is_complete: bool,
    /// Whether the body is too large or has trailers.
    is_unrepeatable: bool,
}

impl RequestCopy {
    /// Splits a request into a copy and the request to send. The chunks of the body are shared.
    pub fn record(request: Request<MessageBody>) -> (Self, Request<MessageBody>) {
        let (head, body) = request.into_parts();
        let recording = Arc::new(Mutex::new(BodyRecording {
            is_complete: body.is_end_stream(),
            ..BodyRecording::default()
        }));
        let copy = Self {
            head: head.clone(),
            recording: Arc::clone(&recording),
        };
        let body = RecordedBody {
            inner: body,
            recording,
        };
        (copy, Request::from_parts(head, body.boxed_unsync()))
    }

    /// The request again; `None` if its body was not sent as a whole or was not kept.
    pub fn into_request(self) -> Option<Request<MessageBody>> {
        let recording = std::mem::take(&mut *lock(&self.recording));
        if !recording.is_complete || recording.is_unrepeatable {
            return None;
        }
        let body = match recording.chunks.as_slice() {
            [] => body::empty(),
            [one] => body::full(one.clone()),
            chunks => {
                let mut all = BytesMut::with_capacity(recording.size);
                for chunk in chunks {
                    all.extend_from_slice(chunk);
                }
                body::full(all.freeze())
            }
        };
        Some(Request::from_parts(self.head, body))
    }
}

fn lock(recording: &Mutex<BodyRecording>) -> std::sync::MutexGuard<'_, BodyRecording> {
    recording.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A body whose chunks are kept while it is sent.
pub struct RecordedBody {
    inner: MessageBody,
    recording: Arc<Mutex<BodyRecording>>,
}

impl Body for RecordedBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        let is_end = self.inner.is_end_stream();
        let mut recording = lock(&self.recording);
        match &frame {
            Some(Ok(frame)) => match frame.data_ref() {
                Some(data) if recording.size + data.len() <= MAX_RECORDED => {
                    recording.size += data.len();
                    recording.chunks.push(data.clone());
                }
                Some(_) | None => {
                    recording.is_unrepeatable = true;
                    recording.chunks.clear();
                }
            },
            Some(Err(_)) => recording.is_unrepeatable = true,
            None => recording.is_complete = true,
        }
        recording.is_complete |= is_end;
        drop(recording);
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt, Full, StreamBody};

    use super::*;

    async fn read(body: MessageBody) -> Bytes {
        body.collect().await.unwrap().to_bytes()
    }

    fn request(body: MessageBody) -> Request<MessageBody> {
        Request::builder().uri("/v1?a=1").body(body).unwrap()
    }

    #[tokio::test]
    async fn request_that_was_sent_as_a_whole_can_be_repeated() {
        let chunks = ["one ", "two"].map(|text| Ok(Frame::data(Bytes::from(text))));
        let body = StreamBody::new(futures_util::stream::iter(chunks));
        let (copy, sent) = RequestCopy::record(request(body.boxed_unsync()));
        assert_eq!(read(sent.into_body()).await, "one two");
        let again = copy.into_request().unwrap();
        assert_eq!(again.uri(), "/v1?a=1");
        assert_eq!(read(again.into_body()).await, "one two");
        let (copy, _) = RequestCopy::record(request(body::empty()));
        assert!(copy.into_request().is_some(), "a request without a body");
    }

    #[tokio::test]
    async fn request_that_is_large_or_was_not_read_cannot_be_repeated() {
        let (copy, _unread) = RequestCopy::record(request(body::full("text")));
        assert!(copy.into_request().is_none());
        let large = Full::new(Bytes::from(vec![b'x'; MAX_RECORDED + 1]));
        let large = large.map_err(|never| match never {}).boxed_unsync();
        let (copy, sent) = RequestCopy::record(request(large));
        assert_eq!(read(sent.into_body()).await.len(), MAX_RECORDED + 1);
        assert!(copy.into_request().is_none());
    }
}
