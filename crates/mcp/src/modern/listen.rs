//! `subscriptions/listen`: a stream of what changes.

use std::sync::Arc;

use http::Response;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::broadcast::{Receiver, error::RecvError};

use super::event;
use super::request::{Refused, Request};
use super::service::SessionlessService;
use crate::answer::{self, BREATHE_EVERY, Content};
use crate::call_headers::CallHeaders;
use crate::hold_terms::{HoldEnd, HoldTerms};
use crate::pool::{Client, Lease};
use crate::relay;
use crate::rpc::Message;
use crate::sse;
use crate::tools::Served;

/// Where a notification says which subscription it is for.
const SUBSCRIPTION: &str = "io.modelcontextprotocol/subscriptionId";

/// The most resources of one subscription.
const MOST_RESOURCES: usize = 100;

/// What a client wants to hear of.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Wanted {
    tools_list_changed: bool,
    prompts_list_changed: bool,
    resources_list_changed: bool,
    resource_subscriptions: Vec<String>,
}

impl Wanted {
    fn wants(&self, message: &Message) -> bool {
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

    /// What was granted, in the client's own words.
    fn granted(&self) -> serde_json::Value {
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

/// Answers with the stream.
pub(super) async fn answer(
    service: &Arc<SessionlessService>,
    served: &Arc<Served>,
    client: &Client,
    request: &Request,
) -> Result<Response<Content>, Refused> {
    let wanted = request.message.param(&["notifications"]);
    let wanted = wanted.and_then(|raw| serde_json::from_str::<Wanted>(raw).ok());
    let Some(mut wanted) = wanted else {
        return Err(Refused::params("Missing or invalid notifications"));
    };
    if wanted.resource_subscriptions.len() > MOST_RESOURCES {
        let why = format!("A subscription has at most {MOST_RESOURCES} resources");
        return Err(Refused::params(why));
    }
    let news = service.pools().news(served, client)?;
    let lease = subscribe(service, served, client, &mut wanted).await?;
    let id = request.message.id().unwrap_or("null").to_owned();
    let params = json!({"notifications": wanted.granted()}).to_string();
    let params = relay::set_meta(&params, SUBSCRIPTION, &id).unwrap_or(params);
    let method = "notifications/subscriptions/acknowledged";
    let first = event(&Message::notification(method, &params));
    let listener = Listener {
        news,
        wanted,
        id,
        lease,
    };
    Ok(answer::told(first, listener, Listener::hear))
}

/// Has a process of its own tell of the resources. Those that it may not ask for are not
/// granted.
async fn subscribe(
    service: &Arc<SessionlessService>,
    served: &Arc<Served>,
    client: &Client,
    wanted: &mut Wanted,
) -> Result<Option<Lease>, Refused> {
    if wanted.resource_subscriptions.is_empty() {
        return Ok(None);
    }
    let (relay, mut permitted) = (service.relay(), Vec::new());
    let (headers, terms) = (
        CallHeaders::default(),
        HoldTerms {
            ends: &[(HoldEnd::Tool, served.stop())],
            ..HoldTerms::default()
        },
    );
    // Before there is a process: what waits for an operator's answer occupies none.
    for uri in std::mem::take(&mut wanted.resource_subscriptions) {
        let params = json!({ "uri": uri }).to_string();
        let text = Message::request("0", "resources/subscribe", &params);
        let Ok(message) = Message::read(text) else {
            continue;
        };
        let judged = relay.permit(served, &client.caller, message, &headers, &terms);
        if let Ok(call) = judged.await {
            permitted.push((uri, call));
        }
    }
    let metrics = relay.governance.metrics();
    let lease = service.pools().lease(served, client, metrics).await?;
    let mut granted = Vec::new();
    for (uri, permitted) in permitted {
        let mut call = lease.process().reserve();
        let text = permitted.message.with_id(&call.id().to_string());
        if lease.process().send(&text).await.is_err() {
            break;
        }
        let answer = tokio::time::timeout(served.timeout(), call.answer()).await;
        if matches!(answer, Ok(Ok(answer)) if answer.result().is_some()) {
            granted.push(uri);
        }
    }
    wanted.resource_subscriptions = granted;
    Ok(Some(lease))
}

struct Listener {
    news: Receiver<Arc<Message>>,
    wanted: Wanted,
    id: String,
    lease: Option<Lease>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        // It still tells of resources that nobody wants to hear of.
        if let Some(lease) = &mut self.lease {
            lease.spoil();
        }
    }
}

impl Listener {
    async fn hear(mut self) -> Option<(String, Self)> {
        loop {
            let text = match tokio::time::timeout(BREATHE_EVERY, self.news.recv()).await {
                Ok(Ok(message)) => match self.written(&message) {
                    Some(text) => text,
                    None => continue,
                },
                // Who was too slow hears the next change.
                Err(_) | Ok(Err(RecvError::Lagged(_))) => sse::BREATH.to_owned(),
                Ok(Err(RecvError::Closed)) => return None,
            };
            return Some((text, self));
        }
    }

    /// The event that tells of it; none where nobody wanted to hear of that.
    fn written(&self, message: &Message) -> Option<String> {
        if !self.wanted.wants(message) {
            return None;
        }
        let params = message.params().unwrap_or("{}");
        let params = relay::set_meta(params, SUBSCRIPTION, &self.id)?;
        Some(event(&message.with_params(&params)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_wants_one_thing_does_not_hear_another() {
        let wanted: Wanted = serde_json::from_value(json!({
            "promptsListChanged": true,
            "resourceSubscriptions": ["a:b"],
        }))
        .unwrap();
        let read = |method: &str, params: &str| {
            Message::read(Message::notification(method, params)).unwrap()
        };
        assert!(wanted.wants(&read("notifications/prompts/list_changed", "{}")));
        assert!(!wanted.wants(&read("notifications/tools/list_changed", "{}")));
        assert!(wanted.wants(&read("notifications/resources/updated", r#"{"uri":"a:b"}"#)));
        assert!(!wanted.wants(&read("notifications/resources/updated", r#"{"uri":"a:c"}"#)));
        assert!(!wanted.wants(&read("notifications/message", "{}")));
        let granted = wanted.granted().to_string();
        assert_eq!(
            granted,
            r#"{"promptsListChanged":true,"resourceSubscriptions":["a:b"]}"#
        );
    }
}
