//! Filter that adds a capability to the ref advertisement for a push.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hyper::body::{Body, Frame};

use crate::body::{BodyError, MessageBody};
use crate::git_protocol::advertisement::AdvertisementRewriter;

/// The filtered response body.
pub(super) struct AdvertisementBody {
    inner: MessageBody,
    /// `None` after the end.
    rewriter: Option<AdvertisementRewriter>,
}

impl AdvertisementBody {
    pub(super) fn new(inner: MessageBody) -> Self {
        Self {
            inner,
            rewriter: Some(AdvertisementRewriter::default()),
        }
    }
}

impl Body for AdvertisementBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        loop {
            let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
            let Some(rewriter) = &mut self.rewriter else {
                return Poll::Ready(frame);
            };
            let out = match frame {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => rewriter.feed(&data),
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => {
                    let rest = rewriter.finish();
                    self.rewriter = None;
                    if rest.is_empty() {
                        return Poll::Ready(None);
                    }
                    rest
                }
            };
            if !out.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(out.into()))));
            }
        }
    }
}
