//! The `input` document of policies for MCP messages.
//!
//! Messages are parsed strictly: the gate and the tool may read an object with a duplicate key
//! differently, so such a message is refused. Every field of the input is always present and has
//! one type, because an agent could exploit a policy that fails on an unexpected type.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use policy::reason::Reason;
use policy::verdict::Denial;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value, json};

use super::call::{self, UnwrappedCall};
use super::{GovernedMessage, MAX_INLINE_BYTES, Moment};
use crate::context::{Execution, PolicyDecision};
use crate::redaction::Wrapping;

/// Why a message cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum UnreadableMessage {
    /// The text is not JSON, or ambiguous.
    #[error("{0}")]
    Json(String),
    /// A key differs from a known key only in upper and lower case.
    #[error(
        "a key differs from a known key only in upper and lower case, and some servers treat both as the same key"
    )]
    Spelling,
    /// A wrapped call cannot be unwrapped.
    #[error("the wrapped call has no name, or too many wrappers")]
    Wrapped,
}

pub(super) fn malformed_denial(why: &str) -> Denial {
    Denial::new(Reason::RegoError, "mcp:form")
        .with_message("The message is malformed or ambiguous JSON, so no policy can evaluate it.")
        .with_evidence(why.to_owned())
}

/// The JSON texts of a message.
#[derive(Clone, Debug, Default)]
pub(super) struct MessageTexts<'a> {
    params: Option<Cow<'a, str>>,
    result: Option<Cow<'a, str>>,
    error: Option<Cow<'a, str>>,
}

impl<'a> MessageTexts<'a> {
    pub(super) fn from_message(message: &GovernedMessage<'a>) -> Self {
        let text = |raw: &'a serde_json::value::RawValue| Cow::Borrowed(raw.get());
        Self {
            params: message.params.map(text),
            result: message.result.map(text),
            error: message.error.map(text),
        }
    }

    /// The text that a policy may change.
    fn target(&self, moment: Moment) -> Option<&str> {
        match moment {
            Moment::Before | Moment::Elicitation => self.params.as_deref(),
            Moment::After => self.result.as_deref().or(self.error.as_deref()),
        }
    }

    pub(super) fn into_target(self, moment: Moment) -> Option<Cow<'a, str>> {
        match moment {
            Moment::Before | Moment::Elicitation => self.params,
            Moment::After => self.result.or(self.error),
        }
    }

    /// Replaces the text that a policy may change.
    pub(super) fn with_target(mut self, moment: Moment, new: Cow<'a, str>) -> Self {
        match moment {
            Moment::Before | Moment::Elicitation => self.params = Some(new),
            Moment::After if self.result.is_none() && self.error.is_some() => {
                self.error = Some(new);
            }
            Moment::After => self.result = Some(new),
        }
        self
    }

    fn len(&self) -> usize {
        let all = [&self.params, &self.result, &self.error];
        all.into_iter().flatten().map(|text| text.len()).sum()
    }

    fn into_owned(self) -> MessageTexts<'static> {
        let own = |text: Cow<'a, str>| Cow::Owned(text.into_owned());
        MessageTexts {
            params: self.params.map(own),
            result: self.result.map(own),
            error: self.error.map(own),
        }
    }
}

/// A parsed message, and the input for policies.
#[derive(Clone, Debug)]
pub(super) struct ParsedMessage<'a> {
    pub(super) texts: MessageTexts<'a>,
    pub(super) call: UnwrappedCall,
    pub(super) input: Arc<Value>,
    pub(super) is_large: bool,
}

impl<'a> ParsedMessage<'a> {
    /// Parses a message; a large message on the blocking pool.
    pub(super) async fn read(
        message: &GovernedMessage<'_>,
        texts: MessageTexts<'a>,
    ) -> Result<Self, Denial> {
        let head = EnvelopeFields::from_message(message);
        let is_large = texts.len() > MAX_INLINE_BYTES;
        let parsed = if is_large {
            let texts = texts.clone().into_owned();
            let parsing = tokio::task::spawn_blocking(move || head.build_input(&texts)).await;
            parsing.unwrap_or_else(|error| Err(UnreadableMessage::Json(error.to_string())))
        } else {
            head.build_input(&texts)
        };
        let (call, input) = parsed.map_err(|why| malformed_denial(&why.to_string()))?;
        Ok(Self {
            texts,
            call,
            input: Arc::new(input),
            is_large,
        })
    }

