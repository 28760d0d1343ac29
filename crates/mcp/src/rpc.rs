//! JSON-RPC messages, kept as they were written.
//!
//! A [`Message`] is its text and where in it the parts stand that a relay has to know. What
//! passes is the text itself: fields nobody here knows, numbers of thirty digits and the
//! order of keys are nobody's business (ADR 5).

use std::borrow::Cow;
use std::ops::Range;

use serde::Deserialize;
use serde_json::value::RawValue;

/// Codes of JSON-RPC and of the protocol revisions that this bridge speaks.
pub mod code {
    /// It is no JSON.
    pub const PARSE: i64 = -32700;
    /// It is no message.
    pub const INVALID: i64 = -32600;
    /// Nobody knows the method.
    pub const NO_METHOD: i64 = -32601;
    /// The parameters are wrong.
    pub const PARAMS: i64 = -32602;
    /// Something failed that the caller cannot help.
    pub const INTERNAL: i64 = -32603;
    /// The server ended, or took too long.
    pub const GONE: i64 = -32001;
    /// A policy refuses.
    pub const REFUSED: i64 = -32003;
    /// A header says something else than the body (2026-07-28).
    pub const HEADER_MISMATCH: i64 = -32020;
    /// The client lacks a capability that the call needs (2026-07-28).
    pub const MISSING_CAPABILITY: i64 = -32021;
    /// A protocol version that is not spoken here (2026-07-28).
    pub const VERSION: i64 = -32022;
}

/// The longest message: 16 MiB.
pub const LONGEST: usize = 16 * 1024 * 1024;

/// The longest id that is carried, in bytes as written.
const LONGEST_ID: usize = 512;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Something that wants an answer.
    Request,
    /// Something that does not.
    Notification,
    /// An answer.
    Response,
}

/// Why a text is no message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadMessage {
    /// It is no JSON.
    #[error("it is no JSON: {0}")]
    Json(String),
    /// It is JSON, and no message.
    #[error("it is no JSON-RPC message: {0}")]
    Shape(&'static str),
    /// There is too much of it.
    #[error("it is longer than {LONGEST} bytes")]
    TooLong,
}

impl BadMessage {
    /// The code to answer with.
    pub const fn code(&self) -> i64 {
        match self {
            BadMessage::Json(_) => code::PARSE,
            BadMessage::Shape(_) | BadMessage::TooLong => code::INVALID,
        }
    }
}

/// One message, as it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    text: String,
    kind: Kind,
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
    #[serde(borrow, default, deserialize_with = "present")]
    id: Option<&'a RawValue>,
    #[serde(borrow)]
    method: Option<Cow<'a, str>>,
    #[serde(borrow)]
    params: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    result: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    error: Option<&'a RawValue>,
}

/// A `null` that is there is not the same as nothing.
fn present<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(deserializer).map(Some)
}

