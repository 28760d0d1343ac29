//! One client's session with one server, in the protocol revisions that have sessions.
//!
//! ```text
//!            initialize
//!   (none) ─────────────▶ open ──── DELETE, idle timeout, tool removed,
//!                          │        server ended ─────────────────────────▶ ended
//!                          └─ messages are buffered while no connection is open
//! ```
//!
//! Every request has its own event buffer, which the response to its POST reads. Messages that
//! belong to no request go to the standing event buffer, which a GET reads. A message goes to
//! exactly one buffer, the first that exists of: the buffer of the request that it names, the
//! buffer of the only open request, the standing buffer if it has a reader, the buffer of the
//! newest request.

mod client_request;
mod server_messages;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::client_request::ClientRequest;
use crate::call_headers::CallHeaders;
use crate::caller::McpCaller;
use crate::event_buffer::EventBuffer;
use crate::hold_terms::{HoldFlag, until_held};
use crate::launch::{LaunchError, LaunchedProgram};
use crate::process::{Process, ProcessEnded, SendError};
use crate::relay::{PermittedCall, Relay};
use crate::rpc::{RpcKind, RpcMessage};
use crate::session_state::{OpenRequest, SessionState};
use crate::shared::SharedProcess;
use crate::tools::StdioServer;

/// Maximum number of open requests of one session.
const MAX_OPEN_REQUESTS: usize = 128;

/// Maximum number of open requests of the server to the client.
const MAX_QUESTIONS: usize = 64;

/// Maximum number of resource subscriptions of one client.
const MAX_SUBSCRIPTIONS: usize = 1000;

/// The number of the standing event buffer.
pub const STANDING_BUFFER: u64 = 0;

/// Transport of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionTransport {
    /// Streamable HTTP: each POST has its own response stream.
    Streamable,
    /// HTTP with SSE of revision 2024-11-05: one stream for all messages.
    HttpSse,
}

