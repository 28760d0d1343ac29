//! Strict HTTP/1 framing checks in front of hyper's lenient parser.
//!
//! hyper's HTTP/1 server accepts ambiguous messages, repairs some of them before the service
//! receives them, and answers those that it rejects without calling the service. So the framing
//! guard sits between the connection and hyper. It tracks the messages and passes on no byte of a
//! head before it has checked the complete head:
//!
//! ```text
//!          complete and valid                    body done
//!   head ──────────────────────▶ passed to hyper ─────────▶ head of the next
//!    │                              │       │
//!    │ fault                        │ fault │ CONNECT or Upgrade
//!    ▼                              ▼       ▼
//!   stand-in, then no bytes:     an error   held back until the service calls
//!   the service answers 400                 `upgrade` (raw) or `resume` (next head)
//! ```
//!
//! **Never here:** a changed byte. hyper reads the client's bytes, or the stand-in request.

mod fault;
mod head;
mod message_tracker;
#[cfg(test)]
mod tests;

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

pub use self::fault::{Fault, FaultKind};
use self::message_tracker::MessageTracker;
use crate::chunked_reader::ChunkedReader;

/// The request that hyper reads in place of a refused one. A service that forgets to call
/// [`GuardHandle::take_fault`] gets a host that no allowlist can contain (RFC 6761, section 6.4).
const STAND_IN: &[u8] =
    b"GET / HTTP/1.1\r\nHost: framing-fault.invalid\r\nConnection: close\r\n\r\n";

/// Largest empty buffer that a connection keeps: many connections are idle.
const MAX_IDLE_BUFFER: usize = 4 * 1024;

/// Most bytes after a fault that are read and dropped. Unread bytes would make the kernel reset the
/// connection before the client has read the answer.
const MAX_DROPPED: usize = 256 * 1024;

/// Size limits of a message head. hyper's own limits (`max_buf_size`, `max_headers`) must be at
/// least these, or hyper answers in place of the service.
#[derive(Clone, Copy, Debug)]
pub struct HeadLimits {
    /// Bytes of a head, up to and including the empty line. Also the most that is held back.
    pub head: usize,
    /// Headers of a message.
    pub headers: usize,
    /// Bytes of a request target.
    pub target: usize,
}

impl Default for HeadLimits {
    fn default() -> Self {
        Self {
            head: 64 * 1024,
            headers: 100,
            target: 16 * 1024,
        }
    }
}

/// A connection whose incoming messages are checked. Serve it with hyper's plain HTTP/1 builder:
/// one that detects HTTP/2 first reads a preface that the guard refuses.
#[derive(Debug)]
pub struct FramingGuard<IO> {
    io: IO,
    tracker: MessageTracker,
    state: State,
    /// Bytes that were read and not passed on yet.
    held: BytesMut,
    /// The number of checked bytes at the start of `held`, which may be passed on.
    checked: usize,
    /// The number of bytes that were read and dropped after a fault.
    dropped: usize,
    /// The last value written to [`Shared::is_inside_head`].
    is_inside_head: bool,
    shared: Arc<Mutex<Shared>>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// The tracker checks the messages.
    Following,
    /// The connection has switched to another protocol.
    Raw,
    /// A head had a fault: the stand-in is the last request that hyper reads.
    Refused,
    /// A body had a fault.
    Broken(Fault),
}

/// The service's handle to the guard of its connection.
#[derive(Clone, Debug)]
pub struct GuardHandle(Arc<Mutex<Shared>>);

#[derive(Debug, Default)]
struct Shared {
    /// The fault and the number of its request. A connection ends with its first fault.
    fault: Option<(u64, Fault)>,
    /// The number of the request whose response decides the protocol of the following bytes.
    pending_upgrade: Option<u64>,
    decision: Option<UpgradeDecision>,
    waker: Option<Waker>,
    /// Whether a head has started and is not complete.
    is_inside_head: bool,
}

#[derive(Clone, Copy, Debug)]
enum UpgradeDecision {
    /// The following bytes are of another protocol.
    Upgrade,
    /// The next HTTP message follows.
    Resume,
}

impl GuardHandle {
    /// The fault of this request, if it has one. The service counts the requests of a connection
    /// from 0, calls this first, and answers a fault with 400. It calls this again when a body
    /// ended in an error, because a fault in the body is found later.
    pub fn take_fault(&self, ordinal: u64) -> Option<Fault> {
        lock(&self.0)
            .fault
            .take_if(|(number, _)| *number == ordinal)
            .map(|(_, fault)| fault)
    }

    /// Whether a head has started and is not complete. If the connection ends now, the service is
    /// not called.
    pub fn is_inside_head(&self) -> bool {
        lock(&self.0).is_inside_head
    }

    /// Reports that this request switched protocols: all following bytes are passed unchecked. Call
    /// it when hyper has released the connection, never before the answer: what hyper reads after
    /// this call is unchecked. [`FramingGuard::into_inner`] makes the call unnecessary.
    pub fn upgrade(&self, ordinal: u64) {
        self.decide_upgrade(ordinal, UpgradeDecision::Upgrade);
    }