impl Message {
    /// Reads one message. A key that stands there twice makes it none: two readers would
    /// disagree about it.
    pub fn read(text: String) -> Result<Self, BadMessage> {
        if text.len() > LONGEST {
            return Err(BadMessage::TooLong);
        }
        let envelope: Envelope<'_> = serde_json::from_str(&text).map_err(|error| {
            if error.is_data() {
                BadMessage::Shape("it is no object, or a part of it has the wrong type")
            } else {
                BadMessage::Json(error.to_string())
            }
        })?;
        if envelope.jsonrpc.as_deref() != Some("2.0") {
            return Err(BadMessage::Shape("jsonrpc is not \"2.0\""));
        }
        let place = |raw: Option<&RawValue>| raw.map(|raw| span(&text, raw.get()));
        let (id, params) = (place(envelope.id), place(envelope.params));
        let (result, error) = (place(envelope.result), place(envelope.error));
        let answers = result.is_some() || error.is_some();
        let kind = match (&envelope.method, answers, envelope.id) {
            (Some(_), false, Some(id)) if is_id(id.get()) => Kind::Request,
            (Some(_), false, Some(_)) => {
                return Err(BadMessage::Shape("its id is no text and no whole number"));
            }
            (Some(_), false, None) => Kind::Notification,
            (None, true, Some(id)) if is_id(id.get()) || id.get() == "null" => Kind::Response,
            (None, true, _) => return Err(BadMessage::Shape("an answer needs an id")),
            (Some(_), true, _) => {
                return Err(BadMessage::Shape("it is a question and an answer"));
            }
            (None, false, _) => return Err(BadMessage::Shape("it has no method and no result")),
        };
        if result.is_some() && error.is_some() {
            return Err(BadMessage::Shape("it has a result and an error"));
        }
        let params_text = envelope.params.map(RawValue::get);
        if params_text.is_some_and(|raw| !raw.starts_with(['{', '['])) {
            return Err(BadMessage::Shape("params is no object and no list"));
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

    /// Reads bytes.
    pub fn read_bytes(bytes: Vec<u8>) -> Result<Self, BadMessage> {
        let text =
            String::from_utf8(bytes).map_err(|_| BadMessage::Json("it is no UTF-8".to_owned()))?;
        Self::read(text)
    }

    /// A request of ours.
    pub fn request(id: &str, method: &str, params: &str) -> String {
        format!(
            r#"{{"jsonrpc":"2.0","id":{id},"method":{},"params":{params}}}"#,
            quote(method)
        )
    }

    /// A notification of ours.
    pub fn notification(method: &str, params: &str) -> String {
        format!(
            r#"{{"jsonrpc":"2.0","method":{},"params":{params}}}"#,
            quote(method)
        )
    }

    /// An answer of ours.
    pub fn answer(id: &str, result: &str) -> String {
        format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{result}}}"#)
    }

    /// An answer of ours that says what went wrong.
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

    /// As it was written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// As it was written.
    pub fn into_text(self) -> String {
        self.text
    }

    /// What it is.
    pub const fn kind(&self) -> Kind {
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

    /// The text of the value at `path` below the parameters, where it is a text.
    pub fn param_text(&self, path: &[&str]) -> Option<String> {
        serde_json::from_str(self.param(path)?).ok()
    }

    /// The same message with another id.
    #[must_use]
    pub fn with_id(&self, id: &str) -> String {
        self.spliced(self.id.as_ref(), id)
    }

    /// The same message with another value at `path` below the parameters, where there is
    /// one.
    #[must_use]
    pub fn with_param(&self, path: &[&str], value: &str) -> String {
        let params = self.params.clone();
        let found = params.and_then(|params| find(&self.text, params, path));
        self.spliced(found.as_ref(), value)
    }

    /// The same message with other parameters.
    #[must_use]
    pub fn with_params(&self, params: &str) -> String {
        if self.params.is_some() {
            return self.spliced(self.params.as_ref(), params);
        }
        // The last brace is the envelope's own.
        let end = self.text.rfind('}').unwrap_or(self.text.len());
        let (head, tail) = self.text.split_at(end);
        format!(r#"{head},"params":{params}{tail}"#)
    }

    /// The same message with another result.
    #[must_use]
    pub fn with_result(&self, result: &str) -> String {
        self.spliced(self.result.as_ref(), result)
    }

    /// The same message with another error.
    #[must_use]
    pub fn with_error(&self, error: &str) -> String {
        self.spliced(self.error.as_ref(), error)
    }

    fn part(&self, place: Option<&Range<usize>>) -> Option<&str> {
        self.text.get(place?.clone())
    }

    fn spliced(&self, place: Option<&Range<usize>>, new: &str) -> String {
        match place {
            Some(place) => splice(&self.text, place.clone(), new),
            None => self.text.clone(),
        }
    }
}

/// `text` with `new` at `place`.
pub fn splice(text: &str, place: Range<usize>, new: &str) -> String {
    let (head, tail) = (text.get(..place.start), text.get(place.end..));
    let mut spliced = String::with_capacity(text.len() + new.len());
    spliced.push_str(head.unwrap_or_default());
    spliced.push_str(new);
    spliced.push_str(tail.unwrap_or_default());
    spliced
}

/// Where the value at `path` stands, below the value at `within`.
pub fn find(text: &str, within: Range<usize>, path: &[&str]) -> Option<Range<usize>> {
    let mut place = within;
    for key in path {
        let value = text.get(place.clone())?;
        let fields: Fields<'_> = serde_json::from_str(value).ok()?;
        let (_, found) = fields.0.into_iter().find(|(name, _)| name == key)?;
        let inner = span(value, found.get());
        place = place.start + inner.start..place.start + inner.end;
    }
    Some(place)
}

/// The fields of an object, in the order in which they are written.
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

/// A key, borrowed where it has no escapes.
#[derive(Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

/// Writes a text as JSON.
pub fn quote(text: &str) -> String {
    // Texts always can be written.
    serde_json::to_string(text).unwrap_or_else(|_| "\"\"".to_owned())
}

/// A message as one line. Line ends can only stand between tokens, where a space means the
/// same: within a text JSON has them escaped.
pub fn line(text: &str) -> Vec<u8> {
    let mut line = Vec::with_capacity(text.len() + 1);
    line.extend(text.bytes().map(|byte| match byte {
        b'\n' | b'\r' => b' ',
        other => other,
    }));
    line.push(b'\n');
    line
}

/// Where `part`, which is borrowed from `text`, stands in it.
fn span(text: &str, part: &str) -> Range<usize> {
    let start = (part.as_ptr() as usize).saturating_sub(text.as_ptr() as usize);
    start..start + part.len()
}

/// Texts and whole numbers. 2.0 counts as one for some and not for others.
fn is_id(raw: &str) -> bool {
    let whole = |digits: &str| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    raw.len() <= LONGEST_ID && (raw.starts_with('"') || whole(raw.strip_prefix('-').unwrap_or(raw)))
}

#[cfg(test)]
mod tests;
