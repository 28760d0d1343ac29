//! State of the process: standard output, calls in flight, requests to the client.

use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::options::Options;
use crate::wire::{Message, Outcome, notification};
use crate::{listing, prompts, resources, tools};

/// Revisions that begin with `initialize`, oldest first.
const REVISIONS: [&str; 4] = ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"];

/// Log levels, least severe first.
pub(crate) const LEVELS: [&str; 8] = [
    "debug",
    "info",
    "notice",
    "warning",
    "error",
    "critical",
    "alert",
    "emergency",
];

/// The server.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) options: Options,
    running: Mutex<HashMap<String, Sender<Event>>>,
    /// Calls that were cancelled and have not ended yet.
    ending: Mutex<HashSet<String>>,
    /// Notified when a cancelled call has ended.
    ended: Condvar,
    pending_requests: Mutex<HashMap<String, Sender<Event>>>,
    capabilities: Mutex<Value>,
    pub(crate) subscribed: Mutex<HashSet<String>>,
    request_count: AtomicU64,
    /// Number of `initialize` requests.
    pub(crate) sessions: AtomicU64,
    level: AtomicUsize,
    /// Whether the optional tool is listed.
    pub(crate) more_tools: AtomicBool,
    /// Whether the optional prompt is listed.
    pub(crate) more_prompts: AtomicBool,
}

/// An event for a call in flight.
#[derive(Debug)]
enum Event {
    /// The client's response to the request of that id.
    Answer(String, Result<Value, Value>),
    /// `notifications/cancelled` with its raw params.
    Cancelled(String),
}

/// One request in flight, on a thread of its own.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) server: Arc<Server>,
    /// The raw params.
    pub(crate) raw: String,
    pub(crate) params: Value,
    events: Receiver<Event>,
    sender: Sender<Event>,
}

/// The client cancelled the call with these params.
#[derive(Debug)]
pub(crate) struct Cancelled(pub(crate) String);

