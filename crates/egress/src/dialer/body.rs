//! Request and response bodies of one exchange with an upstream.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};

use super::exchange::PooledLease;
use super::http1_connection::BodyFrameCount;
use super::pool::PoolSlot;
use crate::body::{BodyError, MessageBody};

/// Request body that is being sent to an upstream.
pub(super) struct OutgoingBody {
    content: MessageBody,
    frames: Arc<BodyFrameCount>,
    /// The slot of an HTTP/2 stream, which is freed when request and response body are dropped.
    _slot: Option<Arc<PoolSlot>>,
}

impl OutgoingBody {
    pub(super) fn new(
        content: MessageBody,
        frames: Arc<BodyFrameCount>,
        slot: Option<Arc<PoolSlot>>,
    ) -> Self {
        Self {
            content,
            frames,
            _slot: slot,
        }
    }

    /// Takes the body back from a request that was not sent.
    pub(super) fn into_content(self) -> MessageBody {
        self.content
    }
}

impl Body for OutgoingBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let frame = ready!(Pin::new(&mut self.content).poll_frame(cx));
        self.frames.increment();
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.content.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.content.size_hint()
    }
}

/// Response body of an upstream. The connection is released when the body is read to its end or
/// dropped.
pub struct UpstreamBody {
    incoming: Incoming,
    source: BodySource,
}

/// The connection that delivers a response body.
pub(super) enum BodySource {
    /// An HTTP/1 connection that is polled as the body is read.
    Http1(Box<PooledLease>),
    /// A stream of a shared HTTP/2 connection.
    Http2 { _slot: Arc<PoolSlot> },
    /// A connection outside the pool, or one that was released.
    Detached,
}

impl UpstreamBody {
    pub(super) fn new(incoming: Incoming, source: BodySource) -> Self {
        Self { incoming, source }
    }

    /// Releases the connection if the body has ended.
    pub(super) fn release_if_ended(&mut self, cx: &mut Context<'_>) {
        if self.incoming.is_end_stream() {
            self.release(cx);
        }
    }

    /// Releases the connection after a complete body.
    fn release(&mut self, cx: &mut Context<'_>) {
        match std::mem::replace(&mut self.source, BodySource::Detached) {
            BodySource::Http1(lease) => lease.end(cx),
            BodySource::Http2 { .. } | BodySource::Detached => {}
        }
    }
}

impl Body for UpstreamBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = self.get_mut();
        let mut incoming = Pin::new(&mut this.incoming);
        let next = match &mut this.source {
            BodySource::Http1(lease) => {
                let connection = lease.connection();
                let mut hyper_cx = Context::from_waker(connection.waker());
                match incoming.as_mut().poll_frame(&mut hyper_cx) {
                    Poll::Ready(frame) => Poll::Ready(frame),
                    Poll::Pending => connection
                        .drive_until(cx, |_, hyper_cx| incoming.as_mut().poll_frame(hyper_cx)),
                }
            }
            BodySource::Http2 { .. } | BodySource::Detached => incoming.poll_frame(cx),
        };
        let frame = ready!(next);
        match &frame {
            Some(Ok(_)) => this.release_if_ended(cx),
            Some(Err(_)) => this.source = BodySource::Detached,
            None => this.release(cx),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}

impl std::fmt::Debug for UpstreamBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("UpstreamBody").field(&self.incoming).finish()
    }
}
