//! Streamable HTTP as of 2026-07-28: every POST stands for itself.
//!
//! The servers behind the bridge are of the era before, so the bridge speaks both: it
//! introduces each client to a process of its own ([`crate::pool`]), and what a server asks
//! during a call ([`drive`]) becomes an `input_required` result, with which the call waits
//! until the client comes back with the answers.

mod drive;
mod listen;
mod request;
mod service;
mod words;

use std::sync::Arc;
use std::time::Duration;

use http::{Method, Response, StatusCode};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use self::drive::{Drive, Out};
pub use self::request::{REVISION, is_modern};
use self::request::{Refused, Request};
pub use self::service::SessionlessService;
use crate::answer::{self, Content};
use crate::call_headers::CallHeaders;
use crate::hold_terms::{HoldEnd, HoldFlag, HoldTerms, until_held};
use crate::incoming::{Incoming, REVISIONS};
use crate::pool::Client;
use crate::process::{Gone, SendError};
use crate::relay;
use crate::rpc::{self, Kind, Message, code};
use crate::sse::{self, Event};
use crate::tools::Served;

/// Methods during which a server may ask something.
const ASKING: [&str; 3] = ["prompts/get", "resources/read", "tools/call"];

/// Methods during which it may not.
const PLAIN: [&str; 5] = [
    "completion/complete",
    "prompts/list",
    "resources/list",
    "resources/templates/list",
    "tools/list",
];

/// Results that say for how long they hold.
const CACHED: [&str; 5] = [
    "prompts/list",
    "resources/list",
    "resources/read",
    "resources/templates/list",
    "tools/list",
];

/// How long an answer may take before it becomes a stream.
const AT_ONCE: Duration = Duration::from_secs(2);

/// Answers a request of this era.
pub async fn answer(
    service: &Arc<SessionlessService>,
    served: &Arc<Served>,
    incoming: Incoming,
) -> Response<Content> {
    if incoming.head.method != Method::POST {
        return answer::not_allowed("POST");
    }
    let message = match Message::read_bytes(incoming.body.to_vec()) {
        Ok(message) => message,
        Err(bad) => {
            let why = bad.to_string();
            return answer::failure(StatusCode::BAD_REQUEST, None, bad.code(), &why);
        }
    };
    match message.kind() {
        Kind::Request => {}
        // There is nothing that a client could announce: it hangs up instead of cancelling.
        Kind::Notification => return answer::bare(StatusCode::ACCEPTED),
        Kind::Response => {
            let why = "in this revision answers stand in the next request";
            return answer::failure(StatusCode::BAD_REQUEST, None, code::INVALID, why);
        }
    }
    let id = message.id().unwrap_or("null").to_owned();
    let request = match Request::read(message, &incoming.head.headers) {
        Ok(request) => request,
        Err(refused) => return refused.response(&id),
    };
    let headers = CallHeaders::read(&incoming.head.headers);
    let client = Client {
        caller: incoming.caller,
        capabilities: request.capabilities.clone(),
    };
    let answered = match request.method() {
        "server/discover" => discover(service, served, &client, &id).await,
        "subscriptions/listen" => listen::answer(service, served, &client, &request).await,
        method if ASKING.contains(&method) => call(service, served, client, request, headers).await,
        method if PLAIN.contains(&method) => {
            plain(service, served, &client, request, &headers).await
        }
        method => Err(Refused::new(
            StatusCode::NOT_FOUND,
            code::NO_METHOD,
            format!("Method not found: {method}"),
        )),
    };
    answered.unwrap_or_else(|refused| refused.response(&id))
}

