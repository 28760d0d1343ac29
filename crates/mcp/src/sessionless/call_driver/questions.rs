//! Questions of a server to the client during a call: decision, forwarding and answers.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;

use policy::verdict::Denial;
use serde_json::Value;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::super::request::RequestError;
use super::super::translation::{INPUT_KEY, without_input_key};
use super::{CallDriver, Question};
use crate::hold_terms::{HoldEnd, HoldFlag, HoldTerms, until_held};
use crate::metrics::CallStatus;
use crate::relay;
use crate::rpc::{RpcMessage, code};

/// Maximum number of open questions of one call.
const MAX_QUESTIONS: usize = 64;

/// A question with the policy decision about it.
pub(super) struct DecidedQuestion {
    id: String,
    method: String,
    decided: Result<RpcMessage, Denial>,
}

type DecisionFuture = Pin<Box<dyn Future<Output = DecidedQuestion> + Send>>;

/// Questions that wait for the operator. Dropping this ends the waits.
#[derive(Debug, Default)]
pub(super) struct UndecidedQuestions {
    deciding: JoinSet<DecidedQuestion>,
    /// Cancels the wait for a question that the server withdraws, by the server's id.
    withdrawn: HashMap<String, CancellationToken>,
}

impl UndecidedQuestions {
    pub(super) fn is_empty(&self) -> bool {
        self.deciding.is_empty()
    }

    /// Waits for the next decision; none if the server has withdrawn the question.
    pub(super) async fn next(&mut self) -> Option<DecidedQuestion> {
        let decided = self.deciding.join_next().await?.ok()?;
        self.withdrawn.remove(&decided.id)?;
        Some(decided)
    }

    /// Ends the wait for the question `id`, which the server has withdrawn.
    pub(super) fn withdraw(&mut self, id: &str) {
        if let Some(withdrawn) = self.withdrawn.remove(id) {
            withdrawn.cancel();
        }
    }

    fn push(&mut self, id: String, deciding: DecisionFuture, withdrawn: CancellationToken) {
        self.deciding.spawn(deciding);
        self.withdrawn.insert(id, withdrawn);
    }
}

impl CallDriver {
    /// Decides about a question of the server. Returns the answer to the call if the question ends
    /// the call.
    pub(super) async fn decide_question(&mut self, question: RpcMessage) -> Option<String> {
        let id = question.id().unwrap_or("null").to_owned();
        let method = question.method().unwrap_or_default().to_owned();
        let capability = match method.as_str() {
            "elicitation/create" => "elicitation",
            "roots/list" => "roots",
            "sampling/createMessage" => "sampling",
            _ => {
                self.refuse_question(&id, code::METHOD_NOT_FOUND, "Method not found")
                    .await;
                return None;
            }
        };
        let capabilities: Value =
            serde_json::from_str(&self.client.capabilities).unwrap_or_default();
        if capabilities.get(capability).is_none() {
            self.refuse_question(
                &id,
                code::METHOD_NOT_FOUND,
                "the client lacks the capability",
            )
            .await;
            let text = RequestError::missing_capability(capability).text(self.id());
            self.abandon(
                "the client lacks a capability that the call needs",
                CallStatus::Error,
            )
            .await;
            return Some(text);
        }
        let open = self.questions.len() + self.undecided.deciding.len();
        if open >= MAX_QUESTIONS || self.undecided.withdrawn.contains_key(&id) {
            let text = "too many requests of the server are open, or the id is in use";
            self.refuse_question(&id, code::INTERNAL_ERROR, text).await;
            return None;
        }
        let (flag, withdrawn) = (HoldFlag::default(), CancellationToken::new());
        let mut deciding: DecisionFuture = {
            let (service, server) = (Arc::clone(&self.service), Arc::clone(&self.server));
            let (caller, id) = (self.client.caller.clone(), id.clone());
            let (flag, withdrawn) = (flag.clone(), withdrawn.clone());
            Box::pin(async move {
                let terms = HoldTerms {
                    ends: &[
                        (HoldEnd::Tool, server.stop()),
                        (HoldEnd::Withdrawn, &withdrawn),
                    ],
                    flag: Some(&flag),
                    ..HoldTerms::default()
                };
                let relay = service.relay();
                let decided = relay.permit_question(&server, &caller, question, &terms);
                DecidedQuestion {
                    decided: decided.await,
                    id,
                    method,
                }
            })
        };
        match until_held(deciding.as_mut(), &flag).await {
            Some(decided) => self.add_question(decided).await,
            None => {
                // The call continues to forward messages of the server during the wait.
                self.undecided.push(id, deciding, withdrawn);
                None
            }
        }
    }

