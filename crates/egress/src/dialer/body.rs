//! The two bodies of one exchange. Each holds the connection's place; it is free when both
//! are gone.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};

use super::pool::Place;
use crate::body::{Broken, Content};

/// A request's body on its way out.
pub(super) struct Departing {
    content: Content,
    place: Option<Arc<Place>>,
}

impl Departing {
    pub(super) fn new(content: Content, place: Option<Arc<Place>>) -> Self {
        Self { content, place }
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
        if let Some(place) = &self.place {
            place.frames.fetch_add(1, Ordering::Relaxed);
        }
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
    place: Option<Arc<Place>>,
}

impl Arriving {
    pub(super) fn new(incoming: Incoming, place: Option<Arc<Place>>) -> Self {
        let mut arriving = Self { incoming, place };
        arriving.look();
        arriving
    }

    fn look(&mut self) {
        if self.incoming.is_end_stream()
            && let Some(place) = self.place.take()
        {
            place.whole();
        }
    }
}

impl Body for Arriving {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.incoming).poll_frame(cx));
        match &frame {
            Some(Ok(_)) => self.look(),
            Some(Err(_)) => self.place = None,
            None => {
                if let Some(place) = self.place.take() {
                    place.whole();
                }
            }
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
