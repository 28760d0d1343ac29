//! `subscriptions/listen`: an event stream of change notifications.

use std::sync::Arc;

use http::Response;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::broadcast::{Receiver, error::RecvError};

use super::format_event;
use super::request::{Request, RequestError};
use super::service::SessionlessService;
use crate::answer::{self, KEEPALIVE_INTERVAL, McpBody};
use crate::call_headers::CallHeaders;
use crate::hold_terms::{HoldEnd, HoldTerms};
use crate::pool::{Lease, PoolClient};
use crate::relay;
use crate::rpc::RpcMessage;
use crate::sse;
use crate::tools::StdioServer;

/// Key of `_meta` with the id of the subscription.
const SUBSCRIPTION_ID_KEY: &str = "io.modelcontextprotocol/subscriptionId";

/// Maximum number of resources of one subscription.
const MAX_RESOURCES: usize = 100;

/// The notifications that a client subscribes to.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct SubscriptionFilter {
    tools_list_changed: bool,
    prompts_list_changed: bool,
    resources_list_changed: bool,
    resource_subscriptions: Vec<String>,
}

impl SubscriptionFilter {
    fn matches(&self, message: &RpcMessage) -> bool {
        match message.method().unwrap_or_default() {
            "notifications/tools/list_changed" => self.tools_list_changed,
            "notifications/prompts/list_changed" => self.prompts_list_changed,
            "notifications/resources/list_changed" => self.resources_list_changed,
            "notifications/resources/updated" => {
                let uri = message.param_text(&["uri"]);
                uri.is_some_and(|uri| self.resource_subscriptions.contains(&uri))
            }
            _ => false,
        }
    }

    /// The granted filter as JSON, for the acknowledgement.
    fn to_json(&self) -> serde_json::Value {
        let mut granted = serde_json::Map::new();
        let flags = [
            ("toolsListChanged", self.tools_list_changed),
            ("promptsListChanged", self.prompts_list_changed),
            ("resourcesListChanged", self.resources_list_changed),
        ];
        for (name, _) in flags.into_iter().filter(|(_, wanted)| *wanted) {
            granted.insert(name.to_owned(), json!(true));
        }
        if !self.resource_subscriptions.is_empty() {
            let list = json!(self.resource_subscriptions);
            granted.insert("resourceSubscriptions".to_owned(), list);
        }
        granted.into()
    }
}

/// Answers with an event stream.
pub(super) async fn answer(
    service: &Arc<SessionlessService>,
    server: &Arc<StdioServer>,
    client: &PoolClient,
    request: &Request,
) -> Result<Response<McpBody>, RequestError> {
    let filter = request.message.param(&["notifications"]);
    let filter = filter.and_then(|raw| serde_json::from_str::<SubscriptionFilter>(raw).ok());
    let Some(mut filter) = filter else {
        return Err(RequestError::invalid_params(
            "Missing or invalid notifications",
        ));
    };
    if filter.resource_subscriptions.len() > MAX_RESOURCES {
        let why = format!("Too many resources: a subscription may have at most {MAX_RESOURCES}");
        return Err(RequestError::invalid_params(why));
    }
    let changes = service.pools().subscribe(server, client)?;
    let lease = subscribe(service, server, client, &mut filter).await?;
    let id = request.message.id().unwrap_or("null").to_owned();
    let params = json!({"notifications": filter.to_json()}).to_string();
    let params = relay::set_meta(&params, SUBSCRIPTION_ID_KEY, &id).unwrap_or(params);
    let method = "notifications/subscriptions/acknowledged";
    let first = format_event(&RpcMessage::notification(method, &params));
    let stream = SubscriptionStream {
        changes,
        filter,
        id,
        lease,
    };
    Ok(answer::event_stream(
        first,
        stream,
        SubscriptionStream::next_event,
    ))
}