/// A request to the client: its method, its params, and its key in 2026-07-28.
pub(crate) type ClientRequest<'a> = (&'a str, Value, &'a str);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    pub(crate) fn new(options: Options) -> Self {
        Self {
            options,
            running: Mutex::default(),
            ending: Mutex::default(),
            ended: Condvar::new(),
            pending_requests: Mutex::default(),
            capabilities: Mutex::new(json!({})),
            subscribed: Mutex::default(),
            request_count: AtomicU64::new(0),
            sessions: AtomicU64::new(0),
            level: AtomicUsize::new(0),
            more_tools: AtomicBool::new(false),
            more_prompts: AtomicBool::new(false),
        }
    }

    /// Handles a line from the client.
    pub(crate) fn handle_line(self: &Arc<Self>, line: &[u8]) {
        let Ok(message) = serde_json::from_slice::<Message<'_>>(line) else {
            self.write_lines("{\"jsonrpc\":\"2.0\",\"id\":null,\"error\":{\"code\":-32700,\"message\":\"Parse error\"}}");
            return;
        };
        match (&message.method, message.id) {
            (Some(method), Some(id)) => {
                let params = message.params.map_or("{}", |params| params.get());
                self.request(id.get(), method, params);
            }
            (Some(method), None) => {
                self.handle_notification(method, message.params.map_or("{}", |p| p.get()));
            }
            (None, Some(id)) => self.handle_response(id.get(), &message),
            (None, None) => {}
        }
    }

    fn request(self: &Arc<Self>, id: &str, method: &str, raw: &str) {
        let params = parse_params(raw);
        let name = params.get("name").and_then(Value::as_str).unwrap_or("");
        let needs_thread = match method {
            "tools/call" => tools::needs_thread(name),
            "prompts/get" => prompts::sends_request(name),
            _ => false,
        };
        let (sender, events) = channel();
        let call = Call {
            server: Arc::clone(self),
            raw: raw.to_owned(),
            params,
            events,
            sender: sender.clone(),
        };
        if !needs_thread {
            self.answer(id, &self.outcome(method, &call));
            return;
        }
        lock(&self.running).insert(id.to_owned(), sender);
        let (server, id, method) = (Arc::clone(self), id.to_owned(), method.to_owned());
        std::thread::spawn(move || {
            let outcome = server.outcome(&method, &call);
            lock(&server.running).remove(&id);
            server.answer(&id, &outcome);
            lock(&server.ending).remove(&id);
            server.ended.notify_all();
        });
    }

    fn outcome(&self, method: &str, call: &Call) -> Outcome {
        match method {
            "initialize" => self.initialize(&call.params),
            "ping" => Outcome::value(&json!({})),
            "logging/setLevel" => self.set_level(&call.params),
            "tools/list" => listing::tools(self, &call.params),
            "tools/call" => tools::call(call).unwrap_or(Outcome::NoResponse),
            "prompts/list" => listing::prompts(self, &call.params),
            "prompts/get" => prompts::get(call).unwrap_or(Outcome::NoResponse),
            "resources/list" => listing::resources(self, &call.params),
            "resources/templates/list" => listing::templates(),
            "resources/read" => resources::read(&call.params),
            "resources/subscribe" => {
                let uri = text(&call.params, "uri").to_owned();
                lock(&self.subscribed).insert(uri);
                Outcome::value(&json!({}))
            }
            "resources/unsubscribe" => {
                lock(&self.subscribed).remove(text(&call.params, "uri"));
                Outcome::value(&json!({}))
            }
            "completion/complete" => prompts::complete(&call.params),
            _ => Outcome::Error(-32601, "Method not found".to_owned(), None),
        }
    }

    fn initialize(&self, params: &Value) -> Outcome {
        self.sessions.fetch_add(1, Ordering::Relaxed);
        let capabilities = params.get("capabilities").cloned();
        *lock(&self.capabilities) = capabilities.unwrap_or_else(|| json!({}));
        let newest = self.options.revision.as_deref().unwrap_or("2025-11-25");
        let requested = text(params, "protocolVersion");
        let known = REVISIONS.contains(&requested) && requested <= newest;
        Outcome::value(&json!({
            "protocolVersion": if known { requested } else { newest },
            "capabilities": {
                "tools": {"listChanged": true},
                "prompts": {"listChanged": true},
                "resources": {"listChanged": true, "subscribe": true},
                "logging": {},
                "completions": {},
            },
            "serverInfo": {"name": "mcp-fixture", "version": "1.0.0"},
            "instructions": "A server for tests.",
        }))
    }

    fn set_level(&self, params: &Value) -> Outcome {
        let wanted = text(params, "level");
        match LEVELS.iter().position(|level| *level == wanted) {
            Some(level) => {
                self.level.store(level, Ordering::Relaxed);
                Outcome::value(&json!({}))
            }
            None => Outcome::invalid(format!("no such level: {wanted}")),
        }
    }

    fn handle_notification(&self, method: &str, raw: &str) {
        if method != "notifications/cancelled" {
            return;
        }
        let Ok(message) = serde_json::from_str::<HashMap<String, &RawValue>>(raw) else {
            return;
        };
        let Some(id) = message.get("requestId") else {
            return;
        };
        if let Some(call) = lock(&self.running).get(id.get()) {
            lock(&self.ending).insert(id.get().to_owned());
            let _ = call.send(Event::Cancelled(raw.to_owned()));
        }
    }

    /// Waits until cancelled calls have recorded their cancellation. The time is limited, because
    /// some tools ignore a cancellation.
    pub(crate) fn wait_for_cancelled_calls(&self) {
        let ending = lock(&self.ending);
        let busy = |ending: &mut HashSet<String>| !ending.is_empty();
        let _ = self
            .ended
            .wait_timeout_while(ending, Duration::from_millis(200), busy);
    }

    fn handle_response(&self, id: &str, message: &Message<'_>) {
        let Ok(id) = serde_json::from_str::<String>(id) else {
            return;
        };
        let Some(call) = lock(&self.pending_requests).remove(&id) else {
            return;
        };
        let value = |raw: &str| serde_json::from_str(raw).unwrap_or(Value::Null);
        let answer = match (message.result, message.error) {
            (Some(result), _) => Ok(value(result.get())),
            (None, Some(error)) => Err(value(error.get())),
            (None, None) => Err(Value::Null),
        };
        let _ = call.send(Event::Answer(id, answer));
    }

    fn answer(&self, id: &str, outcome: &Outcome) {
        if let Some(line) = outcome.line(id) {
            self.write_lines(&line);
        }
    }

    /// Writes lines in one write.
    pub(crate) fn write_lines(&self, line: &str) {
        let mut bytes = Vec::with_capacity(line.len() + 1);
        bytes.extend_from_slice(line.as_bytes());
        bytes.push(b'\n');
        self.write_bytes(&bytes);
    }

    /// Writes raw bytes.
    pub(crate) fn write_bytes(&self, bytes: &[u8]) {
        let mut out = std::io::stdout().lock();
        if out.write_all(bytes).and_then(|()| out.flush()).is_err() && !self.options.stubborn {
            std::process::exit(0);
        }
    }

    /// Sends a notification.
    pub(crate) fn notify(&self, method: &str, params: &Value) {
        self.write_lines(&notification(method, params));
    }

    /// Sends a log notification, if the client's level includes it.
    pub(crate) fn log(&self, level: &str, data: &Value) {
        let index = LEVELS.iter().position(|known| *known == level);
        if index.is_none_or(|index| index >= self.level.load(Ordering::Relaxed)) {
            let params = json!({"level": level, "logger": "mcp-fixture", "data": data});
            self.notify("notifications/message", &params);
        }
    }

    /// Whether the client declared this capability at `initialize`.
    pub(crate) fn client_supports(&self, what: &str) -> bool {
        lock(&self.capabilities).get(what).is_some()
    }

    /// The capabilities that the client declared at `initialize`.
    pub(crate) fn client_capabilities(&self) -> Value {
        lock(&self.capabilities).clone()
    }

    /// Whether a resource was subscribed to.
    pub(crate) fn is_subscribed(&self, uri: &str) -> bool {
        lock(&self.subscribed).contains(uri)
    }
}

