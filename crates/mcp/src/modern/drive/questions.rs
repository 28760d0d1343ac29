//! What a server asks during a call, and who answers.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;

use policy::verdict::Denial;
use serde_json::Value;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::super::request::Refused;
use super::super::words::{INPUT_KEY, without_key};
use super::{Drive, Question};
use crate::hold_terms::{HoldEnd, HoldFlag, HoldTerms, until_held};
use crate::metrics::Status;
use crate::relay;
use crate::rpc::{Message, code};

/// The most questions of one call.
const MOST_QUESTIONS: usize = 64;

/// A question of a server that was decided.
pub(super) struct DecidedQuestion {
    id: String,
    method: String,
    decided: Result<Message, Denial>,
}

type Deciding = Pin<Box<dyn Future<Output = DecidedQuestion> + Send>>;

/// Questions of a server about which an operator is asked. Dropping them ends the waits.
#[derive(Debug, Default)]
pub(super) struct Undecided {
    deciding: JoinSet<DecidedQuestion>,
    /// By the server's id, cancelled where the server withdraws one.
    withdrawn: HashMap<String, CancellationToken>,
}

impl Undecided {
    pub(super) fn is_empty(&self) -> bool {
        self.deciding.is_empty()
    }

    /// The next one that is decided; none where the server has withdrawn it meanwhile.
    pub(super) async fn next(&mut self) -> Option<DecidedQuestion> {
        let decided = self.deciding.join_next().await?.ok()?;
        self.withdrawn.remove(&decided.id)?;
        Some(decided)
    }

    /// The server withdraws the question `id`.
    pub(super) fn withdraw(&mut self, id: &str) {
        if let Some(withdrawn) = self.withdrawn.remove(id) {
            withdrawn.cancel();
        }
    }

    fn push(&mut self, id: String, deciding: Deciding, withdrawn: CancellationToken) {
        self.deciding.spawn(deciding);
        self.withdrawn.insert(id, withdrawn);
    }
}

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
        let open = self.questions.len() + self.undecided.deciding.len();
        if open >= MOST_QUESTIONS || self.undecided.withdrawn.contains_key(&id) {
            let text = "too many questions are open, or one of this id";
            self.refuse_question(&id, code::INTERNAL, text).await;
            return None;
        }
        let (flag, withdrawn) = (HoldFlag::default(), CancellationToken::new());
        let mut deciding: Deciding = {
            let (service, served) = (Arc::clone(&self.service), Arc::clone(&self.served));
            let (caller, id) = (self.client.caller.clone(), id.clone());
            let (flag, withdrawn) = (flag.clone(), withdrawn.clone());
            Box::pin(async move {
                let terms = HoldTerms {
                    ends: &[
                        (HoldEnd::Tool, served.stop()),
                        (HoldEnd::Withdrawn, &withdrawn),
                    ],
                    flag: Some(&flag),
                    ..HoldTerms::default()
                };
                let relay = service.relay();
                let decided = relay.permit_question(&served, &caller, question, &terms);
                DecidedQuestion {
                    decided: decided.await,
                    id,
                    method,
                }
            })
        };
        match until_held(deciding.as_mut(), &flag).await {
            Some(decided) => self.ask(decided).await,
            None => {
                // What the server says meanwhile is passed on.
                self.undecided.push(id, deciding, withdrawn);
                None
            }
        }
    }

    /// Asks the client what the server wants to know, where that is allowed. An answer to the
    /// call where that ends it.
    pub(super) async fn ask(&mut self, decided: DecidedQuestion) -> Option<String> {
        let DecidedQuestion {
            id,
            method,
            decided,
        } = decided;
        let question = match decided {
            Ok(question) => question,
            Err(denial) => {
                let refused = relay::refused_question(&id, &denial);
                self.lease.process().offer(&refused).await;
                return None;
            }
        };
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
