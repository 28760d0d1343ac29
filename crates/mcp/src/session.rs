//! One client's conversation with one server, in the revisions that have sessions.
//!
//! ```text
//!            initialize
//!   (none) ─────────────▶ open ──── DELETE, idle too long, the tool goes,
//!                          │        the server ends ──────────────────────▶ over
//!                          └─ connections come and go; what is said meanwhile waits
//! ```
//!
//! Every request has an event buffer of its own, the stream of its POST; what belongs to none
//! goes to the standing event buffer, which a GET reads. A message goes to one of them and to no
//! other: the event buffer of the request it names, of the only request that is open, the standing
//! one where somebody reads it, the newest request's.

mod client_request;
mod hearing;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::client_request::ClientRequest;
use crate::call_headers::CallHeaders;
use crate::caller::Caller;
use crate::event_buffer::EventBuffer;
use crate::hold_terms::{HoldFlag, until_held};
use crate::launch::{LaunchError, Launched};
use crate::process::{Gone, Process, SendError};
use crate::relay::{Permitted, Relay};
use crate::rpc::{Kind, Message};
use crate::session_state::{OpenRequest, SessionState};
use crate::shared::SharedProcess;
use crate::tools::Served;

/// The most requests of one session that are open at a time.
const MOST_OPEN: usize = 128;

/// The most questions of a server that wait for an answer.
const MOST_QUESTIONS: usize = 64;

/// The most resources that one client has news of.
const MOST_SUBSCRIBED: usize = 1000;

/// The number of the standing event buffer.
pub const STANDING: u64 = 0;

/// How a client hears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Streamable HTTP: each POST has a stream.
    Streamable,
    /// The HTTP+SSE of 2024-11-05: one stream for everything.
    OneStream,
}

