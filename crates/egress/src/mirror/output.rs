//! The standard output of a child process as an HTTP body.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use hyper::body::{Body, Frame};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::process::{Child, ChildStdout};
use tokio::sync::OwnedSemaphorePermit;

use super::directory::UsageGuard;
use crate::body::BodyError;

/// Size of the read buffer.
const READ_BYTES: usize = 32 * 1024;

/// The standard output of a child process. Dropping it kills the process.
#[derive(Debug)]
pub struct ChildOutput {
    banner: Bytes,
    stdout: Option<ChildStdout>,
    child: Child,
    buffer: BytesMut,
    permit: Option<OwnedSemaphorePermit>,
    usage: Option<UsageGuard>,
}

impl ChildOutput {
    /// A body of `banner` followed by the output of `child`.
    pub fn new(mut child: Child, banner: &'static [u8]) -> Self {
        Self {
            banner: Bytes::from_static(banner),
            stdout: child.stdout.take(),
            child,
            buffer: BytesMut::new(),
            permit: None,
            usage: None,
        }
    }

    /// Keeps the mirror's directory in use until the output ends.
    #[must_use]
    pub fn with_usage_guard(mut self, usage: UsageGuard) -> Self {
        self.usage = Some(usage);
        self
    }

    /// Holds a semaphore permit until the output ends.
    #[must_use]
    pub fn with_permit(mut self, permit: Option<OwnedSemaphorePermit>) -> Self {
        self.permit = permit;
        self
    }
}

impl Body for ChildOutput {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        if !this.banner.is_empty() {
            let banner = std::mem::take(&mut this.banner);
            return Poll::Ready(Some(Ok(Frame::data(banner))));
        }
        let Some(stdout) = &mut this.stdout else {
            return Poll::Ready(None);
        };
        this.buffer.resize(READ_BYTES, 0);
        let mut read = ReadBuf::new(&mut this.buffer);
        ready!(Pin::new(stdout).poll_read(cx, &mut read))?;
        let length = read.filled().len();
        if length > 0 {
            this.buffer.truncate(length);
            let data = this.buffer.split().freeze();
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        this.stdout = None;
        // The runtime reaps the process if it is still running. The exit status is not needed,
        // because git reports errors in its output.
        let _ = this.child.try_wait();
        this.permit = None;
        this.usage = None;
        Poll::Ready(None)
    }
}
