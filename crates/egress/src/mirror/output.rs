//! What a program prints, as the body of an answer.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use hyper::body::{Body, Frame};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::process::{Child, ChildStdout};
use tokio::sync::OwnedSemaphorePermit;

use super::room::Usage;
use crate::body::Broken;

/// What is read of a program at once.
const PIECE: usize = 32 * 1024;

/// What a program prints. The program ends with it.
#[derive(Debug)]
pub struct Output {
    banner: Bytes,
    stdout: Option<ChildStdout>,
    child: Child,
    buffer: BytesMut,
    place: Option<OwnedSemaphorePermit>,
    usage: Option<Usage>,
}

impl Output {
    /// What `child` prints, after `banner`.
    pub fn new(mut child: Child, banner: &'static [u8]) -> Self {
        Self {
            banner: Bytes::from_static(banner),
            stdout: child.stdout.take(),
            child,
            buffer: BytesMut::new(),
            place: None,
            usage: None,
        }
    }

    /// The same, with a mirror that is in use until it ends.
    #[must_use]
    pub fn using(mut self, usage: Usage) -> Self {
        self.usage = Some(usage);
        self
    }

    /// The same, with a place that is free when it ends.
    #[must_use]
    pub fn holding(mut self, place: Option<OwnedSemaphorePermit>) -> Self {
        self.place = place;
        self
    }
}

impl Body for Output {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let this = &mut *self;
        if !this.banner.is_empty() {
            let banner = std::mem::take(&mut this.banner);
            return Poll::Ready(Some(Ok(Frame::data(banner))));
        }
        let Some(stdout) = &mut this.stdout else {
            return Poll::Ready(None);
        };
        this.buffer.resize(PIECE, 0);
        let mut read = ReadBuf::new(&mut this.buffer);
        ready!(Pin::new(stdout).poll_read(cx, &mut read))?;
        let length = read.filled().len();
        if length > 0 {
            this.buffer.truncate(length);
            let piece = this.buffer.split().freeze();
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
        this.stdout = None;
        // Reaped by the runtime: nobody waits for how it ended. What git has to say about
        // that, it says in what it prints.
        let _ = this.child.try_wait();
        this.place = None;
        this.usage = None;
        Poll::Ready(None)
    }
}
