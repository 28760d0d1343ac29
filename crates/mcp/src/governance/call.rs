//! Which tool is meant by a call, beneath its wrappings.

use serde_json::{Map, Value};

use super::input::Unreadable;
use crate::redaction::Wrapping;

/// What separates a server's name from a tool's in names of both.
const PREFIX_END: &str = "__";

/// The tool of Docker's gateway that calls another.
const WRAPPER: &str = "mcp-exec";

/// How often a call may be wrapped.
const MOST_WRAPPINGS: usize = 4;

/// A call, taken apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Call {
    /// The tool's own name, innermost, without a server's in front.
    pub name: String,
    /// The name as it was sent.
    pub outer_name: String,
    /// The server's name in front of the innermost name; empty where there is none.
    pub server: String,
    /// From the outermost.
    pub(crate) wrappings: Vec<Wrapping>,
}

impl Call {
    /// Takes `params` of `method` apart; nothing where that cannot be done.
    pub fn of(method: &str, params: &str) -> Option<Self> {
        let mut params = super::input::read(params).ok()?;
        Self::read(method, &mut params).ok()
    }

    fn named(&mut self, name: &str) {
        let (server, own) = split(name).unwrap_or(("", name));
        server.clone_into(&mut self.server);
        own.clone_into(&mut self.name);
    }

    /// Takes `params` of `method` apart; what is left in `params` is the innermost call.
    pub(super) fn read(method: &str, params: &mut Value) -> Result<Self, Unreadable> {
        let mut call = Self::default();
        let Some(name) = name_of(params) else {
            return Ok(call);
        };
        call.outer_name = name.to_owned();
        call.named(name);
        while method == "tools/call" && call.name == WRAPPER {
            let inner = params.get_mut("arguments").map(Value::take);
            let Some(mut inner) = inner.filter(|inner| name_of(inner).is_some()) else {
                return Err(Unreadable::Wrapped);
            };
            check_keys(&inner)?;
            let wrapping = match inner.get("arguments") {
                Some(Value::String(text)) => {
                    let arguments = super::input::read(text)?;
                    if let Some(place) = inner.get_mut("arguments") {
                        *place = arguments;
                    }
                    Wrapping::Text
                }
                _ => Wrapping::Plain,
            };
            call.wrappings.push(wrapping);
            if call.wrappings.len() > MOST_WRAPPINGS {
                return Err(Unreadable::Wrapped);
            }
            call.named(name_of(&inner).unwrap_or_default());
            *params = inner;
        }
        Ok(call)
    }
}

fn name_of(params: &Value) -> Option<&str> {
    params.get("name").and_then(Value::as_str)
}

/// The server's name, and the tool's own.
fn split(name: &str) -> Option<(&str, &str)> {
    let (prefix, own) = name.split_once(PREFIX_END)?;
    (!prefix.is_empty() && !own.is_empty()).then_some((prefix, own))
}

/// Servers written in Go take `Name` for `name`; what they would read and policy does not is
/// refused.
pub(super) fn check_keys(params: &Value) -> Result<(), Unreadable> {
    let Value::Object(fields) = params else {
        return Ok(());
    };
    let wrong = |key: &str| {
        let folded = key.to_uppercase().to_lowercase();
        key != folded && matches!(folded.as_str(), "name" | "arguments" | "uri")
    };
    match fields.keys().any(|key| wrong(key)) {
        true => Err(Unreadable::Spelling),
        false => Ok(()),
    }
}

/// A policy finds an object here, whatever was sent.
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
