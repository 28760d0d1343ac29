//! One request of a client, from its registration to its answer.
//!
//! ```text
//!   registered ──▶ decided ──▶ sent ──▶ answered
//!        │            │ ▲        │
//!        │       held ▼ │ answer │ cancelled, too long
//!        └──────▶ refused, cancelled: the id is free again
//! ```

use std::sync::Arc;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Expected, Session, SessionError};
use crate::call_headers::CallHeaders;
use crate::hold_terms::{HoldEnd, HoldFlag, HoldTerms};
use crate::metrics::Status;
use crate::process::{Call, Gone, SendError};
use crate::relay::Permitted;
use crate::rpc::{Message, code};

/// An open request. Dropping it frees its id and ends its event buffer.
pub(super) struct ClientRequest {
    pub(super) session: Arc<Session>,
    /// The server's answer will be here.
    pub(super) call: Call,
    pub(super) expected: Expected,
    /// The client does not want the answer any more.
    pub(super) cancelled: CancellationToken,
}

impl ClientRequest {
    /// Decides about the request, sends it and has its answer delivered. `flag` is set while it
    /// waits for an operator's answer. Where it is set, errors go to the event buffer.
    pub(super) async fn send(
        self,
        message: Message,
        headers: CallHeaders,
        flag: HoldFlag,
    ) -> Result<(), SessionError> {
        let id = message.id().unwrap_or("null").to_owned();
        let session = &self.session;
        let ends = self.ends();
        let terms = HoldTerms {
            ends: &ends,
            flag: Some(&flag),
            ..HoldTerms::default()
        };
        let (served, caller) = (&session.served, &session.caller);
        let permitted = session
            .relay
            .permit(served, caller, message, &headers, &terms);
        let permitted = match permitted.await {
            Ok(permitted) => permitted,
            Err(_) if flag.is_set() && session.is_over() => {
                let text = Gone { code: None }.to_string();
                self.finish(Message::failure(&id, code::GONE, &text, None));
                return Ok(());
            }
            Err(refusal) => {
                self.finish(refusal);
                return Ok(());
            }
        };
        if permitted.method == "initialize"
            && let Some(shared_process) = &session.shared_process
        {
            let answer = shared_process.introduce(permitted.message.id().unwrap_or("null"));
            session.note_version(&answer);
            self.finish(answer);
            return Ok(());
        }
        if permitted.method == "resources/unsubscribe" && session.shared_process.is_some() {
            // Others may still want the news.
            let mut state = session.state();
            session.note_subscription(&mut state, &permitted);
            drop(state);
            self.finish(Message::answer(&id, "{}"));
            return Ok(());
        }
        let own = self.call.id().to_string();
        let token = permitted.message.param(&["_meta", "progressToken"]);
        let token = token.map(str::to_owned);
        let mut text = permitted.message.with_id(&own);
        if session.shared_process.is_some() && token.is_some() {
            // Tokens of different clients may be alike.
            if let Ok(message) = Message::read(text.clone()) {
                text = message.with_param(&["_meta", "progressToken"], &own);
            }
        }
        if !self.note_sent(&permitted, token) {
            self.note_unanswered(&permitted, Status::Cancelled);
            return Ok(());
        }
        match session.process.send(&text).await {
            Ok(()) => {}
            Err(SendError::Gone(gone)) => {
                let answer = self.deliver(&permitted, Err(gone)).await;
                self.finish(answer);
                return Ok(());
            }
            Err(error @ SendError::Write(_)) => {
                self.note_unanswered(&permitted, Status::Error);
                if flag.is_set() {
                    let text = error.to_string();
                    self.finish(Message::failure(&id, code::INTERNAL, &text, None));
                    return Ok(());
                }
                session.forget(self.expected.number);
                return Err(error.into());
            }
        }
        // A client that goes away has not cancelled anything: it may come back for the answer.
        tokio::spawn(self.see_through(permitted));
        Ok(())
    }

    /// What ends a wait for an operator's answer.
    fn ends(&self) -> [(HoldEnd, &CancellationToken); 3] {
        [
            (HoldEnd::Tool, self.session.served.stop()),
            (HoldEnd::Withdrawn, &self.session.stop),
            (HoldEnd::Withdrawn, &self.cancelled),
        ]
    }

    /// Notes that the server is about to be sent the request. `false` where the client has
    /// cancelled it before: a cancellation reaches the server from now on, and none did before.
    fn note_sent(&self, permitted: &Permitted, token: Option<String>) -> bool {
        let session = &self.session;
        let mut state = session.state();
        if self.cancelled.is_cancelled() {
            return false;
        }
        session.note_subscription(&mut state, permitted);
        if let Some(open) = state.open.get_mut(&self.call.id()) {
            open.token = token;
            open.is_sent = true;
        }
        true
    }

    async fn see_through(mut self, permitted: Permitted) {
        let limit = self.session.served.timeout();
        let answer = tokio::select! {
            answer = self.call.answer() => answer,
            () = self.cancelled.cancelled() => {
                self.note_unanswered(&permitted, Status::Cancelled);
                return;
            }
            () = tokio::time::sleep(limit) => {
                self.note_unanswered(&permitted, Status::Timeout);
                self.session.give_up(self.call.id(), "the call took too long").await;
                let id = permitted.message.id().unwrap_or("null");
                let text = format!("the call took longer than {} s", limit.as_secs());
                self.finish(Message::failure(id, code::GONE, &text, None));
                return;
            }
        };
        let text = self.deliver(&permitted, answer).await;
        if permitted.method == "initialize" {
            self.session.note_version(&text);
        }
        self.finish(text);
    }

    async fn deliver(&self, permitted: &Permitted, answer: Result<Message, Gone>) -> String {
        let Session {
            relay,
            served,
            caller,
            ..
        } = &*self.session;
        let ends = self.ends();
        let terms = HoldTerms {
            ends: &ends,
            ..HoldTerms::default()
        };
        relay
            .deliver(served, caller, permitted, answer, &terms)
            .await
    }

    /// Counts a call that ends without an answer of the server.
    fn note_unanswered(&self, permitted: &Permitted, status: Status) {
        let session = &self.session;
        let (served, caller) = (&session.served, &session.caller);
        let relay = &session.relay;
        relay.note_unanswered(served, caller, permitted, status);
    }

    /// Answers the request, unless the client has cancelled it.
    fn finish(self, text: String) {
        if self.cancelled.is_cancelled() {
            return;
        }
        // The client may use the id again as soon as it has the answer.
        self.release();
        self.expected.event_buffer.finish(text);
    }

    fn release(&self) {
        let mut state = self.session.state();
        state.open.remove(&self.call.id());
        state.touched = Instant::now();
    }
}

impl Drop for ClientRequest {
    fn drop(&mut self) {
        self.release();
        self.expected.event_buffer.close();
    }
}
