//! One call of a client, driven to its end or to the next question.
//!
//! ```text
//!              ┌── notification ──▶ the client's stream
//!   running ───┼── question ──▶ answered in advance, or gathered ──▶ held ── answers ─┐
//!      ▲       └── answer ──▶ over                                     │ too long     │
//!      │                                                               ▼              │
//!      └───────────────────────────────────────────────────────────────(abandoned)────┘
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::request::{ENVELOPE, Refused, Request};
use crate::bridge::{self, Bridge};
use crate::pool::{Client, Lease};
use crate::process::{Call, Gone};
use crate::relay::{self, Permitted};
use crate::rpc::{self, Fields, Kind, Message, code};
use crate::tools::Served;

/// How long after a question others may come that belong to the same answer.
const GATHERED: Duration = Duration::from_millis(20);

/// How long a call waits for the answers.
const HELD_FOR: Duration = Duration::from_secs(300);

/// The most calls of one caller that wait.
const MOST_HELD: usize = 64;

/// The most questions of one call.
const MOST_QUESTIONS: usize = 64;

/// Where a server of the era before may say by which name it wants to be answered.
const INPUT_KEY: &str = "palisade/inputKey";

/// Where a client says under which name it wants to hear of progress.
const TOKEN: [&str; 2] = ["_meta", "progressToken"];

/// Levels of the server's log, the quietest first (RFC 5424, 6.2.1).
const LEVELS: [&str; 8] = [
    "emergency",
    "alert",
    "critical",
    "error",
    "warning",
    "notice",
    "info",
    "debug",
];

/// What a client hears of a call.
#[derive(Debug)]
pub(super) enum Out {
    /// Something on the way.
    Said(String),
    /// The end.
    Final(String),
}

/// A call that waits for answers.
#[derive(Debug)]
pub struct Held {
    drive: Drive,
    expires: Instant,
}

impl Held {
    /// When it is given up.
    pub fn expires(&self) -> Instant {
        self.expires
    }

    /// Gives it up.
    pub fn abandon(self) {
        let mut drive = self.drive;
        tokio::spawn(async move { drive.abandon("nobody answered").await });
    }
}

