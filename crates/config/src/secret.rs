//! A text that is never shown.

use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use zeroize::Zeroize;

/// Text that must not appear in a log, an error, an audit record or on a terminal.
///
/// The type has no `Display`, its `Debug` and `Serialize` show only whether it is set, and its
/// bytes are zeroed when it is dropped. [`Secret::expose`] is the only access to the value, so that
/// every use can be found in the code.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Box<str>);

impl Secret {
    /// A secret with this value.
    pub fn new(value: impl Into<Box<str>>) -> Self {
        Self(value.into())
    }

    /// The value itself.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Whether the value is empty, for example from `${VAR:-}` with VAR unset.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The text that is shown instead of the value.
    pub(crate) fn display_text(&self) -> &'static str {
        if self.is_empty() {
            "[unset]"
        } else {
            "[secret]"
        }
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.display_text())
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.display_text())
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(Self::new)
    }
}

/// The validator recognises by `writeOnly` that it must not quote a value.
impl JsonSchema for Secret {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Secret".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "writeOnly": true })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_shows_only_whether_it_is_set() {
        let secret = Secret::new("hunter2");
        assert_eq!(secret.expose(), "hunter2");
        assert_eq!(format!("{secret:?}"), "[secret]");
        assert_eq!(serde_json::to_string(&secret).unwrap(), "\"[secret]\"");
        assert_eq!(format!("{:?}", Secret::new("")), "[unset]");
    }
}
