//! The outermost object of a hook's body, its fields unread.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The longest text of an envelope.
const LONGEST: usize = 256;

/// Fields by name, each once.
#[derive(Debug)]
pub(super) struct Envelope<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

/// A field that is missing or wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {what}")]
pub(super) struct Wrong {
    pub(super) field: &'static str,
    pub(super) what: &'static str,
}

impl<'a> Envelope<'a> {
    pub(super) fn has(&self, field: &str) -> bool {
        self.0.iter().any(|(name, _)| name == field)
    }

    /// The field as it is written; nothing where it is null.
    pub(super) fn raw(&self, field: &str) -> Option<&'a RawValue> {
        let found = self.0.iter().find(|(name, _)| name == field);
        found.map(|(_, raw)| *raw).filter(|raw| raw.get() != "null")
    }

    /// A field that may be missing, read by `read` where it is there.
    pub(super) fn optional<T>(
        &self,
        field: &'static str,
        read: impl FnOnce(&Self, &'static str) -> Result<T, Wrong>,
    ) -> Result<Option<T>, Wrong> {
        self.has(field).then(|| read(self, field)).transpose()
    }

    /// The text of a field that must be there.
    pub(super) fn text(&self, field: &'static str) -> Result<String, Wrong> {
        if !self.has(field) {
            let what = "it is missing";
            return Err(Wrong { field, what });
        }
        let text = self.raw(field).map(|raw| serde_json::from_str(raw.get()));
        match text {
            Some(Ok(Cow::<'_, str>::Owned(text))) if text.len() <= LONGEST => Ok(text),
            Some(Ok(Cow::Borrowed(text))) if text.len() <= LONGEST => Ok(text.to_owned()),
            Some(Ok(_)) => {
                let what = "it is too long";
                Err(Wrong { field, what })
            }
            Some(Err(_)) | None => {
                let what = "it is no text";
                Err(Wrong { field, what })
            }
        }
    }

    /// The same, and it must not be empty.
    pub(super) fn word(&self, field: &'static str) -> Result<String, Wrong> {
        let what = "it is empty";
        let text = self.text(field)?;
        (!text.is_empty())
            .then_some(text)
            .ok_or(Wrong { field, what })
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Envelope<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;

        impl<'de> Visitor<'de> for Fields {
            type Value = Envelope<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = Envelope(Vec::new());
                while let Some((name, raw)) = map.next_entry::<Cow<'de, str>, &RawValue>()? {
                    if fields.has(&name) {
                        return Err(A::Error::custom("a field comes twice"));
                    }
                    // No envelope of either dialect has more, and looking for each takes time.
                    if fields.0.len() >= 64 {
                        return Err(A::Error::custom("there are too many fields"));
                    }
                    fields.0.push((name, raw));
                }
                Ok(fields)
            }
        }

        deserializer.deserialize_map(Fields)
    }
}
