//! `palisade.internal`: the gate's own pages for a sandbox. They contain no tokens, no data of
//! other sandboxes, and nothing of the control API.

use http::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use http::request::Parts;
use http::{Request, Response, StatusCode, Uri};
use policy::allowlist::{HostRule, Target};
use policy::id::RequestId;
use serde_json::{Value, json};

use crate::body::{self, MessageBody};
use crate::request_cx::RequestCx;

/// Answers a request to the gate itself.
pub async fn answer(cx: &RequestCx, target: &Target) -> Response<MessageBody> {
    if !matches!(target.method.as_str(), "GET" | "HEAD") {
        let mut refused = json_response(
            StatusCode::METHOD_NOT_ALLOWED,
            &json!({"error": "Method not allowed: use GET."}),
        );
        refused
            .headers_mut()
            .insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refused;
    }
    let segments: Vec<&str> = target.path.segments().collect();
    match segments.as_slice() {
        [] => json_response(StatusCode::OK, &index(cx)),
        ["health"] => json_response(StatusCode::OK, &json!({"status": "ok"})),
        ["allowlist"] => json_response(StatusCode::OK, &allowlist(cx)),
        ["why", id] => why(cx, id).await,
        _ => json_response(
            StatusCode::NOT_FOUND,
            &json!({"error": "Not found: GET / lists the paths."}),
        ),
    }
}

/// Whether the request is for the bridge.
pub fn is_for_tools(target: &Target) -> bool {
    target.path.segments().next() == Some("mcp")
}

/// Converts a request for the bridge: path and query without scheme and host.
pub fn for_tools(mut head: Parts, body: MessageBody) -> Request<MessageBody> {
    let path = head.uri.path_and_query().cloned();
    head.uri = path.map_or_else(|| Uri::from_static("/"), Uri::from);
    Request::from_parts(head, body)
}

fn index(cx: &RequestCx) -> Value {
    json!({
        "sandbox": cx.sandbox.id(),
        "paths": {
            "/allowlist": "what this sandbox may reach",
            "/why/<request-id>": "why a request of this sandbox was refused",
            "/health": "whether the gate is running",
            "/mcp/<tool>": "tools, over Streamable HTTP",
        },
    })
}

fn allowlist(cx: &RequestCx) -> Value {
    let show = |rule: &HostRule| {
        let endpoints = |list: &[policy::endpoint::EndpointRule]| -> Vec<String> {
            list.iter().map(ToString::to_string).collect()
        };
        json!({
            "host": rule.pattern.to_string(),
            "ports": rule.ports(),
            "allow": endpoints(&rule.endpoints.allow),
            "deny": endpoints(&rule.endpoints.deny),
            "programs": rule.programs,
        })
    };
    let list: Vec<Value> = cx.snapshot.settings.allowlist().rules().map(show).collect();
    json!({"sandbox": cx.sandbox.id(), "hosts": list})
}

async fn why(cx: &RequestCx, id: &str) -> Response<MessageBody> {
    let Ok(id) = RequestId::parse(id) else {
        return json_response(
            StatusCode::BAD_REQUEST,
            &json!({"error": "Invalid request id: it must have 26 letters and digits."}),
        );
    };
    if let Some(refusal) = cx.sandbox.explain(id) {
        return json_response(
            StatusCode::OK,
            &json!({
                "request_id": id,
                "error": refusal.message,
                "verdict": refusal.verdict,
                "reason": refusal.reason.code(),
                "says": refusal.reason.description(),
                "rule": refusal.rule.as_str(),
                "stage": refusal.stage.as_str(),
                "host": refusal.host,
                "method": refusal.method,
                "path": refusal.path,
            }),
        );
    }
    match cx.services.audit().find(cx.sandbox.id(), id).await {
        Some(event) => json_response(
            StatusCode::OK,
            &json!({
                "request_id": id,
                "verdict": event.verdict,
                "reason": event.reason.map(policy::reason::Reason::code),
                "says": event.reason.map(policy::reason::Reason::description),
                "rule": event.rule,
                "stage": event.stage,
                "host": event.host,
                "method": event.method,
                "path": event.path,
                "status": event.status,
            }),
        ),
        None => json_response(
            StatusCode::NOT_FOUND,
            &json!({"error": "This sandbox has no request with that id."}),
        ),
    }
}

fn json_response(status: StatusCode, value: &Value) -> Response<MessageBody> {
    let mut response = Response::new(body::full(value.to_string() + "\n"));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
