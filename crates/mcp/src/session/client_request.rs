//! One request of a client in a session, from its registration to its answer.
//!
//! ```text
//!   registered ──▶ decided ──▶ sent ──▶ answered
//!        │            │ ▲        │
//!        │       held ▼ │ answer │ cancelled, timed out
//!        └──────▶ refused, cancelled: the id is free again
//! ```

use std::sync::Arc;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{PendingResponse, Session, SessionError};
use crate::call_headers::CallHeaders;
use crate::hold_terms::{HoldEnd, HoldFlag, HoldTerms};
use crate::metrics::CallStatus;
use crate::process::{PendingCall, ProcessEnded, SendError};
use crate::relay::PermittedCall;
use crate::rpc::{RpcMessage, code};

/// An open request. Dropping it frees its id and ends its event buffer.
pub(super) struct ClientRequest {
    pub(super) session: Arc<Session>,
    /// Receives the server's answer.
    pub(super) call: PendingCall,
    pub(super) response: PendingResponse,
    /// Set when the client cancels the request.
    pub(super) cancelled: CancellationToken,
}

impl ClientRequest {
    /// Decides about the request, sends it, and starts a task that delivers the answer. `flag` is
    /// set once the request waits for the operator; errors then go to the event buffer.
    pub(super) async fn send(
        self,
        message: RpcMessage,
        headers: CallHeaders,
        flag: HoldFlag,
    ) -> Result<(), SessionError> {
        let id = message.id().unwrap_or("null").to_owned();
        let session = &self.session;
        let hold_ends = self.hold_ends();
        let terms = HoldTerms {
            ends: &hold_ends,
            flag: Some(&flag),
            ..HoldTerms::default()
        };
        let (server, caller) = (&session.server, &session.caller);
        let permitted = session
            .relay
            .permit(server, caller, message, &headers, &terms);
        let permitted = match permitted.await {
            Ok(permitted) => permitted,
            Err(_) if flag.is_set() && session.has_ended() => {
                let text = ProcessEnded { code: None }.to_string();
                self.finish(RpcMessage::failure(&id, code::SERVER_ENDED, &text, None));
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
            let answer = shared_process.initialize_answer(permitted.message.id().unwrap_or("null"));
            session.store_version(&answer);
            self.finish(answer);
            return Ok(());
        }
        if permitted.method == "resources/unsubscribe" && session.shared_process.is_some() {
            // Other sessions may still be subscribed.
            let mut state = session.state();
            session.record_subscription(&mut state, &permitted);
            drop(state);
            self.finish(RpcMessage::answer(&id, "{}"));
            return Ok(());
        }
        let own = self.call.id().to_string();
        let token = permitted.message.param(&["_meta", "progressToken"]);
        let token = token.map(str::to_owned);
        let mut text = permitted.message.with_id(&own);
        if session.shared_process.is_some() && token.is_some() {
            // Different clients may use the same token.
            if let Ok(message) = RpcMessage::read(text.clone()) {
                text = message.with_param(&["_meta", "progressToken"], &own);
            }
        }
        if !self.mark_sent(&permitted, token) {
            self.record_unanswered(&permitted, CallStatus::Cancelled);
            return Ok(());
        }
        match session.process.send(&text).await {
            Ok(()) => {}
            Err(SendError::ProcessEnded(ended)) => {
                let answer = self.deliver(&permitted, Err(ended)).await;
                self.finish(answer);
                return Ok(());
            }
            Err(error @ SendError::Write(_)) => {
                self.record_unanswered(&permitted, CallStatus::Error);
                if flag.is_set() {
                    let text = error.to_string();
                    self.finish(RpcMessage::failure(&id, code::INTERNAL_ERROR, &text, None));
                    return Ok(());
                }
                session.remove_buffer(self.response.number);
                return Err(error.into());
            }
        }
        // A client that disconnects does not cancel the request: it may resume the stream.
        tokio::spawn(self.await_answer(permitted));
        Ok(())
    }

    /// Events that end a wait for the operator.
    fn hold_ends(&self) -> [(HoldEnd, &CancellationToken); 3] {
        [
            (HoldEnd::Tool, self.session.server.stop()),
            (HoldEnd::Withdrawn, &self.session.stop),
            (HoldEnd::Withdrawn, &self.cancelled),
        ]
    }

    /// Marks the request as sent. `false` if the client has already cancelled it; later
    /// cancellations are forwarded to the server.
    fn mark_sent(&self, permitted: &PermittedCall, token: Option<String>) -> bool {
        let session = &self.session;
        let mut state = session.state();
        if self.cancelled.is_cancelled() {
            return false;
        }
        session.record_subscription(&mut state, permitted);
        if let Some(open) = state.open_requests.get_mut(&self.call.id()) {
            open.progress_token = token;
            open.is_sent = true;
        }
        true
    }

    /// Waits for the answer, a cancellation or the timeout, and finishes the request.
    async fn await_answer(mut self, permitted: PermittedCall) {
        let limit = self.session.server.timeout();
        let answer = tokio::select! {
            answer = self.call.answer() => answer,
            () = self.cancelled.cancelled() => {
                self.record_unanswered(&permitted, CallStatus::Cancelled);
                return;
            }
            () = tokio::time::sleep(limit) => {
                self.record_unanswered(&permitted, CallStatus::Timeout);
                self.session.cancel_call(self.call.id(), "the call timed out").await;
                let id = permitted.message.id().unwrap_or("null");
                let text = format!("the call timed out after {} s", limit.as_secs());
                self.finish(RpcMessage::failure(id, code::SERVER_ENDED, &text, None));
                return;
            }
        };
        let text = self.deliver(&permitted, answer).await;
        if permitted.method == "initialize" {
            self.session.store_version(&text);
        }
        self.finish(text);
    }

    async fn deliver(
        &self,
        permitted: &PermittedCall,
        answer: Result<RpcMessage, ProcessEnded>,
    ) -> String {
        let Session {
            relay,
            server,
            caller,
            ..
        } = &*self.session;
        let hold_ends = self.hold_ends();
        let terms = HoldTerms {
            ends: &hold_ends,
            ..HoldTerms::default()
        };
        relay
            .deliver(server, caller, permitted, answer, &terms)
            .await
    }

    /// Records a call that ends without an answer of the server.
    fn record_unanswered(&self, permitted: &PermittedCall, status: CallStatus) {
        let session = &self.session;
        let (server, caller) = (&session.server, &session.caller);
        let relay = &session.relay;
        relay.record_unanswered(server, caller, permitted, status);
    }

    /// Answers the request, unless the client has cancelled it.
    fn finish(self, text: String) {
        if self.cancelled.is_cancelled() {
            return;
        }
        // The client may use the id again as soon as it has the answer.
        self.release();
        self.response.event_buffer.finish(text);
    }

    fn release(&self) {
        let mut state = self.session.state();
        state.open_requests.remove(&self.call.id());
        state.last_used = Instant::now();
    }
}

impl Drop for ClientRequest {
    fn drop(&mut self) {
        self.release();
        self.response.event_buffer.close();
    }
}
