//! Streamable HTTP of revision 2026-07-28, which has no sessions: every POST is independent.
//!
//! The servers behind the bridge implement the earlier revisions with sessions, so the bridge
//! translates. It initializes a server process for each client ([`crate::pool`]). A request of the
//! server to the client during a call ([`call_driver`]) becomes an `input_required` result, and the call
//! is held until the client repeats it with the answers.

mod call_driver;
mod listen;
mod request;
mod service;
mod translation;

use std::sync::Arc;
use std::time::Duration;

use http::{Method, Response, StatusCode};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use self::call_driver::{CallDriver, CallEvent};
pub use self::request::{REVISION, is_sessionless};
use self::request::{Request, RequestError};
pub use self::service::SessionlessService;
use crate::answer::{self, McpBody};
use crate::call_headers::CallHeaders;
use crate::hold_terms::{HoldEnd, HoldFlag, HoldTerms, until_held};
use crate::incoming::{Incoming, REVISIONS};
use crate::pool::PoolClient;
use crate::process::{ProcessEnded, SendError};
use crate::relay;
use crate::rpc::{self, RpcKind, RpcMessage, code};
use crate::sse::{self, Event};
use crate::tools::StdioServer;

/// Methods during which a server may send requests to the client.
const INTERACTIVE_METHODS: [&str; 3] = ["prompts/get", "resources/read", "tools/call"];

/// Methods during which a server sends no requests to the client.
const PLAIN_METHODS: [&str; 5] = [
    "completion/complete",
    "prompts/list",
    "resources/list",
    "resources/templates/list",
    "tools/list",
];

/// Methods whose results have cache fields (`ttlMs`, `cacheScope`).
const CACHED_METHODS: [&str; 5] = [
    "prompts/list",
    "resources/list",
    "resources/read",
    "resources/templates/list",
    "tools/list",
];

/// After this time the response becomes an event stream.
const SINGLE_REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// Answers a request of revision 2026-07-28.
pub async fn answer(
    service: &Arc<SessionlessService>,
    server: &Arc<StdioServer>,
    incoming: Incoming,
) -> Response<McpBody> {
    if incoming.head.method != Method::POST {
        return answer::method_not_allowed("POST");
    }
    let message = match RpcMessage::read_bytes(incoming.body.to_vec()) {
        Ok(message) => message,
        Err(bad) => {
            let why = bad.to_string();
            return answer::rpc_error(StatusCode::BAD_REQUEST, None, bad.code(), &why);
        }
    };
    match message.kind() {
        RpcKind::Request => {}
        // Clients send no notifications in this revision: they disconnect to cancel a request.
        RpcKind::Notification => return answer::empty_response(StatusCode::ACCEPTED),
        RpcKind::Response => {
            let why = "revision 2026-07-28 has no responses of clients: use inputResponses";
            return answer::rpc_error(StatusCode::BAD_REQUEST, None, code::INVALID_REQUEST, why);
        }
    }
    let id = message.id().unwrap_or("null").to_owned();
    let request = match Request::read(message, &incoming.head.headers) {
        Ok(request) => request,
        Err(refused) => return refused.response(&id),
    };
    let headers = CallHeaders::read(&incoming.head.headers);
    let client = PoolClient {
        caller: incoming.caller,
        capabilities: request.capabilities.clone(),
    };
    let answered = match request.method() {
        "server/discover" => discover(service, server, &client, &id).await,
        "subscriptions/listen" => listen::answer(service, server, &client, &request).await,
        method if INTERACTIVE_METHODS.contains(&method) => {
            call(service, server, client, request, headers).await
        }
        method if PLAIN_METHODS.contains(&method) => {
            plain_request(service, server, &client, request, &headers).await
        }
        method => Err(RequestError::new(
            StatusCode::NOT_FOUND,
            code::METHOD_NOT_FOUND,
            format!("Method not found: {method}"),
        )),
    };
    answered.unwrap_or_else(|refused| refused.response(&id))
}

