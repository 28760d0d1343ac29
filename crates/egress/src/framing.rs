//! A strict reader under hyper's lax one.
//!
//! hyper's HTTP/1 server takes much that two readers understand in two ways, mends it before
//! a service sees it, and answers what it does not take without asking the service. So this
//! guard sits between the connection and hyper. It follows the messages and hands on nothing
//! of a head that it has not checked whole:
//!
//! ```text
//!            whole and good                      body done
//!   head ──────────────────────▶ handed to hyper ─────────▶ head of the next
//!    │                              │       │
//!    │ fault                        │ fault │ CONNECT or Upgrade: fork
//!    ▼                              ▼       ▼
//!   stand-in, then silence:      an error   held back until the service says
//!   the service answers 400                 `upgrade` (raw) or `resume` (next head)
//! ```
//!
//! **Never here:** a byte changed. What hyper gets is what the client sent, or the stand-in.

mod course;
mod fault;
mod head;
#[cfg(test)]
mod tests;

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use self::course::Course;
pub use self::fault::{Fault, FaultKind};
use crate::pieces::Pieces;

/// What hyper gets in place of a request that was refused. A service that forgets to ask
/// [`Faults::take`] finds a host that no allowlist can name (RFC 6761, section 6.4).
const STAND_IN: &[u8] =
    b"GET / HTTP/1.1\r\nHost: framing-fault.invalid\r\nConnection: close\r\n\r\n";

/// A buffer above this is given back when it is empty: idle connections are many.
const KEPT: usize = 4 * 1024;

/// How much of what follows a fault is read and dropped. Bytes that nobody read turn the
/// answer into a reset.
const DROPPED: usize = 256 * 1024;

/// How much of a head is read. hyper's own limits (`max_buf_size`, `max_headers`) must be at
/// least these, or it answers in place of the service.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of a head, from its first to the empty line. Also the most that is held back.
    pub head: usize,
    /// Headers of a message.
    pub headers: usize,
    /// Bytes of a request target.
    pub target: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            head: 64 * 1024,
            headers: 100,
            target: 16 * 1024,
        }
    }
}

/// A connection whose incoming messages are followed. Serve it with hyper's plain HTTP/1
/// builder: one that looks for HTTP/2 first reads a preface that the guard refuses.
#[derive(Debug)]
pub struct Guarded<IO> {
    io: IO,
    course: Course,
    state: State,
    /// Bytes that were read and not handed on yet.
    held: BytesMut,
    /// So many of them, from the first, may be handed on.
    good: usize,
    dropped: usize,
    /// What [`Shared::is_inside_head`] says.
    is_inside_head: bool,
    shared: Arc<Mutex<Shared>>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Following,
    /// The connection speaks something else now.
    Raw,
    /// The stand-in was, or is about to be, the last that hyper hears.
    Refused,
    /// A body ended in a fault.
    Broken(Fault),
}

/// What the guard has to say to the service of its connection, and the service to it.
#[derive(Clone, Debug)]
pub struct Faults(Arc<Mutex<Shared>>);

#[derive(Debug, Default)]
struct Shared {
    /// A connection has one fault at most: it is the end of it.
    fault: Option<(u64, Fault)>,
    /// The request whose answer decides what the following bytes are.
    fork: Option<u64>,
    turn: Option<Turn>,
    waker: Option<Waker>,
    /// Whether a head has begun and has not ended.
    is_inside_head: bool,
}

#[derive(Clone, Copy, Debug)]
enum Turn {
    Upgrade,
    Resume,
}

impl Faults {
    /// The fault of this request, where it has one. The service counts the requests of a
    /// connection from 0, asks before anything else, and answers a fault with 400. It asks
    /// again when a body ended in an error: the fault may have come late.
    pub fn take(&self, ordinal: u64) -> Option<Fault> {
        lock(&self.0)
            .fault
            .take_if(|(number, _)| *number == ordinal)
            .map(|(_, fault)| fault)
    }

    /// Whether a head has begun and has not ended. A connection that ends so ends without a
    /// request, and the service is not asked.
    pub fn is_inside_head(&self) -> bool {
        lock(&self.0).is_inside_head
    }

