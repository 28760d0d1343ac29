//! What a server says by itself, and where it goes.

use std::sync::{Arc, Weak};

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

use super::{MOST_QUESTIONS, Session, Way};
use crate::event_buffer::EventBuffer;
use crate::hold_terms::{HoldEnd, HoldTerms};
use crate::process::Home;
use crate::relay;
use crate::rpc::{Kind, Message, code};

impl Session {
    /// Hears what the server says by itself.
    pub async fn hear(&self, message: Message) {
        match (message.kind(), message.method().unwrap_or_default()) {
            (Kind::Request, _) => self.hear_question(message),
            (_, "notifications/progress") => match self.progressed(&message) {
                Some((event_buffer, text)) => event_buffer.push(text).await,
                None => tracing::debug!("progress of nothing that is open"),
            },
            (_, "notifications/cancelled") => {
                let event_buffer = message
                    .param(&["requestId"])
                    .and_then(|id| self.withdraw_question(id));
                if let Some(event_buffer) = event_buffer {
                    event_buffer.push(message.into_text()).await;
                }
            }
            _ => self.place().push(message.into_text()).await,
        }
    }

    /// A question to the client. Judging it must not keep the server's output waiting.
    fn hear_question(&self, question: Message) {
        let Some(session) = self.me.upgrade() else {
            return;
        };
        let event_buffer = self.place();
        let id = question.id().unwrap_or("null").to_owned();
        let withdrawn = CancellationToken::new();
        if !self.register_question(&id, &withdrawn) {
            let text = "too many questions are open, or one of this id";
            let refused = Message::failure(&id, code::INTERNAL, text, None);
            tokio::spawn(async move { session.process.offer(&refused).await });
            return;
        }
        tokio::spawn(async move {
            let (served, caller) = (&session.served, &session.caller);
            let terms = HoldTerms {
                ends: &[
                    (HoldEnd::Tool, served.stop()),
                    (HoldEnd::Withdrawn, &session.stop),
                    (HoldEnd::Withdrawn, &withdrawn),
                ],
                ..HoldTerms::default()
            };
            let relay = &session.relay;
            let judged = relay.permit_question(served, caller, question, &terms);
            match judged.await {
                Ok(question) => {
                    // The request during which it was asked may be over by now.
                    let event_buffer = match event_buffer.is_closed() {
                        true => session.place(),
                        false => event_buffer,
                    };
                    if session.open_question(&id, &event_buffer) {
                        event_buffer.push(question.into_text()).await;
                    }
                }
                Err(denial) => {
                    if session.close_question(&id) {
                        let refused = relay::refused_question(&id, &denial);
                        session.process.offer(&refused).await;
                    }
                }
            }
        });
    }

    /// Registers a question before it is decided. `false` where there are too many, or one of
    /// that id.
    fn register_question(&self, id: &str, withdrawn: &CancellationToken) -> bool {
        let mut state = self.state();
        let has_room = state.questions.len() + state.undecided.len() < MOST_QUESTIONS;
        if !has_room || state.undecided.contains_key(id) {
            return false;
        }
        state.undecided.insert(id.to_owned(), withdrawn.clone());
        true
    }

    /// Remembers where a question was asked; `false` where the server has withdrawn it.
    fn open_question(&self, id: &str, event_buffer: &Arc<EventBuffer>) -> bool {
        let mut state = self.state();
        let is_wanted = state.undecided.remove(id).is_some();
        if is_wanted {
            state
                .questions
                .insert(id.to_owned(), Arc::clone(event_buffer));
        }
        is_wanted
    }

    /// Forgets a question that was refused; `false` where the server has withdrawn it.
    fn close_question(&self, id: &str) -> bool {
        self.state().undecided.remove(id).is_some()
    }

    /// The server withdraws a question. Where the client was asked it, if it was.
    fn withdraw_question(&self, id: &str) -> Option<Arc<EventBuffer>> {
        let mut state = self.state();
        if let Some(undecided) = state.undecided.remove(id) {
            undecided.cancel();
            return None;
        }
        state.questions.remove(id)
    }

    /// Where something belongs that names no request.
    fn place(&self) -> Arc<EventBuffer> {
        if self.way == Way::OneStream {
            return Arc::clone(&self.standing);
        }
        let state = self.state();
        let newest = || state.sent().max_by_key(|open| open.number);
        match newest() {
            Some(only) if state.sent().count() == 1 => Arc::clone(&only.event_buffer),
            Some(newest) if !self.standing.is_read() => Arc::clone(&newest.event_buffer),
            _ => Arc::clone(&self.standing),
        }
    }

    /// The request that a progress notification is about, with its client's own token.
    fn progressed(&self, message: &Message) -> Option<(Arc<EventBuffer>, String)> {
        let token = message.param(&["progressToken"])?;
        let state = self.state();
        let found = if self.shared_process.is_some() {
            state.open.get(&token.parse::<u64>().ok()?)
        } else {
            let mut all = state.sent();
            all.find(|open| open.token.as_deref() == Some(token))
        };
        let found = found?;
        let own = found.token.as_deref()?;
        let text = message.with_param(&["progressToken"], own);
        Some((Arc::clone(&found.event_buffer), text))
    }
}

/// Takes the messages of a process to one session, while that lasts.
pub(super) struct SessionHome(pub(super) Weak<Session>);

#[async_trait]
impl Home for SessionHome {
    async fn hear(&self, message: Message) {
        if let Some(session) = self.0.upgrade() {
            session.hear(message).await;
        }
    }
}
