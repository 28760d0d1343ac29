//! What a server says by itself, and where it goes.

use std::sync::{Arc, Weak};

use async_trait::async_trait;

use super::{MOST_QUESTIONS, Session, Way};
use crate::outlet::Outlet;
use crate::process::Home;
use crate::relay;
use crate::rpc::{Kind, Message, code};

impl Session {
    /// Hears what the server says by itself.
    pub async fn hear(&self, message: Message) {
        match (message.kind(), message.method().unwrap_or_default()) {
            (Kind::Request, _) => self.hear_question(message),
            (_, "notifications/progress") => match self.progressed(&message) {
                Some((outlet, text)) => outlet.push(text).await,
                None => tracing::debug!("progress of nothing that is open"),
            },
            (_, "notifications/cancelled") => {
                let asked = message.param(&["requestId"]).map(str::to_owned);
                let outlet = asked.and_then(|id| self.state().questions.remove(&id));
                if let Some(outlet) = outlet {
                    outlet.push(message.into_text()).await;
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
        let outlet = self.place();
        tokio::spawn(async move {
            let id = question.id().unwrap_or("null").to_owned();
            let (served, caller) = (&session.served, &session.caller);
            let refused = match session
                .relay
                .permit_question(served, caller, question)
                .await
            {
                Ok(question) if session.note_question(&id, &outlet) => {
                    outlet.push(question.into_text()).await;
                    return;
                }
                Ok(_) => Message::failure(&id, code::INTERNAL, "too many questions are open", None),
                Err(denial) => relay::refused_question(&id, &denial),
            };
            session.process.offer(&refused).await;
        });
    }

    /// Remembers where a question was asked; not if there are too many.
    fn note_question(&self, id: &str, outlet: &Arc<Outlet>) -> bool {
        let mut state = self.state();
        let has_room = state.questions.len() < MOST_QUESTIONS;
        if has_room {
            state.questions.insert(id.to_owned(), Arc::clone(outlet));
        }
        has_room
    }

    /// Where something belongs that names no request.
    fn place(&self) -> Arc<Outlet> {
        if self.way == Way::OneStream {
            return Arc::clone(&self.standing);
        }
        let state = self.state();
        let newest = || state.open.values().max_by_key(|open| open.number);
        match newest() {
            Some(only) if state.open.len() == 1 => Arc::clone(&only.outlet),
            Some(newest) if !self.standing.is_read() => Arc::clone(&newest.outlet),
            _ => Arc::clone(&self.standing),
        }
    }

    /// The request that a progress notification is about, with its client's own token.
    fn progressed(&self, message: &Message) -> Option<(Arc<Outlet>, String)> {
        let token = message.param(&["progressToken"])?;
        let state = self.state();
        let found = if self.commons.is_some() {
            state.open.get(&token.parse::<u64>().ok()?)
        } else {
            let mut all = state.open.values();
            all.find(|open| open.token.as_deref() == Some(token))
        };
        let found = found?;
        let own = found.token.as_deref()?;
        let text = message.with_param(&["progressToken"], own);
        Some((Arc::clone(&found.outlet), text))
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
