//! An HTTP/1 connection's bytes as the library gets them.
//!
//! The library's buffer grows with what is read at once, up to the largest head, and stays as
//! large while the connection is unused: so only so much is read at once.
//!
//! An upstream may answer and close while the request is still being sent. The library would
//! give up with the first byte that cannot be written, and lose the answer that has come: so
//! such bytes are dropped, and what is read decides.

use std::io::{IoSlice, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf, Take};

use super::wire::Wire;

/// What is read at once: one record of TLS and some more. The library's buffer doubles when
/// it was filled, so this keeps it at 32 KiB.
const MOST_AT_ONCE: u64 = 24 * 1024;

/// A connection, read in sips, that may have stopped to listen.
pub(super) struct IoTap {
    wire: Take<Wire>,
    deaf: WriteClosed,
}

/// Whether the other side does not listen any more.
#[derive(Clone, Debug, Default)]
pub(super) struct WriteClosed(Arc<AtomicBool>);

impl WriteClosed {
    pub(super) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Takes a failure to write for a success, from then on.
    fn or<T>(&self, written: Result<T>, dropped: T) -> Result<T> {
        written.or_else(|error| {
            tracing::debug!(%error, "an upstream does not listen any more");
            self.0.store(true, Ordering::Relaxed);
            Ok(dropped)
        })
    }
}

impl IoTap {
    pub(super) fn new(wire: Wire) -> (Self, WriteClosed) {
        let deaf = WriteClosed::default();
        let tap = Self {
            wire: wire.take(MOST_AT_ONCE),
            deaf: deaf.clone(),
        };
        (tap, deaf)
    }
}

impl AsyncRead for IoTap {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        self.wire.set_limit(MOST_AT_ONCE);
        Pin::new(&mut self.wire).poll_read(cx, buf)
    }
}

impl AsyncWrite for IoTap {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize>> {
        if self.deaf.is_set() {
            return Poll::Ready(Ok(bytes.len()));
        }
        let written = ready!(Pin::new(self.wire.get_mut()).poll_write(cx, bytes));
        Poll::Ready(self.deaf.or(written, bytes.len()))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let whole = slices.iter().map(|slice| slice.len()).sum();
        if self.deaf.is_set() {
            return Poll::Ready(Ok(whole));
        }
        let written = ready!(Pin::new(self.wire.get_mut()).poll_write_vectored(cx, slices));
        Poll::Ready(self.deaf.or(written, whole))
    }

    fn is_write_vectored(&self) -> bool {
        self.wire.get_ref().is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        if self.deaf.is_set() {
            return Poll::Ready(Ok(()));
        }
        let flushed = ready!(Pin::new(self.wire.get_mut()).poll_flush(cx));
        Poll::Ready(self.deaf.or(flushed, ()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(self.wire.get_mut()).poll_shutdown(cx)
    }
}
