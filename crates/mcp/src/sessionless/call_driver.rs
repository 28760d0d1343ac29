//! Runs one call until its answer, or until the server's requests need answers of the client.
//!
//! A *question* is a request of the server to the client.
//!
//! ```text
//!              ┌── notification ──▶ the client's stream
//!   running ───┼── question ──▶ answered in advance, or gathered ──▶ held ── answers ─┐
//!      ▲       └── answer ──▶ ended                                    │ expired      │
//!      │                                                               ▼              │
//!      └───────────────────────────────────────────────────────────────(abandoned)────┘
//! ```
//!
//! While the operator decides about a question, the call continues. While the operator decides
//! about the answer, the call leases no process.

mod questions;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::Instant;

use self::questions::{DecidedQuestion, UndecidedQuestions};
use super::request::{Request, RequestError};
use super::service::SessionlessService;
use super::translation::{read_input_responses, to_session_revision, with_client_token};
use crate::call_headers::CallHeaders;
use crate::caller::is_same_caller;
use crate::hold_terms::{CallApprovals, HoldEnd, HoldFlag, HoldTerms, until_held};
use crate::metrics::CallStatus;
use crate::pool::{Lease, PoolClient};
use crate::process::{PendingCall, ProcessEnded, SendError};
use crate::relay::{self, PermittedCall};
use crate::rpc::{self, RpcKind, RpcMessage, code};
use crate::tools::StdioServer;

/// How long further questions are gathered after a question, for one `input_required` result.
const QUESTION_GATHER_TIME: Duration = Duration::from_millis(20);

/// How long a held call waits for the client's answers.
const HELD_CALL_LIFETIME: Duration = Duration::from_secs(300);

/// Maximum number of held calls of one caller.
const MAX_HELD_CALLS: usize = 64;

/// Path of the client's progress token in the parameters.
const PROGRESS_TOKEN: [&str; 2] = ["_meta", "progressToken"];

/// Log levels, the most severe first (RFC 5424, 6.2.1).
const LOG_LEVELS: [&str; 8] = [
    "emergency",
    "alert",
    "critical",
    "error",
    "warning",
    "notice",
    "info",
    "debug",
];

/// A part of the response to a call.
#[derive(Debug)]
pub(super) enum CallEvent {
    /// A message of the server during the call.
    Message(String),
    /// The answer, which ends the response.
    Final(String),
    /// The call cannot be made.
    Refused(RequestError),
}

/// A call that waits for the client's answers.
#[derive(Debug)]
pub(super) struct HeldCall {
    driver: CallDriver,
    expires: Instant,
}

impl HeldCall {
    /// When the call is abandoned.
    pub(super) fn expires(&self) -> Instant {
        self.expires
    }

    /// Whether `message` of `client` continues this call: it has the same caller, method, and tool
    /// name or URI.
    fn is_continued_by(
        &self,
        server: &Arc<StdioServer>,
        client: &PoolClient,
        message: &RpcMessage,
    ) -> bool {
        let driver = &self.driver;
        let target = |message: &RpcMessage| {
            let name = message.param_text(&["name"]);
            (name, message.param_text(&["uri"]))
        };
        Arc::ptr_eq(&driver.server, server)
            && is_same_caller(&driver.client.caller, &client.caller)
            && message.method() == Some(&driver.permitted.method)
            && target(&driver.permitted.message) == target(message)
            && self.expires > Instant::now()
    }

    /// Abandons the call.
    pub(super) fn abandon(self, status: CallStatus) {
        let mut driver = self.driver;
        tokio::spawn(async move { driver.abandon("the client sent no answers", status).await });
    }
}

/// A request of the server that the client has to answer.
#[derive(Debug)]
struct Question {
    /// Key in `inputRequests` and `inputResponses`.
    key: String,
    /// The server's id of the request.
    id: String,
    method: String,
    params: String,
}

/// A running call, with the process that it leases and the server's open questions.
#[derive(Debug)]
pub(super) struct CallDriver {
    service: Arc<SessionlessService>,
    server: Arc<StdioServer>,
    client: PoolClient,
    permitted: PermittedCall,
    call: PendingCall,
    lease: Lease,
    log_level: Option<String>,
    /// The progress token that the server received. The client may send another one with its
    /// answers.
    server_token: Option<String>,
    /// The input responses of the client's requests, by the key of the question that each answers.
    /// Each is removed when it is sent to the server.
    responses: BTreeMap<String, String>,
    questions: Vec<Question>,
    /// Questions that wait for the operator.
    undecided: UndecidedQuestions,
    /// Number of questions so far.
    question_count: usize,
}

