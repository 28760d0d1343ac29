mod expiry;
mod properties;
mod replay;
mod sharing;

use std::sync::Arc;

use http_body_util::BodyExt;
use policy::reason::Reason;
use policy::verdict::VerdictKind;

use super::*;
use crate::context::RequestOrigin;
use crate::governance::tests::{MemoryAudit, governance, policy_snapshot};

/// A response with its collected body.
struct HookResponse {
    status: StatusCode,
    json: bool,
    body: String,
}

impl HookResponse {
    async fn of(response: Response<Full<Bytes>>) -> Self {
        let (head, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Self {
            status: head.status,
            json: head.headers.get(CONTENT_TYPE).is_some(),
            body: String::from_utf8(body.to_vec()).unwrap(),
        }
    }

    #[track_caller]
    fn value(&self) -> Value {
        assert!(self.json);
        serde_json::from_str(&self.body).unwrap()
    }
}

/// An interceptor with one policy.
fn interceptor(policy: &str) -> (Interceptor, Arc<MemoryAudit>) {
    let (governance, audit_log) = governance(policy_snapshot("", &[("mcp/authz", "", policy)]));
    (
        Interceptor::new(governance, CancellationToken::new()),
        audit_log,
    )
}

async fn before(interceptor: &Interceptor, body: impl ToString) -> HookResponse {
    HookResponse::of(
        interceptor
            .answer_before(body.to_string().into(), None)
            .await,
    )
    .await
}

async fn after(interceptor: &Interceptor, body: impl ToString) -> HookResponse {
    HookResponse::of(
        interceptor
            .answer_after(body.to_string().into(), None)
            .await,
    )
    .await
}

fn request(id: &str, params: Value) -> Value {
    json!({
        "version": "1.0", "type": "before", "request_id": id,
        "timestamp": "2026-01-02T03:04:05.678Z", "method": "tools/call", "params": params,
        "tool_id": "fs", "agent_id": "anna", "session_id": "s1",
    })
}

fn response(id: &str, result: Value) -> Value {
    json!({
        "version": "1.0", "type": "after", "request_id": id,
        "timestamp": "2026-01-02T03:04:05+01:00", "result": result,
        "tool_id": "fs", "agent_id": "anna", "session_id": "s1",
    })
}

#[tokio::test]
async fn missing_or_invalid_field_is_named() {
    let (interceptor, audit_log) = interceptor("allow := true");
    let good = request("r", json!({"name": "t"}));
    assert_eq!(before(&interceptor, &good).await.status, StatusCode::OK);
    audit_log.take();
    for field in [
        "version",
        "type",
        "request_id",
        "timestamp",
        "method",
        "tool_id",
        "agent_id",
        "session_id",
    ] {
        let mut without = good.clone();
        without.as_object_mut().unwrap().shift_remove(field);
        let is_optional = ["version", "timestamp", "session_id"].contains(&field);
        let with = |value: Value| {
            let mut wrong = good.clone();
            wrong[field] = value;
            wrong
        };
        let mut bad = vec![with(json!(7)), with(json!(null)), with(json!(["x"]))];
        if is_optional {
            let answer = before(&interceptor, &without).await;
            assert_eq!(answer.status, StatusCode::OK, "{without}");
            assert_eq!(answer.value()["action"], "pass");
            audit_log.take();
        } else {
            bad.push(without);
        }
        for bad in bad {
            let answer = before(&interceptor, &bad).await;
            assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{bad}");
            let answer = answer.value();
            assert_eq!(answer["field"], field, "{bad}");
            assert_eq!(answer["action"], "block", "{bad}");
        }
    }
    for (field, value) in [
        ("version", json!("2.0")),
        ("type", json!("after")),
        ("request_id", json!("")),
        ("request_id", json!("x".repeat(300))),
        ("timestamp", json!("yesterday")),
        ("timestamp", json!("2026-01-02T03:04:05")),
        ("timestamp", json!("2026-01-02")),
    ] {
        let mut wrong = good.clone();
        wrong[field] = value;
        let answer = before(&interceptor, &wrong).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{wrong}");
        assert_eq!(answer.value()["field"], field, "{wrong}");
    }
    let good = response("r", json!({}));
    for (change, field) in [
        (json!({"result": null, "error": 1}), "error"),
        (json!({"error": {"code": 1, "message": "x"}}), "error"),
        (json!({"method": ""}), "method"),
    ] {
        let mut wrong = good.clone();
        for (key, value) in change.as_object().unwrap() {
            wrong[key] = value.clone();
        }
        let answer = after(&interceptor, &wrong).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{wrong}");
        assert_eq!(answer.value()["field"], field, "{wrong}");
    }
    let mut neither = good.clone();
    neither.as_object_mut().unwrap().shift_remove("result");
    let answer = after(&interceptor, &neither).await;
    assert_eq!(answer.value()["field"], "result");
    assert!(audit_log.take().is_empty(), "no policy was evaluated");
}

#[tokio::test]
async fn malformed_body_is_refused_in_both_dialects() {
    let (interceptor, _) = interceptor("allow := true");
    for body in [
        "",
        "x",
        "[1]",
        "7",
        "\"text\"",
        "{\"a\":1,\"a\":2}",
        "{",
        "\u{0}",
    ] {
        for answer in [
            before(&interceptor, body).await,
            after(&interceptor, body).await,
        ] {
            assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{body}");
            let answer = answer.value();
            assert_eq!(answer["field"], "body");
            assert_eq!(answer["isError"], true);
            assert_eq!(answer["action"], "block");
        }
    }
    let answer = HookResponse::of(
        interceptor
            .answer_before(Bytes::from_static(b"{\"\xff\":1}"), None)
            .await,
    )
    .await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn both_hooks_of_a_request_have_one_audit_id() {
    let (interceptor, audit_log) = interceptor("allow := true");
    let contexts = interceptor.governance.contexts().clone();
    let answer = before(&interceptor, request("r", json!({"name": "fs__read"}))).await;
    assert_eq!(answer.value()["action"], "pass");
    let known = contexts.find("r").unwrap();
    assert_eq!(known.decision.as_ref().unwrap().verdict, VerdictKind::Allow);
    assert_eq!((&*known.method, &*known.name), ("tools/call", "read"));
    let answer = after(&interceptor, response("r", json!({"content": []}))).await;
    assert_eq!(answer.value()["action"], "pass");
    assert!(contexts.is_empty());
    let events = audit_log.take();
    assert_eq!(events[0].request_id, events[1].request_id);
    assert_eq!(events[1].method.as_deref(), Some("tools/call"));
    assert_eq!(events[1].operation.as_deref(), Some("read"));
}

#[tokio::test(start_paused = true)]
async fn after_hook_of_an_expired_context_is_blocked() {
    let (interceptor, _) = interceptor("allow := true");
    before(&interceptor, request("r", json!({"name": "t"}))).await;
    tokio::time::advance(crate::context::TTL + Duration::from_secs(1)).await;
    let answer = after(&interceptor, response("r", json!({}))).await.value();
    assert_eq!(answer["action"], "block");
    // A response without a before hook is evaluated.
    let answer = after(&interceptor, response("new", json!({})))
        .await
        .value();
    assert_eq!(answer["action"], "pass");
}

#[tokio::test]
async fn modified_data_keeps_all_digits_of_numbers() {
    let policy = r#"decision := {"action": "redact", "outputs": {"redaction_rules": {"fields": ["arguments.key"]}}}"#;
    let (interceptor, _) = interceptor(policy);
    let params = r#"{"name":"t","arguments":{"key":"k", "n":123456789012345678901234567890}}"#;
    let body = request("r", json!("PARAMS")).to_string();
    let answer = before(&interceptor, body.replace("\"PARAMS\"", params)).await;
    let wanted = r#""modified_data":{"name":"t","arguments":{"key":"[redacted]", "n":123456789012345678901234567890}}"#;
    assert!(answer.body.contains(wanted), "{}", answer.body);
}

#[tokio::test(start_paused = true)]
async fn docker_gateway_counts_as_present_five_minutes_after_a_hook() {
    let (interceptor, _) = interceptor("allow := true");
    before(&interceptor, request("r", json!({}))).await;
    assert!(!interceptor.has_recent_docker_hook());
    before(
        &interceptor,
        r#"{"method":"tools/call","params":{"name":"t"}}"#,
    )
    .await;
    assert!(interceptor.has_recent_docker_hook());
    tokio::time::advance(DOCKER_GATEWAY_TTL).await;
    assert!(interceptor.has_recent_docker_hook());
    tokio::time::advance(Duration::from_millis(1)).await;
    assert!(!interceptor.has_recent_docker_hook());
    after(&interceptor, "null").await;
    assert!(interceptor.has_recent_docker_hook());
}

#[tokio::test]
async fn result_is_matched_by_its_correlation_key_which_is_removed() {
    let policy = r#"
default allow := true
allow := false if { input.name == "read"; input.tool_id == "fs"; input.agent_id == "anna"; contains(input.result.content[0].text, "no") }
allow := false if input.result._meta["palisade/request"]"#;
    let (interceptor, audit_log) = interceptor(policy);
    let id = crate::governance::new_request();
    let contexts = interceptor.governance.contexts().clone();
    let stamped = |text: &str, meta: &str| {
        format!(
            r#"{{"content":[{{"type":"text","text":"{text}"}}],"_meta":{{{meta}"palisade/request":"{id}"}},"n":1.50}}"#
        )
    };
    let origin = RequestOrigin {
        request: Some(id),
        agent: "anna",
        tool: "fs",
        name: "read",
        method: "tools/call",
        ..RequestOrigin::default()
    };
    contexts.create(&id.to_string(), origin);
    let answer = after(&interceptor, stamped("yes", "")).await;
    assert_eq!(
        answer.body,
        r#"{"content":[{"type":"text","text":"yes"}],"n":1.50}"#
    );
    assert!(contexts.is_empty());
    assert_eq!(audit_log.take()[0].request_id, Some(id));
    contexts.create(&id.to_string(), origin);
    let answer = after(&interceptor, stamped("no", "\"k\":1,")).await;
    assert_eq!(answer.value()["isError"], true);
    // The request is unknown: the result is evaluated without a name, and the key removed.
    let answer = after(&interceptor, stamped("no", "\"k\":1,")).await;
    assert_eq!(
        answer.body,
        r#"{"content":[{"type":"text","text":"no"}],"_meta":{"k":1},"n":1.50}"#
    );
}

#[tokio::test]
async fn redacted_arguments_pass_only_to_tools_of_the_bridge() {
    let policy = r#"decision := {"action": "redact", "outputs": {"redaction_rules": {"replacements": {"s3cret": "*"}}}}"#;
    let (interceptor, audit_log) = interceptor(policy);
    let call = |name: &str, text: &str| json!({"method": "tools/call", "params": {"name": name, "arguments": {"x": text}}});
    assert_eq!(before(&interceptor, call("t", "fine")).await.body, "");
    assert_eq!(before(&interceptor, call("fs__t", "s3cret")).await.body, "");
    for name in ["t", "other__t"] {
        let answer = before(&interceptor, call(name, "s3cret")).await;
        assert_eq!(answer.value()["isError"], true, "{name}");
        assert!(!answer.body.contains("s3cret"));
    }
    let events = audit_log.take();
    assert_eq!(events.len(), 4);
    assert_eq!(events[1].host.as_deref(), Some("fs"));
}

#[tokio::test]
async fn client_credentials_are_neither_evaluated_nor_recorded() {
    let policy = r#"decision := {"action": "block", "reason": json.marshal(input)}"#;
    let (interceptor, audit_log) = interceptor(policy);
    let body = r#"{"Session":{},"Params":{"name":"t"},"Extra":{"TokenInfo":{"Extra":"hunter2"},"Header":{"Authorization":["Bearer hunter2"]}}}"#;
    let answer = before(&interceptor, body).await;
    assert_eq!(answer.value()["isError"], true);
    assert!(!answer.body.contains("hunter2"));
    let events = serde_json::to_string(&audit_log.take()).unwrap();
    assert!(!events.contains("hunter2"));
}

#[tokio::test]
async fn policy_metadata_is_returned_without_replacing_reserved_fields() {
    let policy = r#"decision := {"action": input.params.say, "reason": "So.", "metadata": {
        "ticket": [1, "two"], "rule": "mine", "code": "mine", "request": "mine"}}"#;
    for action in ["allow", "block"] {
        let (interceptor, _) = interceptor(policy);
        let answer = before(&interceptor, request("r", json!({"say": action}))).await;
        let metadata = &answer.value()["metadata"];
        assert_eq!(metadata["ticket"], json!([1, "two"]), "{action}");
        assert!(!answer.body.contains("mine"), "{action}: {}", answer.body);
        let rule = (action == "block").then_some("rego:b0");
        assert_eq!(metadata["rule"].as_str(), rule);
    }
    // Metadata above the size limit is dropped.
    let policy = r#"decision := {"allow": true, "metadata": {"long": sprintf("%05000d", [1])}}"#;
    let (interceptor, _) = interceptor(policy);
    let answer = before(&interceptor, request("r", json!({}))).await;
    assert_eq!(answer.value()["action"], "pass");
    assert_eq!(answer.value()["metadata"].get("long"), None);
}

#[tokio::test]
async fn policy_rule_name_is_not_in_the_answer() {
    let policy = r#"decision := {"allow": false, "rule": "the-pattern"}"#;
    let (interceptor, _) = interceptor(policy);
    let answer = before(&interceptor, request("r", json!({}))).await;
    let value = answer.value();
    assert_eq!(value["reason"], Reason::RegoDenied.description());
    assert_eq!(value["metadata"]["rule"], "rego:b0");
    assert_eq!(value["metadata"]["code"], "rego_denied");
    assert!(!answer.body.contains("the-pattern"));
}
