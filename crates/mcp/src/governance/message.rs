//! An MCP message as policy bundles read and change it.

use std::borrow::Cow;
use std::sync::Arc;

use async_trait::async_trait;
use decide::bundles::BundleSubject;
use decide::question::digest;
use policy::reason::Reason;
use policy::rego::DecisionDetails;
use policy::verdict::{Denial, Digest, RuleName};
use serde_json::{Map, Value};

use super::GovernedMessage;
use super::input::{self, MessageTexts, ParsedMessage};
use crate::context::CORRELATION_KEY;
use crate::redaction::{self, PatternCache};
use crate::trace::TRACEPARENT;

/// A parsed message.
pub(super) struct PolicyMessage<'a> {
    message: &'a GovernedMessage<'a>,
    patterns: &'a PatternCache,
    parsed: ParsedMessage<'a>,
}

impl<'a> PolicyMessage<'a> {
    pub(super) async fn read(
        message: &'a GovernedMessage<'a>,
        patterns: &'a PatternCache,
    ) -> Result<Self, Denial> {
        Ok(Self {
            message,
            patterns,
            parsed: ParsedMessage::read(message, MessageTexts::from_message(message)).await?,
        })
    }

    /// The name of the requested tool or prompt.
    pub(super) fn name(&self) -> &str {
        &self.parsed.call.name
    }
}

#[async_trait]
impl BundleSubject for PolicyMessage<'_> {
    fn input(&self) -> &Arc<Value> {
        &self.parsed.input
    }

    /// The digest covers caller, tool and content. Session and request id are left out: the hook
    /// of a gateway and the bridge see the same call with different ones.
    fn digest(&self) -> Digest {
        let Value::Object(fields) = &*self.parsed.input else {
            return digest([self.parsed.input.to_string().as_bytes()]);
        };
        let mut facts = fields.clone();
        facts.retain(|name, _| !["session_id", "before", "execution"].contains(&name.as_str()));
        if let Some(Value::Object(params)) = facts.get_mut("params") {
            remove_request_metadata(params);
        }
        let mut facts = Value::Object(facts);
        facts.sort_all_objects();
        digest([facts.to_string().as_bytes()])
    }

    fn is_large(&self) -> bool {
        self.parsed.is_large
    }

    /// A policy that requires a redaction has not allowed the original message: if the redaction
    /// fails, the message is refused, even with `fail_open`.
    async fn propose(
        &self,
        rule: RuleName,
        outputs: Value,
        _: DecisionDetails,
    ) -> Result<Option<String>, Denial> {
        let (target, wrappings) = self.parsed.target(self.message.moment);
        let redacted = redaction::apply(self.patterns, outputs, target, wrappings).await;
        redacted.map_err(|fault| {
            Denial::new(Reason::RegoDenied, rule)
                .with_message("A policy requires a redaction that cannot be applied.")
                .with_evidence(fault.to_string())
        })
    }

    async fn accept(&mut self, content: String) -> Result<(), Denial> {
        let texts = self.parsed.texts.clone();
        let texts = texts.with_target(self.message.moment, Cow::Owned(content));
        self.parsed = ParsedMessage::read(self.message, texts).await?;
        Ok(())
    }

    fn changed(&self) -> Result<Option<String>, Denial> {
        let moment = self.message.moment;
        let old = MessageTexts::from_message(self.message).into_target(moment);
        match self.parsed.texts.clone().into_target(moment) {
            // The texts are also equal if one bundle reverted the change of another.
            new if new == old => Ok(None),
            Some(text) => Ok(Some(text.into_owned())),
            None => Err(input::malformed_denial("the changed message is empty")),
        }
    }
}

/// Removes from `_meta` the fields that identify the request, its trace and its client, and do
/// not affect the call.
fn remove_request_metadata(params: &mut Map<String, Value>) {
    let Some(Value::Object(meta)) = params.get_mut("_meta") else {
        return;
    };
    meta.retain(|name, _| {
        let identifies = [CORRELATION_KEY, TRACEPARENT, "progressToken"].contains(&name.as_str());
        !identifies && !name.starts_with("io.modelcontextprotocol/")
    });
    if meta.is_empty() {
        params.shift_remove("_meta");
    }
}
