//! What one client hears, in order, with a memory for clients whose connection broke.
//!
//! ```text
//!   push ──▶ [ kept: already heard … | waiting: not heard yet … ] ──▶ reader
//!              goes first when there is no room   makes push wait while somebody reads,
//!                                                 goes, too, while nobody does
//! ```

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// The most messages that are kept.
pub const MOST_MESSAGES: usize = 1000;

/// The most bytes that are kept, beyond one message: 4 MiB.
const MOST_BYTES: usize = 4 * 1024 * 1024;

/// How long what was heard is kept for a client that comes back.
pub const KEPT: Duration = Duration::from_secs(60);

/// One message of an event buffer, and its number in it. The first is 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// Its place.
    pub number: u64,
    /// The message.
    pub text: Arc<str>,
    /// Whether it is the last.
    pub last: bool,
}

/// See the module.
#[derive(Debug)]
pub struct EventBuffer {
    inner: Mutex<Inner>,
    /// Something was said, or it ended, or another reader came.
    news: Notify,
    /// Something was heard.
    room: Notify,
}

#[derive(Debug)]
struct Inner {
    messages: VecDeque<(Said, Instant)>,
    bytes: usize,
    /// The number of the next message.
    next: u64,
    /// The number of the message that the reader hears next.
    heard: u64,
    /// Which reader is the one; none while nobody reads.
    reader: Option<u64>,
    readers: u64,
    closed: bool,
    /// When somebody last came, left or was told something.
    touched: Instant,
}

impl Default for EventBuffer {
    fn default() -> Self {
        Self {
            inner: Mutex::new(Inner {
                messages: VecDeque::new(),
                bytes: 0,
                next: 1,
                heard: 1,
                reader: None,
                readers: 0,
                closed: false,
                touched: Instant::now(),
            }),
            news: Notify::new(),
            room: Notify::new(),
        }
    }
}

impl EventBuffer {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says something. Waits while a reader is there and too far behind.
    pub async fn push(&self, text: String) {
        let text: Arc<str> = text.into();
        loop {
            let room = self.room.notified();
            tokio::pin!(room);
            room.as_mut().enable();
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
            room.await;
        }
        self.news.notify_waiters();
    }

    /// Says the last thing. Never waits: who asked has it coming.
    pub fn finish(&self, text: String) {
        let mut inner = self.lock();
        if !inner.closed {
            inner.make_room(text.len());
            inner.add(text.into(), true);
            inner.closed = true;
        }
        drop(inner);
        self.news.notify_waiters();
        self.room.notify_waiters();
    }

    /// Ends it without another word.
    pub fn close(&self) {
        self.lock().closed = true;
        self.news.notify_waiters();
        self.room.notify_waiters();
    }

    /// Whether nothing more will be said.
    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// How many bytes are kept.
    pub fn bytes(&self) -> usize {
        self.lock().bytes
    }

    /// Whether somebody reads.
    pub fn is_read(&self) -> bool {
        self.lock().reader.is_some()
    }

    /// Whether it is over, and everything was heard or kept for long enough.
    pub fn is_spent(&self) -> bool {
        let inner = self.lock();
        inner.closed && inner.reader.is_none() && inner.touched.elapsed() > KEPT
    }

    /// The number of the last message that somebody heard.
    pub fn heard(&self) -> u64 {
        self.lock().heard - 1
    }

    /// For how long nobody has read.
    pub fn alone_for(&self) -> Option<Duration> {
        let inner = self.lock();
        inner.reader.is_none().then(|| inner.touched.elapsed())
    }

    /// Reads on after message number `after`. Whoever read before hears nothing more: a
    /// message goes to one connection.
    pub fn read(self: &Arc<Self>, after: u64) -> Reader {
        let mut inner = self.lock();
        inner.readers += 1;
        inner.reader = Some(inner.readers);
        inner.heard = after.saturating_add(1).min(inner.next);
        inner.touched = Instant::now();
        let own = inner.readers;
        drop(inner);
        self.news.notify_waiters();
        self.room.notify_waiters();
        Reader {
            event_buffer: Arc::clone(self),
            own,
        }
    }
}

impl Inner {
    /// Whether there is room for `more` bytes, made by forgetting what may be forgotten.
    fn make_room(&mut self, more: usize) -> bool {
        while !self.messages.is_empty()
            && (self.messages.len() >= MOST_MESSAGES || self.bytes + more > MOST_BYTES)
        {
            let Some((first, _)) = self.messages.front() else {
                break;
            };
            if self.reader.is_some() && first.number >= self.heard {
                return false;
            }
            self.forget_first();
        }
        true
    }

    fn forget_first(&mut self) {
        if let Some((gone, _)) = self.messages.pop_front() {
            self.bytes -= gone.text.len();
        }
    }

    fn add(&mut self, text: Arc<str>, last: bool) {
        // What was heard long ago is not asked for any more.
        while let Some((first, at)) = self.messages.front() {
            if first.number >= self.heard || at.elapsed() <= KEPT {
                break;
            }
            self.forget_first();
        }
        self.bytes += text.len();
        let number = self.next;
        self.next += 1;
        self.touched = Instant::now();
        let said = Said { number, text, last };
        self.messages.push_back((said, self.touched));
    }
}

/// One connection's ear. Dropping it leaves the event buffer to the next.
#[derive(Debug)]
pub struct Reader {
    event_buffer: Arc<EventBuffer>,
    own: u64,
}

/// What there is to hear.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// This.
    Said(Said),
    /// Nothing for a while.
    Nothing,
    /// It is over, or somebody else reads now.
    Over,
}

impl Reader {
    /// The next message; gives up after `patience`.
    pub async fn next(&mut self, patience: Duration) -> Heard {
        let deadline = Instant::now() + patience;
        loop {
            let news = self.event_buffer.news.notified();
            tokio::pin!(news);
            news.as_mut().enable();
            if let Some(heard) = self.look() {
                return heard;
            }
            if tokio::time::timeout_at(deadline, news).await.is_err() {
                return Heard::Nothing;
            }
        }
    }

    fn look(&self) -> Option<Heard> {
        let mut inner = self.event_buffer.lock();
        if inner.reader != Some(self.own) {
            return Some(Heard::Over);
        }
        let first = inner.messages.front().map(|(said, _)| said.number);
        let found = first.and_then(|first| {
            let index = inner.heard.saturating_sub(first);
            let index = usize::try_from(index).ok()?;
            inner.messages.get(index).map(|(said, _)| said.clone())
        });
        match found {
            Some(said) => {
                inner.heard = said.number + 1;
                inner.touched = Instant::now();
                drop(inner);
                self.event_buffer.room.notify_waiters();
                Some(Heard::Said(said))
            }
            None if inner.closed => Some(Heard::Over),
            None => None,
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut inner = self.event_buffer.lock();
        if inner.reader == Some(self.own) {
            inner.reader = None;
            inner.touched = Instant::now();
        }
        drop(inner);
        self.event_buffer.room.notify_waiters();
        self.event_buffer.news.notify_waiters();
    }
}

#[cfg(test)]
mod tests;
