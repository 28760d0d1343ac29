//! Reader that returns bytes in chunks of a fixed size, for tests and fuzz targets of parsers.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, ReadBuf};

/// Returns `rest` in chunks of `step` bytes, then the end.
pub(crate) struct ChunkedReader<'a> {
    pub(crate) rest: &'a [u8],
    pub(crate) step: usize,
}

impl AsyncRead for ChunkedReader<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let length = self.rest.len().min(self.step).min(buf.remaining());
        let (chunk, rest) = self.rest.split_at(length);
        buf.put_slice(chunk);
        self.rest = rest;
        Poll::Ready(Ok(()))
    }
}
