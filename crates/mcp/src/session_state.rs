//! The state of one session: its open requests, their event buffers, the server's questions and the
//! client's subscriptions.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::event_buffer::EventBuffer;

/// The most event buffers that are kept for clients who come back.
const MOST_KEPT: usize = 64;

/// The most bytes in them: 8 MiB.
const MOST_KEPT_BYTES: usize = 8 * 1024 * 1024;

/// See the module.
#[derive(Debug)]
pub(crate) struct SessionState {
    /// The revision that both sides agreed on.
    pub(crate) version: Option<String>,
    /// The server's failed start was reported.
    pub(crate) start_failed: bool,
    /// Open requests, by the id that the server knows.
    pub(crate) open: HashMap<u64, OpenRequest>,
    /// Outlets of requests, open and over, by number.
    pub(crate) event_buffers: HashMap<u64, Arc<EventBuffer>>,
    pub(crate) last_outlet: u64,
    /// Questions of the server, by its id as written, and where they were asked.
    pub(crate) questions: HashMap<String, Arc<EventBuffer>>,
    /// Questions of the server that are not decided yet, by its id as written. Cancelled where
    /// the server takes one back.
    pub(crate) undecided: HashMap<String, CancellationToken>,
    /// Resources that the client wants news of.
    pub(crate) subscribed: HashSet<String>,
    pub(crate) touched: Instant,
    /// Requests of the transport that are being answered.
    pub(crate) busy: usize,
}

impl SessionState {
    /// So many event buffers are kept for clients who come back, and so many bytes in them; the
    /// oldest go first.
    pub(crate) fn make_room(&mut self) {
        loop {
            let bytes: usize = self
                .event_buffers
                .values()
                .map(|event_buffer| event_buffer.bytes())
                .sum();
            if self.event_buffers.len() < MOST_KEPT && bytes <= MOST_KEPT_BYTES {
                return;
            }
            let over = self
                .event_buffers
                .iter()
                .filter(|(_, event_buffer)| event_buffer.is_closed());
            let Some(oldest) = over.map(|(number, _)| *number).min() else {
                return;
            };
            self.event_buffers.remove(&oldest);
        }
    }

    /// The open requests that the server was sent.
    pub(crate) fn sent(&self) -> impl Iterator<Item = &OpenRequest> {
        self.open.values().filter(|open| open.is_sent)
    }

    /// Whether one of its requests is open at the server.
    pub(crate) fn is_waiting(&self) -> bool {
        self.sent().next().is_some()
    }

    /// Whether the server's request `call` is one of its own.
    pub(crate) fn has_open(&self, call: u64) -> bool {
        self.open.get(&call).is_some_and(|open| open.is_sent)
    }

    /// Whether it asked for news of the resource.
    pub(crate) fn has_subscribed(&self, uri: &str) -> bool {
        self.subscribed.contains(uri)
    }
}

/// A request of the client that has no answer yet.
#[derive(Debug)]
pub(crate) struct OpenRequest {
    /// The client's id, as written.
    pub(crate) id: String,
    pub(crate) event_buffer: Arc<EventBuffer>,
    /// The client's token for progress, as written; known once the request was sent.
    pub(crate) token: Option<String>,
    /// Whether the server was sent the request. Until then it is decided, or waits for an
    /// operator's answer.
    pub(crate) is_sent: bool,
    /// In which order they came.
    pub(crate) number: u64,
    pub(crate) cancelled: CancellationToken,
}