/// Why a session does not accept a message, or was not opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// The server has ended.
    #[error("{0}")]
    ProcessEnded(#[from] ProcessEnded),
    /// Writing to the server failed.
    #[error("{0}")]
    Write(String),
    /// The session has too many open requests.
    #[error("too many open requests in this session: the maximum is {MAX_OPEN_REQUESTS}")]
    TooManyRequests,
    /// The message has no id and is not a notification.
    #[error("a request needs an id")]
    NotNotification,
    /// The bridge has too many sessions.
    #[error("too many sessions are open; close one and retry")]
    TooManySessions,
    /// The id is in use.
    #[error("another open request has this id")]
    DuplicateId,
    /// The server failed to start.
    #[error("{0}")]
    Launch(#[from] LaunchError),
}

impl From<SendError> for SessionError {
    fn from(error: SendError) -> Self {
        match error {
            SendError::ProcessEnded(ended) => SessionError::ProcessEnded(ended),
            SendError::Write(_) => SessionError::Write(error.to_string()),
        }
    }
}

/// A session of one client with one server.
#[derive(Debug)]
pub struct Session {
    id: String,
    server: Arc<StdioServer>,
    caller: McpCaller,
    transport: SessionTransport,
    relay: Relay,
    process: Arc<Process>,
    /// Set if the process is shared with other sessions.
    shared_process: Option<Arc<SharedProcess>>,
    /// The event buffer for messages that belong to no request.
    standing_buffer: Arc<EventBuffer>,
    state: Arc<Mutex<SessionState>>,
    stop: CancellationToken,
    weak_self: Weak<Session>,
}

/// Source of a session's process.
enum ProcessSource {
    Launched(LaunchedProgram),
    Shared(Arc<Process>),
}

/// Where the response to a request will be written.
#[derive(Clone, Debug)]
pub struct PendingResponse {
    /// The event buffer of the request.
    pub event_buffer: Arc<EventBuffer>,
    /// The number of the event buffer in the session.
    pub number: u64,
}

impl Session {
    /// Opens a session: starts a server for `caller`, or joins the shared process.
    pub async fn open(
        id: String,
        server: Arc<StdioServer>,
        caller: McpCaller,
        transport: SessionTransport,
        relay: Relay,
        shared_process: Option<Arc<SharedProcess>>,
    ) -> Result<Arc<Self>, SessionError> {
        let stop = server.stop().child_token();
        let metrics = relay.governance.metrics().clone();
        let source = match &shared_process {
            Some(shared_process) => {
                ProcessSource::Shared(shared_process.process(&server, &caller, &metrics).await?)
            }
            None => ProcessSource::Launched(server.launch(&caller).await?),
        };
        let session = Arc::new_cyclic(|weak_self: &Weak<Session>| {
            let process = match source {
                ProcessSource::Launched(launched) => {
                    let handler =
                        Arc::new(server_messages::SessionMessageHandler(weak_self.clone()));
                    server.attach(launched, handler, &metrics)
                }
                ProcessSource::Shared(process) => process,
            };
            Self {
                id,
                server,
                caller,
                transport,
                relay,
                process,
                shared_process,
                standing_buffer: Arc::default(),
                state: Arc::new(Mutex::new(SessionState {
                    version: None,
                    start_failed: false,
                    open_requests: HashMap::new(),
                    event_buffers: HashMap::new(),
                    last_buffer: STANDING_BUFFER,
                    questions: HashMap::new(),
                    undecided_questions: HashMap::new(),
                    subscriptions: HashSet::new(),
                    last_used: Instant::now(),
                    active_requests: 0,
                })),
                stop,
                weak_self: weak_self.clone(),
            }
        });
        if let Some(shared_process) = &session.shared_process {
            let handler = Arc::new(server_messages::SessionMessageHandler(
                session.weak_self.clone(),
            ));
            shared_process.join(&session.id, &session.state, handler);
        }
        tokio::spawn(Self::watch(Arc::downgrade(&session)));
        Ok(session)
    }

    /// Ends the session when its server ends, and the server when the session ends.
    async fn watch(weak_self: Weak<Self>) {
        let Some((process, stop)) = weak_self
            .upgrade()
            .map(|session| (Arc::clone(&session.process), session.stop.clone()))
        else {
            return;
        };
        let ended = tokio::select! {
            ended = process.wait_for_end() => Some(ended),
            () = stop.cancelled() => None,
        };
        if let Some(session) = weak_self.upgrade() {
            // A server that was stopped has not failed.
            if let Some(ended) = ended.filter(|_| !stop.is_cancelled()) {
                session.report_failed_start(&ended.to_string());
            }
            session.end();
        } else {
            stop.cancel();
        }
    }

    /// Reports once that the server did not complete `initialize`. No effect if it did.
    pub fn report_failed_start(&self, error: &str) {
        let mut state = self.state();
        if state.version.is_some() || std::mem::replace(&mut state.start_failed, true) {
            return;
        }
        drop(state);
        self.server.record_start_failure(error);
    }

    /// The session id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The client that opened the session.
    pub fn caller(&self) -> &McpCaller {
        &self.caller
    }

    /// The configured server.
    pub fn server(&self) -> &Arc<StdioServer> {
        &self.server
    }

    /// Transport of the session.
    pub fn transport(&self) -> SessionTransport {
        self.transport
    }

    /// The standing event buffer: messages that belong to no request.
    pub fn standing_buffer(&self) -> &Arc<EventBuffer> {
        &self.standing_buffer
    }

    /// The event buffer with this number.
    pub fn event_buffer(&self, number: u64) -> Option<Arc<EventBuffer>> {
        if number == STANDING_BUFFER {
            return Some(Arc::clone(&self.standing_buffer));
        }
        self.state().event_buffers.get(&number).cloned()
    }

    /// The negotiated protocol revision; none before `initialize` has completed.
    pub fn version(&self) -> Option<String> {
        self.state().version.clone()
    }

    /// Whether the session has ended.
    pub fn has_ended(&self) -> bool {
        self.stop.is_cancelled() || !self.process.is_alive()
    }

    /// The server process.
    pub fn process(&self) -> &Arc<Process> {
        &self.process
    }

    /// How long the session has been idle; none while a connection is open or a request is being
    /// answered.
    pub fn idle_for(&self) -> Option<Duration> {
        let state = self.state();
        let unread = |event_buffer: &Arc<EventBuffer>| !event_buffer.has_reader();
        let is_idle = state.active_requests == 0
            && unread(&self.standing_buffer)
            && state.event_buffers.values().all(unread);
        is_idle.then(|| {
            let since = state.last_used.elapsed();
            self.standing_buffer
                .unread_for()
                .map_or(since, |alone| alone.min(since))
        })
    }

    /// Marks the session as in use until the returned value is dropped.
    pub fn begin_use(self: &Arc<Self>) -> SessionUse {
        let mut state = self.state();
        state.active_requests += 1;
        state.last_used = Instant::now();
        drop(state);
        SessionUse(Arc::clone(self))
    }

    /// Removes the event buffer of a request whose response was delivered completely.
    pub fn remove_buffer(&self, number: u64) {
        self.state().event_buffers.remove(&number);
    }

    /// Removes event buffers that clients can no longer resume.
    pub fn remove_expired_buffers(&self) {
        self.state()
            .event_buffers
            .retain(|_, event_buffer| !event_buffer.is_expired());
    }

    /// Ends the session; open requests receive an error.
    pub fn end(&self) {
        self.stop.cancel();
        match &self.shared_process {
            Some(shared_process) => shared_process.leave(&self.id),
            None => self.process.stop(),
        }
        self.standing_buffer.close();
    }

    /// Sends a request to the server. The answer goes to the returned event buffer. Returns as soon
    /// as the request was sent or refused, or waits for the operator.
    pub async fn send_request(
        self: &Arc<Self>,
        message: RpcMessage,
        headers: CallHeaders,
    ) -> Result<PendingResponse, SessionError> {
        let request = self.register(&message)?;
        let (response, flag) = (request.response.clone(), HoldFlag::default());
        let mut sending = Box::pin(request.send(message, headers, flag.clone()));
        match until_held(sending.as_mut(), &flag).await {
            Some(sent) => sent?,
            // The client receives its stream while the request waits.
            None => drop(tokio::spawn(sending)),
        }
        Ok(response)
    }

    /// Registers a request under the client's id, before policies decide about it.
    fn register(self: &Arc<Self>, message: &RpcMessage) -> Result<ClientRequest, SessionError> {
        if self.has_ended() {
            return Err(SessionError::ProcessEnded(ProcessEnded { code: None }));
        }
        let id = message.id().unwrap_or("null");
        let call = self.process.reserve();
        let mut state = self.state();
        state.last_used = Instant::now();
        if state.open_requests.len() >= MAX_OPEN_REQUESTS {
            return Err(SessionError::TooManyRequests);
        }
        if state.open_requests.values().any(|open| open.id == id) {
            return Err(SessionError::DuplicateId);
        }
        let response = self.create_buffer(&mut state);
        let cancelled = CancellationToken::new();
        let open = OpenRequest {
            id: id.to_owned(),
            event_buffer: Arc::clone(&response.event_buffer),
            progress_token: None,
            is_sent: false,
            number: response.number,
            cancelled: cancelled.clone(),
        };
        state.open_requests.insert(call.id(), open);
        drop(state);
        Ok(ClientRequest {
            session: Arc::clone(self),
            call,
            response,
            cancelled,
        })
    }

    /// Records a subscription. A shared server sends the notifications of all clients to the
    /// bridge, which routes them by these subscriptions.
    fn record_subscription(&self, state: &mut SessionState, permitted: &PermittedCall) {
        let uri = || permitted.message.param_text(&["uri"]);
        match (permitted.method.as_str(), uri) {
            ("resources/subscribe", uri) if state.subscriptions.len() < MAX_SUBSCRIPTIONS => {
                state.subscriptions.extend(uri());
            }
            ("resources/unsubscribe", uri) => {
                if let Some(uri) = uri() {
                    state.subscriptions.remove(&uri);
                }
            }
            _ => {}
        }
    }

    /// Sends the server a cancellation of the call.
    async fn cancel_call(&self, call: u64, reason: &str) {
        let params = serde_json::json!({"requestId": call, "reason": reason});
        let text = RpcMessage::notification("notifications/cancelled", &params.to_string());
        self.process.send_best_effort(&text).await;
    }

    /// Stores the negotiated revision of an `initialize` answer.
    fn store_version(&self, answer: &str) {
        let Ok(answer) = RpcMessage::read(answer.to_owned()) else {
            return;
        };
        let Some(result) = answer.result() else {
            return;
        };
        let range = crate::rpc::find(result, 0..result.len(), &["protocolVersion"]);
        let version = range.and_then(|range| serde_json::from_str(result.get(range)?).ok());
        if version.is_some() {
            self.server.record_start_success();
        }
        self.state().version = version;
    }

    /// Sends a notification or an answer of the client to the server.
    pub async fn send_message(&self, message: RpcMessage) -> Result<(), SessionError> {
        self.state().last_used = Instant::now();
        match message.kind() {
            RpcKind::Response => {
                let question = message.id().map(str::to_owned);
                let question = question.and_then(|id| self.state().questions.remove(&id));
                if question.is_none() {
                    let tool = self.server.name();
                    tracing::debug!(%tool, "mcp client answer dropped: the tool sent no such request");
                    return Ok(());
                }
                self.process.send(message.text()).await?;
            }
            // A server may execute a call without an id, which would bypass the policies.
            RpcKind::Notification | RpcKind::Request if !is_notification(&message) => {
                return Err(SessionError::NotNotification);
            }
            RpcKind::Notification | RpcKind::Request => {
                let text = match message.method() {
                    Some("notifications/cancelled") => match self.cancel(&message) {
                        Some(text) => text,
                        None => return Ok(()),
                    },
                    // A shared server was initialized once, for all sessions.
                    Some("notifications/initialized" | "notifications/roots/list_changed")
                        if self.shared_process.is_some() =>
                    {
                        return Ok(());
                    }
                    _ => message.into_text(),
                };
                self.process.send(&text).await?;
            }
        }
        Ok(())
    }

    /// Cancels an open request. Returns the cancellation with the server's id; none if the request
    /// is not open or the server has not received it.
    fn cancel(&self, message: &RpcMessage) -> Option<String> {
        let wanted = message.param(&["requestId"])?;
        let state = self.state();
        let mut all = state.open_requests.iter();
        let (own, open) = all.find(|(_, open)| open.id == wanted)?;
        open.cancelled.cancel();
        let own = open.is_sent.then(|| own.to_string())?;
        Some(message.with_param(&["requestId"], &own))
    }

    /// Creates the event buffer for the response to a request.
    fn create_buffer(&self, state: &mut SessionState) -> PendingResponse {
        if self.transport == SessionTransport::HttpSse {
            // An answer must not end the standing event buffer.
            return PendingResponse {
                event_buffer: self.forwarding_buffer(),
                number: STANDING_BUFFER,
            };
        }
        state.evict_buffers();
        state.last_buffer += 1;
        let number = state.last_buffer;
        let event_buffer = Arc::new(EventBuffer::default());
        state
            .event_buffers
            .insert(number, Arc::clone(&event_buffer));
        PendingResponse {
            event_buffer,
            number,
        }
    }

    /// An event buffer whose messages are forwarded to the standing one.
    fn forwarding_buffer(&self) -> Arc<EventBuffer> {
        let event_buffer = Arc::new(EventBuffer::default());
        let (mut reader, standing) = (
            event_buffer.open_reader(0),
            Arc::clone(&self.standing_buffer),
        );
        tokio::spawn(async move {
            loop {
                match reader.next(Duration::from_secs(3600)).await {
                    crate::event_buffer::ReadOutcome::Message(message) => {
                        standing.push(message.text.to_string()).await;
                    }
                    crate::event_buffer::ReadOutcome::TimedOut => {}
                    crate::event_buffer::ReadOutcome::Closed => return,
                }
            }
        });
        event_buffer
    }

    fn state(&self) -> MutexGuard<'_, SessionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a message is a notification, which no server executes as a call.
fn is_notification(message: &RpcMessage) -> bool {
    let method = message.method().unwrap_or_default();
    message.kind() == RpcKind::Notification && method.starts_with("notifications/")
}

/// Marks a session as in use; see [`Session::begin_use`].
#[derive(Debug)]
pub struct SessionUse(Arc<Session>);

impl Drop for SessionUse {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.active_requests = state.active_requests.saturating_sub(1);
        state.last_used = Instant::now();
    }
}
