//! Routes requests and notifications of the server to the client's event buffers.
//!
//! A *question* is a request of the server to the client.

use std::sync::{Arc, Weak};

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

use super::{MAX_QUESTIONS, Session, SessionTransport};
use crate::event_buffer::EventBuffer;
use crate::hold_terms::{HoldEnd, HoldTerms};
use crate::process::MessageHandler;
use crate::relay;
use crate::rpc::{RpcKind, RpcMessage, code};

impl Session {
    /// Handles a request or notification of the server.
    pub async fn handle_server_message(&self, message: RpcMessage) {
        match (message.kind(), message.method().unwrap_or_default()) {
            (RpcKind::Request, _) => self.handle_question(message),
            (_, "notifications/progress") => match self.route_progress(&message) {
                Some((event_buffer, text)) => event_buffer.push(text).await,
                None => tracing::debug!("mcp tool progress dropped: no open request has the token"),
            },
            (_, "notifications/cancelled") => {
                let event_buffer = message
                    .param(&["requestId"])
                    .and_then(|id| self.withdraw_question(id));
                if let Some(event_buffer) = event_buffer {
                    event_buffer.push(message.into_text()).await;
                }
            }
            _ => self.default_buffer().push(message.into_text()).await,
        }
    }

    /// Handles a question. A separate task decides about the question, so that the server's output
    /// is still read.
    fn handle_question(&self, question: RpcMessage) {
        let Some(session) = self.weak_self.upgrade() else {
            return;
        };
        let event_buffer = self.default_buffer();
        let id = question.id().unwrap_or("null").to_owned();
        let withdrawn = CancellationToken::new();
        if !self.register_question(&id, &withdrawn) {
            let text = "too many requests of the server are open, or the id is in use";
            let refused = RpcMessage::failure(&id, code::INTERNAL_ERROR, text, None);
            tokio::spawn(async move { session.process.send_best_effort(&refused).await });
            return;
        }
        tokio::spawn(async move {
            let (server, caller) = (&session.server, &session.caller);
            let terms = HoldTerms {
                ends: &[
                    (HoldEnd::Tool, server.stop()),
                    (HoldEnd::Withdrawn, &session.stop),
                    (HoldEnd::Withdrawn, &withdrawn),
                ],
                ..HoldTerms::default()
            };
            let relay = &session.relay;
            let decision = relay.permit_question(server, caller, question, &terms);
            match decision.await {
                Ok(question) => {
                    // The client's request may have ended during the decision.
                    let event_buffer = match event_buffer.is_closed() {
                        true => session.default_buffer(),
                        false => event_buffer,
                    };
                    if session.open_question(&id, &event_buffer) {
                        event_buffer.push(question.into_text()).await;
                    }
                }
                Err(denial) => {
                    if session.close_question(&id) {
                        let refused = relay::refused_question(&id, &denial);
                        session.process.send_best_effort(&refused).await;
                    }
                }
            }
        });
    }

    /// Registers a question before the decision. `false` if there are too many, or the id is in
    /// use.
    fn register_question(&self, id: &str, withdrawn: &CancellationToken) -> bool {
        let mut state = self.state();
        let is_below_limit =
            state.questions.len() + state.undecided_questions.len() < MAX_QUESTIONS;
        if !is_below_limit || state.undecided_questions.contains_key(id) {
            return false;
        }
        state
            .undecided_questions
            .insert(id.to_owned(), withdrawn.clone());
        true
    }

    /// Stores the event buffer of an allowed question; `false` if the server has withdrawn it.
    fn open_question(&self, id: &str, event_buffer: &Arc<EventBuffer>) -> bool {
        let mut state = self.state();
        let is_pending = state.undecided_questions.remove(id).is_some();
        if is_pending {
            state
                .questions
                .insert(id.to_owned(), Arc::clone(event_buffer));
        }
        is_pending
    }

    /// Removes a refused question; `false` if the server has withdrawn it.
    fn close_question(&self, id: &str) -> bool {
        self.state().undecided_questions.remove(id).is_some()
    }

    /// Removes a question that the server withdraws. Returns its event buffer if the client has
    /// received the question.
    fn withdraw_question(&self, id: &str) -> Option<Arc<EventBuffer>> {
        let mut state = self.state();
        if let Some(undecided) = state.undecided_questions.remove(id) {
            undecided.cancel();
            return None;
        }
        state.questions.remove(id)
    }

    /// The event buffer for messages that name no request.
    fn default_buffer(&self) -> Arc<EventBuffer> {
        if self.transport == SessionTransport::HttpSse {
            return Arc::clone(&self.standing_buffer);
        }
        let state = self.state();
        let newest = || state.sent_requests().max_by_key(|open| open.number);
        match newest() {
            Some(only) if state.sent_requests().count() == 1 => Arc::clone(&only.event_buffer),
            Some(newest) if !self.standing_buffer.has_reader() => Arc::clone(&newest.event_buffer),
            _ => Arc::clone(&self.standing_buffer),
        }
    }

    /// The event buffer for a progress notification, and the notification with the client's token.
    fn route_progress(&self, message: &RpcMessage) -> Option<(Arc<EventBuffer>, String)> {
        let token = message.param(&["progressToken"])?;
        let state = self.state();
        let found = if self.shared_process.is_some() {
            state.open_requests.get(&token.parse::<u64>().ok()?)
        } else {
            let mut all = state.sent_requests();
            all.find(|open| open.progress_token.as_deref() == Some(token))
        };
        let found = found?;
        let own = found.progress_token.as_deref()?;
        let text = message.with_param(&["progressToken"], own);
        Some((Arc::clone(&found.event_buffer), text))
    }
}

/// Passes the messages of a process to one session, while the session exists.
pub(super) struct SessionMessageHandler(pub(super) Weak<Session>);

#[async_trait]
impl MessageHandler for SessionMessageHandler {
    async fn handle(&self, message: RpcMessage) {
        if let Some(session) = self.0.upgrade() {
            session.handle_server_message(message).await;
        }
    }
}