    /// The text that a policy may change, and how each `mcp-exec` call around it encodes its
    /// arguments, from the outermost.
    pub(super) fn target(&self, moment: Moment) -> (&str, &[Wrapping]) {
        // A policy may add content to a message without any.
        let text = self.texts.target(moment).unwrap_or("{}");
        match moment {
            Moment::Before | Moment::Elicitation => (text, &self.call.wrappings),
            Moment::After => (text, &[]),
        }
    }
}

/// The fields of the input that do not come from the message's content.
struct EnvelopeFields {
    moment: Moment,
    method: String,
    tool: String,
    agent: String,
    session: String,
    sandbox: String,
    call_decision: Value,
    execution: Value,
}

impl EnvelopeFields {
    fn from_message(message: &GovernedMessage<'_>) -> Self {
        let sandbox = message.caller.sandbox.as_ref();
        Self {
            moment: message.moment,
            method: message.method.to_owned(),
            tool: message.tool.to_owned(),
            agent: message.caller.agent.clone(),
            session: message.caller.session.clone(),
            sandbox: sandbox.map_or("", |id| id.as_str()).to_owned(),
            call_decision: message
                .call_decision
                .map_or_else(|| json!({}), call_decision_json),
            execution: message.execution.map_or_else(|| json!({}), execution_json),
        }
    }

    fn build_input(
        self,
        texts: &MessageTexts<'_>,
    ) -> Result<(UnwrappedCall, Value), UnreadableMessage> {
        let value = |text: &Option<Cow<'_, str>>| text.as_deref().map(parse_json).transpose();
        let mut params = value(&texts.params)?.unwrap_or_default();
        call::check_keys(&params)?;
        let call = UnwrappedCall::read(&self.method, &mut params)?;
        let input = json!({
            "kind": "mcp",
            "moment": self.moment.as_str(),
            "method": self.method,
            "params": call::as_object(Some(params)),
            "tool_id": self.tool,
            "agent_id": self.agent,
            "session_id": self.session,
            "sandbox": self.sandbox,
            "name": call.name,
            "outer_name": call.outer_name,
            "result": call::as_object(value(&texts.result)?),
            "error": call::as_object(value(&texts.error)?),
            "before": self.call_decision,
            "execution": self.execution,
        });
        Ok((call, input))
    }
}

fn call_decision_json(decision: &PolicyDecision) -> Value {
    // The text is empty if the policies returned no metadata.
    let metadata = serde_json::from_str(&decision.metadata).unwrap_or_default();
    json!({
        "action": decision.action(),
        "reason": decision.reason,
        "metadata": call::as_object(Some(metadata)),
    })
}

fn execution_json(execution: &Execution) -> Value {
    let millis = u64::try_from(execution.duration.as_millis()).unwrap_or(u64::MAX);
    json!({
        "exit_code": execution.exit_code,
        "failed": execution.failed,
        "duration_ms": millis,
    })
}

/// Parses JSON and refuses duplicate keys.
pub(super) fn parse_json(text: &str) -> Result<Value, UnreadableMessage> {
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = StrictValue.deserialize(&mut reader);
    let value = value.and_then(|value| reader.end().map(|()| value));
    value.map_err(|error| UnreadableMessage::Json(error.to_string()))
}

/// Deserializes a [`Value`] and refuses duplicate keys.
struct StrictValue;

impl<'de> DeserializeSeed<'de> for StrictValue {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for StrictValue {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_f64<E>(self, number: f64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_string<E>(self, text: String) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(StrictValue)? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if fields.contains_key(&key) {
                return Err(A::Error::custom("duplicate key in an object"));
            }
            fields.insert(key, entries.next_value_seed(StrictValue)?);
        }
        Ok(Value::Object(fields))
    }
}