impl CallDriver {
    /// Starts a call, or resumes the held call that the request names. The inner error is the
    /// answer of a refused call. `flag` is set while the call waits for the operator; dropping this
    /// future ends the wait.
    pub(super) async fn begin_or_resume(
        service: Arc<SessionlessService>,
        server: Arc<StdioServer>,
        client: PoolClient,
        request: Request,
        headers: CallHeaders,
        flag: HoldFlag,
    ) -> Result<Result<Self, String>, RequestError> {
        let responses = read_input_responses(&request.message)?;
        let state = match request.message.param(&["requestState"]) {
            None => None,
            Some(_) => match request.message.param_text(&["requestState"]) {
                Some(state) => Some(state),
                None => return Err(RequestError::invalid_params("Invalid requestState")),
            },
        };
        let (message, log_level) = (request.message, request.log_level);
        let state = state.as_deref();
        // Approvals that the operator gave before the call was held stay valid.
        let call_approvals =
            state.and_then(|state| find_approvals(&service, &server, &client, &message, state));
        let terms = HoldTerms {
            ends: &[(HoldEnd::Tool, server.stop())],
            flag: Some(&flag),
            call_approvals: call_approvals.as_ref(),
            ..HoldTerms::default()
        };
        // Policies also decide about the answers, which are part of the message.
        let (relay, caller) = (service.relay(), &client.caller);
        let permitted = relay.permit(&server, caller, message, &headers, &terms);
        let permitted = match permitted.await {
            Ok(permitted) => permitted,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let Some(state) = state else {
            let driver =
                Self::begin(&service, &server, client, permitted, log_level, responses).await?;
            return Ok(Ok(driver));
        };
        let mut driver = take_held_call(&service, &server, &client, &permitted, state)?;
        driver.permitted = permitted;
        driver.log_level = log_level;
        driver.responses.extend(responses);
        driver.answer_questions().await?;
        Ok(Ok(driver))
    }

    async fn begin(
        service: &Arc<SessionlessService>,
        server: &Arc<StdioServer>,
        client: PoolClient,
        permitted: PermittedCall,
        log_level: Option<String>,
        responses: BTreeMap<String, String>,
    ) -> Result<Self, RequestError> {
        let metrics = service.relay().governance.metrics();
        let lease = service.pools().lease(server, &client, metrics).await?;
        let process = Arc::clone(lease.process());
        if let Some(level) = log_level
            .as_deref()
            .filter(|level| LOG_LEVELS.contains(level))
        {
            let setting = process.reserve();
            let params = json!({ "level": level }).to_string();
            let text = RpcMessage::request(&setting.id().to_string(), "logging/setLevel", &params);
            process.send_best_effort(&text).await;
        }
        let call = process.reserve();
        let text = to_session_revision(&permitted.message, &call.id().to_string())?;
        let server_token = permitted.message.param(&PROGRESS_TOKEN).map(str::to_owned);
        let driver = Self {
            service: Arc::clone(service),
            server: Arc::clone(server),
            client,
            permitted,
            call,
            lease,
            log_level,
            server_token,
            responses,
            questions: Vec::new(),
            undecided: UndecidedQuestions::default(),
            question_count: 0,
        };
        match process.send(&text).await {
            // If the process ended, `PendingCall::answer` reports it.
            Ok(()) | Err(SendError::ProcessEnded(_)) => Ok(driver),
            Err(error @ SendError::Write(_)) => {
                driver.record_unanswered(CallStatus::Error);
                Err(RequestError::write_failed(&error))
            }
        }
    }

    /// Runs the call until there is an answer, or questions that the client has to answer.
    pub(super) async fn run(mut self, client: mpsc::Sender<CallEvent>) {
        let deadline = Instant::now() + self.server.timeout();
        let mut last_message = Instant::now();
        loop {
            let has_undecided = !self.undecided.is_empty();
            let has_questions = !self.questions.is_empty() && !has_undecided;
            let step = tokio::select! {
                biased;
                message = self.lease.recv() => CallStep::Message(message),
                answer = self.call.answer() => CallStep::Answer(answer),
                decided = self.undecided.next(), if has_undecided => CallStep::Decided(decided),
                () = client.closed() => CallStep::ClientClosed,
                () = tokio::time::sleep_until(last_message + QUESTION_GATHER_TIME), if has_questions => {
                    CallStep::QuestionsGathered
                }
                () = tokio::time::sleep_until(deadline) => CallStep::TimedOut,
            };
            let end = match step {
                CallStep::Message(Some(message)) => {
                    last_message = Instant::now();
                    self.handle_message(message, &client).await
                }
                CallStep::Message(None) => {
                    return self.finish(Err(ProcessEnded { code: None }), client).await;
                }
                CallStep::Answer(answer) => {
                    self.forward_queued(&client).await;
                    return self.finish(answer, client).await;
                }
                CallStep::Decided(None) => None,
                CallStep::Decided(Some(decided)) => {
                    last_message = Instant::now();
                    self.add_question(decided).await
                }
                CallStep::ClientClosed => {
                    self.abandon("the client disconnected", CallStatus::Cancelled)
                        .await;
                    return;
                }
                CallStep::TimedOut => {
                    self.abandon("the call timed out", CallStatus::Timeout)
                        .await;
                    let text = format!("the call timed out after {:?}", self.server.timeout());
                    Some(RpcMessage::failure(
                        self.id(),
                        code::SERVER_ENDED,
                        &text,
                        None,
                    ))
                }
                CallStep::QuestionsGathered => {
                    self.hold(&client).await;
                    return;
                }
            };
            if let Some(text) = end {
                drop(client.send(CallEvent::Final(text)).await);
                return;
            }
        }
    }

    fn id(&self) -> &str {
        self.permitted.message.id().unwrap_or("null")
    }

    /// Handles a request or notification of the server. Returns the answer to the call if the
    /// message ends the call.
    async fn handle_message(
        &mut self,
        message: RpcMessage,
        client: &mpsc::Sender<CallEvent>,
    ) -> Option<String> {
        if message.kind() == RpcKind::Request {
            return self.decide_question(message).await;
        }
        match message.method().unwrap_or_default() {
            "notifications/message" if !self.is_at_wanted_level(&message) => {}
            "notifications/cancelled" => {
                let id = message.param(&["requestId"]).unwrap_or_default();
                self.questions.retain(|question| question.id != id);
                self.undecided.withdraw(id);
            }
            "notifications/progress" => {
                let client_token = self.permitted.message.param(&PROGRESS_TOKEN);
                if let Some(text) =
                    with_client_token(&message, self.server_token.as_deref(), client_token)
                {
                    drop(client.send(CallEvent::Message(text)).await);
                }
            }
            // `run` notices a client that has disconnected.
            _ => drop(client.send(CallEvent::Message(message.into_text())).await),
        }
        None
    }

    /// Whether a log message has at least the level that the client wants.
    fn is_at_wanted_level(&self, message: &RpcMessage) -> bool {
        let rank = |level: &str| LOG_LEVELS.iter().position(|known| *known == level);
        let wanted = self.log_level.as_deref().and_then(rank);
        let level = message.param_text(&["level"]);
        let level = level.as_deref().and_then(rank);
        wanted.is_some_and(|wanted| level.is_some_and(|level| level <= wanted))
    }

    /// Answers the client with the questions, and holds the call until the client sends answers.
    async fn hold(self, client: &mpsc::Sender<CallEvent>) {
        let mut requests = String::new();
        for question in &self.questions {
            if !requests.is_empty() {
                requests.push(',');
            }
            let (key, method) = (rpc::quote(&question.key), rpc::quote(&question.method));
            let params = &question.params;
            requests.push_str(&format!(r#"{key}:{{"method":{method},"params":{params}}}"#));
        }
        let state = relay::to_hex(relay::random_bytes::<32>());
        let result = format!(
            r#"{{"resultType":"input_required","inputRequests":{{{requests}}},"requestState":"{state}"}}"#
        );
        let text = RpcMessage::answer(self.id(), &result);
        let service = Arc::clone(&self.service);
        let evicted = {
            let mut held = service.held_calls();
            let is_own =
                |one: &HeldCall| is_same_caller(&one.driver.client.caller, &self.client.caller);
            let own_count = held.values().filter(|one| is_own(one)).count();
            let oldest = held
                .iter()
                .filter(|(_, one)| is_own(one))
                .min_by_key(|(_, one)| one.expires);
            let oldest = oldest
                .map(|(name, _)| name.clone())
                .filter(|_| own_count >= MAX_HELD_CALLS);
            let evicted = oldest.and_then(|name| held.remove(&name));
            let expires = Instant::now() + HELD_CALL_LIFETIME;
            let one = HeldCall {
                driver: self,
                expires,
            };
            held.insert(state, one);
            evicted
        };
        if let Some(evicted) = evicted {
            evicted.abandon(CallStatus::Cancelled);
        }
        drop(client.send(CallEvent::Final(text)).await);
    }

    /// Forwards the notifications that the server sent before its answer.
    async fn forward_queued(&mut self, client: &mpsc::Sender<CallEvent>) {
        while let Some(message) = self.lease.try_recv() {
            if message.kind() == RpcKind::Notification {
                drop(self.handle_message(message, client).await);
            }
        }
    }

    /// Delivers the answer. A client that disconnects while the operator decides about the answer
    /// ends the wait.
    async fn finish(
        self,
        answer: Result<RpcMessage, ProcessEnded>,
        client: mpsc::Sender<CallEvent>,
    ) {
        let Self {
            service,
            server,
            client: PoolClient { caller, .. },
            permitted,
            call,
            mut lease,
            questions,
            undecided,
            ..
        } = self;
        if !questions.is_empty() || !undecided.is_empty() {
            // The server answered although its questions are open: it may still work on them.
            lease.discard();
        }
        // A wait for the operator must not occupy a process.
        drop((undecided, call, lease));
        let flag = HoldFlag::default();
        let terms = HoldTerms {
            ends: &[(HoldEnd::Tool, server.stop())],
            flag: Some(&flag),
            ..HoldTerms::default()
        };
        let relay = service.relay();
        let mut delivering =
            std::pin::pin!(relay.deliver(&server, &caller, &permitted, answer, &terms));
        let text = match until_held(delivering.as_mut(), &flag).await {
            Some(text) => text,
            None => tokio::select! {
                text = delivering => text,
                () = client.closed() => return,
            },
        };
        drop(client.send(CallEvent::Final(text)).await);
    }

    /// Records a call that ends without an answer of the server.
    fn record_unanswered(&self, status: CallStatus) {
        let (relay, caller) = (self.service.relay(), &self.client.caller);
        relay.record_unanswered(&self.server, caller, &self.permitted, status);
    }

    /// Abandons the call. The process is not reused.
    async fn abandon(&mut self, why: &str, status: CallStatus) {
        self.record_unanswered(status);
        self.lease.discard();
        for question in std::mem::take(&mut self.questions) {
            self.refuse_question(&question.id, code::INTERNAL_ERROR, why)
                .await;
        }
        let params = json!({"requestId": self.call.id(), "reason": why}).to_string();
        let text = RpcMessage::notification("notifications/cancelled", &params);
        self.lease.process().send_best_effort(&text).await;
    }
}

/// The next event of a running call.
enum CallStep {
    Message(Option<RpcMessage>),
    Answer(Result<RpcMessage, ProcessEnded>),
    Decided(Option<DecidedQuestion>),
    ClientClosed,
    QuestionsGathered,
    TimedOut,
}

/// Removes the held call `state` if `permitted` continues it.
fn take_held_call(
    service: &Arc<SessionlessService>,
    server: &Arc<StdioServer>,
    client: &PoolClient,
    permitted: &PermittedCall,
    state: &str,
) -> Result<CallDriver, RequestError> {
    let mut held = service.held_calls();
    let is_continued = held
        .get(state)
        .is_some_and(|held| held.is_continued_by(server, client, &permitted.message));
    let found = if is_continued {
        held.remove(state)
    } else {
        None
    };
    found
        .map(|held| held.driver)
        .ok_or_else(|| RequestError::invalid_params("Invalid or expired requestState"))
}

/// The operator's approvals of the held call `state`, if `message` continues it.
fn find_approvals(
    service: &Arc<SessionlessService>,
    server: &Arc<StdioServer>,
    client: &PoolClient,
    message: &RpcMessage,
    state: &str,
) -> Option<CallApprovals> {
    let held = service.held_calls();
    let held = held.get(state)?;
    let is_continued = held.is_continued_by(server, client, message);
    is_continued.then(|| held.driver.permitted.approvals().clone())
}
