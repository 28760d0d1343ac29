//! I/O adapter between an HTTP/1 upstream connection and hyper.
//!
//! hyper's read buffer grows with the size of a read, up to the largest head, and keeps that
//! size while the connection is idle. So the size of one read is limited.
//!
//! An upstream may respond and close while the request is still being sent. hyper would fail at
//! the first failed write and lose the response that has arrived. So failed writes are dropped,
//! and reads decide how the exchange ends.

use std::io::{IoSlice, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf, Take};

use super::connector::TcpOrTlsStream;

/// Largest single read: slightly more than one TLS record. hyper doubles a buffer that was
/// filled, so this keeps it at 32 KiB.
const MAX_READ: u64 = 24 * 1024;

/// A stream with limited reads that ignores write errors.
pub(super) struct IoTap {
    stream: Take<TcpOrTlsStream>,
    write_closed: WriteClosed,
}

/// Whether a write has failed: the peer reads nothing more.
#[derive(Clone, Debug, Default)]
pub(super) struct WriteClosed(Arc<AtomicBool>);

impl WriteClosed {
    pub(super) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Turns a write error into a success and drops all later writes.
    fn ignore_error<T>(&self, written: Result<T>, dropped: T) -> Result<T> {
        written.or_else(|error| {
            tracing::debug!(%error, "upstream closed its read side");
            self.0.store(true, Ordering::Relaxed);
            Ok(dropped)
        })
    }
}

impl IoTap {
    pub(super) fn new(stream: TcpOrTlsStream) -> (Self, WriteClosed) {
        let write_closed = WriteClosed::default();
        let tap = Self {
            stream: stream.take(MAX_READ),
            write_closed: write_closed.clone(),
        };
        (tap, write_closed)
    }
}

impl AsyncRead for IoTap {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        self.stream.set_limit(MAX_READ);
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for IoTap {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize>> {
        if self.write_closed.is_set() {
            return Poll::Ready(Ok(bytes.len()));
        }
        let written = ready!(Pin::new(self.stream.get_mut()).poll_write(cx, bytes));
        Poll::Ready(self.write_closed.ignore_error(written, bytes.len()))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let whole = slices.iter().map(|slice| slice.len()).sum();
        if self.write_closed.is_set() {
            return Poll::Ready(Ok(whole));
        }
        let written = ready!(Pin::new(self.stream.get_mut()).poll_write_vectored(cx, slices));
        Poll::Ready(self.write_closed.ignore_error(written, whole))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.get_ref().is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        if self.write_closed.is_set() {
            return Poll::Ready(Ok(()));
        }
        let flushed = ready!(Pin::new(self.stream.get_mut()).poll_flush(cx));
        Poll::Ready(self.write_closed.ignore_error(flushed, ()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(self.stream.get_mut()).poll_shutdown(cx)
    }
}