/// Answers `server/discover` from the server's `initialize` result.
async fn discover(
    service: &Arc<SessionlessService>,
    server: &Arc<StdioServer>,
    client: &PoolClient,
    id: &str,
) -> Result<Response<McpBody>, RequestError> {
    let metrics = service.relay().governance.metrics();
    let worker = service.pools().get_worker(server, client, metrics).await?;
    let initialized: Value = serde_json::from_str(worker.initialize_result()).unwrap_or_default();
    let object = |value: &Value| match value {
        Value::Object(_) => value.clone(),
        _ => json!({}),
    };
    let mut result = json!({
        "resultType": "complete",
        "supportedVersions": supported_revisions(),
        "capabilities": object(initialized.get("capabilities").unwrap_or(&Value::Null)),
        "ttlMs": 0,
        "cacheScope": "private",
    });
    if let Some(fields) = result.as_object_mut() {
        if let Some(Value::String(text)) = initialized.get("instructions") {
            fields.insert("instructions".to_owned(), Value::String(text.clone()));
        }
        if let Some(info @ Value::Object(_)) = initialized.get("serverInfo") {
            let meta = json!({"io.modelcontextprotocol/serverInfo": info});
            fields.insert("_meta".to_owned(), meta);
        }
    }
    let text = RpcMessage::answer(id, &result.to_string());
    Ok(answer::json_text(StatusCode::OK, text))
}

/// All supported revisions, the newest first.
fn supported_revisions() -> Vec<&'static str> {
    std::iter::once(REVISION).chain(REVISIONS).collect()
}

/// Answers a request during which the server sends no requests.
async fn plain_request(
    service: &Arc<SessionlessService>,
    server: &Arc<StdioServer>,
    client: &PoolClient,
    request: Request,
    headers: &CallHeaders,
) -> Result<Response<McpBody>, RequestError> {
    let (relay, caller) = (service.relay(), &client.caller);
    // A client that disconnects drops this future, which also ends a wait for the operator.
    let terms = HoldTerms {
        ends: &[(HoldEnd::Tool, server.stop())],
        ..HoldTerms::default()
    };
    let permitted = relay.permit(server, caller, request.message, headers, &terms);
    let permitted = match permitted.await {
        Ok(permitted) => permitted,
        Err(refusal) => return Ok(json_response("", refusal)),
    };
    let metrics = relay.governance.metrics();
    let worker = service.pools().get_worker(server, client, metrics).await?;
    let process = worker.process();
    let mut call = process.reserve();
    let text = translation::to_session_revision(&permitted.message, &call.id().to_string())?;
    let answer = match process.send(&text).await {
        Ok(()) => match tokio::time::timeout(server.timeout(), call.answer()).await {
            Ok(answer) => answer,
            Err(_) => Err(ProcessEnded { code: None }),
        },
        Err(SendError::ProcessEnded(ended)) => Err(ended),
        Err(error @ SendError::Write(_)) => return Err(RequestError::write_failed(&error)),
    };
    drop(call);
    let answer = relay.deliver(server, caller, &permitted, answer, &terms);
    Ok(json_response(&permitted.method, answer.await))
}

/// Answers a request during which the server may send requests to the client.
async fn call(
    service: &Arc<SessionlessService>,
    server: &Arc<StdioServer>,
    client: PoolClient,
    request: Request,
    headers: CallHeaders,
) -> Result<Response<McpBody>, RequestError> {
    let method = request.method().to_owned();
    let id = request.message.id().unwrap_or("null").to_owned();
    let (service, server) = (Arc::clone(service), Arc::clone(server));
    let flag = HoldFlag::default();
    let mut starting = Box::pin(CallDriver::begin_or_resume(
        service,
        server,
        client,
        request,
        headers,
        flag.clone(),
    ));
    let (sender, mut receiver) = mpsc::channel(16);
    match until_held(starting.as_mut(), &flag).await {
        Some(started) => match started? {
            Ok(driver) => drop(tokio::spawn(driver.run(sender))),
            Err(refusal) => return Ok(json_response(&method, refusal)),
        },
        None => drop(tokio::spawn(run_held(starting, sender))),
    }
    let first = match tokio::time::timeout(SINGLE_REPLY_TIMEOUT, receiver.recv()).await {
        Ok(Some(CallEvent::Final(text))) => return Ok(json_response(&method, text)),
        Ok(Some(CallEvent::Refused(refused))) => return Err(refused),
        Ok(Some(CallEvent::Message(text))) => Some(text),
        Ok(None) => {
            return Err(RequestError::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                code::INTERNAL_ERROR,
                "the call ended without an answer",
            ));
        }
        Err(_) => None,
    };
    let first = first.map_or_else(|| sse::KEEPALIVE.to_owned(), |text| format_event(&text));
    let stream = CallStream {
        receiver,
        method,
        id,
    };
    Ok(answer::event_stream(first, stream, next_event))
}