    /// The switch that this request asked for took place: all that follows is passed as it
    /// is. To be said when hyper has handed the connection over, never before the answer: what
    /// hyper reads after this is unchecked. [`Guarded::into_inner`] makes it unnecessary.
    pub fn upgrade(&self, ordinal: u64) {
        self.turn(ordinal, Turn::Upgrade);
    }

    /// This request did not switch protocols: what follows it is the next message. May be
    /// said of every request; after one with CONNECT or `Upgrade` it must be, or the
    /// connection stands still.
    pub fn resume(&self, ordinal: u64) {
        self.turn(ordinal, Turn::Resume);
    }

    fn turn(&self, ordinal: u64, turn: Turn) {
        let mut shared = lock(&self.0);
        if shared.fork != Some(ordinal) || shared.turn.is_some() {
            return;
        }
        shared.turn = Some(turn);
        let waker = shared.waker.take();
        drop(shared);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<IO> Guarded<IO> {
    /// Guards `io`, from its first byte.
    pub fn new(io: IO, limits: Limits) -> (Self, Faults) {
        let shared = Arc::new(Mutex::new(Shared::default()));
        let guarded = Self {
            io,
            course: Course::new(limits),
            state: State::Following,
            held: BytesMut::new(),
            good: 0,
            dropped: 0,
            is_inside_head: false,
            shared: Arc::clone(&shared),
        };
        (guarded, Faults(shared))
    }

    /// The connection, and the bytes of it that were read and not handed on. They come after
    /// those that hyper gives back.
    pub fn into_inner(self) -> (IO, Bytes) {
        let held = match self.state {
            State::Following | State::Raw => self.held.freeze(),
            // What is held is no longer the client's.
            State::Refused | State::Broken(_) => Bytes::new(),
        };
        (self.io, held)
    }

    /// Follows what is held, which nothing good is left of.
    fn follow_held(&mut self) {
        let (good, followed) = self.course.follow(&self.held);
        self.good = good;
        self.settle(followed);
    }

    /// Notes whether a head has begun and has not ended. Most heads come whole.
    fn note_head(&mut self) {
        let is_inside = self.good == 0 && !self.held.is_empty() && self.course.is_in_head();
        if self.is_inside_head != is_inside {
            self.is_inside_head = is_inside;
            lock(&self.shared).is_inside_head = is_inside;
        }
    }

    /// Notes what following led to. The good bytes before it are handed on first.
    fn settle(&mut self, followed: Result<(), FaultKind>) {
        let Err(what) = followed else {
            // Before the head is handed on: the service answers for it then.
            if let Some(ordinal) = self.course.switching() {
                lock(&self.shared).fork = Some(ordinal);
            }
            return;
        };
        let fault = Fault { what };
        lock(&self.shared).fault = Some((self.course.ordinal(), fault));
        self.held.truncate(self.good);
        if self.course.is_in_head() {
            self.held.extend_from_slice(STAND_IN);
            self.good = self.held.len();
            self.state = State::Refused;
        } else {
            self.state = State::Broken(fault);
        }
    }

    fn hand_out(&mut self, buf: &mut ReadBuf<'_>) {
        let length = self.good.min(buf.remaining());
        buf.put_slice(self.held.get(..length).unwrap_or_default());
        self.held.advance(length);
        self.good -= length;
        if self.held.is_empty() && self.held.capacity() > KEPT {
            self.held = BytesMut::new();
        }
    }

    /// What the service said of the request at the fork; else wakes this task when it does.
    fn turn(&self, cx: &Context<'_>) -> Option<Turn> {
        let mut shared = lock(&self.shared);
        let turn = shared.turn.take();
        match turn {
            Some(_) => shared.fork = None,
            None => shared.waker = Some(cx.waker().clone()),
        }
        turn
    }
}

impl<IO: AsyncRead + Unpin> Guarded<IO> {
    /// Reads what there is into what is held. The caller's buffer is lent for it.
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

    /// At a fork: holds back what comes, and listens for the client's leaving.
    fn poll_fork(
        &mut self,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
        most: usize,
    ) -> Poll<io::Result<()>> {
        while self.held.len() < most {
            if ready!(self.poll_hold(cx, buf))? == 0 {
                // What came before the end must be decided on first.
                return if self.held.is_empty() {
                    Poll::Ready(Ok(()))
                } else {
                    Poll::Pending
                };
            }
        }
        Poll::Pending
    }

    /// Reads and drops what there is, without waiting for more.
    fn drain(&mut self, cx: &mut Context<'_>) {
        let mut space = [0; 2048];
        while self.dropped < DROPPED {
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

impl<IO: AsyncRead + Unpin> AsyncRead for Guarded<IO> {
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
            if this.good > 0 {
                this.hand_out(buf);
                return Poll::Ready(Ok(()));
            }
            match this.state {
                State::Following => {}
                State::Raw if this.held.is_empty() => {
                    return Pin::new(&mut this.io).poll_read(cx, buf);
                }
                State::Raw => {
                    this.good = this.held.len();
                    continue;
                }
                // Not the end of the stream: hyper drops a service that has not answered when
                // it sees that. It closes by itself, after the answer.
                State::Refused => {
                    this.drain(cx);
                    return Poll::Pending;
                }
                State::Broken(fault) => {
                    return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, fault)));
                }
            }
            if this.course.is_at_fork() {
                match this.turn(cx) {
                    None => return this.poll_fork(cx, buf, this.course.limits().head),
                    Some(Turn::Upgrade) => this.state = State::Raw,
                    Some(Turn::Resume) => {
                        this.course.resume();
                        this.follow_held();
                    }
                }
                continue;
            }
            if !this.held.is_empty() {
                this.note_head();
                if ready!(this.poll_hold(cx, buf))? > 0 {
                    this.follow_held();
                } else if this.course.is_in_head() {
                    this.settle(Err(FaultKind::Cut));
                } else {
                    // In trailers: hyper says itself that the body is incomplete.
                    return Poll::Ready(Ok(()));
                }
                this.note_head();
                continue;
            }
            let before = buf.filled().len();
            ready!(Pin::new(&mut this.io).poll_read(cx, buf))?;
            let read = buf.filled().get(before..).unwrap_or_default();
            if read.is_empty() {
                return Poll::Ready(Ok(()));
            }
            let (good, followed) = this.course.follow(read);
            if followed.is_ok() {
                this.held
                    .extend_from_slice(read.get(good..).unwrap_or_default());
            }
            buf.set_filled(before + good);
            this.settle(followed);
            if good > 0 {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl<IO: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Guarded<IO> {
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

/// For a fuzzer: whatever comes, however it is split, the same comes out, and nothing but
/// what went in and the stand-in.
pub fn exercise(bytes: &[u8]) {
    let whole = Exercise::run(bytes, usize::MAX);
    for step in [1, 3] {
        assert_eq!(whole, Exercise::run(bytes, step), "in steps of {step}");
    }
    let handed = match whole.fault {
        Some(_) => whole.out.strip_suffix(STAND_IN).unwrap_or(&whole.out),
        None => &whole.out,
    };
    assert!(bytes.starts_with(handed), "a byte was changed");
}

/// What a connection of these bytes came to, when no request on it switched protocols.
#[derive(Debug, PartialEq, Eq)]
struct Exercise {
    out: Vec<u8>,
    fault: Option<(u64, Fault)>,
}

impl Exercise {
    fn run(bytes: &[u8], step: usize) -> Self {
        let pieces = Pieces { rest: bytes, step };
        let (mut guarded, faults) = Guarded::new(pieces, Limits::default());
        let mut cx = Context::from_waker(Waker::noop());
        let mut out = Vec::new();
        let mut space = [0; 1024];
        loop {
            let mut buf = ReadBuf::new(&mut space);
            match Pin::new(&mut guarded).poll_read(&mut cx, &mut buf) {
                Poll::Ready(Ok(())) if !buf.filled().is_empty() => {
                    out.extend_from_slice(buf.filled());
                    continue;
                }
                Poll::Ready(Ok(()) | Err(_)) | Poll::Pending => {}
            }
            let fork = lock(&faults.0).fork;
            match fork {
                Some(ordinal) if guarded.course.is_at_fork() => faults.resume(ordinal),
                _ => break,
            }
        }
        let fault = lock(&faults.0).fault.take();
        Self { out, fault }
    }
}
