//! Unwraps a tool call: Docker's gateway has a tool (`mcp-exec`) that calls another tool.

use serde_json::{Map, Value};

use super::input::UnreadableMessage;
use crate::redaction::Wrapping;

/// Separates the server's name from the tool's name.
const PREFIX_END: &str = "__";

/// The tool of Docker's gateway that calls another tool.
const WRAPPER: &str = "mcp-exec";

/// The most wrappers around a call.
const MAX_WRAPPINGS: usize = 4;

/// A call without its wrappers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnwrappedCall {
    /// The innermost tool's name, without the server's prefix.
    pub name: String,
    /// The outermost name, as it was sent.
    pub outer_name: String,
    /// The server's prefix of the innermost name; empty if there is none.
    pub server: String,
    /// How each `mcp-exec` call around this call encodes its arguments, from the outermost.
    pub(crate) wrappings: Vec<Wrapping>,
}

impl UnwrappedCall {
    /// Unwraps the `params` of `method`; none if they cannot be parsed.
    pub fn from_params(method: &str, params: &str) -> Option<Self> {
        let mut params = super::input::parse_json(params).ok()?;
        Self::read(method, &mut params).ok()
    }

    fn set_name(&mut self, name: &str) {
        let (server, own) = split(name).unwrap_or(("", name));
        server.clone_into(&mut self.server);
        own.clone_into(&mut self.name);
    }

    /// Unwraps the `params` of `method`; `params` become those of the innermost call.
    pub(super) fn read(method: &str, params: &mut Value) -> Result<Self, UnreadableMessage> {
        let mut call = Self::default();
        let Some(name) = name_of(params) else {
            return Ok(call);
        };
        call.outer_name = name.to_owned();
        call.set_name(name);
        while method == "tools/call" && call.name == WRAPPER {
            let inner = params.get_mut("arguments").map(Value::take);
            let Some(mut inner) = inner.filter(|inner| name_of(inner).is_some()) else {
                return Err(UnreadableMessage::Wrapped);
            };
            check_keys(&inner)?;
            let wrapping = match inner.get("arguments") {
                Some(Value::String(text)) => {
                    let arguments = super::input::parse_json(text)?;
                    if let Some(text) = inner.get_mut("arguments") {
                        *text = arguments;
                    }
                    Wrapping::Text
                }
                _ => Wrapping::Plain,
            };
            call.wrappings.push(wrapping);
            if call.wrappings.len() > MAX_WRAPPINGS {
                return Err(UnreadableMessage::Wrapped);
            }
            call.set_name(name_of(&inner).unwrap_or_default());
            *params = inner;
        }
        Ok(call)
    }
}

fn name_of(params: &Value) -> Option<&str> {
    params.get("name").and_then(Value::as_str)
}

/// Splits a name into the server's prefix and the tool's name.
fn split(name: &str) -> Option<(&str, &str)> {
    let (prefix, own) = name.split_once(PREFIX_END)?;
    (!prefix.is_empty() && !own.is_empty()).then_some((prefix, own))
}

/// Refuses keys that differ from a known key only in upper and lower case. Servers written in Go
/// treat `Name` as `name`, and policies do not.
pub(super) fn check_keys(params: &Value) -> Result<(), UnreadableMessage> {
    let Value::Object(fields) = params else {
        return Ok(());
    };
    let is_ambiguous = |key: &str| {
        let folded = key.to_uppercase().to_lowercase();
        key != folded && matches!(folded.as_str(), "name" | "arguments" | "uri")
    };
    match fields.keys().any(|key| is_ambiguous(key)) {
        true => Err(UnreadableMessage::Spelling),
        false => Ok(()),
    }
}

/// The value as an object, so that policies always find the same type.
pub(super) fn as_object(value: Option<Value>) -> Value {
    match value {
        Some(Value::Object(fields)) => Value::Object(fields),
        None | Some(Value::Null) => Value::Object(Map::new()),
        Some(list @ Value::Array(_)) => {
            Value::Object(Map::from_iter([("_array".to_owned(), list)]))
        }
        Some(other) => Value::Object(Map::from_iter([("_value".to_owned(), other)])),
    }
}
