//! After hooks that come when their request has expired, while the sweeper runs.
//!
//! Issue 14, number 9.

use tokio_util::sync::CancellationToken;

use super::*;
use crate::bridge::Bridge;
use crate::call_headers::CallHeaders;
use crate::caller::Caller;
use crate::context::TTL;
use crate::fingerprint::Fingerprints;
use crate::hold_terms::HoldTerms;
use crate::launch::{Local, PATIENCE};
use crate::relay::{GatewayHookProbe, Relay};
use crate::rpc::Message;
use crate::tools::Launchers;

/// Lets a result through if it does not know what was called.
const NAMELESS_PASSES: &str = r#"
default allow := true
allow := false if { input.moment == "after"; input.name != "" }"#;

/// A bridge with the tool `fs` behind `interceptor`, whose sweeper runs.
pub(super) fn swept(interceptor: &Interceptor) -> Arc<Bridge> {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("palisade.yaml");
    std::fs::write(
        &file,
        "version: '1.0'\ntools: [{name: fs, command: ['true']}]\n",
    )
    .unwrap();
    let local = Arc::new(Local {
        leash: Vec::new(),
        patience: PATIENCE,
    });
    let launchers = Launchers {
        local: Arc::clone(&local) as _,
        sandbox: local,
    };
    let relay = Relay {
        governance: interceptor.governance.clone(),
        stamps: GatewayHookProbe(Arc::new(|| true)),
    };
    let prints = Fingerprints::open(&place.path().join("tools.json")).unwrap();
    let bridge = Bridge::new(launchers, Arc::new(prints), relay, CancellationToken::new());
    bridge.apply(&config::load(Some(&file), &|_| None).unwrap());
    let sweeping = Arc::clone(&bridge);
    tokio::spawn(async move { sweeping.sweep().await });
    bridge
}

/// Lets the clock, which otherwise stands still, pass the end of every entry, and the sweeper
/// run a few times.
pub(super) async fn expire(interceptor: &Interceptor) {
    let contexts = interceptor.governance.contexts();
    assert!(!contexts.is_empty());
    tokio::time::sleep(TTL + Duration::from_secs(3)).await;
    assert!(contexts.is_empty(), "the sweeper ran");
}

#[tokio::test(start_paused = true)]
async fn a_late_after_hook_is_blocked_also_after_the_sweep() {
    let (interceptor, _) = interceptor(NAMELESS_PASSES);
    let _bridge = swept(&interceptor);
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
async fn a_result_with_an_expired_stamp_is_blocked_also_after_the_sweep() {
    let (interceptor, _) = interceptor(NAMELESS_PASSES);
    let _bridge = swept(&interceptor);
    let id = crate::governance::new_request();
    let origin = Origin {
        request: Some(id),
        tool: "fs",
        name: "t",
        method: "tools/call",
        ..Origin::default()
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
async fn a_call_longer_than_an_entry_lives_is_judged_by_name() {
    let policy = r#"
default allow := false
allow if input.moment == "before"
allow if { input.name == "read"; input.tool_id == "fs"; input.agent_id == "anna" }"#;
    let (interceptor, _) = interceptor(policy);
    let bridge = swept(&interceptor);
    let caller = Caller {
        agent: "anna".to_owned(),
        session: String::new(),
        sandbox: None,
    };
    let served = bridge.tool(Some("fs"), &caller).unwrap();
    let call =
        json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "read"}});
    let call = Message::read(call.to_string()).unwrap();
    let relay = bridge.relay();
    let permitted = relay
        .permit(
            &served,
            &caller,
            call,
            &CallHeaders::default(),
            &HoldTerms::default(),
        )
        .await
        .unwrap();
    expire(&interceptor).await;
    let result = r#"{"jsonrpc":"2.0","id":1,"result":{"content":[]}}"#;
    let result = Ok(Message::read(result.to_owned()).unwrap());
    let terms = HoldTerms::default();
    let delivered = relay
        .deliver(&served, &caller, &permitted, result, &terms)
        .await;
    let delivered: Value = serde_json::from_str(&delivered).unwrap();
    let stamp = &delivered["result"]["_meta"]["palisade/request"];
    assert!(stamp.is_string(), "{delivered}");
    let answer = after(&interceptor, &delivered["result"]).await;
    assert_eq!(answer.body, r#"{"content":[]}"#);
}
