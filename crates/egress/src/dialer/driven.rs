//! An HTTP/1 connection without a task of its own.
//!
//! Whoever uses it drives it: then a client's connection, its request and the answer are one
//! task, and nobody wakes anybody ([`super::bell`]). While it lies unused nobody does, and what
//! came in meanwhile (the upstream's goodbye, as a rule) is found by the next who looks.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use http::Request;
use hyper::client::conn::http1::{Connection, SendRequest};
use hyper_util::rt::TokioIo;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};
use tokio::time::timeout;
use tokio_util::either::Either;

use super::body::Departing;
use super::error::said;
use super::exchange::Answered;
use super::io_tap::{IoTap, WriteClosed};
use super::wake_flag::WakeFlag;
use super::wire::{Wire, http1};
use crate::alarm::Alarm;

/// How long the runtime may take to notice what lies in a socket. A new connection would
/// take longer.
const SETTLE: Duration = Duration::from_millis(5);

/// How often the library is asked in a row, when each time it has more to do. Then others get
/// their turn.
const MOST_TURNS: u32 = 8;

/// One HTTP/1 connection.
pub(super) struct Driven {
    sender: SendRequest<Departing>,
    /// Until it ends.
    connection: Option<Pin<Box<Running>>>,
    /// Its socket's number, for as long as it is there.
    socket: RawFd,
    peer: SocketAddr,
    frames: Arc<Frames>,
    deaf: WriteClosed,
    bell: Arc<WakeFlag>,
    /// What the library pulls to ring it.
    waker: Waker,
    /// How long an answer may take.
    alarm: Alarm,
}

/// What the library makes of the connection's bytes.
type Running = Connection<TokioIo<IoTap>, Departing>;

/// Frames of requests' bodies that were taken: while they move, the upstream listens.
#[derive(Debug, Default)]
pub(super) struct Frames(AtomicU64);

impl Frames {
    pub(super) fn taken(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn so_far(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Driven {
    pub(super) async fn begin(wire: Wire, peer: SocketAddr) -> hyper::Result<Self> {
        let socket = match &wire {
            Either::Left(plain) => plain.as_raw_fd(),
            Either::Right(tls) => tls.get_ref().0.as_raw_fd(),
        };
        let (tap, deaf) = IoTap::new(wire);
        let (sender, connection) = http1().handshake(TokioIo::new(tap)).await?;
        let bell = Arc::new(WakeFlag::default());
        Ok(Self {
            waker: Waker::from(Arc::clone(&bell)),
            bell,
            alarm: Alarm::default(),
            sender,
            connection: Some(Box::pin(connection)),
            socket,
            peer,
            frames: Arc::default(),
            deaf,
        })
    }

    pub(super) fn peer(&self) -> SocketAddr {
        self.peer
    }

    pub(super) fn frames(&self) -> &Arc<Frames> {
        &self.frames
    }

    /// Whether the upstream stopped to listen, so that it never takes another request.
    pub(super) fn is_deaf(&self) -> bool {
        self.deaf.is_set()
    }

    /// Its timer, which serves one exchange after the other.
    pub(super) fn alarm(&mut self) -> &mut Alarm {
        &mut self.alarm
    }

    /// What the user is woken by.
    pub(super) fn waker(&self) -> &Waker {
        &self.waker
    }

    /// Nobody uses it for now.
    pub(super) fn rest(&self) {
        self.bell.forget();
    }

    /// Reads and writes what can be, until `look` finds what it waits for or there is nothing
    /// left to do. Then the user is woken when there is again.
    pub(super) fn attend<T>(
        &mut self,
        cx: &mut Context<'_>,
        mut look: impl FnMut(&mut Self, &mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        let (bell, waker) = (Arc::clone(&self.bell), self.waker.clone());
        let mut inside = Context::from_waker(&waker);
        bell.attend(cx.waker());
        // What rang before is found now.
        bell.answer();
        let mut turns = MOST_TURNS;
        loop {
            self.drive(&mut inside);
            if let Poll::Ready(found) = look(self, &mut inside) {
                // What it waits for next it drives for itself.
                bell.leave();
                return Poll::Ready(found);
            }
            turns -= 1;
            if turns == 0 || !bell.answer() {
                break;
            }
        }
        if bell.leave() {
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }

    fn drive(&mut self, inside: &mut Context<'_>) {
        let Some(connection) = &mut self.connection else {
            return;
        };
        if let Poll::Ready(ended) = connection.as_mut().poll(inside) {
            self.connection = None;
            if let Err(error) = ended {
                let peer = self.peer;
                tracing::debug!(%peer, error = said(&error), "an upstream connection ended");
            }
        }
    }

    /// Whether it can take a request; `false` when it never will.
    pub(super) fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        self.attend(cx, |this, inside| {
            if this.connection.is_none() || (this.is_deaf() && this.sender.is_ready()) {
                return Poll::Ready(false);
            }
            this.sender.poll_ready(inside).map(|ready| ready.is_ok())
        })
    }

    /// Whether the library is done with one exchange, and has asked for the next.
    pub(super) fn is_done(&self) -> bool {
        self.connection.is_some() && !self.is_deaf() && self.sender.is_ready()
    }

    /// Whether it can take a request now, after it lay about. What came meanwhile is read
    /// first, also if the runtime has not heard of it yet.
    pub(super) async fn is_ready(&mut self) -> bool {
        if self.is_done() && !self.has_unread() {
            return true;
        }
        // Seldom: a connection that the upstream has left.
        let ready = poll_fn(|cx| match self.poll_ready(cx) {
            Poll::Ready(true) if self.has_unread() => Poll::Pending,
            ready => ready,
        });
        timeout(SETTLE, ready).await.unwrap_or(false)
    }

    /// Whether something, be it the end, lies in the socket.
    fn has_unread(&self) -> bool {
        let look = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        recv(self.socket, &mut [0], look) != Err(Errno::EAGAIN)
    }

    /// Whether it can take a request, as far as a look without waiting can tell.
    pub(super) fn is_alive(&mut self) -> bool {
        let mut cx = Context::from_waker(Waker::noop());
        self.poll_ready(&mut cx) == Poll::Ready(true)
    }

    /// Sends a request. The answer comes while the connection is driven.
    pub(super) fn send(
        &mut self,
        request: Request<Departing>,
    ) -> impl Future<Output = Answered> + use<> {
        self.sender.try_send_request(request)
    }
}
