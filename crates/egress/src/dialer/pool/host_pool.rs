//! Pool of the connections of one sandbox to one route.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use hyper::client::conn::http2;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::{IDLE_TIMEOUT, Key, MAX_POOLED_PER_SANDBOX, MAX_POOLED_TOTAL, Pool, lock_mutex};
use crate::dialer::body::OutgoingBody;
use crate::dialer::error::DialError;
use crate::dialer::http1_connection::Http1Connection;

/// Idle HTTP/1 connections.
const MAX_IDLE_HTTP1: usize = 32;

/// HTTP/1 connections that are in use.
const MAX_BUSY_HTTP1: usize = 256;

/// HTTP/2 connections.
const MAX_HTTP2: usize = 8;

/// Streams on one HTTP/2 connection, even if the peer allows more.
const MAX_STREAMS: usize = 256;

/// The connections of one sandbox to one route.
pub(in crate::dialer) struct HostPool {
    pub(in crate::dialer) key: Key,
    state: Mutex<State>,
    /// Notified when a slot is freed or a dial ends.
    pub(in crate::dialer) changed: Notify,
    pool: Weak<Pool>,
    /// Pooled connections of this sandbox, in all its host pools.
    pub(super) pooled: Arc<AtomicUsize>,
}

#[derive(Default)]
struct State {
    /// A closed pool neither takes nor gives connections.
    closed: bool,
    /// Idle HTTP/1 connections, the most recent last.
    idle: VecDeque<IdleConnection>,
    http2: Vec<Arc<Http2Connection>>,
    /// HTTP/1 connections in use or being dialled.
    busy: usize,
    /// The protocol that the upstream negotiated last.
    protocol: KnownProtocol,
    /// The number of the running dial that other requests wait for.
    dialing: Option<u64>,
    /// The number of dials so far; each dial has the next number.
    dials: u64,
    /// The number and the error of the last failed dial that other requests waited for.
    failed: Option<(u64, DialError)>,
}

/// The protocol that the upstream negotiated last.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum KnownProtocol {
    #[default]
    Unknown,
    Http1,
    Http2,
}

struct IdleConnection {
    connection: Http1Connection,
    since: Instant,
}

/// A shared HTTP/2 connection.
pub(in crate::dialer) struct Http2Connection {
    pub(in crate::dialer) sender: http2::SendRequest<OutgoingBody>,
    pub(in crate::dialer) peer: SocketAddr,
    /// Concurrent streams that the peer allows, as far as known.
    max_streams: Arc<AtomicUsize>,
    usage: Mutex<Usage>,
}

/// Number of streams in use, and the time of the last change to zero.
struct Usage {
    streams: usize,
    since: Instant,
}

/// Result of a checkout.
pub(in crate::dialer) enum Checkout {
    /// An idle connection, which may have closed since.
    Http1 {
        slot: PoolSlot,
        connection: Http1Connection,
    },
    /// A stream of a shared connection.
    Http2 {
        slot: PoolSlot,
        connection: Arc<Http2Connection>,
    },
    /// No connection: the caller dials.
    Dial(DialPermit),
    /// The limit is reached: check out again after `changed`.
    Wait {
        /// The running dial, if any.
        dial: Option<u64>,
    },
    /// The dial that the caller waited for failed.
    Failed(DialError),
    /// The host pool was closed: get another one from the pool.
    Closed,
}

/// Permission to dial. Other requests may wait for the result: dropping the permit lets the
/// next of them dial.
pub(in crate::dialer) struct DialPermit {
    host_pool: Arc<HostPool>,
    /// The dial's number, if other requests wait for it; otherwise the dial counts as busy.
    number: Option<u64>,
    done: bool,
}

/// A request's use of a pooled connection or stream. Dropping the slot frees it.
pub(in crate::dialer) struct PoolSlot {
    host_pool: Arc<HostPool>,
    /// The HTTP/2 connection of the stream; `None` for a whole HTTP/1 connection.
    connection: Option<Arc<Http2Connection>>,
}

impl HostPool {
    pub(super) fn new(key: Key, pool: Weak<Pool>, pooled: Arc<AtomicUsize>) -> Self {
        Self {
            key,
            state: Mutex::default(),
            changed: Notify::new(),
            pool,
            pooled,
        }
    }

