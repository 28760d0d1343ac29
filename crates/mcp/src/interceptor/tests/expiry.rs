//! After hooks whose context has expired, while the bridge removes expired contexts.
//!
//! Issue 14, number 9.

use tokio_util::sync::CancellationToken;

use super::*;
use crate::bridge::Bridge;
use crate::call_headers::CallHeaders;
use crate::caller::McpCaller;
use crate::context::TTL;
use crate::fingerprint::Fingerprints;
use crate::hold_terms::HoldTerms;
use crate::launch::{DEFAULT_EXIT_TIMEOUT, LocalLauncher};
use crate::relay::{GatewayHookProbe, Relay};
use crate::rpc::RpcMessage;
use crate::tools::Launchers;

/// Lets a result pass if the name of the called tool is unknown.
const NAMELESS_PASSES: &str = r#"
default allow := true
allow := false if { input.moment == "after"; input.name != "" }"#;

/// A bridge with the tool `fs` behind `interceptor`, with a running cleanup task.
pub(super) fn bridge_with_sweeper(interceptor: &Interceptor) -> Arc<Bridge> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("palisade.yaml");
    std::fs::write(
        &file,
        "version: '1.0'\ntools: [{name: fs, command: ['true']}]\n",
    )
    .unwrap();
    let local = Arc::new(LocalLauncher {
        guard_command: Vec::new(),
        exit_timeout: DEFAULT_EXIT_TIMEOUT,
    });
    let launchers = Launchers {
        local: Arc::clone(&local) as _,
        sandbox: local,
    };
    let relay = Relay {
        governance: interceptor.governance.clone(),
        gateway_hooks: GatewayHookProbe(Arc::new(|| true)),
    };
    let fingerprints = Fingerprints::open(&dir.path().join("tools.json")).unwrap();
    let bridge = Bridge::new(
        launchers,
        Arc::new(fingerprints),
        relay,
        CancellationToken::new(),
    );
    bridge.apply(&config::load(Some(&file), &|_| None).unwrap());
    let sweeping = Arc::clone(&bridge);
    tokio::spawn(async move { sweeping.sweep().await });
    bridge
}

/// Advances the paused clock until every context has expired and the cleanup has run.
pub(super) async fn expire(interceptor: &Interceptor) {
    let contexts = interceptor.governance.contexts();
    assert!(!contexts.is_empty());
    tokio::time::sleep(TTL + Duration::from_secs(3)).await;
    assert!(contexts.is_empty(), "the cleanup has run");
}

#[tokio::test(start_paused = true)]
async fn late_after_hook_is_blocked_after_cleanup() {
    let (interceptor, _) = interceptor(NAMELESS_PASSES);
    let _bridge = bridge_with_sweeper(&interceptor);
    let answer = before(&interceptor, request("r", json!({"name": "t"}))).await;
    assert_eq!(answer.value()["action"], "pass");
    expire(&interceptor).await;
    for _ in 0..2 {
        let answer = after(&interceptor, response("r", json!({}))).await.value();
        assert_eq!(answer["action"], "block", "{answer}");
        assert_eq!(answer["metadata"]["rule"], "mcp:context");
    }
    // A response without a before hook is evaluated.
    let answer = after(&interceptor, response("new", json!({}))).await;
    assert_eq!(answer.value()["action"], "pass");
}

#[tokio::test(start_paused = true)]
async fn result_with_an_expired_key_is_blocked_after_cleanup() {
    let (interceptor, _) = interceptor(NAMELESS_PASSES);
    let _bridge = bridge_with_sweeper(&interceptor);
    let id = crate::governance::new_request();
    let origin = RequestOrigin {
        request: Some(id),
        tool: "fs",
        name: "t",
        method: "tools/call",
        ..RequestOrigin::default()
    };
    let contexts = interceptor.governance.contexts();
    contexts.create(&id.to_string(), origin);
    expire(&interceptor).await;
    for _ in 0..2 {
        let stamped = json!({"content": [], "_meta": {"palisade/request": id}});
        let answer = after(&interceptor, stamped).await.value();
        assert_eq!(answer["isError"], true, "{answer}");
    }
}

#[tokio::test(start_paused = true)]
async fn result_of_a_call_longer_than_ttl_is_evaluated_by_name() {
    let policy = r#"
default allow := false
allow if input.moment == "before"
allow if { input.name == "read"; input.tool_id == "fs"; input.agent_id == "anna" }"#;
    let (interceptor, _) = interceptor(policy);
    let bridge = bridge_with_sweeper(&interceptor);
    let caller = McpCaller {
        agent: "anna".to_owned(),
        session: String::new(),
        sandbox: None,
    };
    let server = bridge.tool(Some("fs"), &caller).unwrap();
    let call =
        json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "read"}});
    let call = RpcMessage::read(call.to_string()).unwrap();
    let relay = bridge.relay();
    let permitted = relay
        .permit(
            &server,
            &caller,
            call,
            &CallHeaders::default(),
            &HoldTerms::default(),
        )
        .await
        .unwrap();
    expire(&interceptor).await;
    let result = r#"{"jsonrpc":"2.0","id":1,"result":{"content":[]}}"#;
    let result = Ok(RpcMessage::read(result.to_owned()).unwrap());
    let terms = HoldTerms::default();
    let delivered = relay
        .deliver(&server, &caller, &permitted, result, &terms)
        .await;
    let delivered: Value = serde_json::from_str(&delivered).unwrap();
    let stamp = &delivered["result"]["_meta"]["palisade/request"];
    assert!(stamp.is_string(), "{delivered}");
    let answer = after(&interceptor, &delivered["result"]).await;
    assert_eq!(answer.body, r#"{"content":[]}"#);
}
