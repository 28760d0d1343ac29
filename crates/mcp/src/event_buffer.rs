//! Event buffer: the ordered messages to one client, kept for a while so that the client can
//! resume after its connection broke.
//!
//! ```text
//!   push ──▶ [ read: kept for a resume … | unread … ] ──▶ reader
//!              dropped first when full     with a reader, push waits while these fill the
//!                                          buffer; without one, the oldest are dropped
//! ```

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// The most messages in the buffer.
pub const MAX_MESSAGES: usize = 1000;

/// The most bytes in the buffer, 4 MiB. A single larger message is kept as well.
const MAX_BYTES: usize = 4 * 1024 * 1024;

/// How long read messages are kept for a client that reconnects.
pub const RETENTION: Duration = Duration::from_secs(60);

/// One message of an event buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferedMessage {
    /// The message's number; the first is 1.
    pub number: u64,
    /// The message's text.
    pub text: Arc<str>,
    /// Whether no message follows.
    pub last: bool,
}

/// The messages to one client.
#[derive(Debug)]
pub struct EventBuffer {
    inner: Mutex<Inner>,
    /// Notified when a message is added, the buffer is closed, or the reader changes.
    changed: Notify,
    /// Notified when a message is read, the buffer is closed, or the reader changes.
    space: Notify,
}

#[derive(Debug)]
struct Inner {
    messages: VecDeque<(BufferedMessage, Instant)>,
    bytes: usize,
    /// The number of the next message.
    next: u64,
    /// The number of the message that is read next.
    next_read: u64,
    /// The number of the current reader; none without a reader.
    reader: Option<u64>,
    /// The number of readers so far.
    readers: u64,
    closed: bool,
    /// When a message was last added or read, or a reader came or left.
    last_used: Instant,
}

impl Default for EventBuffer {
    fn default() -> Self {
        Self {
            inner: Mutex::new(Inner {
                messages: VecDeque::new(),
                bytes: 0,
                next: 1,
                next_read: 1,
                reader: None,
                readers: 0,
                closed: false,
                last_used: Instant::now(),
            }),
            changed: Notify::new(),
            space: Notify::new(),
        }
    }
}

impl EventBuffer {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a message. Waits while the buffer is full of messages that its reader has not read.
    pub async fn push(&self, text: String) {
        let text: Arc<str> = text.into();
        loop {
            let space = self.space.notified();
            tokio::pin!(space);
            space.as_mut().enable();
            {
                let mut inner = self.lock();
                if inner.closed {
                    return;
                }
                if inner.make_room(text.len()) {
                    inner.add(text, false);
                    break;
                }
            }
            space.await;
        }
        self.changed.notify_waiters();
    }

    /// Adds the last message and closes the buffer. Never waits.
    pub fn finish(&self, text: String) {
        let mut inner = self.lock();
        if !inner.closed {
            inner.make_room(text.len());
            inner.add(text.into(), true);
            inner.closed = true;
        }
        drop(inner);
        self.changed.notify_waiters();
        self.space.notify_waiters();
    }

    /// Closes the buffer without another message.
    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_waiters();
        self.space.notify_waiters();
    }

    /// Whether no further message can be added.
    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// The bytes of the messages in the buffer.
    pub fn bytes(&self) -> usize {
        self.lock().bytes
    }

    /// Whether there is a reader.
    pub fn has_reader(&self) -> bool {
        self.lock().reader.is_some()
    }

    /// Whether the buffer is closed, has no reader and was not used for [`RETENTION`].
    pub fn is_expired(&self) -> bool {
        let inner = self.lock();
        inner.closed && inner.reader.is_none() && inner.last_used.elapsed() > RETENTION
    }

    /// The number of the last message that was read.
    pub fn last_read(&self) -> u64 {
        self.lock().next_read - 1
    }

    /// How long the buffer has been without a reader; none while there is one.
    pub fn unread_for(&self) -> Option<Duration> {
        let inner = self.lock();
        inner.reader.is_none().then(|| inner.last_used.elapsed())
    }

    /// A reader of the messages after number `after`. An earlier reader gets no further message:
    /// each message goes to one connection.
    pub fn open_reader(self: &Arc<Self>, after: u64) -> EventReader {
        let mut inner = self.lock();
        inner.readers += 1;
        inner.reader = Some(inner.readers);
        inner.next_read = after.saturating_add(1).min(inner.next);
        inner.last_used = Instant::now();
        let number = inner.readers;
        drop(inner);
        self.changed.notify_waiters();
        self.space.notify_waiters();
        EventReader {
            event_buffer: Arc::clone(self),
            number,
        }
    }
}

