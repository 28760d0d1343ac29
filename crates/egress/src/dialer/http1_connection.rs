//! HTTP/1 upstream connection that its current request polls, without a task of its own.
//!
//! Client connection, request and response then run in one task, without wake-ups between
//! tasks ([`super::wake_flag`]). An idle connection is not polled: what arrived meanwhile
//! (usually the upstream's close) is found when the connection is next checked.

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

use super::body::OutgoingBody;
use super::connector::{TcpOrTlsStream, http1};
use super::error::error_chain;
use super::exchange::SendResult;
use super::io_tap::{IoTap, WriteClosed};
use super::wake_flag::WakeFlag;
use crate::alarm::Alarm;

/// Time for the runtime to report that a socket is readable. A new connection would take
/// longer.
const READABLE_TIMEOUT: Duration = Duration::from_millis(5);

/// How often hyper is polled in a row while it makes progress, before the task yields.
const MAX_POLLS: u32 = 8;

/// One HTTP/1 connection.
pub(super) struct Http1Connection {
    sender: SendRequest<OutgoingBody>,
    /// `None` after the connection has ended.
    connection: Option<Pin<Box<HyperConnection>>>,
    /// The file descriptor, valid while `connection` exists.
    socket: RawFd,
    peer: SocketAddr,
    frames: Arc<BodyFrameCount>,
    write_closed: WriteClosed,
    wake_flag: Arc<WakeFlag>,
    /// The waker that hyper uses to set `wake_flag`.
    waker: Waker,
    /// The response timeout.
    alarm: Alarm,
}

/// hyper's connection object, which does the I/O.
type HyperConnection = Connection<TokioIo<IoTap>, OutgoingBody>;

/// Counts request body frames that hyper has taken: progress shows that the upstream reads.
#[derive(Debug, Default)]
pub(super) struct BodyFrameCount(AtomicU64);

impl BodyFrameCount {
    pub(super) fn increment(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Http1Connection {
    pub(super) async fn begin(stream: TcpOrTlsStream, peer: SocketAddr) -> hyper::Result<Self> {
        let socket = match &stream {
            Either::Left(plain) => plain.as_raw_fd(),
            Either::Right(tls) => tls.get_ref().0.as_raw_fd(),
        };
        let (tap, write_closed) = IoTap::new(stream);
        let (sender, connection) = http1().handshake(TokioIo::new(tap)).await?;
        let wake_flag = Arc::new(WakeFlag::default());
        Ok(Self {
            waker: Waker::from(Arc::clone(&wake_flag)),
            wake_flag,
            alarm: Alarm::default(),
            sender,
            connection: Some(Box::pin(connection)),
            socket,
            peer,
            frames: Arc::default(),
            write_closed,
        })
    }

    pub(super) fn peer(&self) -> SocketAddr {
        self.peer
    }

    pub(super) fn frames(&self) -> &Arc<BodyFrameCount> {
        &self.frames
    }

    /// Whether the upstream stopped reading, so that it never takes another request.
    pub(super) fn is_write_closed(&self) -> bool {
        self.write_closed.is_set()
    }

    /// The timer, reused by every exchange on this connection.
    pub(super) fn alarm(&mut self) -> &mut Alarm {
        &mut self.alarm
    }

    /// The waker to poll hyper with.
    pub(super) fn waker(&self) -> &Waker {
        &self.waker
    }

    /// Marks the connection as idle: no task is woken for it.
    pub(super) fn set_idle(&self) {
        self.wake_flag.clear_task();
    }

    /// Polls hyper until `check` is ready or no more progress is possible; the task of `cx` is then
    /// woken when progress is possible again.
    pub(super) fn drive_until<T>(
        &mut self,
        cx: &mut Context<'_>,
        mut check: impl FnMut(&mut Self, &mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        let (wake_flag, waker) = (Arc::clone(&self.wake_flag), self.waker.clone());
        let mut hyper_cx = Context::from_waker(&waker);
        wake_flag.begin_poll(cx.waker());
        // Earlier wake-ups are handled by this poll.
        wake_flag.take();
        let mut polls = MAX_POLLS;
        loop {
            self.drive(&mut hyper_cx);
            if let Poll::Ready(found) = check(self, &mut hyper_cx) {
                // The caller polls again if it needs more.
                wake_flag.end_poll();
                return Poll::Ready(found);
            }
            polls -= 1;
            if polls == 0 || !wake_flag.take() {
                break;
            }
        }
        if wake_flag.end_poll() {
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }

    fn drive(&mut self, hyper_cx: &mut Context<'_>) {
        let Some(connection) = &mut self.connection else {
            return;
        };
        if let Poll::Ready(ended) = connection.as_mut().poll(hyper_cx) {
            self.connection = None;
            if let Err(error) = ended {
                let peer = self.peer;
                tracing::debug!(%peer, error = error_chain(&error), "upstream connection failed");
            }
        }
    }

    /// Ready with whether the connection can take a request; `false` if it never will.
    pub(super) fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        self.drive_until(cx, |this, hyper_cx| {
            if this.connection.is_none() || (this.is_write_closed() && this.sender.is_ready()) {
                return Poll::Ready(false);
            }
            this.sender.poll_ready(hyper_cx).map(|ready| ready.is_ok())
        })
    }

    /// Whether the exchange has ended and the connection can take the next request.
    pub(super) fn is_done(&self) -> bool {
        self.connection.is_some() && !self.is_write_closed() && self.sender.is_ready()
    }

    /// Whether an idle connection can take a request now. Bytes that arrived meanwhile are read
    /// first, even if the runtime has not reported them yet.
    pub(super) async fn is_ready(&mut self) -> bool {
        if self.is_done() && !self.has_unread() {
            return true;
        }
        // Rare: the upstream has closed the connection.
        let ready = poll_fn(|cx| match self.poll_ready(cx) {
            Poll::Ready(true) if self.has_unread() => Poll::Pending,
            ready => ready,
        });
        timeout(READABLE_TIMEOUT, ready).await.unwrap_or(false)
    }

    /// Whether the socket has unread bytes or has reached its end.
    fn has_unread(&self) -> bool {
        let peek = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        recv(self.socket, &mut [0], peek) != Err(Errno::EAGAIN)
    }

    /// Whether the connection can take a request, without waiting.
    pub(super) fn is_alive(&mut self) -> bool {
        let mut cx = Context::from_waker(Waker::noop());
        self.poll_ready(&mut cx) == Poll::Ready(true)
    }

    /// Sends a request. The response arrives while the connection is polled.
    pub(super) fn send(
        &mut self,
        request: Request<OutgoingBody>,
    ) -> impl Future<Output = SendResult> + use<> {
        self.sender.try_send_request(request)
    }
}
