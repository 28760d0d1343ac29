//! One call of a client, driven to its end or to the next question.
//!
//! ```text
//!              ┌── notification ──▶ the client's stream
//!   running ───┼── question ──▶ answered in advance, or gathered ──▶ held ── answers ─┐
//!      ▲       └── answer ──▶ over                                     │ too long     │
//!      │                                                               ▼              │
//!      └───────────────────────────────────────────────────────────────(abandoned)────┘
//! ```
//!
//! While an operator is asked about a question of the server, the call goes on; while an
//! operator is asked about the answer, the call has no process any more.

mod questions;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::Instant;

use self::questions::{DecidedQuestion, Undecided};
use super::request::{Refused, Request};
use super::service::SessionlessService;
use super::words::{in_old_words, read_given, retold};
use crate::call_headers::CallHeaders;
use crate::caller::same;
use crate::hold_terms::{CallApprovals, HoldEnd, HoldFlag, HoldTerms, until_held};
use crate::metrics::Status;
use crate::pool::{Client, Lease};
use crate::process::{Call, Gone, SendError};
use crate::relay::{self, Permitted};
use crate::rpc::{self, Kind, Message, code};
use crate::tools::Served;

/// How long after a question others may come that belong to the same answer.
const GATHERED: Duration = Duration::from_millis(20);

/// How long a call waits for the answers.
const HELD_FOR: Duration = Duration::from_secs(300);

/// The most calls of one caller that wait.
const MOST_HELD: usize = 64;

/// Where a client says under which name it wants to hear of progress.
const TOKEN: [&str; 2] = ["_meta", "progressToken"];

/// Levels of the server's log, the quietest first (RFC 5424, 6.2.1).
const LEVELS: [&str; 8] = [
    "emergency",
    "alert",
    "critical",
    "error",
    "warning",
    "notice",
    "info",
    "debug",
];

/// What a client hears of a call.
#[derive(Debug)]
pub(super) enum Out {
    /// Something on the way.
    Said(String),
    /// The end.
    Final(String),
    /// The call cannot be made.
    Refused(Refused),
}

/// A call that waits for answers.
#[derive(Debug)]
pub(super) struct Held {
    drive: Drive,
    expires: Instant,
}

impl Held {
    /// When it is given up.
    pub(super) fn expires(&self) -> Instant {
        self.expires
    }

    /// Whether `message` of `client` continues it: it is the same caller's, and about the same.
    fn is_continued_by(&self, served: &Arc<Served>, client: &Client, message: &Message) -> bool {
        let drive = &self.drive;
        let about = |message: &Message| {
            let name = message.param_text(&["name"]);
            (name, message.param_text(&["uri"]))
        };
        Arc::ptr_eq(&drive.served, served)
            && same(&drive.client.caller, &client.caller)
            && message.method() == Some(&drive.permitted.method)
            && about(&drive.permitted.message) == about(message)
            && self.expires > Instant::now()
    }

    /// Gives it up.
    pub(super) fn abandon(self, status: Status) {
        let mut drive = self.drive;
        tokio::spawn(async move { drive.abandon("nobody answered", status).await });
    }
}

