//! The advertisement for a push, which gains a capability on its way to the client.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hyper::body::{Body, Frame};

use crate::body::{Broken, Content};
use crate::git_protocol::advertisement::Rewriter;

/// An advertisement on its way.
pub(super) struct Rewritten {
    inner: Content,
    /// None once everything was given.
    rewriter: Option<Rewriter>,
}

impl Rewritten {
    pub(super) fn new(inner: Content) -> Self {
        Self {
            inner,
            rewriter: Some(Rewriter::default()),
        }
    }
}

impl Body for Rewritten {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
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
