//! What a policy finds under `input`.
//!
//! A message is read strictly: an object with the same key twice means one thing to us and
//! perhaps another to the tool, so it does not pass. Every field is always there and of one
//! type: a policy that trips over a type is one that an agent can trip.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use policy::reason::Reason;
use policy::verdict::Denial;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value, json};

use super::call::{self, Call};
use super::{Asked, LARGE, Moment};
use crate::context::{Execution, PolicyDecision};
use crate::redaction::Wrapping;

/// Why a message cannot be judged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unreadable {
    /// It is no JSON, or ambiguous.
    #[error("{0}")]
    Json(String),
    /// A key that is another to some readers.
    #[error("a key is spelt so that some take it for another")]
    Spelling,
    /// A call in a call that cannot be taken apart.
    #[error("the wrapped call has no name, or is wrapped too often")]
    Wrapped,
}

pub(super) fn unreadable(why: &str) -> Denial {
    Denial::new(Reason::RegoError, "mcp:form")
        .saying("The message cannot be read in one way only, so no policy can judge it.")
        .because(why.to_owned())
}

/// The texts of a message.
#[derive(Clone, Debug, Default)]
pub(super) struct Parts<'a> {
    params: Option<Cow<'a, str>>,
    result: Option<Cow<'a, str>>,
    error: Option<Cow<'a, str>>,
}

impl<'a> Parts<'a> {
    pub(super) fn of(asked: &Asked<'a>) -> Self {
        let text = |raw: &'a serde_json::value::RawValue| Cow::Borrowed(raw.get());
        Self {
            params: asked.params.map(text),
            result: asked.result.map(text),
            error: asked.error.map(text),
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

    /// The same with another text.
    pub(super) fn with(mut self, moment: Moment, new: Cow<'a, str>) -> Self {
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

    fn into_owned(self) -> Parts<'static> {
        let own = |text: Cow<'a, str>| Cow::Owned(text.into_owned());
        Parts {
            params: self.params.map(own),
            result: self.result.map(own),
            error: self.error.map(own),
        }
    }
}

/// A message, read.
#[derive(Clone, Debug)]
pub(super) struct Subject<'a> {
    pub(super) parts: Parts<'a>,
    pub(super) call: Call,
    pub(super) input: Arc<Value>,
    pub(super) large: bool,
}

impl<'a> Subject<'a> {
    /// Reads a message, elsewhere if that takes long.
    pub(super) async fn read(asked: &Asked<'_>, parts: Parts<'a>) -> Result<Self, Denial> {
        let head = Head::of(asked);
        let large = parts.len() > LARGE;
        let read = if large {
            let parts = parts.clone().into_owned();
            let reading = tokio::task::spawn_blocking(move || head.input(&parts)).await;
            reading.unwrap_or_else(|error| Err(Unreadable::Json(error.to_string())))
        } else {
            head.input(&parts)
        };
        let (call, input) = read.map_err(|why| unreadable(&why.to_string()))?;
        Ok(Self {
            parts,
            call,
            input: Arc::new(input),
            large,
        })
    }

    /// The text that a policy may change, and how it is wrapped.
    pub(super) fn target(&self, moment: Moment) -> (&str, &[Wrapping]) {
        // Where there is nothing, a policy may put something.
        let text = self.parts.target(moment).unwrap_or("{}");
        match moment {
            Moment::Before | Moment::Elicitation => (text, &self.call.wrappings),
            Moment::After => (text, &[]),
        }
    }
}

/// What is known of a message without reading it.
struct Head {
    moment: Moment,
    method: String,
    tool: String,
    agent: String,
    session: String,
    sandbox: String,
    before: Value,
    execution: Value,
}

impl Head {
    fn of(asked: &Asked<'_>) -> Self {
        let sandbox = asked.caller.sandbox.as_ref();
        Self {
            moment: asked.moment,
            method: asked.method.to_owned(),
            tool: asked.tool.to_owned(),
            agent: asked.caller.agent.clone(),
            session: asked.caller.session.clone(),
            sandbox: sandbox.map_or("", |id| id.as_str()).to_owned(),
            before: asked.before.map_or_else(|| json!({}), before),
            execution: asked.execution.map_or_else(|| json!({}), execution),
        }
    }

    fn input(self, parts: &Parts<'_>) -> Result<(Call, Value), Unreadable> {
        let value = |text: &Option<Cow<'_, str>>| text.as_deref().map(read).transpose();
        let mut params = value(&parts.params)?.unwrap_or_default();
        call::check_keys(&params)?;
        let call = Call::read(&self.method, &mut params)?;
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
            "result": call::as_object(value(&parts.result)?),
            "error": call::as_object(value(&parts.error)?),
            "before": self.before,
            "execution": self.execution,
        });
        Ok((call, input))
    }
}

fn before(decision: &PolicyDecision) -> Value {
    // Empty where the policies had none.
    let metadata = serde_json::from_str(&decision.metadata).unwrap_or_default();
    json!({
        "action": decision.action(),
        "reason": decision.reason,
        "metadata": call::as_object(Some(metadata)),
    })
}

fn execution(execution: &Execution) -> Value {
    let millis = u64::try_from(execution.duration.as_millis()).unwrap_or(u64::MAX);
    json!({
        "exit_code": execution.exit_code,
        "failed": execution.failed,
        "duration_ms": millis,
    })
}

/// Reads JSON in which no key comes twice.
pub(super) fn read(text: &str) -> Result<Value, Unreadable> {
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = Strict.deserialize(&mut reader);
    let value = value.and_then(|value| reader.end().map(|()| value));
    value.map_err(|error| Unreadable::Json(error.to_string()))
}

struct Strict;

impl<'de> DeserializeSeed<'de> for Strict {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, one: bool) -> Result<Value, E> {
        Ok(Value::Bool(one))
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
        while let Some(item) = items.next_element_seed(Strict)? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if fields.contains_key(&key) {
                return Err(A::Error::custom("an object has a key twice"));
            }
            fields.insert(key, entries.next_value_seed(Strict)?);
        }
        Ok(Value::Object(fields))
    }
}
