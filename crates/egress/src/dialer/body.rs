//! The two bodies of one exchange.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};

use super::driven::Frames;
use super::exchange::PooledLease;
use super::pool::Place;
use crate::body::{Broken, Content};

/// A request's body on its way out.
pub(super) struct Departing {
    content: Content,
    frames: Arc<Frames>,
    /// A stream's place is free when neither body needs it.
    _place: Option<Arc<Place>>,
}

impl Departing {
    pub(super) fn new(content: Content, frames: Arc<Frames>, place: Option<Arc<Place>>) -> Self {
        Self {
            content,
            frames,
            _place: place,
        }
    }

    /// The body itself, if the request was not sent after all.
    pub(super) fn into_content(self) -> Content {
        self.content
    }
}

impl Body for Departing {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let frame = ready!(Pin::new(&mut self.content).poll_frame(cx));
        self.frames.taken();
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.content.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.content.size_hint()
    }
}

/// A response's body on its way in. Read to its end or dropped, it gives its connection back.
pub struct Arriving {
    incoming: Incoming,
    way: Way,
}

/// What brings it.
pub(super) enum Way {
    /// A connection that is driven as the body is read.
    Http1(Box<PooledLease>),
    /// One stream among others of a connection.
    Http2 { _place: Arc<Place> },
    /// A connection of its own, or none any more.
    Free,
}

impl Arriving {
    pub(super) fn new(incoming: Incoming, way: Way) -> Self {
        Self { incoming, way }
    }

    /// Gives the connection back if nothing more comes.
    pub(super) fn look(&mut self, cx: &mut Context<'_>) {
        if self.incoming.is_end_stream() {
            self.end(cx);
        }
    }

    /// The body came to its proper end.
    fn end(&mut self, cx: &mut Context<'_>) {
        match std::mem::replace(&mut self.way, Way::Free) {
            Way::Http1(ride) => ride.end(cx),
            Way::Http2 { .. } | Way::Free => {}
        }
    }
}

impl Body for Arriving {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = self.get_mut();
        let mut incoming = Pin::new(&mut this.incoming);
        let next = match &mut this.way {
            Way::Http1(ride) => {
                let connection = ride.connection();
                let mut inside = Context::from_waker(connection.waker());
                match incoming.as_mut().poll_frame(&mut inside) {
                    Poll::Ready(frame) => Poll::Ready(frame),
                    Poll::Pending => {
                        connection.attend(cx, |_, inside| incoming.as_mut().poll_frame(inside))
                    }
                }
            }
            Way::Http2 { .. } | Way::Free => incoming.poll_frame(cx),
        };
        let frame = ready!(next);
        match &frame {
            Some(Ok(_)) => this.look(cx),
            Some(Err(_)) => this.way = Way::Free,
            None => this.end(cx),
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

impl std::fmt::Debug for Arriving {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Arriving").field(&self.incoming).finish()
    }
}
