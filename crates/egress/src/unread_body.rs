//! What a client still sends when nobody wants it any more.
//!
//! A request can be answered before its body has come: with a refusal, or by an upstream in a
//! hurry. Over HTTP/1 the connection would then be closed with bytes unread, over HTTP/2 the
//! stream be reset, and many a client would never see the answer that was on its way. So the
//! rest is read for a while, into nowhere.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::runtime::Handle;
use tokio::time::timeout;

/// How long a client may go on, and how much it may send.
const PARTING: Duration = Duration::from_secs(10);
const MOST_LEFT: usize = 256 * 1024 * 1024;

/// A request's body that is read on for a while when it is dropped before its end.
pub struct UnreadBody {
    body: Option<Incoming>,
    is_wanted: bool,
}

impl UnreadBody {
    /// `body` of a client that would not read the answer before it has sent all of it.
    pub fn drained(body: Incoming) -> Self {
        Self {
            body: Some(body),
            is_wanted: true,
        }
    }

    /// `body` of a client that is told otherwise to stop.
    pub fn let_go(body: Incoming) -> Self {
        Self {
            body: Some(body),
            is_wanted: false,
        }
    }
}

impl Body for UnreadBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match &mut self.body {
            Some(body) => Pin::new(body).poll_frame(cx),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body
            .as_ref()
            .map_or_else(SizeHint::new, Body::size_hint)
    }
}

impl Drop for UnreadBody {
    fn drop(&mut self) {
        let Some(body) = self.body.take() else { return };
        if !self.is_wanted || body.is_end_stream() {
            return;
        }
        if let Ok(runtime) = Handle::try_current() {
            // It ends with its connection, whatever else.
            runtime.spawn(timeout(PARTING, read_on(body)));
        }
    }
}

async fn read_on(mut body: Incoming) {
    let mut left = MOST_LEFT;
    while let Some(Ok(frame)) = body.frame().await {
        let length = frame.data_ref().map_or(0, Bytes::len);
        let Some(rest) = left.checked_sub(length) else {
            return;
        };
        left = rest;
    }
}
