//! Actions on the MCP servers behind the bridge: list them, and accept changed tool
//! definitions.

use mcp::bridge::Bridge;
use policy::audit::{AuditEvent, Kind};
use serde_json::{Value, json};
use store::Store;

use crate::action::AcceptBody;
use crate::reply::{ControlError, ControlReply};
use crate::wall_now;

/// Every server, with the tools that it has listed.
pub(crate) fn list(bridge: &Bridge) -> ControlReply {
    let listed = bridge.fingerprints().all();
    let servers = bridge.report().into_iter().map(|server| {
        let tools = listed.get(&server.name).into_iter().flatten();
        let tools: Vec<Value> = tools
            .map(|(name, print)| {
                json!({
                    "name": name,
                    "fingerprint": print.trusted,
                    "changed": print.changed.is_some(),
                    "offered": print.changed,
                })
            })
            .collect();
        json!({
            "name": server.name,
            "description": server.description,
            "runtime": server.runtime,
            "sessions": server.sessions,
            "failures": server.failures(),
            "error": server.unavailable.as_ref().map(|why| &why.error),
            "tools": tools,
        })
    });
    ControlReply::ok(servers.collect())
}

/// Trusts the current tool definitions of a server.
pub(crate) async fn accept(
    bridge: &Bridge,
    store: &Store,
    body: &AcceptBody,
) -> Result<ControlReply, ControlError> {
    let accepted = bridge
        .fingerprints()
        .accept(&body.server, body.tool.as_deref());
    if accepted.is_empty() {
        let what = match &body.tool {
            Some(tool) => format!("{}/{tool}", body.server),
            None => body.server.clone(),
        };
        return Err(ControlError::NotFound(format!(
            "no tool definition of {} has changed; see: palisade bridge list",
            what.escape_default()
        )));
    }
    let event = AuditEvent {
        event: Some("tool_accepted".to_owned()),
        host: Some(body.server.clone()),
        operation: Some(accepted.join(", ")),
        ..AuditEvent::new(Kind::Config)
    };
    store.audit().record_durable(event, wall_now()).await?;
    Ok(ControlReply::ok(
        json!({"status": "accepted", "server": body.server, "tools": accepted}),
    ))
}