/// What the server is.
async fn discover(
    service: &Arc<SessionlessService>,
    served: &Arc<Served>,
    client: &Client,
    id: &str,
) -> Result<Response<Content>, Refused> {
    let metrics = service.relay().governance.metrics();
    let worker = service.pools().any(served, client, metrics).await?;
    let said: Value = serde_json::from_str(worker.introduction()).unwrap_or_default();
    let object = |value: &Value| match value {
        Value::Object(_) => value.clone(),
        _ => json!({}),
    };
    let mut result = json!({
        "resultType": "complete",
        "supportedVersions": supported(),
        "capabilities": object(said.get("capabilities").unwrap_or(&Value::Null)),
        "ttlMs": 0,
        "cacheScope": "private",
    });
    if let Some(fields) = result.as_object_mut() {
        if let Some(Value::String(text)) = said.get("instructions") {
            fields.insert("instructions".to_owned(), Value::String(text.clone()));
        }
        if let Some(info @ Value::Object(_)) = said.get("serverInfo") {
            let meta = json!({"io.modelcontextprotocol/serverInfo": info});
            fields.insert("_meta".to_owned(), meta);
        }
    }
    let text = Message::answer(id, &result.to_string());
    Ok(answer::json_text(StatusCode::OK, text))
}

/// Every revision that is spoken here, the newest first.
fn supported() -> Vec<&'static str> {
    std::iter::once(REVISION).chain(REVISIONS).collect()
}

/// A request during which nothing can be asked.
async fn plain(
    service: &Arc<SessionlessService>,
    served: &Arc<Served>,
    client: &Client,
    request: Request,
    headers: &CallHeaders,
) -> Result<Response<Content>, Refused> {
    let (relay, caller) = (service.relay(), &client.caller);
    // A client that hangs up drops this, and ends a wait for an operator's answer with it.
    let terms = HoldTerms {
        ends: &[(HoldEnd::Tool, served.stop())],
        ..HoldTerms::default()
    };
    let permitted = relay.permit(served, caller, request.message, headers, &terms);
    let permitted = match permitted.await {
        Ok(permitted) => permitted,
        Err(refusal) => return Ok(finished("", refusal)),
    };
    let metrics = relay.governance.metrics();
    let worker = service.pools().any(served, client, metrics).await?;
    let process = worker.process();
    let mut call = process.reserve();
    let text = words::in_old_words(&permitted.message, &call.id().to_string())?;
    let answer = match process.send(&text).await {
        Ok(()) => match tokio::time::timeout(served.timeout(), call.answer()).await {
            Ok(answer) => answer,
            Err(_) => Err(Gone { code: None }),
        },
        Err(SendError::Gone(gone)) => Err(gone),
        Err(error @ SendError::Write(_)) => return Err(Refused::unwritten(&error)),
    };
    drop(call);
    let answer = relay.deliver(served, caller, &permitted, answer, &terms);
    Ok(finished(&permitted.method, answer.await))
}

/// A request during which the server may ask something.
async fn call(
    service: &Arc<SessionlessService>,
    served: &Arc<Served>,
    client: Client,
    request: Request,
    headers: CallHeaders,
) -> Result<Response<Content>, Refused> {
    let method = request.method().to_owned();
    let id = request.message.id().unwrap_or("null").to_owned();
    let (service, served) = (Arc::clone(service), Arc::clone(served));
    let flag = HoldFlag::default();
    let mut begun = Box::pin(Drive::begin_or_resume(
        service,
        served,
        client,
        request,
        headers,
        flag.clone(),
    ));
    let (sender, mut receiver) = mpsc::channel(16);
    match until_held(begun.as_mut(), &flag).await {
        Some(driven) => match driven? {
            Ok(drive) => drop(tokio::spawn(drive.run(sender))),
            Err(refusal) => return Ok(finished(&method, refusal)),
        },
        None => drop(tokio::spawn(run_held(begun, sender))),
    }
    let first = match tokio::time::timeout(AT_ONCE, receiver.recv()).await {
        Ok(Some(Out::Final(text))) => return Ok(finished(&method, text)),
        Ok(Some(Out::Refused(refused))) => return Err(refused),
        Ok(Some(Out::Said(text))) => Some(text),
        Ok(None) => {
            return Err(Refused::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                code::INTERNAL,
                "the call ended without an answer",
            ));
        }
        Err(_) => None,
    };
    let first = first.map_or_else(|| sse::BREATH.to_owned(), |text| event(&text));
    let listener = Listener {
        receiver,
        method,
        id,
    };
    Ok(answer::told(first, listener, hear))
}

