//! JSON-RPC messages, kept as they were written.
//!
//! A [`RpcMessage`] is the text and the ranges of the parts that the relay uses. The relay forwards
//! the text itself, so unknown fields, numbers of thirty digits and the order of keys are preserved
//! (ADR 5).

use std::borrow::Cow;
use std::ops::Range;

use serde::Deserialize;
use serde_json::value::RawValue;

/// Error codes of JSON-RPC and of the supported MCP revisions.
pub mod code {
    /// The text is not JSON.
    pub const PARSE_ERROR: i64 = -32700;
    /// The JSON is not a valid JSON-RPC message.
    pub const INVALID_REQUEST: i64 = -32600;
    /// The method is unknown.
    pub const METHOD_NOT_FOUND: i64 = -32601;
    /// The parameters are invalid.
    pub const INVALID_PARAMS: i64 = -32602;
    /// An internal failure that the caller cannot fix.
    pub const INTERNAL_ERROR: i64 = -32603;
    /// The server ended, or the call timed out.
    pub const SERVER_ENDED: i64 = -32001;
    /// A policy refused the message.
    pub const POLICY_REFUSED: i64 = -32003;
    /// A header differs from the body (2026-07-28).
    pub const HEADER_MISMATCH: i64 = -32020;
    /// The client lacks a capability that the call needs (2026-07-28).
    pub const MISSING_CAPABILITY: i64 = -32021;
    /// The protocol version is not supported (2026-07-28).
    pub const UNSUPPORTED_VERSION: i64 = -32022;
}

/// Maximum size of a message: 16 MiB.
pub const MAX_MESSAGE_BYTES: usize = 16 * 1024 * 1024;

/// Maximum size of an id, in bytes as written.
const MAX_ID_BYTES: usize = 512;

/// Kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RpcKind {
    /// A message with a method and an id, which expects a response.
    Request,
    /// A message with a method and no id.
    Notification,
    /// A message with a result or an error.
    Response,
}

/// Why a text is not a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadMessage {
    /// The text is not JSON.
    #[error("the message is not valid JSON: {0}")]
    Json(String),
    /// The JSON is not a JSON-RPC message.
    #[error("the JSON is not a JSON-RPC message: {0}")]
    Shape(&'static str),
    /// The text is too long.
    #[error("the message is longer than {MAX_MESSAGE_BYTES} bytes")]
    TooLong,
}

impl BadMessage {
    /// The JSON-RPC error code.
    pub const fn code(&self) -> i64 {
        match self {
            BadMessage::Json(_) => code::PARSE_ERROR,
            BadMessage::Shape(_) | BadMessage::TooLong => code::INVALID_REQUEST,
        }
    }
}

/// One message as it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RpcMessage {
    text: String,
    kind: RpcKind,
    method: Option<String>,
    id: Option<Range<usize>>,
    params: Option<Range<usize>>,
    result: Option<Range<usize>>,
    error: Option<Range<usize>>,
}

#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(borrow)]
    jsonrpc: Option<Cow<'a, str>>,
    #[serde(borrow, default, deserialize_with = "deserialize_present")]
    id: Option<&'a RawValue>,
    #[serde(borrow)]
    method: Option<Cow<'a, str>>,
    #[serde(borrow)]
    params: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "deserialize_present")]
    result: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "deserialize_present")]
    error: Option<&'a RawValue>,
}

/// Distinguishes a field that is `null` from a missing one.
fn deserialize_present<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(deserializer).map(Some)
}