impl Inner {
    /// Drops old messages until there is space for `added_bytes`. Returns false if the oldest
    /// message has not been read by the current reader.
    fn make_room(&mut self, added_bytes: usize) -> bool {
        while !self.messages.is_empty()
            && (self.messages.len() >= MAX_MESSAGES || self.bytes + added_bytes > MAX_BYTES)
        {
            let Some((first, _)) = self.messages.front() else {
                break;
            };
            if self.reader.is_some() && first.number >= self.next_read {
                return false;
            }
            self.drop_first();
        }
        true
    }

    fn drop_first(&mut self) {
        if let Some((message, _)) = self.messages.pop_front() {
            self.bytes -= message.text.len();
        }
    }

    fn add(&mut self, text: Arc<str>, last: bool) {
        // Messages that were read before the retention time are not needed for a resume.
        while let Some((first, at)) = self.messages.front() {
            if first.number >= self.next_read || at.elapsed() <= RETENTION {
                break;
            }
            self.drop_first();
        }
        self.bytes += text.len();
        let number = self.next;
        self.next += 1;
        self.last_used = Instant::now();
        let message = BufferedMessage { number, text, last };
        self.messages.push_back((message, self.last_used));
    }
}

/// The reader of one connection. Dropping it leaves the event buffer to the next reader.
#[derive(Debug)]
pub struct EventReader {
    event_buffer: Arc<EventBuffer>,
    number: u64,
}

/// The outcome of waiting for a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadOutcome {
    /// The next message.
    Message(BufferedMessage),
    /// No message came in time.
    TimedOut,
    /// The buffer is closed and everything was read, or another reader has replaced this one.
    Closed,
}

impl EventReader {
    /// Waits for the next message, at most for `timeout`.
    pub async fn next(&mut self, timeout: Duration) -> ReadOutcome {
        let deadline = Instant::now() + timeout;
        loop {
            let changed = self.event_buffer.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if let Some(outcome) = self.try_next() {
                return outcome;
            }
            if tokio::time::timeout_at(deadline, changed).await.is_err() {
                return ReadOutcome::TimedOut;
            }
        }
    }

    fn try_next(&self) -> Option<ReadOutcome> {
        let mut inner = self.event_buffer.lock();
        if inner.reader != Some(self.number) {
            return Some(ReadOutcome::Closed);
        }
        let first = inner.messages.front().map(|(message, _)| message.number);
        let found = first.and_then(|first| {
            let index = inner.next_read.saturating_sub(first);
            let index = usize::try_from(index).ok()?;
            inner
                .messages
                .get(index)
                .map(|(message, _)| message.clone())
        });
        match found {
            Some(message) => {
                inner.next_read = message.number + 1;
                inner.last_used = Instant::now();
                drop(inner);
                self.event_buffer.space.notify_waiters();
                Some(ReadOutcome::Message(message))
            }
            None if inner.closed => Some(ReadOutcome::Closed),
            None => None,
        }
    }
}

impl Drop for EventReader {
    fn drop(&mut self) {
        let mut inner = self.event_buffer.lock();
        if inner.reader == Some(self.number) {
            inner.reader = None;
            inner.last_used = Instant::now();
        }
        drop(inner);
        self.event_buffer.space.notify_waiters();
        self.event_buffer.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests;