    /// Reports that this request did not switch protocols: the next message follows. May be called
    /// for every request, and must be called after CONNECT or `Upgrade`, or the connection
    /// stalls.
    pub fn resume(&self, ordinal: u64) {
        self.decide_upgrade(ordinal, UpgradeDecision::Resume);
    }

    fn decide_upgrade(&self, ordinal: u64, decision: UpgradeDecision) {
        let mut shared = lock(&self.0);
        if shared.pending_upgrade != Some(ordinal) || shared.decision.is_some() {
            return;
        }
        shared.decision = Some(decision);
        let waker = shared.waker.take();
        drop(shared);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<IO> FramingGuard<IO> {
    /// Guards `io` from its first byte.
    pub fn new(io: IO, limits: HeadLimits) -> (Self, GuardHandle) {
        let shared = Arc::new(Mutex::new(Shared::default()));
        let guard = Self {
            io,
            tracker: MessageTracker::new(limits),
            state: State::Following,
            held: BytesMut::new(),
            checked: 0,
            dropped: 0,
            is_inside_head: false,
            shared: Arc::clone(&shared),
        };
        (guard, GuardHandle(shared))
    }

    /// The connection, and its bytes that were read and not passed on. They follow the bytes in
    /// hyper's own buffer.
    pub fn into_inner(self) -> (IO, Bytes) {
        let held = match self.state {
            State::Following | State::Raw => self.held.freeze(),
            // The held bytes are the stand-in, not the client's.
            State::Refused | State::Broken(_) => Bytes::new(),
        };
        (self.io, held)
    }

    /// Checks the held bytes, none of which are checked yet.
    fn check_held(&mut self) {
        let (checked, result) = self.tracker.check_bytes(&self.held);
        self.checked = checked;
        self.record_result(result);
    }

    /// Updates `is_inside_head`, and takes the lock only if it changed: most heads arrive whole.
    fn update_inside_head(&mut self) {
        let is_inside = self.checked == 0 && !self.held.is_empty() && self.tracker.is_in_head();
        if self.is_inside_head != is_inside {
            self.is_inside_head = is_inside;
            lock(&self.shared).is_inside_head = is_inside;
        }
    }

    /// Records the result of a check. The checked bytes before a fault are passed on first.
    fn record_result(&mut self, result: Result<(), FaultKind>) {
        let Err(kind) = result else {
            // Set before the head is passed on, because the service then answers it.
            if let Some(ordinal) = self.tracker.switching_ordinal() {
                lock(&self.shared).pending_upgrade = Some(ordinal);
            }
            return;
        };
        let fault = Fault { kind };
        lock(&self.shared).fault = Some((self.tracker.ordinal(), fault));
        self.held.truncate(self.checked);
        if self.tracker.is_in_head() {
            self.held.extend_from_slice(STAND_IN);
            self.checked = self.held.len();
            self.state = State::Refused;
        } else {
            self.state = State::Broken(fault);
        }
    }

    fn pass_on(&mut self, buf: &mut ReadBuf<'_>) {
        let length = self.checked.min(buf.remaining());
        buf.put_slice(self.held.get(..length).unwrap_or_default());
        self.held.advance(length);
        self.checked -= length;
        if self.held.is_empty() && self.held.capacity() > MAX_IDLE_BUFFER {
            self.held = BytesMut::new();
        }
    }

    /// The service's decision about a pending upgrade. Before the decision, returns `None` and
    /// registers this task to be woken.
    fn upgrade_decision(&self, cx: &Context<'_>) -> Option<UpgradeDecision> {
        let mut shared = lock(&self.shared);
        let decision = shared.decision.take();
        match decision {
            Some(_) => shared.pending_upgrade = None,
            None => shared.waker = Some(cx.waker().clone()),
        }
        decision
    }
}

impl<IO: AsyncRead + Unpin> FramingGuard<IO> {
    /// Reads available bytes into `held`, through the caller's buffer.
    fn poll_hold(
        &mut self,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<usize>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.io).poll_read(cx, buf))?;
        let read = buf.filled().get(before..).unwrap_or_default();
        let length = read.len();
        self.held.extend_from_slice(read);
        buf.set_filled(before);
        Poll::Ready(Ok(length))
    }

    /// While an upgrade is pending: holds incoming bytes back, and detects that the client closed
    /// the connection.
    fn poll_upgrade_pending(
        &mut self,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
        max_held: usize,
    ) -> Poll<io::Result<()>> {
        while self.held.len() < max_held {
            if ready!(self.poll_hold(cx, buf))? == 0 {
                // The service must decide about the held bytes before the end is reported.
                return if self.held.is_empty() {
                    Poll::Ready(Ok(()))
                } else {
                    Poll::Pending
                };
            }
        }
        Poll::Pending
    }