#[derive(Debug)]
struct Question {
    key: String,
    id: String,
    method: String,
    params: String,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Drive {
    bridge: Arc<Bridge>,
    served: Arc<Served>,
    client: Client,
    permitted: Permitted,
    call: Call,
    lease: Lease,
    log_level: Option<String>,
    /// The token for progress that the server was given. The client may give another one with
    /// every answer.
    token: Option<String>,
    /// Answers that came before their questions.
    given: BTreeMap<String, String>,
    questions: Vec<Question>,
    asked: usize,
}

impl Drive {
    /// Begins a call, or goes on with the one that the request names. The inner error is an
    /// answer that says no.
    pub(super) async fn begin_or_resume(
        bridge: &Arc<Bridge>,
        served: &Arc<Served>,
        client: Client,
        request: Request,
        parent: Option<&str>,
    ) -> Result<Result<Self, String>, Refused> {
        let given = read_given(&request.message)?;
        let state = match request.message.param(&["requestState"]) {
            None => None,
            Some(_) => match request.message.param_text(&["requestState"]) {
                Some(state) => Some(state),
                None => return Err(Refused::params("Invalid requestState")),
            },
        };
        let (relay, log_level) = (bridge.relay(), request.log_level.clone());
        // The answers are the client's words to the server, so they are judged as the call.
        let permitted = relay
            .permit(served, &client.caller, request.message, parent)
            .await;
        let permitted = match permitted {
            Ok(permitted) => permitted,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let Some(state) = state else {
            let drive = Self::begin(bridge, served, client, permitted, log_level, given).await?;
            return Ok(Ok(drive));
        };
        let mut drive = take_held(bridge, served, &client, &permitted, &state)?;
        drive.permitted = permitted;
        drive.log_level = log_level;
        drive.given.extend(given);
        drive.answer_questions().await?;
        Ok(Ok(drive))
    }

    async fn begin(
        bridge: &Arc<Bridge>,
        served: &Arc<Served>,
        client: Client,
        permitted: Permitted,
        log_level: Option<String>,
        given: BTreeMap<String, String>,
    ) -> Result<Self, Refused> {
        let metrics = bridge.relay().governance.metrics();
        let lease = bridge.pools().lease(served, &client, metrics).await?;
        let process = Arc::clone(lease.process());
        if let Some(level) = log_level.as_deref().filter(|level| LEVELS.contains(level)) {
            let setting = process.reserve();
            let params = json!({ "level": level }).to_string();
            let text = Message::request(&setting.id().to_string(), "logging/setLevel", &params);
            process.offer(&text).await;
        }
        let call = process.reserve();
        let text = in_old_words(&permitted.message, &call.id().to_string())?;
        let token = permitted.message.param(&TOKEN).map(str::to_owned);
        let drive = Self {
            bridge: Arc::clone(bridge),
            served: Arc::clone(served),
            client,
            permitted,
            call,
            lease,
            log_level,
            token,
            given,
            questions: Vec::new(),
            asked: 0,
        };
        // If it is gone, the answer says so.
        process.offer(&text).await;
        Ok(drive)
    }

    /// Goes on until there is an answer, or questions that the client has to answer.
    pub(super) async fn run(mut self, client: mpsc::Sender<Out>) {
        let deadline = Instant::now() + self.served.timeout();
        let mut quiet_since = Instant::now();
        loop {
            let step = tokio::select! {
                biased;
                said = self.lease.hear() => Step::Said(said),
                answer = self.call.answer() => Step::Answer(answer),
                () = client.closed() => Step::Left,
                () = tokio::time::sleep_until(quiet_since + GATHERED), if !self.questions.is_empty() => {
                    Step::Quiet
                }
                () = tokio::time::sleep_until(deadline) => Step::TooLong,
            };
            let end = match step {
                Step::Said(Some(message)) => {
                    quiet_since = Instant::now();
                    self.heard(message, &client).await
                }
                Step::Said(None) => Some(self.finish(Err(Gone { code: None })).await),
                Step::Answer(answer) => Some(self.finish_all(answer, &client).await),
                Step::Left => {
                    self.abandon("the client left").await;
                    return;
                }
                Step::TooLong => {
                    self.abandon("the call took too long").await;
                    let text = format!("the call took longer than {:?}", self.served.timeout());
                    Some(Message::failure(self.id(), code::GONE, &text, None))
                }
                Step::Quiet => {
                    self.hold(&client).await;
                    return;
                }
            };
            if let Some(text) = end {
                drop(client.send(Out::Final(text)).await);
                return;
            }
        }
    }

    fn id(&self) -> &str {
        self.permitted.message.id().unwrap_or("null")
    }

    /// What the server says by itself. An answer to the call where that ends it.
    async fn heard(&mut self, message: Message, client: &mpsc::Sender<Out>) -> Option<String> {
        if message.kind() == Kind::Request {
            return self.question(message).await;
        }
        match message.method().unwrap_or_default() {
            "notifications/message" if !self.is_wanted(&message) => {}
            "notifications/cancelled" => {
                let gone = message.param(&["requestId"]).unwrap_or_default();
                self.questions.retain(|question| question.id != gone);
            }
            "notifications/progress" => {
                let now = self.permitted.message.param(&TOKEN);
                if let Some(text) = retold(&message, self.token.as_deref(), now) {
                    drop(client.send(Out::Said(text)).await);
                }
            }
            // A client that left is noticed by the one who waits for it.
            _ => drop(client.send(Out::Said(message.into_text())).await),
        }
        None
    }

    /// Whether the client wants to hear what is logged.
    fn is_wanted(&self, message: &Message) -> bool {
        let place = |level: &str| LEVELS.iter().position(|known| *known == level);
        let wanted = self.log_level.as_deref().and_then(place);
        let said = message.param_text(&["level"]);
        let said = said.as_deref().and_then(place);
        wanted.is_some_and(|wanted| said.is_some_and(|said| said <= wanted))
    }

    async fn question(&mut self, question: Message) -> Option<String> {
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
            self.abandon("the client cannot do what the call needs")
                .await;
            return Some(text);
        }
        let relay = self.bridge.relay();
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
                    self.abandon("the client's answer is none").await;
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

    async fn refuse_question(&self, id: &str, code: i64, text: &str) {
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
    async fn answer_questions(&mut self) -> Result<(), Refused> {
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
                self.abandon("the client's answer is none").await;
                Err(refused)
            }
            None => Ok(()),
        }
    }

