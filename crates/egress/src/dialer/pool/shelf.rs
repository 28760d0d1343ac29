//! The connections of one sandbox to one route: which are free, and who may dial.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use hyper::client::conn::http2;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::{KEEP, Key, MOST_OF_ALL, MOST_OF_SANDBOX, Pool, locked};
use crate::dialer::body::Departing;
use crate::dialer::driven::Driven;
use crate::dialer::error::DialError;

/// Unused HTTP/1 connections.
const MOST_IDLE: usize = 32;

/// HTTP/1 connections in use.
const MOST_BUSY: usize = 256;

/// HTTP/2 connections.
const MOST_LINES: usize = 8;

/// Streams on one of them, whatever the peer allows.
const MOST_STREAMS: usize = 256;

/// The connections of one sandbox to one route.
pub(in crate::dialer) struct HostPool {
    pub(in crate::dialer) key: Key,
    state: Mutex<State>,
    /// Something was given back, or a dial ended.
    pub(in crate::dialer) changed: Notify,
    pool: Weak<Pool>,
    /// Connections that are kept for this sandbox, on all its shelves.
    pub(super) kept: Arc<AtomicUsize>,
}

#[derive(Default)]
struct State {
    /// Nothing is put here any more, nor taken.
    closed: bool,
    /// Unused HTTP/1 connections, the latest at the back.
    idle: VecDeque<Idle>,
    lines: Vec<Arc<Line>>,
    /// HTTP/1 connections in use, and those being dialled that others need not wait for.
    busy: usize,
    speaks: Speaks,
    /// The number of the dial others wait for.
    dialing: Option<u64>,
    dials: u64,
    failed: Option<(u64, DialError)>,
}

/// What the upstream chose last.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Speaks {
    #[default]
    Unknown,
    Http1,
    Http2,
}

struct Idle {
    connection: Driven,
    since: Instant,
}

/// One HTTP/2 connection and how much of it is used.
pub(in crate::dialer) struct Line {
    pub(in crate::dialer) sender: http2::SendRequest<Departing>,
    pub(in crate::dialer) peer: SocketAddr,
    /// What the peer allows at once, as far as is known.
    most: Arc<AtomicUsize>,
    usage: Mutex<Usage>,
}

struct Usage {
    streams: usize,
    since: Instant,
}

/// What one look at the shelf gave.
pub(in crate::dialer) enum Checkout {
    /// A connection that was there; it may have ended since.
    Http1 { place: Place, connection: Driven },
    /// A stream of a connection that was there.
    Http2 { place: Place, line: Arc<Line> },
    /// Nothing: dial.
    Dial(Dial),
    /// Nothing, and no room: look again when something changed.
    Wait {
        /// The dial that may help.
        dial: Option<u64>,
    },
    /// The dial that was waited for failed, and so would the next.
    Failed(DialError),
    /// The shelf was taken down: ask the pool for another.
    Gone,
}

/// The right to dial. Others may be waiting for the outcome: dropped without one, it lets the
/// next of them dial.
pub(in crate::dialer) struct Dial {
    shelf: Arc<HostPool>,
    /// Its number, if others wait for it; else it counts as busy.
    number: Option<u64>,
    done: bool,
}

/// A request's hold on a connection.
pub(in crate::dialer) struct Place {
    shelf: Arc<HostPool>,
    /// The connection it is a stream of; none on HTTP/1, where it is the whole of one.
    line: Option<Arc<Line>>,
}

impl HostPool {
    pub(super) fn new(key: Key, pool: Weak<Pool>, kept: Arc<AtomicUsize>) -> Self {
        Self {
            key,
            state: Mutex::default(),
            changed: Notify::new(),
            pool,
            kept,
        }
    }