#[derive(Debug)]
struct Question {
    key: String,
    id: String,
    method: String,
    params: String,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Drive {
    service: Arc<SessionlessService>,
    served: Arc<Served>,
    client: Client,
    permitted: Permitted,
    call: Call,
    lease: Lease,
    log_level: Option<String>,
    /// The token for progress that the server was given. The client may give another one with
    /// every answer.
    token: Option<String>,
    /// Answers that came before their questions.
    given: BTreeMap<String, String>,
    questions: Vec<Question>,
    /// Questions about which an operator is asked.
    undecided: Undecided,
    asked: usize,
}

impl Drive {
    /// Begins a call, or goes on with the one that the request names. The inner error is an
    /// answer that says no. `flag` is set while the call waits for an operator's answer; dropping
    /// this ends the wait.
    pub(super) async fn begin_or_resume(
        service: Arc<SessionlessService>,
        served: Arc<Served>,
        client: Client,
        request: Request,
        headers: CallHeaders,
        flag: HoldFlag,
    ) -> Result<Result<Self, String>, Refused> {
        let given = read_given(&request.message)?;
        let state = match request.message.param(&["requestState"]) {
            None => None,
            Some(_) => match request.message.param_text(&["requestState"]) {
                Some(state) => Some(state),
                None => return Err(Refused::params("Invalid requestState")),
            },
        };
        let (message, log_level) = (request.message, request.log_level);
        let state = state.as_deref();
        // What an operator approved of the call is not asked again when it goes on.
        let continued =
            state.and_then(|state| find_approvals(&service, &served, &client, &message, state));
        let terms = HoldTerms {
            ends: &[(HoldEnd::Tool, served.stop())],
            flag: Some(&flag),
            continued: continued.as_ref(),
            ..HoldTerms::default()
        };
        // The answers are the client's words to the server, so they are judged as the call.
        let (relay, caller) = (service.relay(), &client.caller);
        let permitted = relay.permit(&served, caller, message, &headers, &terms);
        let permitted = match permitted.await {
            Ok(permitted) => permitted,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let Some(state) = state else {
            let drive = Self::begin(&service, &served, client, permitted, log_level, given).await?;
            return Ok(Ok(drive));
        };
        let mut drive = take_held(&service, &served, &client, &permitted, state)?;
        drive.permitted = permitted;
        drive.log_level = log_level;
        drive.given.extend(given);
        drive.answer_questions().await?;
        Ok(Ok(drive))
    }

    async fn begin(
        service: &Arc<SessionlessService>,
        served: &Arc<Served>,
        client: Client,
        permitted: Permitted,
        log_level: Option<String>,
        given: BTreeMap<String, String>,
    ) -> Result<Self, Refused> {
        let metrics = service.relay().governance.metrics();
        let lease = service.pools().lease(served, &client, metrics).await?;
        let process = Arc::clone(lease.process());
        if let Some(level) = log_level.as_deref().filter(|level| LEVELS.contains(level)) {
            let setting = process.reserve();
            let params = json!({ "level": level }).to_string();
            let text = Message::request(&setting.id().to_string(), "logging/setLevel", &params);
            process.offer(&text).await;
        }
        let call = process.reserve();
        let text = in_old_words(&permitted.message, &call.id().to_string())?;
        let token = permitted.message.param(&TOKEN).map(str::to_owned);
        let drive = Self {
            service: Arc::clone(service),
            served: Arc::clone(served),
            client,
            permitted,
            call,
            lease,
            log_level,
            token,
            given,
            questions: Vec::new(),
            undecided: Undecided::default(),
            asked: 0,
        };
        match process.send(&text).await {
            // If it is gone, the answer says so.
            Ok(()) | Err(SendError::Gone(_)) => Ok(drive),
            Err(error @ SendError::Write(_)) => {
                drive.note_unanswered(Status::Error);
                Err(Refused::unwritten(&error))
            }
        }
    }

    /// Goes on until there is an answer, or questions that the client has to answer.
    pub(super) async fn run(mut self, client: mpsc::Sender<Out>) {
        let deadline = Instant::now() + self.served.timeout();
        let mut quiet_since = Instant::now();
        loop {
            let has_undecided = !self.undecided.is_empty();
            let is_asking = !self.questions.is_empty() && !has_undecided;
            let step = tokio::select! {
                biased;
                said = self.lease.hear() => Step::Said(said),
                answer = self.call.answer() => Step::Answer(answer),
                decided = self.undecided.next(), if has_undecided => Step::Decided(decided),
                () = client.closed() => Step::Left,
                () = tokio::time::sleep_until(quiet_since + GATHERED), if is_asking => Step::Quiet,
                () = tokio::time::sleep_until(deadline) => Step::TooLong,
            };
            let end = match step {
                Step::Said(Some(message)) => {
                    quiet_since = Instant::now();
                    self.heard(message, &client).await
                }
                Step::Said(None) => return self.finish(Err(Gone { code: None }), client).await,
                Step::Answer(answer) => {
                    self.hear_rest(&client).await;
                    return self.finish(answer, client).await;
                }
                Step::Decided(None) => None,
                Step::Decided(Some(decided)) => {
                    quiet_since = Instant::now();
                    self.ask(decided).await
                }
                Step::Left => {
                    self.abandon("the client left", Status::Cancelled).await;
                    return;
                }
                Step::TooLong => {
                    self.abandon("the call took too long", Status::Timeout)
                        .await;
                    let text = format!("the call took longer than {:?}", self.served.timeout());
                    Some(Message::failure(self.id(), code::GONE, &text, None))
                }
                Step::Quiet => {
                    self.hold(&client).await;
                    return;
                }
            };
            if let Some(text) = end {
                drop(client.send(Out::Final(text)).await);
                return;
            }
        }
    }

    fn id(&self) -> &str {
        self.permitted.message.id().unwrap_or("null")
    }

    /// What the server says by itself. An answer to the call where that ends it.
    async fn heard(&mut self, message: Message, client: &mpsc::Sender<Out>) -> Option<String> {
        if message.kind() == Kind::Request {
            return self.question(message).await;
        }
        match message.method().unwrap_or_default() {
            "notifications/message" if !self.is_wanted(&message) => {}
            "notifications/cancelled" => {
                let gone = message.param(&["requestId"]).unwrap_or_default();
                self.questions.retain(|question| question.id != gone);
                self.undecided.withdraw(gone);
            }
            "notifications/progress" => {
                let now = self.permitted.message.param(&TOKEN);
                if let Some(text) = retold(&message, self.token.as_deref(), now) {
                    drop(client.send(Out::Said(text)).await);
                }
            }
            // A client that left is noticed by the one who waits for it.
            _ => drop(client.send(Out::Said(message.into_text())).await),
        }
        None
    }

    /// Whether the client wants to hear what is logged.
    fn is_wanted(&self, message: &Message) -> bool {
        let place = |level: &str| LEVELS.iter().position(|known| *known == level);
        let wanted = self.log_level.as_deref().and_then(place);
        let said = message.param_text(&["level"]);
        let said = said.as_deref().and_then(place);
        wanted.is_some_and(|wanted| said.is_some_and(|said| said <= wanted))
    }

    /// Tells the client what the server wants to know, and waits for it to come back.
    async fn hold(self, client: &mpsc::Sender<Out>) {
        let mut requests = String::new();
        for question in &self.questions {
            if !requests.is_empty() {
                requests.push(',');
            }
            let (key, method) = (rpc::quote(&question.key), rpc::quote(&question.method));
            let params = &question.params;
            requests.push_str(&format!(r#"{key}:{{"method":{method},"params":{params}}}"#));
        }
        let state = relay::hex(relay::random::<32>());
        let result = format!(
            r#"{{"resultType":"input_required","inputRequests":{{{requests}}},"requestState":"{state}"}}"#
        );
        let text = Message::answer(self.id(), &result);
        let service = Arc::clone(&self.service);
        let evicted = {
            let mut held = service.held();
            let own = |one: &Held| same(&one.drive.client.caller, &self.client.caller);
            let of_one = held.values().filter(|one| own(one)).count();
            let oldest = held
                .iter()
                .filter(|(_, one)| own(one))
                .min_by_key(|(_, one)| one.expires);
            let oldest = oldest
                .map(|(name, _)| name.clone())
                .filter(|_| of_one >= MOST_HELD);
            let evicted = oldest.and_then(|name| held.remove(&name));
            let expires = Instant::now() + HELD_FOR;
            let one = Held {
                drive: self,
                expires,
            };
            held.insert(state, one);
            evicted
        };
        if let Some(evicted) = evicted {
            evicted.abandon(Status::Cancelled);
        }
        drop(client.send(Out::Final(text)).await);
    }

    /// Passes on what was said before the end.
    async fn hear_rest(&mut self, client: &mpsc::Sender<Out>) {
        while let Some(message) = self.lease.hear_now() {
            if message.kind() == Kind::Notification {
                drop(self.heard(message, client).await);
            }
        }
    }

    /// Delivers the answer. A client that leaves while an operator is asked about the answer ends
    /// the wait.
    async fn finish(self, answer: Result<Message, Gone>, client: mpsc::Sender<Out>) {
        let Self {
            service,
            served,
            client: Client { caller, .. },
            permitted,
            call,
            mut lease,
            questions,
            undecided,
            ..
        } = self;
        if !questions.is_empty() || !undecided.is_empty() {
            // It answered without waiting for what it asked.
            lease.spoil();
        }
        // An answer that waits occupies no process.
        drop((undecided, call, lease));
        let flag = HoldFlag::default();
        let terms = HoldTerms {
            ends: &[(HoldEnd::Tool, served.stop())],
            flag: Some(&flag),
            ..HoldTerms::default()
        };
        let relay = service.relay();
        let mut delivering =
            std::pin::pin!(relay.deliver(&served, &caller, &permitted, answer, &terms));
        let text = match until_held(delivering.as_mut(), &flag).await {
            Some(text) => text,
            None => tokio::select! {
                text = delivering => text,
                () = client.closed() => return,
            },
        };
        drop(client.send(Out::Final(text)).await);
    }

    /// Counts a call that ends without an answer of the server.
    fn note_unanswered(&self, status: Status) {
        let (relay, caller) = (self.service.relay(), &self.client.caller);
        relay.note_unanswered(&self.served, caller, &self.permitted, status);
    }

    /// Gives the call up. The process is not used again.
    async fn abandon(&mut self, why: &str, status: Status) {
        self.note_unanswered(status);
        self.lease.spoil();
        for question in std::mem::take(&mut self.questions) {
            self.refuse_question(&question.id, code::INTERNAL, why)
                .await;
        }
        let params = json!({"requestId": self.call.id(), "reason": why}).to_string();
        let text = Message::notification("notifications/cancelled", &params);
        self.lease.process().offer(&text).await;
    }
}

enum Step {
    Said(Option<Message>),
    Answer(Result<Message, Gone>),
    Decided(Option<DecidedQuestion>),
    Left,
    Quiet,
    TooLong,
}

/// The call that waits under `state`, if it is this caller's and is about the same.
fn take_held(
    service: &Arc<SessionlessService>,
    served: &Arc<Served>,
    client: &Client,
    permitted: &Permitted,
    state: &str,
) -> Result<Drive, Refused> {
    let mut held = service.held();
    let fits = held
        .get(state)
        .is_some_and(|held| held.is_continued_by(served, client, &permitted.message));
    let found = if fits { held.remove(state) } else { None };
    found
        .map(|held| held.drive)
        .ok_or_else(|| Refused::params("Invalid or expired requestState"))
}

/// What an operator approved of the call that waits under `state`, if `message` continues it.
fn find_approvals(
    service: &Arc<SessionlessService>,
    served: &Arc<Served>,
    client: &Client,
    message: &Message,
    state: &str,
) -> Option<CallApprovals> {
    let held = service.held();
    let held = held.get(state)?;
    let fits = held.is_continued_by(served, client, message);
    fits.then(|| held.drive.permitted.approvals().clone())
}
