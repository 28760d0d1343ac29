//! `palisade.internal`: what the gate itself tells a sandbox. Never a token, never another
//! sandbox's business, and nothing that an operator's door offers.

use http::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use http::request::Parts;
use http::{Request, Response, StatusCode, Uri};
use policy::allowlist::{HostRule, Target};
use policy::id::RequestId;
use serde_json::{Value, json};

use crate::body::{self, Content};
use crate::request_cx::RequestCx;

/// Answers a request to the gate itself.
pub async fn answer(cx: &RequestCx, target: &Target) -> Response<Content> {
    if !matches!(target.method.as_str(), "GET" | "HEAD") {
        let mut refused = say(
            StatusCode::METHOD_NOT_ALLOWED,
            &json!({"error": "Only GET is understood here."}),
        );
        refused
            .headers_mut()
            .insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refused;
    }
    let segments: Vec<&str> = target.path.segments().collect();
    match segments.as_slice() {
        [] => say(StatusCode::OK, &index(cx)),
        ["health"] => say(StatusCode::OK, &json!({"status": "ok"})),
        ["allowlist"] => say(StatusCode::OK, &allowlist(cx)),
        ["why", id] => why(cx, id).await,
        _ => say(
            StatusCode::NOT_FOUND,
            &json!({"error": "There is nothing here. '/' lists what there is."}),
        ),
    }
}

/// Whether it is the bridge that is asked.
pub fn is_for_tools(target: &Target) -> bool {
    target.path.segments().next() == Some("mcp")
}

/// The request as the bridge reads it: what is asked for, without where it is.
pub fn for_tools(mut head: Parts, body: Content) -> Request<Content> {
    let within = head.uri.path_and_query().cloned();
    head.uri = within.map_or_else(|| Uri::from_static("/"), Uri::from);
    Request::from_parts(head, body)
}

fn index(cx: &RequestCx) -> Value {
    json!({
        "sandbox": cx.sandbox.id(),
        "paths": {
            "/allowlist": "what this sandbox may reach",
            "/why/<request-id>": "why a request of this sandbox was refused",
            "/health": "whether the gate is there",
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

async fn why(cx: &RequestCx, id: &str) -> Response<Content> {
    let Ok(id) = RequestId::parse(id) else {
        return say(
            StatusCode::BAD_REQUEST,
            &json!({"error": "That is no request id: they have 26 letters and digits."}),
        );
    };
    if let Some(one) = cx.sandbox.explain(id) {
        return say(
            StatusCode::OK,
            &json!({
                "request_id": id,
                "error": one.message,
                "verdict": one.verdict,
                "reason": one.reason.code(),
                "says": one.reason.says(),
                "rule": one.rule.as_str(),
                "stage": one.stage.as_str(),
                "host": one.host,
                "method": one.method,
                "path": one.path,
            }),
        );
    }
    match cx.services.audit().find(cx.sandbox.id(), id).await {
        Some(event) => say(
            StatusCode::OK,
            &json!({
                "request_id": id,
                "verdict": event.verdict,
                "reason": event.reason.map(policy::reason::Reason::code),
                "says": event.reason.map(policy::reason::Reason::says),
                "rule": event.rule,
                "stage": event.stage,
                "host": event.host,
                "method": event.method,
                "path": event.path,
                "status": event.status,
            }),
        ),
        None => say(
            StatusCode::NOT_FOUND,
            &json!({"error": "No request of this sandbox has that id."}),
        ),
    }
}

fn say(status: StatusCode, value: &Value) -> Response<Content> {
    let mut response = Response::new(body::full(value.to_string() + "\n"));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
