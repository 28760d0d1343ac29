//! Contexts that a call through the bridge shares with the hooks.

use super::expiry::{bridge_with_sweeper, expire};
use super::*;
use crate::bridge::Bridge;
use crate::call_headers::CallHeaders;
use crate::caller::McpCaller;
use crate::context::CORRELATION_KEY;
use crate::hold_terms::HoldTerms;
use crate::rpc::RpcMessage;

fn anna() -> McpCaller {
    McpCaller {
        agent: "anna".to_owned(),
        session: String::new(),
        sandbox: None,
    }
}

/// Has the relay permit a call of `fs` with the request ids `meta` in `_meta` and `header` in the
/// header. The error is the refusal.
async fn permit(bridge: &Bridge, meta: &str, header: &str) -> Result<(), Value> {
    let params = json!({"name": "t", "_meta": {CORRELATION_KEY: meta}});
    let call = RpcMessage::request("1", "tools/call", &params.to_string());
    let server = bridge.tool(Some("fs"), &anna()).unwrap();
    let headers = CallHeaders {
        parent: None,
        request_id: Some(header.to_owned()),
    };
    let call = RpcMessage::read(call).unwrap();
    let (relay, terms) = (bridge.relay(), HoldTerms::default());
    let permitted = relay.permit(&server, &anna(), call, &headers, &terms).await;
    permitted
        .map(drop)
        .map_err(|refusal| serde_json::from_str(&refusal).unwrap())
}

#[tokio::test(start_paused = true)]
async fn refused_request_wins_over_an_allowed_one() {
    let policy = r#"
default allow := true
allow := false if input.params.refuse"#;
    let (interceptor, audit_log) = interceptor(policy);
    let bridge = bridge_with_sweeper(&interceptor);
    before(&interceptor, request("fine", json!({"name": "t"}))).await;
    before(
        &interceptor,
        request("refused", json!({"name": "t", "refuse": true})),
    )
    .await;
    assert_eq!(permit(&bridge, "fine", "fine").await, Ok(()));
    assert_eq!(permit(&bridge, "unknown", "fine").await, Ok(()));
    audit_log.take();
    for (meta, header) in [("fine", "refused"), ("refused", "fine")] {
        let refusal = permit(&bridge, meta, header).await.unwrap_err();
        assert_eq!(refusal["result"]["isError"], true, "{refusal}");
        let record = audit_log.take().remove(0);
        assert_eq!(record.event.as_deref(), Some("stored_decision"));
        assert_eq!(record.bundle.as_deref(), Some("b0"));
    }
}

#[tokio::test(start_paused = true)]
async fn call_with_an_expired_request_id_is_refused() {
    let (interceptor, audit_log) = interceptor("allow := true");
    let bridge = bridge_with_sweeper(&interceptor);
    before(&interceptor, request("r", json!({"name": "t"}))).await;
    expire(&interceptor).await;
    audit_log.take();
    for (meta, header) in [("r", "new"), ("new", "r")] {
        let refusal = permit(&bridge, meta, header).await.unwrap_err();
        let about = &refusal["result"]["_meta"]["palisade/refusal"];
        assert_eq!(about["rule"], "mcp:context", "{refusal}");
        assert_eq!(
            audit_log.take().remove(0).rule.unwrap().as_str(),
            "mcp:context"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn docker_after_hook_receives_decision_and_outcome() {
    let policy = r#"
decision := {"action": "allow", "reason": "fine", "metadata": {"ticket": 7}} if input.moment == "before"

decision := {"action": "redact", "outputs": {"modified_data": {"before": input.before, "execution": input.execution}}} if {
	input.moment == "after"
	input.result.hook
}

decision := {"action": "allow"} if {
	input.moment == "after"
	not input.result.hook
}"#;
    let (interceptor, _) = interceptor(policy);
    let bridge = bridge_with_sweeper(&interceptor);
    let server = bridge.tool(Some("fs"), &anna()).unwrap();
    let call = RpcMessage::request("1", "tools/call", r#"{"name":"t"}"#);
    let call = RpcMessage::read(call).unwrap();
    let relay = bridge.relay();
    let headers = CallHeaders::default();
    let terms = HoldTerms::default();
    let permitted = relay
        .permit(&server, &anna(), call, &headers, &terms)
        .await
        .unwrap();
    tokio::time::advance(Duration::from_millis(1234)).await;
    let answer = RpcMessage::read(RpcMessage::answer("1", r#"{"content":[]}"#)).unwrap();
    let delivered = relay
        .deliver(&server, &anna(), &permitted, Ok(answer), &terms)
        .await;
    let delivered: Value = serde_json::from_str(&delivered).unwrap();
    let mut result = delivered["result"].clone();
    result["hook"] = json!(true);
    assert_eq!(
        after(&interceptor, result).await.value(),
        json!({
            "before": {"action": "allow", "reason": "fine", "metadata": {"ticket": 7}},
            "execution": {"exit_code": 0, "failed": false, "duration_ms": 1234},
        })
    );
}
