//! A message of a tool as policy bundles read and change it.

use std::borrow::Cow;
use std::sync::Arc;

use async_trait::async_trait;
use decide::bundles::BundleSubject;
use decide::question::digest;
use policy::reason::Reason;
use policy::rego::Said;
use policy::verdict::{Denial, Digest, RuleName};
use serde_json::{Map, Value};

use super::Asked;
use super::input::{self, Parts, Subject};
use crate::context::CORRELATION;
use crate::redaction::{self, Patterns};
use crate::trace::TRACEPARENT;

/// A message, read.
pub(super) struct PolicyMessage<'a> {
    asked: &'a Asked<'a>,
    patterns: &'a Patterns,
    subject: Subject<'a>,
}

impl<'a> PolicyMessage<'a> {
    pub(super) async fn read(asked: &'a Asked<'a>, patterns: &'a Patterns) -> Result<Self, Denial> {
        Ok(Self {
            asked,
            patterns,
            subject: Subject::read(asked, Parts::of(asked)).await?,
        })
    }

    /// The name of the tool or prompt that is asked for.
    pub(super) fn name(&self) -> &str {
        &self.subject.call.name
    }
}

#[async_trait]
impl BundleSubject for PolicyMessage<'_> {
    fn input(&self) -> &Arc<Value> {
        &self.subject.input
    }

    /// A question is about who sends what to which tool. The hook of a gateway and the bridge see
    /// the same call under other sessions and other names of requests.
    fn digest(&self) -> Digest {
        let Value::Object(fields) = &*self.subject.input else {
            return digest([self.subject.input.to_string().as_bytes()]);
        };
        let mut facts = fields.clone();
        facts.retain(|name, _| !["session_id", "before", "execution"].contains(&name.as_str()));
        if let Some(Value::Object(params)) = facts.get_mut("params") {
            without_bookkeeping(params);
        }
        let mut facts = Value::Object(facts);
        facts.sort_all_objects();
        digest([facts.to_string().as_bytes()])
    }

    fn is_large(&self) -> bool {
        self.subject.large
    }

    /// A policy that wants something redacted has not allowed it as it is: where that cannot be
    /// done, the message is refused, even where failures pass.
    async fn propose(
        &self,
        rule: RuleName,
        outputs: Value,
        _: Said,
    ) -> Result<Option<String>, Denial> {
        let (target, wrappings) = self.subject.target(self.asked.moment);
        let redacted = redaction::apply(self.patterns, outputs, target, wrappings).await;
        redacted.map_err(|fault| {
            Denial::new(Reason::RegoDenied, rule)
                .saying("A policy wants this redacted, and that cannot be done.")
                .because(fault.to_string())
        })
    }

    async fn accept(&mut self, content: String) -> Result<(), Denial> {
        let parts = self.subject.parts.clone();
        let parts = parts.with(self.asked.moment, Cow::Owned(content));
        self.subject = Subject::read(self.asked, parts).await?;
        Ok(())
    }

    fn changed(&self) -> Result<Option<String>, Denial> {
        let moment = self.asked.moment;
        let old = Parts::of(self.asked).into_target(moment);
        match self.subject.parts.clone().into_target(moment) {
            // Also where one bundle takes back what another has changed.
            new if new == old => Ok(None),
            Some(text) => Ok(Some(text.into_owned())),
            None => Err(input::unreadable("nothing is left of it")),
        }
    }
}

/// Takes out of `_meta` what names the request, its trace and its client, and says nothing about
/// what is to be done.
fn without_bookkeeping(params: &mut Map<String, Value>) {
    let Some(Value::Object(meta)) = params.get_mut("_meta") else {
        return;
    };
    meta.retain(|name, _| {
        let is_own = [CORRELATION, TRACEPARENT, "progressToken"].contains(&name.as_str());
        !is_own && !name.starts_with("io.modelcontextprotocol/")
    });
    if meta.is_empty() {
        params.shift_remove("_meta");
    }
}