impl RpcMessage {
    /// Parses one message. Duplicate keys are refused: different parsers would use different
    /// values.
    pub fn read(text: String) -> Result<Self, BadMessage> {
        if text.len() > MAX_MESSAGE_BYTES {
            return Err(BadMessage::TooLong);
        }
        let envelope: Envelope<'_> = serde_json::from_str(&text).map_err(|error| {
            if error.is_data() {
                BadMessage::Shape("it is not an object, or a field has the wrong type")
            } else {
                BadMessage::Json(error.to_string())
            }
        })?;
        if envelope.jsonrpc.as_deref() != Some("2.0") {
            return Err(BadMessage::Shape("jsonrpc is not \"2.0\""));
        }
        let range = |raw: Option<&RawValue>| raw.map(|raw| range_of(&text, raw.get()));
        let (id, params) = (range(envelope.id), range(envelope.params));
        let (result, error) = (range(envelope.result), range(envelope.error));
        let is_response = result.is_some() || error.is_some();
        let kind = match (&envelope.method, is_response, envelope.id) {
            (Some(_), false, Some(id)) if is_id(id.get()) => RpcKind::Request,
            (Some(_), false, Some(_)) => {
                return Err(BadMessage::Shape("the id is not a string or an integer"));
            }
            (Some(_), false, None) => RpcKind::Notification,
            (None, true, Some(id)) if is_id(id.get()) || id.get() == "null" => RpcKind::Response,
            (None, true, _) => return Err(BadMessage::Shape("a response needs an id")),
            (Some(_), true, _) => {
                return Err(BadMessage::Shape("it is both a request and a response"));
            }
            (None, false, _) => return Err(BadMessage::Shape("it has no method, result or error")),
        };
        if result.is_some() && error.is_some() {
            return Err(BadMessage::Shape("it has both a result and an error"));
        }
        let params_text = envelope.params.map(RawValue::get);
        if params_text.is_some_and(|raw| !raw.starts_with(['{', '['])) {
            return Err(BadMessage::Shape("params is not an object or an array"));
        }
        let method = envelope.method.map(Cow::into_owned);
        Ok(Self {
            kind,
            method,
            id,
            params,
            result,
            error,
            text,
        })
    }

    /// Parses one message from bytes.
    pub fn read_bytes(bytes: Vec<u8>) -> Result<Self, BadMessage> {
        let text = String::from_utf8(bytes)
            .map_err(|_| BadMessage::Json("the text is not UTF-8".to_owned()))?;
        Self::read(text)
    }

    /// Writes a request.
    pub fn request(id: &str, method: &str, params: &str) -> String {
        format!(
            r#"{{"jsonrpc":"2.0","id":{id},"method":{},"params":{params}}}"#,
            quote(method)
        )
    }

    /// Writes a notification.
    pub fn notification(method: &str, params: &str) -> String {
        format!(
            r#"{{"jsonrpc":"2.0","method":{},"params":{params}}}"#,
            quote(method)
        )
    }

    /// Writes a response with a result.
    pub fn answer(id: &str, result: &str) -> String {
        format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{result}}}"#)
    }

    /// Writes a response with an error.
    pub fn failure(id: &str, code: i64, message: &str, data: Option<&str>) -> String {
        let message = quote(message);
        match data {
            Some(data) => format!(
                r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":{code},"message":{message},"data":{data}}}}}"#
            ),
            None => format!(
                r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":{code},"message":{message}}}}}"#
            ),
        }
    }

    /// The text as it was written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The text as it was written.
    pub fn into_text(self) -> String {
        self.text
    }

    /// Request, notification or response.
    pub const fn kind(&self) -> RpcKind {
        self.kind
    }

    /// The method, of a request or notification.
    pub fn method(&self) -> Option<&str> {
        self.method.as_deref()
    }

    /// The id as written: `7` or `"seven"`.
    pub fn id(&self) -> Option<&str> {
        self.part(self.id.as_ref())
    }

    /// The parameters as written.
    pub fn params(&self) -> Option<&str> {
        self.part(self.params.as_ref())
    }

    /// The result as written.
    pub fn result(&self) -> Option<&str> {
        self.part(self.result.as_ref())
    }

    /// The error as written.
    pub fn error(&self) -> Option<&str> {
        self.part(self.error.as_ref())
    }

    /// The value at `path` below the parameters, as written.
    pub fn param(&self, path: &[&str]) -> Option<&str> {
        let params = self.params.clone()?;
        let found = find(&self.text, params, path)?;
        self.text.get(found)
    }

    /// The string at `path` below the parameters; none if the value is not a string.
    pub fn param_text(&self, path: &[&str]) -> Option<String> {
        serde_json::from_str(self.param(path)?).ok()
    }

    /// The same message with another id.
    #[must_use]
    pub fn with_id(&self, id: &str) -> String {
        self.with_range_replaced(self.id.as_ref(), id)
    }

    /// The same message with another value at `path` below the parameters; unchanged if there is no
    /// such value.
    #[must_use]
    pub fn with_param(&self, path: &[&str], value: &str) -> String {
        let params = self.params.clone();
        let found = params.and_then(|params| find(&self.text, params, path));
        self.with_range_replaced(found.as_ref(), value)
    }

    /// The same message with other parameters.
    #[must_use]
    pub fn with_params(&self, params: &str) -> String {
        if self.params.is_some() {
            return self.with_range_replaced(self.params.as_ref(), params);
        }
        // The last brace closes the message object.
        let end = self.text.rfind('}').unwrap_or(self.text.len());
        let (head, tail) = self.text.split_at(end);
        format!(r#"{head},"params":{params}{tail}"#)
    }

    /// The same message with another result.
    #[must_use]
    pub fn with_result(&self, result: &str) -> String {
        self.with_range_replaced(self.result.as_ref(), result)
    }

    /// The same message with another error.
    #[must_use]
    pub fn with_error(&self, error: &str) -> String {
        self.with_range_replaced(self.error.as_ref(), error)
    }

    fn part(&self, range: Option<&Range<usize>>) -> Option<&str> {
        self.text.get(range?.clone())
    }

    fn with_range_replaced(&self, range: Option<&Range<usize>>, new: &str) -> String {
        match range {
            Some(range) => splice(&self.text, range.clone(), new),
            None => self.text.clone(),
        }
    }
}

