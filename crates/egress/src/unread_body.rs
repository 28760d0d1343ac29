//! Drains request bodies that were answered before they were read.
//!
//! A request can be answered early, with a refusal or by the upstream. An unread body would make
//! hyper close the HTTP/1 connection or reset the HTTP/2 stream, and many clients would never read
//! the response. So the rest of the body is read and discarded, within limits.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::runtime::Handle;
use tokio::time::timeout;

/// Maximum time for which a body is drained.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of bytes that are drained.
const MAX_DRAINED_BYTES: usize = 256 * 1024 * 1024;

/// A request body that may be drained when it is dropped before its end.
pub struct UnreadBody {
    body: Option<Incoming>,
    drain_on_drop: bool,
}

impl UnreadBody {
    /// A body that is drained on drop: the client reads the response only after sending it.
    pub fn drained(body: Incoming) -> Self {
        Self {
            body: Some(body),
            drain_on_drop: true,
        }
    }

    /// A body that is discarded on drop: the client has not sent it yet.
    pub fn discarded(body: Incoming) -> Self {
        Self {
            body: Some(body),
            drain_on_drop: false,
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
        if !self.drain_on_drop || body.is_end_stream() {
            return;
        }
        if let Ok(runtime) = Handle::try_current() {
            // The task also ends with the connection.
            runtime.spawn(timeout(DRAIN_TIMEOUT, drain(body)));
        }
    }
}

async fn drain(mut body: Incoming) {
    let mut left = MAX_DRAINED_BYTES;
    while let Some(Ok(frame)) = body.frame().await {
        let length = frame.data_ref().map_or(0, Bytes::len);
        let Some(rest) = left.checked_sub(length) else {
            return;
        };
        left = rest;
    }
}