impl Call {
    /// An argument of a tool's call or a prompt.
    pub(crate) fn argument(&self, name: &str) -> &Value {
        let arguments = self.params.get("arguments");
        arguments
            .and_then(|arguments| arguments.get(name))
            .unwrap_or(&Value::Null)
    }

    /// An argument that is a number.
    pub(crate) fn number(&self, name: &str, default: u64) -> u64 {
        self.argument(name).as_u64().unwrap_or(default)
    }

    /// An argument that is a text.
    pub(crate) fn text(&self, name: &str) -> &str {
        self.argument(name).as_str().unwrap_or("")
    }

    /// Waits for `time`; an error if the call is cancelled meanwhile.
    pub(crate) fn pause(&self, time: Duration) -> Result<(), Cancelled> {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left) {
                Ok(Event::Cancelled(params)) => return Err(Cancelled(params)),
                Ok(Event::Answer(..)) => {}
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    }

    /// Waits for the cancellation of the call.
    pub(crate) fn cancelled(&self) -> Cancelled {
        loop {
            if let Err(cancelled) = self.pause(Duration::from_secs(3600)) {
                return cancelled;
            }
        }
    }

    /// Sends a progress notification, if the request has a progress token.
    pub(crate) fn progress(&self, done: u64, total: u64) {
        let token = self.params.pointer("/_meta/progressToken");
        if let Some(token) = token {
            let params = json!({"progressToken": token, "progress": done, "total": total});
            self.server.notify("notifications/progress", &params);
        }
    }

    /// Sends one request to the client.
    pub(crate) fn send_request(
        &self,
        question: ClientRequest<'_>,
    ) -> Result<Result<Value, Value>, Cancelled> {
        let mut answers = self.send_requests(vec![question])?;
        Ok(answers.pop().unwrap_or(Err(Value::Null)))
    }

    /// Sends several requests in one write, and waits for all responses.
    pub(crate) fn send_requests(
        &self,
        questions: Vec<ClientRequest<'_>>,
    ) -> Result<Vec<Result<Value, Value>>, Cancelled> {
        let mut ids = Vec::new();
        let mut lines = Vec::new();
        for (method, mut params, key) in questions {
            let number = self.server.request_count.fetch_add(1, Ordering::Relaxed) + 1;
            let id = format!("srv-{number}");
            if let (Some(params), false) = (params.as_object_mut(), key.is_empty()) {
                params.insert("_meta".to_owned(), json!({"palisade/inputKey": key}));
            }
            let line = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
            lines.push(line.to_string());
            lock(&self.server.pending_requests).insert(id.clone(), self.sender.clone());
            ids.push(id);
        }
        self.server.write_lines(&lines.join("\n"));
        let mut answers: HashMap<String, Result<Value, Value>> = HashMap::new();
        while answers.len() < ids.len() {
            match self.events.recv() {
                Ok(Event::Answer(id, answer)) => {
                    answers.insert(id, answer);
                }
                Ok(Event::Cancelled(params)) => {
                    let mut pending = lock(&self.server.pending_requests);
                    ids.iter().for_each(|id| drop(pending.remove(id)));
                    return Err(Cancelled(params));
                }
                Err(_) => break,
            }
        }
        let answers = ids.iter().map(|id| answers.remove(id));
        Ok(answers
            .map(|answer| answer.unwrap_or(Err(Value::Null)))
            .collect())
    }
}

/// Parses params. Members with numbers that no Rust type can represent are left out.
fn parse_params(raw: &str) -> Value {
    serde_json::from_str(raw).unwrap_or_else(|_| {
        let members: HashMap<&str, &RawValue> = serde_json::from_str(raw).unwrap_or_default();
        let members = members.into_iter();
        let members = members.filter_map(|(name, value)| {
            let value = serde_json::from_str(value.get()).ok()?;
            Some((name.to_owned(), value))
        });
        Value::Object(members.collect())
    })
}

/// A string among the params; empty if missing.
pub(crate) fn text<'a>(params: &'a Value, name: &str) -> &'a str {
    params.get(name).and_then(Value::as_str).unwrap_or("")
}