/// Runs a call that waits for the operator. A client that disconnects ends the wait.
async fn run_held(
    starting: impl Future<Output = Result<Result<CallDriver, String>, RequestError>>,
    client: mpsc::Sender<CallEvent>,
) {
    let started = tokio::select! {
        started = starting => started,
        () = client.closed() => return,
    };
    let end = match started {
        Ok(Ok(driver)) => return driver.run(client).await,
        Ok(Err(refusal)) => CallEvent::Final(refusal),
        Err(refused) => CallEvent::Refused(refused),
    };
    drop(client.send(end).await);
}

fn format_event(text: &str) -> String {
    Event {
        name: Some("message"),
        data: Some(text),
        ..Event::default()
    }
    .write()
}

/// A single JSON response with the HTTP status that fits the answer.
fn json_response(method: &str, text: String) -> Response<McpBody> {
    let (status, text) = translate_answer(method, text);
    answer::json_text(status, text)
}

/// Translates an answer of an earlier revision, and returns its HTTP status.
fn translate_answer(method: &str, text: String) -> (StatusCode, String) {
    let Ok(answer) = RpcMessage::read(text) else {
        let text = RpcMessage::failure(
            "null",
            code::INTERNAL_ERROR,
            "the answer is not a JSON-RPC message",
            None,
        );
        return (StatusCode::INTERNAL_SERVER_ERROR, text);
    };
    if let Some(result) = answer.result() {
        let has_field = |key: &str| rpc::find(result, 0..result.len(), &[key]).is_some();
        let mut entries = Vec::new();
        if !has_field("resultType") {
            entries.push(r#""resultType":"complete""#);
        }
        if CACHED_METHODS.contains(&method) {
            if !has_field("ttlMs") {
                entries.push(r#""ttlMs":0"#);
            }
            if !has_field("cacheScope") {
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
    let field = |key: &str| error.get(rpc::find(error, 0..error.len(), &[key])?);
    let error_code = field("code").and_then(|code| code.parse::<i64>().ok());
    match error_code {
        // A missing resource is an invalid parameter in this revision (SEP-2164).
        Some(-32002) => {
            let id = answer.id().unwrap_or("null");
            let message = field("message").unwrap_or("\"\"");
            let data = field("data").unwrap_or("{}");
            let error = format!(r#"{{"code":-32602,"message":{message},"data":{data}}}"#);
            let text = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#);
            (StatusCode::BAD_REQUEST, text)
        }
        Some(code::METHOD_NOT_FOUND) => (StatusCode::NOT_FOUND, answer.into_text()),
        Some(code::POLICY_REFUSED) => (StatusCode::FORBIDDEN, answer.into_text()),
        Some(
            code::INVALID_PARAMS
            | code::INVALID_REQUEST
            | code::HEADER_MISMATCH
            | code::MISSING_CAPABILITY
            | code::UNSUPPORTED_VERSION,
        ) => (StatusCode::BAD_REQUEST, answer.into_text()),
        Some(code::SERVER_ENDED) => (StatusCode::BAD_GATEWAY, answer.into_text()),
        _ => (StatusCode::OK, answer.into_text()),
    }
}

/// Event stream of a call: its messages and its answer. Dropping the stream cancels the call.
struct CallStream {
    receiver: mpsc::Receiver<CallEvent>,
    method: String,
    /// The request's id, as written.
    id: String,
}

async fn next_event(mut stream: CallStream) -> Option<(String, CallStream)> {
    let received = tokio::time::timeout(answer::KEEPALIVE_INTERVAL, stream.receiver.recv()).await;
    let text = match received {
        Ok(Some(CallEvent::Message(text))) => format_event(&text),
        Ok(Some(CallEvent::Final(text))) => {
            stream.receiver.close();
            format_event(&translate_answer(&stream.method, text).1)
        }
        Ok(Some(CallEvent::Refused(refused))) => {
            stream.receiver.close();
            format_event(&refused.text(&stream.id))
        }
        Ok(None) => return None,
        Err(_) => sse::KEEPALIVE.to_owned(),
    };
    Some((text, stream))
}

#[cfg(test)]
mod tests;
