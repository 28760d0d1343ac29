//! `subscriptions/listen`: a stream of what changes.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::Response;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::broadcast::{Receiver, error::RecvError};
use tokio_util::sync::ReusableBoxFuture;

use super::event;
use super::request::{Refused, Request};
use crate::answer::{self, BREATHE_EVERY, Broken, Content};
use crate::bridge::Bridge;
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
    bridge: &Arc<Bridge>,
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
    let news = bridge.pools().news(served, client)?;
    let lease = subscribe(bridge, served, client, &mut wanted).await?;
    let id = request.message.id().unwrap_or("null").to_owned();
    let params = json!({"notifications": wanted.granted()}).to_string();
    let params = relay::set_meta(&params, SUBSCRIPTION, &id).unwrap_or(params);
    let method = "notifications/subscriptions/acknowledged";
    let told = Told {
        first: Some(event(&Message::notification(method, &params))),
        next: ReusableBoxFuture::new(next(news)),
        wanted,
        id,
        lease,
    };
    Ok(answer::stream(told.boxed_unsync()))
}

/// Has a process of its own tell of the resources. Those that it may not ask for are not
/// granted.
async fn subscribe(
    bridge: &Arc<Bridge>,
    served: &Arc<Served>,
    client: &Client,
    wanted: &mut Wanted,
) -> Result<Option<Lease>, Refused> {
    if wanted.resource_subscriptions.is_empty() {
        return Ok(None);
    }
    let (relay, mut granted) = (bridge.relay(), Vec::new());
    let metrics = relay.governance.metrics();
    let lease = bridge.pools().lease(served, client, metrics).await?;
    for uri in std::mem::take(&mut wanted.resource_subscriptions) {
        let mut call = lease.process().reserve();
        let params = json!({ "uri": uri }).to_string();
        let text = Message::request(&call.id().to_string(), "resources/subscribe", &params);
        let Ok(message) = Message::read(text) else {
            continue;
        };
        let Ok(permitted) = relay.permit(served, &client.caller, message, None).await else {
            continue;
        };
        if lease
            .process()
            .send(permitted.message.text())
            .await
            .is_err()
        {
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

type News = Receiver<Arc<Message>>;

enum Heard {
    Message(Arc<Message>),
    Nothing,
    Over,
}

async fn next(mut news: News) -> (Heard, News) {
    let heard = match tokio::time::timeout(BREATHE_EVERY, news.recv()).await {
        Err(_) => Heard::Nothing,
        Ok(Ok(message)) => Heard::Message(message),
        // Who was too slow hears the next change.
        Ok(Err(RecvError::Lagged(_))) => Heard::Nothing,
        Ok(Err(RecvError::Closed)) => Heard::Over,
    };
    (heard, news)
}

struct Told {
    first: Option<String>,
    next: ReusableBoxFuture<'static, (Heard, News)>,
    wanted: Wanted,
    id: String,
    lease: Option<Lease>,
}

impl Drop for Told {
    fn drop(&mut self) {
        // It still tells of resources that nobody wants to hear of.
        if let Some(lease) = &mut self.lease {
            lease.spoil();
        }
    }
}

impl Body for Told {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let frame = |text: String| Poll::Ready(Some(Ok(Frame::data(Bytes::from(text)))));
        if let Some(first) = self.first.take() {
            return frame(first);
        }
        loop {
            let Poll::Ready((heard, news)) = Pin::new(&mut self.next).poll(context) else {
                return Poll::Pending;
            };
            self.next.set(next(news));
            match heard {
                Heard::Message(message) if self.wanted.wants(&message) => {
                    let params = message.params().unwrap_or("{}");
                    let params = relay::set_meta(params, SUBSCRIPTION, &self.id);
                    let Some(params) = params else { continue };
                    return frame(event(&message.with_params(&params)));
                }
                Heard::Message(_) => {}
                Heard::Nothing => return frame(sse::BREATH.to_owned()),
                Heard::Over => return Poll::Ready(None),
            }
        }
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