    /// Takes a connection or the permission to dial. `awaited_dial` is the dial that the
    /// caller waited for. A retry does not use an idle HTTP/1 connection.
    pub(in crate::dialer) fn check_out(
        self: &Arc<Self>,
        awaited_dial: Option<u64>,
        is_retry: bool,
    ) -> Checkout {
        let mut state = lock_mutex(&self.state);
        if state.closed {
            return Checkout::Closed;
        }
        self.drop_expired(&mut state);
        if let Some(connection) = state.http2.iter().find(|connection| connection.take()) {
            let connection = Arc::clone(connection);
            return Checkout::Http2 {
                slot: PoolSlot::new(self, Some(Arc::clone(&connection))),
                connection,
            };
        }
        if let (Some(awaited_dial), Some((number, error))) = (awaited_dial, &state.failed)
            && awaited_dial == *number
            && state.http2.is_empty()
        {
            return Checkout::Failed(error.clone());
        }
        let has_room = state.busy < MAX_BUSY_HTTP1;
        if has_room
            && !is_retry
            && let Some(idle) = self.take_idle(&mut state)
        {
            state.busy += 1;
            return Checkout::Http1 {
                slot: PoolSlot::new(self, None),
                connection: idle.connection,
            };
        }
        let only_http1 = !self.key.1.tls || state.protocol == KnownProtocol::Http1;
        let number = if only_http1 && has_room {
            state.busy += 1;
            None
        } else if !only_http1 && state.dialing.is_none() && state.http2.len() < MAX_HTTP2 {
            state.dials += 1;
            state.dialing = Some(state.dials);
            state.dialing
        } else {
            return Checkout::Wait {
                dial: state.dialing,
            };
        };
        Checkout::Dial(DialPermit {
            host_pool: Arc::clone(self),
            number,
            done: false,
        })
    }

    /// Takes the most recent idle connection.
    fn take_idle(&self, state: &mut State) -> Option<IdleConnection> {
        let taken = state.idle.pop_back();
        self.subtract_pooled(usize::from(taken.is_some()));
        taken
    }

    /// Keeps an HTTP/1 connection whose exchange has ended.
    fn put_idle(&self, state: &mut State, idle: IdleConnection) {
        if state.closed {
            return;
        }
        if state.idle.len() >= MAX_IDLE_HTTP1 && state.idle.pop_front().is_some() {
            self.subtract_pooled(1);
        }
        state.idle.push_back(idle);
        self.add_pooled();
    }

