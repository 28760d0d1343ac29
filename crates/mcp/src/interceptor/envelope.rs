//! The top-level JSON object of a hook's body, with unparsed fields.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The longest text field of an envelope, in bytes.
const MAX_TEXT_BYTES: usize = 256;

/// The fields by name, without duplicates.
#[derive(Debug)]
pub(super) struct Envelope<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

/// A field that is missing or invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {what}")]
pub(super) struct FieldError {
    pub(super) field: &'static str,
    pub(super) what: &'static str,
}

impl<'a> Envelope<'a> {
    pub(super) fn has(&self, field: &str) -> bool {
        self.0.iter().any(|(name, _)| name == field)
    }

    /// The raw JSON of a field; none if it is missing or null.
    pub(super) fn raw(&self, field: &str) -> Option<&'a RawValue> {
        let found = self.0.iter().find(|(name, _)| name == field);
        found.map(|(_, raw)| *raw).filter(|raw| raw.get() != "null")
    }

    /// An optional field, parsed by `read` if it is present.
    pub(super) fn optional<T>(
        &self,
        field: &'static str,
        read: impl FnOnce(&Self, &'static str) -> Result<T, FieldError>,
    ) -> Result<Option<T>, FieldError> {
        self.has(field).then(|| read(self, field)).transpose()
    }

    /// A required text field.
    pub(super) fn text(&self, field: &'static str) -> Result<String, FieldError> {
        if !self.has(field) {
            let what = "missing";
            return Err(FieldError { field, what });
        }
        let text = self.raw(field).map(|raw| serde_json::from_str(raw.get()));
        match text {
            Some(Ok(Cow::<'_, str>::Owned(text))) if text.len() <= MAX_TEXT_BYTES => Ok(text),
            Some(Ok(Cow::Borrowed(text))) if text.len() <= MAX_TEXT_BYTES => Ok(text.to_owned()),
            Some(Ok(_)) => {
                let what = "longer than 256 bytes";
                Err(FieldError { field, what })
            }
            Some(Err(_)) | None => {
                let what = "must be a string";
                Err(FieldError { field, what })
            }
        }
    }

    /// A required text field that must not be empty.
    pub(super) fn non_empty_text(&self, field: &'static str) -> Result<String, FieldError> {
        let what = "must not be empty";
        let text = self.text(field)?;
        (!text.is_empty())
            .then_some(text)
            .ok_or(FieldError { field, what })
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Envelope<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FieldsVisitor;

        impl<'de> Visitor<'de> for FieldsVisitor {
            type Value = Envelope<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = Envelope(Vec::new());
                while let Some((name, raw)) = map.next_entry::<Cow<'de, str>, &RawValue>()? {
                    if fields.has(&name) {
                        return Err(A::Error::custom("duplicate field"));
                    }
                    // No envelope of either dialect has more, and `has` searches linearly.
                    if fields.0.len() >= 64 {
                        return Err(A::Error::custom("more than 64 fields"));
                    }
                    fields.0.push((name, raw));
                }
                Ok(fields)
            }
        }

        deserializer.deserialize_map(FieldsVisitor)
    }
}