/// Replaces `range` of `text` by `new`.
pub fn splice(text: &str, range: Range<usize>, new: &str) -> String {
    let (head, tail) = (text.get(..range.start), text.get(range.end..));
    let mut spliced = String::with_capacity(text.len() + new.len());
    spliced.push_str(head.unwrap_or_default());
    spliced.push_str(new);
    spliced.push_str(tail.unwrap_or_default());
    spliced
}

/// The range of the value at `path`, below the value at `within`.
pub fn find(text: &str, within: Range<usize>, path: &[&str]) -> Option<Range<usize>> {
    let mut range = within;
    for key in path {
        let value = text.get(range.clone())?;
        let fields: Fields<'_> = serde_json::from_str(value).ok()?;
        let (_, found) = fields.0.into_iter().find(|(name, _)| name == key)?;
        let inner = range_of(value, found.get());
        range = range.start + inner.start..range.start + inner.end;
    }
    Some(range)
}

/// The fields of a JSON object in their original order, including duplicates.
#[derive(Debug)]
pub struct Fields<'a>(pub Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> serde::de::Visitor<'de> for Reader {
            type Value = Fields<'de>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(
                self,
                mut map: A,
            ) -> Result<Fields<'de>, A::Error> {
                let mut fields: Vec<(Cow<'de, str>, &'de RawValue)> = Vec::new();
                while let Some((Key(key), value)) = map.next_entry::<Key<'de>, &'de RawValue>()? {
                    fields.push((key, value));
                }
                Ok(Fields(fields))
            }
        }
        deserializer.deserialize_map(Reader)
    }
}

/// A key, borrowed if it has no escapes.
#[derive(Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

/// Writes a text as a JSON string.
pub fn quote(text: &str) -> String {
    // Serializing a string does not fail.
    serde_json::to_string(text).unwrap_or_else(|_| "\"\"".to_owned())
}

/// A message as one line. Unescaped line ends occur only between the tokens of JSON, where a space
/// means the same.
pub fn to_line(text: &str) -> Vec<u8> {
    let mut line = Vec::with_capacity(text.len() + 1);
    line.extend(text.bytes().map(|byte| match byte {
        b'\n' | b'\r' => b' ',
        other => other,
    }));
    line.push(b'\n');
    line
}

/// The range of `part` in `text`, from which it is borrowed.
fn range_of(text: &str, part: &str) -> Range<usize> {
    let start = (part.as_ptr() as usize).saturating_sub(text.as_ptr() as usize);
    start..start + part.len()
}

/// Whether an id is a string or an integer. `2.0` is refused: parsers disagree whether it is an
/// integer.
fn is_id(raw: &str) -> bool {
    let is_integer =
        |digits: &str| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    raw.len() <= MAX_ID_BYTES
        && (raw.starts_with('"') || is_integer(raw.strip_prefix('-').unwrap_or(raw)))
}

#[cfg(test)]
mod tests;