    /// Tells the client what the server wants to know, and waits for it to come back.
    async fn hold(self, client: &mpsc::Sender<Out>) {
        let mut requests = String::new();
        for question in &self.questions {
            if !requests.is_empty() {
                requests.push(',');
            }
            let (key, method) = (rpc::quote(&question.key), rpc::quote(&question.method));
            let params = &question.params;
            requests.push_str(&format!(r#"{key}:{{"method":{method},"params":{params}}}"#));
        }
        let state = bridge::hex(relay::random::<32>());
        let result = format!(
            r#"{{"resultType":"input_required","inputRequests":{{{requests}}},"requestState":"{state}"}}"#
        );
        let text = Message::answer(self.id(), &result);
        let bridge = Arc::clone(&self.bridge);
        let evicted = {
            let mut held = bridge.pools().held();
            let own = |one: &Held| bridge::same(&one.drive.client.caller, &self.client.caller);
            let of_one = held.values().filter(|one| own(one)).count();
            let oldest = held
                .iter()
                .filter(|(_, one)| own(one))
                .min_by_key(|(_, one)| one.expires);
            let oldest = oldest
                .map(|(name, _)| name.clone())
                .filter(|_| of_one >= MOST_HELD);
            let evicted = oldest.and_then(|name| held.remove(&name));
            let expires = Instant::now() + HELD_FOR;
            let one = Held {
                drive: self,
                expires,
            };
            held.insert(state, one);
            evicted
        };
        if let Some(evicted) = evicted {
            evicted.abandon();
        }
        drop(client.send(Out::Final(text)).await);
    }

    /// The end, after whatever was said before it.
    async fn finish_all(
        &mut self,
        answer: Result<Message, Gone>,
        client: &mpsc::Sender<Out>,
    ) -> String {
        while let Some(message) = self.lease.hear_now() {
            if message.kind() == Kind::Notification {
                drop(self.heard(message, client).await);
            }
        }
        self.finish(answer).await
    }

    async fn finish(&mut self, answer: Result<Message, Gone>) -> String {
        if !self.questions.is_empty() {
            // It answered without waiting for what it asked.
            self.lease.spoil();
        }
        let relay = self.bridge.relay();
        let caller = &self.client.caller;
        relay
            .deliver(&self.served, caller, &self.permitted, answer)
            .await
    }

    /// Gives the call up. The process is not used again.
    async fn abandon(&mut self, why: &str) {
        self.lease.spoil();
        for question in std::mem::take(&mut self.questions) {
            self.refuse_question(&question.id, code::INTERNAL, why)
                .await;
        }
        let params = json!({"requestId": self.call.id(), "reason": why}).to_string();
        let text = Message::notification("notifications/cancelled", &params);
        self.lease.process().offer(&text).await;
    }
}

enum Step {
    Said(Option<Message>),
    Answer(Result<Message, Gone>),
    Left,
    Quiet,
    TooLong,
}

/// Progress under the token that the client knows now, where it wants to hear of it.
fn retold(progress: &Message, given: Option<&str>, now: Option<&str>) -> Option<String> {
    let read = |raw: &str| serde_json::from_str::<Value>(raw).ok();
    let about = progress.param(&["progressToken"]).and_then(read)?;
    if given.and_then(read)? != about {
        return None;
    }
    Some(progress.with_param(&["progressToken"], now?))
}

/// The call that waits under `state`, if it is this caller's and is about the same.
fn take_held(
    bridge: &Arc<Bridge>,
    served: &Arc<Served>,
    client: &Client,
    permitted: &Permitted,
    state: &str,
) -> Result<Drive, Refused> {
    let mut held = bridge.pools().held();
    let fits = held.get(state).is_some_and(|held| {
        let drive = &held.drive;
        let about = |message: &Message| {
            let name = message.param_text(&["name"]);
            (name, message.param_text(&["uri"]))
        };
        Arc::ptr_eq(&drive.served, served)
            && bridge::same(&drive.client.caller, &client.caller)
            && drive.permitted.method == permitted.method
            && about(&drive.permitted.message) == about(&permitted.message)
            && held.expires > Instant::now()
    });
    let found = if fits { held.remove(state) } else { None };
    found
        .map(|held| held.drive)
        .ok_or_else(|| Refused::params("Invalid or expired requestState"))
}

/// The client's answers, as written.
fn read_given(message: &Message) -> Result<BTreeMap<String, String>, Refused> {
    let Some(raw) = message.param(&["inputResponses"]) else {
        return Ok(BTreeMap::new());
    };
    let bad = || Refused::params("Invalid inputResponses");
    let fields: Fields<'_> = serde_json::from_str(raw).map_err(|_| bad())?;
    let mut given = BTreeMap::new();
    for (key, value) in fields.0 {
        let answer = value.get();
        let twice = given.insert(key.into_owned(), answer.to_owned()).is_some();
        if twice || !answer.starts_with('{') {
            return Err(bad());
        }
    }
    Ok(given)
}

/// The request as the era before writes it, under another id. A server may refuse what it
/// finds of this era, as those of the Python SDK do.
pub(super) fn in_old_words(message: &Message, id: &str) -> Result<String, Refused> {
    let Some(params) = message.params() else {
        return Ok(message.with_id(id));
    };
    let mut params = without(params, &["inputResponses", "requestState"]);
    if let Some(place) = rpc::find(&params, 0..params.len(), &["_meta"]) {
        let meta = without(params.get(place.clone()).unwrap_or_default(), &ENVELOPE);
        params = match meta.as_str() {
            "{}" => without(&params, &["_meta"]),
            meta => rpc::splice(&params, place, meta),
        };
    }
    let old = Message::read(message.with_params(&params));
    let old = old.map_err(|bad| Refused::params(bad.to_string()))?;
    Ok(old.with_id(id))
}

/// The object without the fields of those names.
fn without(object: &str, names: &[&str]) -> String {
    let Ok(fields) = serde_json::from_str::<Fields<'_>>(object) else {
        return object.to_owned();
    };
    if !fields
        .0
        .iter()
        .any(|(key, _)| names.contains(&key.as_ref()))
    {
        return object.to_owned();
    }
    let kept = fields
        .0
        .iter()
        .filter(|(key, _)| !names.contains(&key.as_ref()));
    let kept: Vec<_> = kept
        .map(|(key, value)| format!("{}:{}", rpc::quote(key), value.get()))
        .collect();
    format!("{{{}}}", kept.join(","))
}

/// A question's parameters without the name that was for the bridge.
fn without_key(params: &str) -> String {
    let Some(place) = rpc::find(params, 0..params.len(), &["_meta"]) else {
        return params.to_owned();
    };
    let meta = params.get(place.clone()).unwrap_or_default();
    let meta = without(meta, &[INPUT_KEY]);
    if meta == "{}" {
        return without(params, &["_meta"]);
    }
    rpc::splice(params, place, &meta)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_for_the_bridge_is_taken_out() {
        let cases = [
            (r#"{"message":"m"}"#, r#"{"message":"m"}"#),
            (
                r#"{"_meta":{"palisade/inputKey":"k"},"a":1.50}"#,
                r#"{"a":1.50}"#,
            ),
            (
                r#"{"a":1,"_meta":{"x":2,"palisade/inputKey":"k"}}"#,
                r#"{"a":1,"_meta":{"x":2}}"#,
            ),
            ("[1]", "[1]"),
        ];
        for (params, expected) in cases {
            assert_eq!(without_key(params), expected);
        }
    }

    #[test]
    fn progress_is_told_under_the_token_of_the_last_request() {
        let told = |given, now| {
            let text = r#"{"progress":0.50,"progressToken":"t\u00e9"}"#;
            let text = Message::notification("notifications/progress", text);
            retold(&Message::read(text).unwrap(), given, now)
        };
        let expected = |token: &str| {
            let params = format!(r#"{{"progress":0.50,"progressToken":{token}}}"#);
            Some(Message::notification("notifications/progress", &params))
        };
        assert_eq!(told(Some("\"té\""), Some("7")), expected("7"));
        assert_eq!(told(Some("\"té\""), Some("\"té\"")), expected("\"té\""));
        assert_eq!(told(Some("\"té\""), None), None);
        assert_eq!(told(Some("7"), Some("7")), None);
        assert_eq!(told(None, Some("7")), None);
    }

    #[test]
    fn a_server_of_the_era_before_is_asked_in_its_own_words() {
        let envelope = r#""io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{},"io.modelcontextprotocol/clientCapabilities":{},"io.modelcontextprotocol/logLevel":"info""#;
        let cases = [
            (format!(r#"{{"_meta":{{{envelope}}}}}"#), "{}"),
            (
                format!(r#"{{"n":1.50,"_meta":{{"progressToken":7,{envelope},"x/y":[1]}}}}"#),
                r#"{"n":1.50,"_meta":{"progressToken":7,"x/y":[1]}}"#,
            ),
            (
                format!(
                    r#"{{"inputResponses":{{}},"n":1,"requestState":"s","_meta":{{{envelope}}}}}"#
                ),
                r#"{"n":1}"#,
            ),
            (r#"{"_meta":7}"#.to_owned(), r#"{"_meta":7}"#),
        ];
        for (params, expected) in cases {
            let message = Message::request("1", "tools/call", &params);
            let message = Message::read(message).unwrap();
            let expected = Message::request("9", "tools/call", expected);
            assert_eq!(in_old_words(&message, "9"), Ok(expected));
        }
    }

    #[test]
    fn answers_are_objects_under_different_names() {
        let read = |given: &str| {
            let text = Message::request(
                "1",
                "tools/call",
                &format!(r#"{{"inputResponses":{given}}}"#),
            );
            read_given(&Message::read(text).unwrap()).map(|given| given.len())
        };
        assert_eq!(read(r#"{"a":{},"b":{"x":1}}"#), Ok(2));
        for bad in [
            "null",
            "[]",
            "7",
            r#"{"a":1}"#,
            r#"{"a":{},"a":{}}"#,
            r#"{"a":null}"#,
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
