//! One process for all sessions of a server (`shared: true`).
//!
//! The bridge initializes the server once, and answers the `initialize` of every client from that
//! result. Requests and notifications of the server go to the session that they belong to, and are
//! dropped if there is none. `…/list_changed` notifications go once to each session.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use async_trait::async_trait;
use serde_json::json;

use crate::caller::McpCaller;
use crate::handshake::{ProcessStopGuard, initialize};
use crate::launch::LaunchError;
use crate::metrics::Metrics;
use crate::process::{MessageHandler, Process};
use crate::rpc::{RpcKind, RpcMessage, code};
use crate::session_state::SessionState;
use crate::tools::StdioServer;

/// One server process that all sessions of a server share.
#[derive(Debug, Default)]
pub struct SharedProcess {
    inner: Mutex<Inner>,
    /// Serializes starts of the process.
    starting: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct Inner {
    process: Option<Arc<Process>>,
    /// The result of the server's `initialize`.
    initialize_result: String,
    sessions: HashMap<String, MemberSession>,
}

/// A session that uses the process.
#[derive(Clone)]
struct MemberSession {
    state: Weak<Mutex<SessionState>>,
    handler: Arc<dyn MessageHandler>,
}

impl std::fmt::Debug for MemberSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemberSession").finish_non_exhaustive()
    }
}

impl MemberSession {
    /// Whether `test` returns true for the session's state; `false` once the session has ended.
    fn state_matches(&self, test: impl FnOnce(&SessionState) -> bool) -> bool {
        let state = self.state.upgrade();
        state.is_some_and(|state| test(&state.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    async fn handle(&self, message: RpcMessage) {
        self.handler.handle(message).await;
    }
}

impl SharedProcess {
    /// The process, which is started if none is running.
    pub async fn process(
        self: &Arc<Self>,
        server: &StdioServer,
        caller: &McpCaller,
        metrics: &Metrics,
    ) -> Result<Arc<Process>, LaunchError> {
        let _start_guard = self.starting.lock().await;
        let running = self.inner().process.clone();
        if let Some(process) = running.filter(|process| process.is_alive()) {
            return Ok(process);
        }
        let launched = server.launch(caller).await?;
        let handler = Arc::new(SharedMessageHandler(Arc::downgrade(self)));
        let process = server.attach(launched, handler, metrics);
        let capabilities = json!({"sampling": {}, "elicitation": {}, "roots": {}});
        let stop_guard = ProcessStopGuard::new(&process);
        let initialize_result = initialize(&process, server, &capabilities.to_string()).await?;
        stop_guard.disarm();
        let mut inner = self.inner();
        inner.initialize_result = initialize_result;
        inner.process = Some(Arc::clone(&process));
        Ok(process)
    }

    /// The answer to a client's `initialize`.
    pub fn initialize_answer(&self, id: &str) -> String {
        RpcMessage::answer(id, &self.inner().initialize_result)
    }

    /// Adds a session, whose messages go to `handler`.
    pub(crate) fn join(
        &self,
        session: &str,
        state: &Arc<Mutex<SessionState>>,
        handler: Arc<dyn MessageHandler>,
    ) {
        let state = Arc::downgrade(state);
        let member = MemberSession { state, handler };
        self.inner().sessions.insert(session.to_owned(), member);
    }

    /// Removes a session. The process ends with its last session.
    pub fn leave(&self, session: &str) {
        let mut inner = self.inner();
        inner.sessions.remove(session);
        if inner.sessions.is_empty()
            && let Some(process) = inner.process.take()
        {
            process.stop();
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sessions(&self) -> Vec<MemberSession> {
        self.inner().sessions.values().cloned().collect()
    }

    /// Routes a message of the server to the sessions that it belongs to.
    async fn route(&self, message: RpcMessage) {
        let sessions = self.sessions();
        let waiting: Vec<_> = sessions
            .iter()
            .filter(|one| one.state_matches(SessionState::is_waiting))
            .collect();
        let only = match waiting.as_slice() {
            [only] => Some(*only),
            _ => None,
        };
        match (message.kind(), message.method().unwrap_or_default()) {
            (RpcKind::Request, _) => match only {
                Some(only) => only.handle(message).await,
                None => {
                    // No client or several clients wait, and the request does not identify a
                    // client.
                    let text =
                        "the server is shared, and its request cannot be matched to a client";
                    let id = message.id().unwrap_or("null");
                    let refused = RpcMessage::failure(id, code::INTERNAL_ERROR, text, None);
                    let process = self.inner().process.clone();
                    if let Some(process) = process {
                        // In a task: the server may not read its input until its output is read.
                        tokio::spawn(async move { process.send_best_effort(&refused).await });
                    }
                }
            },
            (_, "notifications/progress") => {
                let token = message.param(&["progressToken"]);
                let call = token.and_then(|token| token.parse().ok());
                let has_call = |session: &&MemberSession| {
                    call.is_some_and(|call| {
                        session.state_matches(|state| state.has_open_call(call))
                    })
                };
                if let Some(session) = sessions.iter().find(has_call) {
                    session.handle(message).await;
                }
            }
            (_, "notifications/resources/updated") => {
                let uri = message.param_text(&["uri"]).unwrap_or_default();
                for session in sessions
                    .iter()
                    .filter(|one| one.state_matches(|state| state.has_subscribed(&uri)))
                {
                    session.handle(message.clone()).await;
                }
            }
            (_, method)
                if method == "notifications/cancelled" || method.ends_with("/list_changed") =>
            {
                for session in &sessions {
                    session.handle(message.clone()).await;
                }
            }
            _ => match only {
                Some(only) => only.handle(message).await,
                None => {
                    tracing::debug!("mcp shared tool message dropped: it belongs to no session");
                }
            },
        }
    }
}

/// Passes the messages of the shared process to its sessions.
struct SharedMessageHandler(Weak<SharedProcess>);

#[async_trait]
impl MessageHandler for SharedMessageHandler {
    async fn handle(&self, message: RpcMessage) {
        if let Some(shared_process) = self.0.upgrade() {
            shared_process.route(message).await;
        }
    }
}