    /// Answers an allowed question from the client's responses, or keeps it open for the client.
    /// Refuses a denied one. Returns the answer to the call if an invalid response ends the call.
    pub(super) async fn add_question(&mut self, decided: DecidedQuestion) -> Option<String> {
        let DecidedQuestion {
            id,
            method,
            decided,
        } = decided;
        let question = match decided {
            Ok(question) => question,
            Err(denial) => {
                let refused = relay::refused_question(&id, &denial);
                self.lease.process().send_best_effort(&refused).await;
                return None;
            }
        };
        self.question_count += 1;
        let key = self.question_key(&question);
        let params = question.params().unwrap_or("{}");
        let question = Question {
            key,
            id,
            method,
            params: without_input_key(params),
        };
        match self.responses.remove(&question.key) {
            Some(answer) => match self.send_answer(&question, &answer).await {
                Ok(()) => None,
                Err(refused) => {
                    let text = refused.text(self.id());
                    self.questions.push(question);
                    self.abandon("the client's answer is invalid", CallStatus::Error)
                        .await;
                    Some(text)
                }
            },
            None => {
                self.questions.push(question);
                None
            }
        }
    }

    /// The key of a question: the name that the server chose, or a number.
    fn question_key(&self, question: &RpcMessage) -> String {
        let own = question.param_text(&["_meta", INPUT_KEY]);
        let is_valid = |key: &String| {
            let is_allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
            (1..=64).contains(&key.len()) && key.bytes().all(is_allowed)
        };
        let is_taken = |key: &String| self.questions.iter().any(|known| known.key == *key);
        own.filter(is_valid)
            .filter(|key| !is_taken(key))
            .unwrap_or_else(|| format!("input-{}", self.question_count))
    }

    /// Answers a question of the server with an error.
    pub(super) async fn refuse_question(&self, id: &str, code: i64, text: &str) {
        let refused = RpcMessage::failure(id, code, text, None);
        self.lease.process().send_best_effort(&refused).await;
    }

    /// Sends the client's answer to the server.
    async fn send_answer(&self, question: &Question, answer: &str) -> Result<(), RequestError> {
        let invalid =
            || RequestError::invalid_params(format!("Invalid inputResponses.{}", question.key));
        let value: Value = serde_json::from_str(answer).map_err(|_| invalid())?;
        let Value::Object(fields) = &value else {
            return Err(invalid());
        };
        if question.method == "elicitation/create" {
            let action = fields.get("action").and_then(Value::as_str);
            if !matches!(action, Some("accept" | "decline" | "cancel")) {
                return Err(invalid());
            }
        }
        // If the process ended, `PendingCall::answer` reports it.
        let text = RpcMessage::answer(&question.id, answer);
        self.lease.process().send_best_effort(&text).await;
        Ok(())
    }

    /// Answers the open questions for which the client sent a response; the others stay open.
    pub(super) async fn answer_questions(&mut self) -> Result<(), RequestError> {
        let mut open = Vec::new();
        let mut failed = None;
        for question in std::mem::take(&mut self.questions) {
            let answer = self.responses.remove(&question.key);
            match answer {
                Some(answer) if failed.is_none() => {
                    if let Err(refused) = self.send_answer(&question, &answer).await {
                        failed = Some(refused);
                        open.push(question);
                    }
                }
                _ => open.push(question),
            }
        }
        self.questions = open;
        match failed {
            Some(refused) => {
                self.abandon("the client's answer is invalid", CallStatus::Error)
                    .await;
                Err(refused)
            }
            None => Ok(()),
        }
    }
}
