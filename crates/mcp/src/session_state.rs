//! State of one session: open requests, event buffers, requests of the server (questions), and
//! subscriptions of the client.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::event_buffer::EventBuffer;

/// Maximum number of event buffers kept for clients that resume a stream.
const MAX_BUFFERS: usize = 64;

/// Maximum number of bytes in these buffers: 8 MiB.
const MAX_BUFFERED_BYTES: usize = 8 * 1024 * 1024;

/// The state of one session.
#[derive(Debug)]
pub(crate) struct SessionState {
    /// The negotiated protocol revision.
    pub(crate) version: Option<String>,
    /// Whether a failed start of the server was reported.
    pub(crate) start_failed: bool,
    /// Open requests, by the id that the bridge sends to the server.
    pub(crate) open_requests: HashMap<u64, OpenRequest>,
    /// Event buffers of open and ended requests, by number.
    pub(crate) event_buffers: HashMap<u64, Arc<EventBuffer>>,
    /// Number of the newest event buffer.
    pub(crate) last_buffer: u64,
    /// Event buffers of the questions that the client received, by the server's id as written.
    pub(crate) questions: HashMap<String, Arc<EventBuffer>>,
    /// Undecided questions, by the server's id as written. The token is cancelled if the server
    /// withdraws the question.
    pub(crate) undecided_questions: HashMap<String, CancellationToken>,
    /// URIs of the resources that the client subscribed to.
    pub(crate) subscriptions: HashSet<String>,
    /// When a request or message of the client last used the session.
    pub(crate) last_used: Instant,
    /// Number of HTTP requests that are being answered.
    pub(crate) active_requests: usize,
}

impl SessionState {
    /// Removes the oldest closed event buffers until their number and size are within the limits.
    pub(crate) fn evict_buffers(&mut self) {
        loop {
            let bytes: usize = self
                .event_buffers
                .values()
                .map(|event_buffer| event_buffer.bytes())
                .sum();
            if self.event_buffers.len() < MAX_BUFFERS && bytes <= MAX_BUFFERED_BYTES {
                return;
            }
            let closed = self
                .event_buffers
                .iter()
                .filter(|(_, event_buffer)| event_buffer.is_closed());
            let Some(oldest) = closed.map(|(number, _)| *number).min() else {
                return;
            };
            self.event_buffers.remove(&oldest);
        }
    }

    /// The open requests that were sent to the server.
    pub(crate) fn sent_requests(&self) -> impl Iterator<Item = &OpenRequest> {
        self.open_requests.values().filter(|open| open.is_sent)
    }

    /// Whether a request of the session waits for the server's answer.
    pub(crate) fn is_waiting(&self) -> bool {
        self.sent_requests().next().is_some()
    }

    /// Whether the call with the server's id `call` belongs to this session.
    pub(crate) fn has_open_call(&self, call: u64) -> bool {
        self.open_requests
            .get(&call)
            .is_some_and(|open| open.is_sent)
    }

    /// Whether the client subscribed to the resource.
    pub(crate) fn has_subscribed(&self, uri: &str) -> bool {
        self.subscriptions.contains(uri)
    }
}

/// A request of the client that has no answer yet.
#[derive(Debug)]
pub(crate) struct OpenRequest {
    /// The client's id, as written.
    pub(crate) id: String,
    pub(crate) event_buffer: Arc<EventBuffer>,
    /// The client's progress token, as written; set once the request was sent.
    pub(crate) progress_token: Option<String>,
    /// Whether the request was sent to the server. Before that it waits for the policy decision or
    /// the operator.
    pub(crate) is_sent: bool,
    /// Number of the event buffer; newer requests have higher numbers.
    pub(crate) number: u64,
    pub(crate) cancelled: CancellationToken,
}