    /// Reads and drops available bytes, without waiting for more.
    fn drain(&mut self, cx: &mut Context<'_>) {
        let mut space = [0; 2048];
        while self.dropped < MAX_DROPPED {
            let mut buf = ReadBuf::new(&mut space);
            match Pin::new(&mut self.io).poll_read(cx, &mut buf) {
                Poll::Ready(Ok(())) if !buf.filled().is_empty() => {
                    self.dropped += buf.filled().len();
                }
                Poll::Ready(Ok(()) | Err(_)) | Poll::Pending => return,
            }
        }
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for FramingGuard<IO> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        loop {
            if this.checked > 0 {
                this.pass_on(buf);
                return Poll::Ready(Ok(()));
            }
            match this.state {
                State::Following => {}
                State::Raw if this.held.is_empty() => {
                    return Pin::new(&mut this.io).poll_read(cx, buf);
                }
                State::Raw => {
                    this.checked = this.held.len();
                    continue;
                }
                // Pending, not end of stream: at the end of the stream hyper would drop a service
                // that has not answered yet. hyper closes the connection after the answer.
                State::Refused => {
                    this.drain(cx);
                    return Poll::Pending;
                }
                State::Broken(fault) => {
                    return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, fault)));
                }
            }
            if this.tracker.is_upgrade_pending() {
                match this.upgrade_decision(cx) {
                    None => return this.poll_upgrade_pending(cx, buf, this.tracker.limits().head),
                    Some(UpgradeDecision::Upgrade) => this.state = State::Raw,
                    Some(UpgradeDecision::Resume) => {
                        this.tracker.resume();
                        this.check_held();
                    }
                }
                continue;
            }
            if !this.held.is_empty() {
                this.update_inside_head();
                if ready!(this.poll_hold(cx, buf))? > 0 {
                    this.check_held();
                } else if this.tracker.is_in_head() {
                    this.record_result(Err(FaultKind::Cut));
                } else {
                    // In trailers: hyper itself reports the incomplete body.
                    return Poll::Ready(Ok(()));
                }
                this.update_inside_head();
                continue;
            }
            let before = buf.filled().len();
            ready!(Pin::new(&mut this.io).poll_read(cx, buf))?;
            let read = buf.filled().get(before..).unwrap_or_default();
            if read.is_empty() {
                return Poll::Ready(Ok(()));
            }
            let (checked, result) = this.tracker.check_bytes(read);
            if result.is_ok() {
                this.held
                    .extend_from_slice(read.get(checked..).unwrap_or_default());
            }
            buf.set_filled(before + checked);
            this.record_result(result);
            if checked > 0 {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl<IO: AsyncRead + AsyncWrite + Unpin> AsyncWrite for FramingGuard<IO> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(Pin::new(&mut this.io).poll_shutdown(cx))?;
        match this.state {
            State::Refused | State::Broken(_) => this.drain(cx),
            State::Following | State::Raw => {}
        }
        Poll::Ready(Ok(()))
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Fuzz target: the output does not depend on how the bytes are split, and consists of the input
/// and the stand-in only.
pub fn fuzz_check(bytes: &[u8]) {
    let whole = GuardOutput::run(bytes, usize::MAX);
    for step in [1, 3] {
        assert_eq!(whole, GuardOutput::run(bytes, step), "in pieces of {step}");
    }
    let passed = match whole.fault {
        Some(_) => whole.out.strip_suffix(STAND_IN).unwrap_or(&whole.out),
        None => &whole.out,
    };
    assert!(bytes.starts_with(passed), "the guard changed a byte");
}

/// The output and fault of a connection on which no request switches protocols.
#[derive(Debug, PartialEq, Eq)]
struct GuardOutput {
    out: Vec<u8>,
    fault: Option<(u64, Fault)>,
}

impl GuardOutput {
    fn run(bytes: &[u8], step: usize) -> Self {
        let pieces = ChunkedReader { rest: bytes, step };
        let (mut guard, guard_handle) = FramingGuard::new(pieces, HeadLimits::default());
        let mut cx = Context::from_waker(Waker::noop());
        let mut out = Vec::new();
        let mut space = [0; 1024];
        loop {
            let mut buf = ReadBuf::new(&mut space);
            match Pin::new(&mut guard).poll_read(&mut cx, &mut buf) {
                Poll::Ready(Ok(())) if !buf.filled().is_empty() => {
                    out.extend_from_slice(buf.filled());
                    continue;
                }
                Poll::Ready(Ok(()) | Err(_)) | Poll::Pending => {}
            }
            let pending_upgrade = lock(&guard_handle.0).pending_upgrade;
            match pending_upgrade {
                Some(ordinal) if guard.tracker.is_upgrade_pending() => guard_handle.resume(ordinal),
                _ => break,
            }
        }
        let fault = lock(&guard_handle.0).fault.take();
        Self { out, fault }
    }
}