/// Drives a call that waits for an operator's answer. A client that leaves ends the wait.
async fn run_held(
    begun: impl Future<Output = Result<Result<Drive, String>, Refused>>,
    client: mpsc::Sender<Out>,
) {
    let begun = tokio::select! {
        begun = begun => begun,
        () = client.closed() => return,
    };
    let end = match begun {
        Ok(Ok(drive)) => return drive.run(client).await,
        Ok(Err(refusal)) => Out::Final(refusal),
        Err(refused) => Out::Refused(refused),
    };
    drop(client.send(end).await);
}

fn event(text: &str) -> String {
    Event {
        name: Some("message"),
        data: Some(text),
        ..Event::default()
    }
    .write()
}

/// An answer as one JSON text, with the status that its first word deserves.
fn finished(method: &str, text: String) -> Response<Content> {
    let (status, text) = translated(method, text);
    answer::json_text(status, text)
}

/// An answer of the era before, in the words of this one.
fn translated(method: &str, text: String) -> (StatusCode, String) {
    let Ok(answer) = Message::read(text) else {
        let text = Message::failure("null", code::INTERNAL, "the answer is no message", None);
        return (StatusCode::INTERNAL_SERVER_ERROR, text);
    };
    if let Some(result) = answer.result() {
        let has = |key: &str| rpc::find(result, 0..result.len(), &[key]).is_some();
        let mut entries = Vec::new();
        if !has("resultType") {
            entries.push(r#""resultType":"complete""#);
        }
        if CACHED.contains(&method) {
            if !has("ttlMs") {
                entries.push(r#""ttlMs":0"#);
            }
            if !has("cacheScope") {
                entries.push(r#""cacheScope":"private""#);
            }
        }
        if entries.is_empty() {
            return (StatusCode::OK, answer.into_text());
        }
        let result = relay::add_entry(result, &entries.join(","));
        let text = result.map_or_else(|| answer.text().to_owned(), |r| answer.with_result(&r));
        return (StatusCode::OK, text);
    }
    let error = answer.error().unwrap_or("{}");
    let place = |key: &str| rpc::find(error, 0..error.len(), &[key]);
    let number = place("code").and_then(|place| error.get(place)?.parse::<i64>().ok());
    match number {
        // A resource that does not exist is a parameter that is wrong (SEP-2164).
        Some(-32002) => {
            let id = answer.id().unwrap_or("null");
            let message = place("message")
                .and_then(|at| error.get(at))
                .unwrap_or("\"\"");
            let data = place("data").and_then(|at| error.get(at)).unwrap_or("{}");
            let error = format!(r#"{{"code":-32602,"message":{message},"data":{data}}}"#);
            let text = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#);
            (StatusCode::BAD_REQUEST, text)
        }
        Some(code::NO_METHOD) => (StatusCode::NOT_FOUND, answer.into_text()),
        Some(code::REFUSED) => (StatusCode::FORBIDDEN, answer.into_text()),
        Some(
            code::PARAMS
            | code::INVALID
            | code::HEADER_MISMATCH
            | code::MISSING_CAPABILITY
            | code::VERSION,
        ) => (StatusCode::BAD_REQUEST, answer.into_text()),
        Some(code::GONE) => (StatusCode::BAD_GATEWAY, answer.into_text()),
        _ => (StatusCode::OK, answer.into_text()),
    }
}

/// What is told during a call, and its end. Whoever stops listening cancels the call.
struct Listener {
    receiver: mpsc::Receiver<Out>,
    method: String,
    /// The request's id, as written.
    id: String,
}

async fn hear(mut listener: Listener) -> Option<(String, Listener)> {
    let heard = tokio::time::timeout(answer::BREATHE_EVERY, listener.receiver.recv()).await;
    let text = match heard {
        Ok(Some(Out::Said(text))) => event(&text),
        Ok(Some(Out::Final(text))) => {
            listener.receiver.close();
            event(&translated(&listener.method, text).1)
        }
        Ok(Some(Out::Refused(refused))) => {
            listener.receiver.close();
            event(&refused.text(&listener.id))
        }
        Ok(None) => return None,
        Err(_) => sse::BREATH.to_owned(),
    };
    Some((text, listener))
}

#[cfg(test)]
mod tests;