    /// Looks for a connection. `seen` is the dial that was waited for. A request that goes out
    /// for the second time wants a connection that was not lying about.
    pub(in crate::dialer) fn check_out(
        self: &Arc<Self>,
        seen: Option<u64>,
        again: bool,
    ) -> Checkout {
        let mut state = locked(&self.state);
        if state.closed {
            return Checkout::Gone;
        }
        self.drop_old(&mut state);
        if let Some(line) = state.lines.iter().find(|line| line.take()) {
            let line = Arc::clone(line);
            return Checkout::Http2 {
                place: Place::new(self, Some(Arc::clone(&line))),
                line,
            };
        }
        if let (Some(seen), Some((number, error))) = (seen, &state.failed)
            && seen == *number
            && state.lines.is_empty()
        {
            return Checkout::Failed(error.clone());
        }
        let room = state.busy < MOST_BUSY;
        if room
            && !again
            && let Some(idle) = self.take_idle(&mut state)
        {
            state.busy += 1;
            return Checkout::Http1 {
                place: Place::new(self, None),
                connection: idle.connection,
            };
        }
        let only_http1 = !self.key.1.tls || state.speaks == Speaks::Http1;
        let number = if only_http1 && room {
            state.busy += 1;
            None
        } else if !only_http1 && state.dialing.is_none() && state.lines.len() < MOST_LINES {
            state.dials += 1;
            state.dialing = Some(state.dials);
            state.dialing
        } else {
            return Checkout::Wait {
                dial: state.dialing,
            };
        };
        Checkout::Dial(Dial {
            shelf: Arc::clone(self),
            number,
            done: false,
        })
    }

    /// The latest.
    fn take_idle(&self, state: &mut State) -> Option<Idle> {
        let taken = state.idle.pop_back();
        self.uncount(usize::from(taken.is_some()));
        taken
    }

    /// Keeps an HTTP/1 connection that came to the end of its exchange.
    fn put_idle(&self, state: &mut State, idle: Idle) {
        if state.closed {
            return;
        }
        if state.idle.len() >= MOST_IDLE && state.idle.pop_front().is_some() {
            self.uncount(1);
        }
        state.idle.push_back(idle);
        self.count();
    }