    fn add_pooled(&self) {
        self.pooled.fetch_add(1, Ordering::Relaxed);
        if let Some(pool) = self.pool.upgrade() {
            pool.pooled.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn subtract_pooled(&self, by: usize) {
        self.pooled.fetch_sub(by, Ordering::Relaxed);
        if let Some(pool) = self.pool.upgrade() {
            pool.pooled.fetch_sub(by, Ordering::Relaxed);
        }
    }

    /// Enforces the limits. Call it without a host pool's lock: it locks other host pools.
    fn trim(&self) {
        let Some(pool) = self.pool.upgrade() else {
            return;
        };
        if self.pooled.load(Ordering::Relaxed) > MAX_POOLED_PER_SANDBOX {
            pool.trim(Some(&self.key.0));
        } else if pool.pooled.load(Ordering::Relaxed) > MAX_POOLED_TOTAL {
            pool.trim(None);
        }
    }

    pub(super) fn close(&self) {
        let mut state = lock_mutex(&self.state);
        state.closed = true;
        self.subtract_pooled(state.idle.len() + state.http2.len());
        let closed = (
            std::mem::take(&mut state.idle),
            std::mem::take(&mut state.http2),
        );
        drop(state);
        drop(closed);
        self.changed.notify_waiters();
    }

    pub(super) fn idle(&self) -> usize {
        let mut state = lock_mutex(&self.state);
        self.drop_closed(&mut state);
        let http2 = state.http2.iter();
        state.idle.len()
            + http2
                .filter(|connection| connection.idle_since().is_some())
                .count()
    }

    /// The time since which the longest idle connection is idle.
    pub(super) fn oldest(&self) -> Option<Instant> {
        lock_mutex(&self.state).oldest()
    }

    pub(super) fn drop_oldest(&self) {
        let mut state = lock_mutex(&self.state);
        let oldest = state.oldest();
        let before = state.pooled();
        if state.idle.front().map(|idle| idle.since) == oldest {
            state.idle.pop_front();
        } else {
            state
                .http2
                .retain(|connection| connection.idle_since() != oldest);
        }
        self.subtract_pooled(before - state.pooled());
    }

    /// Drops expired connections, and HTTP/2 connections that are known to be closed.
    fn drop_expired(&self, state: &mut State) {
        let before = state.pooled();
        let is_expired = |idle: &IdleConnection| idle.since.elapsed() >= IDLE_TIMEOUT;
        while state.idle.front().is_some_and(is_expired) {
            state.idle.pop_front();
        }
        state.http2.retain(|connection| {
            let unused = connection.idle_since();
            let expired = unused.is_some_and(|since| since.elapsed() >= IDLE_TIMEOUT);
            !expired && !connection.sender.is_closed()
        });
        self.subtract_pooled(before - state.pooled());
    }

    /// Drops expired connections, and idle ones that the upstream has closed.
    fn drop_closed(&self, state: &mut State) {
        let before = state.pooled();
        state.idle.retain_mut(|idle| idle.connection.is_alive());
        self.subtract_pooled(before - state.pooled());
        self.drop_expired(state);
    }

    /// Drops expired and closed connections; returns whether the host pool is empty.
    pub(super) fn sweep(&self) -> bool {
        let mut state = lock_mutex(&self.state);
        self.drop_closed(&mut state);
        state.pooled() == 0 && state.busy == 0 && state.dialing.is_none()
    }
}

impl State {
    fn pooled(&self) -> usize {
        self.idle.len() + self.http2.len()
    }

    fn oldest(&self) -> Option<Instant> {
        let idle = self.idle.front().map(|idle| idle.since);
        let http2 = self
            .http2
            .iter()
            .filter_map(|connection| connection.idle_since());
        http2.chain(idle).min()
    }
}

impl DialPermit {
    /// Ends the dial to an HTTP/1.1 upstream: the caller keeps the connection, and waiting
    /// requests dial.
    pub(in crate::dialer) fn complete_http1(mut self) -> PoolSlot {
        let mut state = lock_mutex(&self.host_pool.state);
        state.protocol = KnownProtocol::Http1;
        if self.number.is_some() {
            state.dialing = None;
            state.busy += 1;
        }
        drop(state);
        self.done = true;
        self.host_pool.changed.notify_waiters();
        PoolSlot::new(&self.host_pool, None)
    }

    /// Ends the dial to an HTTP/2 upstream: waiting requests share the connection.
    pub(in crate::dialer) fn complete_http2(
        mut self,
        sender: http2::SendRequest<OutgoingBody>,
        peer: SocketAddr,
        max_streams: Arc<AtomicUsize>,
    ) -> PoolSlot {
        let connection = Arc::new(Http2Connection {
            sender,
            peer,
            max_streams,
            usage: Mutex::new(Usage {
                streams: 1,
                since: Instant::now(),
            }),
        });
        let mut state = lock_mutex(&self.host_pool.state);
        state.protocol = KnownProtocol::Http2;
        match self.number {
            Some(_) => state.dialing = None,
            None => state.busy = state.busy.saturating_sub(1),
        }
        // Assume the stream limit of the other connections until this peer's SETTINGS arrive.
        for other in &state.http2 {
            let allowed = other.max_streams.load(Ordering::Relaxed);
            connection.max_streams.fetch_min(allowed, Ordering::Relaxed);
        }
        if !state.closed && state.http2.len() < MAX_HTTP2 {
            state.http2.push(Arc::clone(&connection));
            self.host_pool.add_pooled();
        }
        drop(state);
        self.done = true;
        self.host_pool.trim();
        self.host_pool.changed.notify_waiters();
        PoolSlot::new(&self.host_pool, Some(connection))
    }

    /// Ends a failed dial: requests that waited for it get the same error.
    pub(in crate::dialer) fn fail(mut self, error: &DialError) {
        if let Some(number) = self.number {
            lock_mutex(&self.host_pool.state).failed = Some((number, error.clone()));
        }
        self.give_up();
    }

    fn give_up(&mut self) {
        self.done = true;
        let mut state = lock_mutex(&self.host_pool.state);
        match self.number {
            Some(_) => state.dialing = None,
            None => state.busy = state.busy.saturating_sub(1),
        }
        drop(state);
        self.host_pool.changed.notify_waiters();
    }
}

impl Drop for DialPermit {
    fn drop(&mut self) {
        if !self.done {
            self.give_up();
        }
    }
}

impl Http2Connection {
    /// Takes a stream if the peer allows another one.
    fn take(&self) -> bool {
        let max_streams = self
            .max_streams
            .load(Ordering::Relaxed)
            .clamp(1, MAX_STREAMS);
        let mut usage = lock_mutex(&self.usage);
        let free = usage.streams < max_streams;
        if free {
            usage.streams += 1;
        }
        free
    }

    fn give_back(&self) {
        let mut usage = lock_mutex(&self.usage);
        usage.streams = usage.streams.saturating_sub(1);
        usage.since = Instant::now();
    }

    /// Since when the connection is idle; `None` while it is in use.
    fn idle_since(&self) -> Option<Instant> {
        let usage = lock_mutex(&self.usage);
        (usage.streams == 0).then_some(usage.since)
    }
}

impl PoolSlot {
    fn new(host_pool: &Arc<HostPool>, connection: Option<Arc<Http2Connection>>) -> Self {
        Self {
            host_pool: Arc::clone(host_pool),
            connection,
        }
    }

    /// Returns an HTTP/1 connection, whose exchange has ended, to the pool.
    pub(in crate::dialer) fn give_back(self, connection: Http1Connection) {
        let since = Instant::now();
        connection.set_idle();
        let mut state = lock_mutex(&self.host_pool.state);
        self.host_pool
            .put_idle(&mut state, IdleConnection { connection, since });
        drop(state);
        self.host_pool.trim();
    }
}

impl Drop for PoolSlot {
    fn drop(&mut self) {
        match &self.connection {
            Some(connection) => connection.give_back(),
            None => {
                let mut state = lock_mutex(&self.host_pool.state);
                state.busy = state.busy.saturating_sub(1);
            }
        }
        self.host_pool.changed.notify_one();
    }
}