/// Why a session takes no message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// Its server ended.
    #[error("{0}")]
    Gone(#[from] Gone),
    /// Its server could not be written to.
    #[error("{0}")]
    Write(String),
    /// It has too much to do.
    #[error("more than {MOST_OPEN} requests of this session are open")]
    Busy,
    /// It has no id, and is no notification.
    #[error("a request needs an id")]
    NoNotice,
    /// There are too many sessions.
    #[error("too many sessions are open")]
    Full,
    /// The id is taken.
    #[error("a request with this id is open")]
    Twice,
    /// Its server was not started.
    #[error("{0}")]
    Launch(#[from] LaunchError),
}

impl From<SendError> for SessionError {
    fn from(error: SendError) -> Self {
        match error {
            SendError::Gone(gone) => SessionError::Gone(gone),
            SendError::Write(_) => SessionError::Write(error.to_string()),
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Session {
    id: String,
    served: Arc<Served>,
    caller: Caller,
    way: Way,
    relay: Relay,
    process: Arc<Process>,
    /// Set where others talk to the same process.
    shared_process: Option<Arc<SharedProcess>>,
    standing: Arc<EventBuffer>,
    state: Arc<Mutex<SessionState>>,
    stop: CancellationToken,
    me: Weak<Session>,
}

/// How a session comes to its server.
enum Start {
    Launched(Launched),
    Joined(Arc<Process>),
}

/// Where the answer to a request will be.
#[derive(Clone, Debug)]
pub struct Expected {
    /// The event buffer.
    pub event_buffer: Arc<EventBuffer>,
    /// Its number in the session.
    pub number: u64,
}

impl Session {
    /// Starts a server for `caller`, or joins those who share one.
    pub async fn open(
        id: String,
        served: Arc<Served>,
        caller: Caller,
        way: Way,
        relay: Relay,
        shared_process: Option<Arc<SharedProcess>>,
    ) -> Result<Arc<Self>, SessionError> {
        let stop = served.stop().child_token();
        let metrics = relay.governance.metrics().clone();
        let start = match &shared_process {
            Some(shared_process) => {
                Start::Joined(shared_process.process(&served, &caller, &metrics).await?)
            }
            None => Start::Launched(served.launch(&caller).await?),
        };
        let session = Arc::new_cyclic(|me: &Weak<Session>| {
            let process = match start {
                Start::Launched(launched) => {
                    let home = Arc::new(hearing::SessionHome(me.clone()));
                    served.keep(launched, home, &metrics)
                }
                Start::Joined(process) => process,
            };
            Self {
                id,
                served,
                caller,
                way,
                relay,
                process,
                shared_process,
                standing: Arc::default(),
                state: Arc::new(Mutex::new(SessionState {
                    version: None,
                    start_failed: false,
                    open: HashMap::new(),
                    event_buffers: HashMap::new(),
                    last_outlet: STANDING,
                    questions: HashMap::new(),
                    undecided: HashMap::new(),
                    subscribed: HashSet::new(),
                    touched: Instant::now(),
                    busy: 0,
                })),
                stop,
                me: me.clone(),
            }
        });
        if let Some(shared_process) = &session.shared_process {
            let home = Arc::new(hearing::SessionHome(session.me.clone()));
            shared_process.join(&session.id, &session.state, home);
        }
        tokio::spawn(Self::watch(Arc::downgrade(&session)));
        Ok(session)
    }

    /// Ends the session with its server, and the server with its session.
    async fn watch(me: Weak<Self>) {
        let Some((process, stop)) = me
            .upgrade()
            .map(|session| (Arc::clone(&session.process), session.stop.clone()))
        else {
            return;
        };
        let gone = tokio::select! {
            gone = process.ended() => Some(gone),
            () = stop.cancelled() => None,
        };
        if let Some(session) = me.upgrade() {
            // One that was stopped has not failed.
            if let Some(gone) = gone.filter(|_| !stop.is_cancelled()) {
                session.report_failed_start(&gone.to_string());
            }
            session.end();
        } else {
            stop.cancel();
        }
    }

    /// Reports, once, that its server did not come to introduce itself. Nothing where it did.
    pub fn report_failed_start(&self, error: &str) {
        let mut state = self.state();
        if state.version.is_some() || std::mem::replace(&mut state.start_failed, true) {
            return;
        }
        drop(state);
        self.served.failed(error);
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Whose it is.
    pub fn caller(&self) -> &Caller {
        &self.caller
    }

    /// The server.
    pub fn served(&self) -> &Arc<Served> {
        &self.served
    }

    /// How its client hears.
    pub fn way(&self) -> Way {
        self.way
    }

    /// What is said beside the answers.
    pub fn standing(&self) -> &Arc<EventBuffer> {
        &self.standing
    }

    /// The event buffer of that number.
    pub fn event_buffer(&self, number: u64) -> Option<Arc<EventBuffer>> {
        if number == STANDING {
            return Some(Arc::clone(&self.standing));
        }
        self.state().event_buffers.get(&number).cloned()
    }

    /// The revision both sides agreed on, once they have.
    pub fn version(&self) -> Option<String> {
        self.state().version.clone()
    }

    /// Whether it is over.
    pub fn is_over(&self) -> bool {
        self.stop.is_cancelled() || !self.process.is_alive()
    }

    /// Its process.
    pub fn process(&self) -> &Arc<Process> {
        &self.process
    }

    /// For how long nobody has been there; none while somebody is, or an answer is due.
    pub fn idle_for(&self) -> Option<Duration> {
        let state = self.state();
        let unread = |event_buffer: &Arc<EventBuffer>| !event_buffer.is_read();
        let alone =
            state.busy == 0 && unread(&self.standing) && state.event_buffers.values().all(unread);
        alone.then(|| {
            let since = state.touched.elapsed();
            self.standing
                .alone_for()
                .map_or(since, |alone| alone.min(since))
        })
    }

    /// Somebody is there until this is dropped.
    pub fn attend(self: &Arc<Self>) -> Attendance {
        let mut state = self.state();
        state.busy += 1;
        state.touched = Instant::now();
        drop(state);
        Attendance(Arc::clone(self))
    }

    /// Forgets the event buffer of a request that was answered whole.
    pub fn forget(&self, number: u64) {
        self.state().event_buffers.remove(&number);
    }

    /// Forgets what nobody will ask for any more.
    pub fn tidy(&self) {
        self.state()
            .event_buffers
            .retain(|_, event_buffer| !event_buffer.is_spent());
    }

    /// Ends it. Whoever waits hears so.
    pub fn end(&self) {
        self.stop.cancel();
        match &self.shared_process {
            Some(shared_process) => shared_process.leave(&self.id),
            None => self.process.stop(),
        }
        self.standing.close();
    }

    /// Takes a request to the server. The answer comes to the event buffer. Returns as soon as the
    /// request was sent or refused, or waits for an operator's answer.
    pub async fn ask(
        self: &Arc<Self>,
        message: Message,
        headers: CallHeaders,
    ) -> Result<Expected, SessionError> {
        let request = self.register(&message)?;
        let (expected, flag) = (request.expected.clone(), HoldFlag::default());
        let mut sending = Box::pin(request.send(message, headers, flag.clone()));
        match until_held(sending.as_mut(), &flag).await {
            Some(sent) => sent?,
            // The client gets its stream meanwhile.
            None => drop(tokio::spawn(sending)),
        }
        Ok(expected)
    }

    /// Registers a request under the client's id, before anything is decided about it.
    fn register(self: &Arc<Self>, message: &Message) -> Result<ClientRequest, SessionError> {
        if self.is_over() {
            return Err(SessionError::Gone(Gone { code: None }));
        }
        let id = message.id().unwrap_or("null");
        let call = self.process.reserve();
        let mut state = self.state();
        state.touched = Instant::now();
        if state.open.len() >= MOST_OPEN {
            return Err(SessionError::Busy);
        }
        if state.open.values().any(|open| open.id == id) {
            return Err(SessionError::Twice);
        }
        let expected = self.expect(&mut state);
        let cancelled = CancellationToken::new();
        let open = OpenRequest {
            id: id.to_owned(),
            event_buffer: Arc::clone(&expected.event_buffer),
            token: None,
            is_sent: false,
            number: expected.number,
            cancelled: cancelled.clone(),
        };
        state.open.insert(call.id(), open);
        drop(state);
        Ok(ClientRequest {
            session: Arc::clone(self),
            call,
            expected,
            cancelled,
        })
    }

    /// Where a server is shared it tells everybody's news to the bridge, which has to know
    /// who wants them.
    fn note_subscription(&self, state: &mut SessionState, permitted: &Permitted) {
        let uri = || permitted.message.param_text(&["uri"]);
        match (permitted.method.as_str(), uri) {
            ("resources/subscribe", uri) if state.subscribed.len() < MOST_SUBSCRIBED => {
                state.subscribed.extend(uri());
            }
            ("resources/unsubscribe", uri) => {
                if let Some(uri) = uri() {
                    state.subscribed.remove(&uri);
                }
            }
            _ => {}
        }
    }

    /// Tells the server that nobody wants the answer any more.
    async fn give_up(&self, call: u64, reason: &str) {
        let params = serde_json::json!({"requestId": call, "reason": reason});
        let text = Message::notification("notifications/cancelled", &params.to_string());
        self.process.offer(&text).await;
    }

    fn note_version(&self, answer: &str) {
        let Ok(answer) = Message::read(answer.to_owned()) else {
            return;
        };
        let Some(result) = answer.result() else {
            return;
        };
        let place = crate::rpc::find(result, 0..result.len(), &["protocolVersion"]);
        let version = place.and_then(|place| serde_json::from_str(result.get(place)?).ok());
        if version.is_some() {
            self.served.worked();
        }
        self.state().version = version;
    }

    /// Takes a notification or an answer of the client to the server.
    pub async fn tell(&self, message: Message) -> Result<(), SessionError> {
        self.state().touched = Instant::now();
        match message.kind() {
            Kind::Response => {
                let asked = message.id().map(str::to_owned);
                let asked = asked.and_then(|id| self.state().questions.remove(&id));
                if asked.is_none() {
                    tracing::debug!(tool = %self.served.name(), "an answer to no question was dropped");
                    return Ok(());
                }
                self.process.send(message.text()).await?;
            }
            // Without an id a call would be made all the same, and nobody would judge it.
            Kind::Notification | Kind::Request if !is_notice(&message) => {
                return Err(SessionError::NoNotice);
            }
            Kind::Notification | Kind::Request => {
                let text = match message.method() {
                    Some("notifications/cancelled") => match self.cancel(&message) {
                        Some(text) => text,
                        None => return Ok(()),
                    },
                    // Those who share a server were introduced once.
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

    /// A client's wish to cancel, with the id that the server knows; none where the server does
    /// not know the request. A request that is not open cannot be cancelled.
    fn cancel(&self, message: &Message) -> Option<String> {
        let wanted = message.param(&["requestId"])?;
        let state = self.state();
        let mut all = state.open.iter();
        let (own, open) = all.find(|(_, open)| open.id == wanted)?;
        open.cancelled.cancel();
        let own = open.is_sent.then(|| own.to_string())?;
        Some(message.with_param(&["requestId"], &own))
    }

    /// A place for the answer to a request.
    fn expect(&self, state: &mut SessionState) -> Expected {
        if self.way == Way::OneStream {
            // The standing event buffer never ends with an answer.
            return Expected {
                event_buffer: self.forwarding(),
                number: STANDING,
            };
        }
        state.make_room();
        state.last_outlet += 1;
        let number = state.last_outlet;
        let event_buffer = Arc::new(EventBuffer::default());
        state
            .event_buffers
            .insert(number, Arc::clone(&event_buffer));
        Expected {
            event_buffer,
            number,
        }
    }

    /// An event buffer whose messages come out of the standing one.
    fn forwarding(&self) -> Arc<EventBuffer> {
        let event_buffer = Arc::new(EventBuffer::default());
        let (mut reader, standing) = (event_buffer.read(0), Arc::clone(&self.standing));
        tokio::spawn(async move {
            loop {
                match reader.next(Duration::from_secs(3600)).await {
                    crate::event_buffer::Heard::Said(said) => {
                        standing.push(said.text.to_string()).await;
                    }
                    crate::event_buffer::Heard::Nothing => {}
                    crate::event_buffer::Heard::Over => return,
                }
            }
        });
        event_buffer
    }

    fn state(&self) -> MutexGuard<'_, SessionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a server does nothing on hearing it.
fn is_notice(message: &Message) -> bool {
    let method = message.method().unwrap_or_default();
    message.kind() == Kind::Notification && method.starts_with("notifications/")
}

/// Somebody is there.
#[derive(Debug)]
pub struct Attendance(Arc<Session>);

impl Drop for Attendance {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.busy = state.busy.saturating_sub(1);
        state.touched = Instant::now();
    }
}