/// Subscribes to the resources at an exclusively leased process. Resources that a policy refuses
/// are removed from the filter.
async fn subscribe(
    service: &Arc<SessionlessService>,
    server: &Arc<StdioServer>,
    client: &PoolClient,
    filter: &mut SubscriptionFilter,
) -> Result<Option<Lease>, RequestError> {
    if filter.resource_subscriptions.is_empty() {
        return Ok(None);
    }
    let (relay, mut permitted) = (service.relay(), Vec::new());
    let (headers, terms) = (
        CallHeaders::default(),
        HoldTerms {
            ends: &[(HoldEnd::Tool, server.stop())],
            ..HoldTerms::default()
        },
    );
    // Decided before a process is leased: a wait for the operator must not occupy a process.
    for uri in std::mem::take(&mut filter.resource_subscriptions) {
        let params = json!({ "uri": uri }).to_string();
        let text = RpcMessage::request("0", "resources/subscribe", &params);
        let Ok(message) = RpcMessage::read(text) else {
            continue;
        };
        let decision = relay.permit(server, &client.caller, message, &headers, &terms);
        if let Ok(call) = decision.await {
            permitted.push((uri, call));
        }
    }
    let metrics = relay.governance.metrics();
    let lease = service.pools().lease(server, client, metrics).await?;
    let mut granted = Vec::new();
    for (uri, permitted) in permitted {
        let mut call = lease.process().reserve();
        let text = permitted.message.with_id(&call.id().to_string());
        if lease.process().send(&text).await.is_err() {
            break;
        }
        let answer = tokio::time::timeout(server.timeout(), call.answer()).await;
        if matches!(answer, Ok(Ok(answer)) if answer.result().is_some()) {
            granted.push(uri);
        }
    }
    filter.resource_subscriptions = granted;
    Ok(Some(lease))
}

/// Event stream of one subscription.
struct SubscriptionStream {
    changes: Receiver<Arc<RpcMessage>>,
    filter: SubscriptionFilter,
    id: String,
    lease: Option<Lease>,
}

impl Drop for SubscriptionStream {
    fn drop(&mut self) {
        // The process is still subscribed to resources of this stream.
        if let Some(lease) = &mut self.lease {
            lease.discard();
        }
    }
}

impl SubscriptionStream {
    async fn next_event(mut self) -> Option<(String, Self)> {
        loop {
            let text = match tokio::time::timeout(KEEPALIVE_INTERVAL, self.changes.recv()).await {
                Ok(Ok(message)) => match self.event_for(&message) {
                    Some(text) => text,
                    None => continue,
                },
                // A client that was too slow misses changes, and receives the next one.
                Err(_) | Ok(Err(RecvError::Lagged(_))) => sse::KEEPALIVE.to_owned(),
                Ok(Err(RecvError::Closed)) => return None,
            };
            return Some((text, self));
        }
    }

    /// The event for a change notification; none if the filter does not match.
    fn event_for(&self, message: &RpcMessage) -> Option<String> {
        if !self.filter.matches(message) {
            return None;
        }
        let params = message.params().unwrap_or("{}");
        let params = relay::set_meta(params, SUBSCRIPTION_ID_KEY, &self.id)?;
        Some(format_event(&message.with_params(&params)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filter_matches_only_subscribed_notifications() {
        let filter: SubscriptionFilter = serde_json::from_value(json!({
            "promptsListChanged": true,
            "resourceSubscriptions": ["a:b"],
        }))
        .unwrap();
        let read = |method: &str, params: &str| {
            RpcMessage::read(RpcMessage::notification(method, params)).unwrap()
        };
        assert!(filter.matches(&read("notifications/prompts/list_changed", "{}")));
        assert!(!filter.matches(&read("notifications/tools/list_changed", "{}")));
        assert!(filter.matches(&read("notifications/resources/updated", r#"{"uri":"a:b"}"#)));
        assert!(!filter.matches(&read("notifications/resources/updated", r#"{"uri":"a:c"}"#)));
        assert!(!filter.matches(&read("notifications/message", "{}")));
        let granted = filter.to_json().to_string();
        assert_eq!(
            granted,
            r#"{"promptsListChanged":true,"resourceSubscriptions":["a:b"]}"#
        );
    }
}