    fn count(&self) {
        self.kept.fetch_add(1, Ordering::Relaxed);
        if let Some(pool) = self.pool.upgrade() {
            pool.kept.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn uncount(&self, by: usize) {
        self.kept.fetch_sub(by, Ordering::Relaxed);
        if let Some(pool) = self.pool.upgrade() {
            pool.kept.fetch_sub(by, Ordering::Relaxed);
        }
    }

    /// Keeps to the bounds. Not under the lock of a shelf: it looks at the others.
    fn trim(&self) {
        let Some(pool) = self.pool.upgrade() else {
            return;
        };
        if self.kept.load(Ordering::Relaxed) > MOST_OF_SANDBOX {
            pool.trim(Some(&self.key.0));
        } else if pool.kept.load(Ordering::Relaxed) > MOST_OF_ALL {
            pool.trim(None);
        }
    }

    pub(super) fn close(&self) {
        let mut state = locked(&self.state);
        state.closed = true;
        self.uncount(state.idle.len() + state.lines.len());
        let gone = (
            std::mem::take(&mut state.idle),
            std::mem::take(&mut state.lines),
        );
        drop(state);
        drop(gone);
        self.changed.notify_waiters();
    }

    pub(super) fn idle(&self) -> usize {
        let mut state = locked(&self.state);
        self.drop_dead(&mut state);
        let lines = state.lines.iter();
        state.idle.len() + lines.filter(|line| line.unused_since().is_some()).count()
    }

    /// Since when its oldest unused connection is unused.
    pub(super) fn oldest(&self) -> Option<Instant> {
        locked(&self.state).oldest()
    }

    pub(super) fn drop_oldest(&self) {
        let mut state = locked(&self.state);
        let oldest = state.oldest();
        let before = state.kept();
        if state.idle.front().map(|idle| idle.since) == oldest {
            state.idle.pop_front();
        } else {
            state.lines.retain(|line| line.unused_since() != oldest);
        }
        self.uncount(before - state.kept());
    }

    /// Drops what is too old, and lines that are known to be dead.
    fn drop_old(&self, state: &mut State) {
        let before = state.kept();
        let old = |idle: &Idle| idle.since.elapsed() >= KEEP;
        while state.idle.front().is_some_and(old) {
            state.idle.pop_front();
        }
        state.lines.retain(|line| {
            let unused = line.unused_since();
            let stale = unused.is_some_and(|since| since.elapsed() >= KEEP);
            !stale && !line.sender.is_closed()
        });
        self.uncount(before - state.kept());
    }

    /// The same, after a look at every unused connection.
    fn drop_dead(&self, state: &mut State) {
        let before = state.kept();
        state.idle.retain_mut(|idle| idle.connection.is_alive());
        self.uncount(before - state.kept());
        self.drop_old(state);
    }

    /// Says whether the shelf is empty, when what is dead is gone.
    pub(super) fn sweep(&self) -> bool {
        let mut state = locked(&self.state);
        self.drop_dead(&mut state);
        state.kept() == 0 && state.busy == 0 && state.dialing.is_none()
    }
}

impl State {
    fn kept(&self) -> usize {
        self.idle.len() + self.lines.len()
    }

    fn oldest(&self) -> Option<Instant> {
        let idle = self.idle.front().map(|idle| idle.since);
        let lines = self.lines.iter().filter_map(|line| line.unused_since());
        lines.chain(idle).min()
    }
}

impl Dial {
    /// The upstream speaks HTTP/1.1: the connection is the dialer's own, and whoever waited
    /// dials.
    pub(in crate::dialer) fn http1(mut self) -> Place {
        let mut state = locked(&self.shelf.state);
        state.speaks = Speaks::Http1;
        if self.number.is_some() {
            state.dialing = None;
            state.busy += 1;
        }
        drop(state);
        self.done = true;
        self.shelf.changed.notify_waiters();
        Place::new(&self.shelf, None)
    }

    /// The upstream speaks HTTP/2: whoever waited shares the connection.
    pub(in crate::dialer) fn http2(
        mut self,
        sender: http2::SendRequest<Departing>,
        peer: SocketAddr,
        most: Arc<AtomicUsize>,
    ) -> Place {
        let line = Arc::new(Line {
            sender,
            peer,
            most,
            usage: Mutex::new(Usage {
                streams: 1,
                since: Instant::now(),
            }),
        });
        let mut state = locked(&self.shelf.state);
        state.speaks = Speaks::Http2;
        match self.number {
            Some(_) => state.dialing = None,
            None => state.busy = state.busy.saturating_sub(1),
        }
        // What the peer allows on one connection it will allow on the next; its own word comes
        // with its first answer.
        for other in &state.lines {
            let allowed = other.most.load(Ordering::Relaxed);
            line.most.fetch_min(allowed, Ordering::Relaxed);
        }
        if !state.closed && state.lines.len() < MOST_LINES {
            state.lines.push(Arc::clone(&line));
            self.shelf.count();
        }
        drop(state);
        self.done = true;
        self.shelf.trim();
        self.shelf.changed.notify_waiters();
        Place::new(&self.shelf, Some(line))
    }

    /// It failed. Whoever waited for this very dial hears the same.
    pub(in crate::dialer) fn failed(mut self, error: &DialError) {
        if let Some(number) = self.number {
            locked(&self.shelf.state).failed = Some((number, error.clone()));
        }
        self.give_up();
    }

    fn give_up(&mut self) {
        self.done = true;
        let mut state = locked(&self.shelf.state);
        match self.number {
            Some(_) => state.dialing = None,
            None => state.busy = state.busy.saturating_sub(1),
        }
        drop(state);
        self.shelf.changed.notify_waiters();
    }
}

impl Drop for Dial {
    fn drop(&mut self) {
        if !self.done {
            self.give_up();
        }
    }
}

impl Line {
    /// Takes one stream if the peer allows one more.
    fn take(&self) -> bool {
        let most = self.most.load(Ordering::Relaxed).clamp(1, MOST_STREAMS);
        let mut usage = locked(&self.usage);
        let free = usage.streams < most;
        if free {
            usage.streams += 1;
        }
        free
    }

    fn give_back(&self) {
        let mut usage = locked(&self.usage);
        usage.streams = usage.streams.saturating_sub(1);
        usage.since = Instant::now();
    }

    /// Since when nobody has used it, if nobody does.
    fn unused_since(&self) -> Option<Instant> {
        let usage = locked(&self.usage);
        (usage.streams == 0).then_some(usage.since)
    }
}

impl Place {
    fn new(shelf: &Arc<HostPool>, line: Option<Arc<Line>>) -> Self {
        Self {
            shelf: Arc::clone(shelf),
            line,
        }
    }

    /// Keeps an HTTP/1 connection, whose exchange is over, for the next.
    pub(in crate::dialer) fn give_back(self, connection: Driven) {
        let since = Instant::now();
        connection.rest();
        let mut state = locked(&self.shelf.state);
        self.shelf.put_idle(&mut state, Idle { connection, since });
        drop(state);
        self.shelf.trim();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        match &self.line {
            Some(line) => line.give_back(),
            None => {
                let mut state = locked(&self.shelf.state);
                state.busy = state.busy.saturating_sub(1);
            }
        }
        self.shelf.changed.notify_one();
    }
}
