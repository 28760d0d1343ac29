//! What a server asks during a call, and who answers.

use serde_json::Value;

use super::super::request::Refused;
use super::super::words::{INPUT_KEY, without_key};
use super::{Drive, Question};
use crate::metrics::Status;
use crate::relay;
use crate::rpc::{Message, code};

/// The most questions of one call.
const MOST_QUESTIONS: usize = 64;

impl Drive {
    pub(super) async fn question(&mut self, question: Message) -> Option<String> {
        let id = question.id().unwrap_or("null").to_owned();
        let method = question.method().unwrap_or_default().to_owned();
        let needed = match method.as_str() {
            "elicitation/create" => "elicitation",
            "roots/list" => "roots",
            "sampling/createMessage" => "sampling",
            _ => {
                self.refuse_question(&id, code::NO_METHOD, "Method not found")
                    .await;
                return None;
            }
        };
        let capabilities: Value =
            serde_json::from_str(&self.client.capabilities).unwrap_or_default();
        if capabilities.get(needed).is_none() {
            self.refuse_question(&id, code::NO_METHOD, "the client cannot do that")
                .await;
            let text = Refused::missing(needed).text(self.id());
            self.abandon("the client cannot do what the call needs", Status::Error)
                .await;
            return Some(text);
        }
        let relay = self.service.relay();
        let judged = relay
            .permit_question(&self.served, &self.client.caller, question)
            .await;
        let question = match judged {
            Ok(question) => question,
            Err(denial) => {
                let refused = relay::refused_question(&id, &denial);
                self.lease.process().offer(&refused).await;
                return None;
            }
        };
        if self.questions.len() >= MOST_QUESTIONS {
            self.refuse_question(&id, code::INTERNAL, "too many questions are open")
                .await;
            return None;
        }
        self.asked += 1;
        let key = self.key_of(&question);
        let params = question.params().unwrap_or("{}");
        let question = Question {
            key,
            id,
            method,
            params: without_key(params),
        };
        match self.given.remove(&question.key) {
            Some(answer) => match self.pass_on(&question, &answer).await {
                Ok(()) => None,
                Err(refused) => {
                    let text = refused.text(self.id());
                    self.questions.push(question);
                    self.abandon("the client's answer is none", Status::Error)
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

    /// By which name the client answers: the server's own, or a number.
    fn key_of(&self, question: &Message) -> String {
        let own = question.param_text(&["_meta", INPUT_KEY]);
        let fits = |key: &String| {
            let letter = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
            (1..=64).contains(&key.len()) && key.bytes().all(letter)
        };
        let taken = |key: &String| self.questions.iter().any(|known| known.key == *key);
        own.filter(fits)
            .filter(|key| !taken(key))
            .unwrap_or_else(|| format!("input-{}", self.asked))
    }

    pub(super) async fn refuse_question(&self, id: &str, code: i64, text: &str) {
        let refused = Message::failure(id, code, text, None);
        self.lease.process().offer(&refused).await;
    }

    /// Gives the server what the client says to its question.
    async fn pass_on(&self, question: &Question, answer: &str) -> Result<(), Refused> {
        let bad = || Refused::params(format!("Invalid inputResponses.{}", question.key));
        let value: Value = serde_json::from_str(answer).map_err(|_| bad())?;
        let Value::Object(fields) = &value else {
            return Err(bad());
        };
        if question.method == "elicitation/create" {
            let action = fields.get("action").and_then(Value::as_str);
            if !matches!(action, Some("accept" | "decline" | "cancel")) {
                return Err(bad());
            }
        }
        // If it is gone, the answer to the call says so.
        let text = Message::answer(&question.id, answer);
        self.lease.process().offer(&text).await;
        Ok(())
    }

    /// Answers what was asked with what was given; the rest stays open.
    pub(super) async fn answer_questions(&mut self) -> Result<(), Refused> {
        let mut open = Vec::new();
        let mut failed = None;
        for question in std::mem::take(&mut self.questions) {
            let answer = self.given.remove(&question.key);
            match answer {
                Some(answer) if failed.is_none() => {
                    if let Err(refused) = self.pass_on(&question, &answer).await {
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
                self.abandon("the client's answer is none", Status::Error)
                    .await;
                Err(refused)
            }
            None => Ok(()),
        }
    }
}
