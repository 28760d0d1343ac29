//! Identifiers of sandboxes and requests. They are validated when they are parsed.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Id of a sandbox, or of a container that an operator registered.
///
/// 1 to 128 of `A-Z a-z 0-9 _ . -`, starting with a letter or digit: safe as a file name, a
/// metric label, a header value and a command line argument. Cloning is cheap.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SandboxId(Arc<str>);

/// Text that is not a valid id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an id is 1 to 128 letters, digits, '_', '.' or '-', and starts with a letter or digit")]
pub struct BadId;

impl SandboxId {
    /// Validates `text`.
    pub fn parse(text: &str) -> Result<Self, BadId> {
        let ok = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
        let starts_well = text
            .bytes()
            .next()
            .is_some_and(|b| b.is_ascii_alphanumeric());
        if text.len() <= 128 && starts_well && text.bytes().all(ok) {
            Ok(Self(text.into()))
        } else {
            Err(BadId)
        }
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for SandboxId {
    type Error = BadId;

    fn try_from(text: String) -> Result<Self, BadId> {
        Self::parse(&text)
    }
}

impl From<SandboxId> for String {
    fn from(id: SandboxId) -> String {
        id.0.as_ref().to_owned()
    }
}

impl std::fmt::Display for SandboxId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Id of a request, from its first byte to its audit record: 26 characters of Crockford's
/// base 32, which avoids letters that are easily confused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RequestId(u128);

/// The digits of Crockford's base 32.
const CROCKFORD: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";

impl RequestId {
    /// An id that sorts by `millis` and is made unique by the low 80 bits of `random`.
    pub const fn new(millis: u64, random: u128) -> Self {
        Self(((millis as u128 & ((1 << 48) - 1)) << 80) | (random & ((1 << 80) - 1)))
    }

    /// Parses 26 characters; upper and lower case are equal.
    pub fn parse(text: &str) -> Result<Self, BadId> {
        if text.len() != 26 {
            return Err(BadId);
        }
        let mut value: u128 = 0;
        for (index, byte) in text.bytes().enumerate() {
            let digit = CROCKFORD
                .iter()
                .position(|c| *c == byte.to_ascii_uppercase())
                .ok_or(BadId)?;
            if index == 0 && digit > 7 {
                return Err(BadId);
            }
            value = (value << 5) | digit as u128;
        }
        Ok(Self(value))
    }
}

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut text = [b'0'; 26];
        for (index, byte) in text.iter_mut().rev().enumerate() {
            let digit = usize::try_from((self.0 >> (index * 5)) & 31).unwrap_or_default();
            *byte = CROCKFORD.get(digit).copied().unwrap_or(b'0');
        }
        f.write_str(std::str::from_utf8(&text).unwrap_or_default())
    }
}

impl std::fmt::Debug for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RequestId({self})")
    }
}

impl TryFrom<String> for RequestId {
    type Error = BadId;

    fn try_from(text: String) -> Result<Self, BadId> {
        Self::parse(&text)
    }
}

impl From<RequestId> for String {
    fn from(id: RequestId) -> String {
        id.to_string()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sandbox_id_with_unsafe_characters_is_rejected() {
        for good in ["a", "abc", "0f", "palisade-app_1.x", &"x".repeat(128)] {
            assert_eq!(SandboxId::parse(good).unwrap().as_str(), good);
        }
        for bad in [
            "",
            ".",
            "..",
            "-x",
            "a/b",
            "a b",
            "a\nb",
            "a\0",
            "é",
            "a\u{202e}b",
            &"x".repeat(129),
        ] {
            assert_eq!(SandboxId::parse(bad), Err(BadId), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn request_ids_round_trip_and_sort_by_time(a: u32, b: u32, x: u128, y: u128) {
            let (first, second) = (RequestId::new(a.into(), x), RequestId::new(b.into(), y));
            prop_assert_eq!(RequestId::parse(&first.to_string()), Ok(first));
            prop_assert_eq!(RequestId::parse(&first.to_string().to_lowercase()), Ok(first));
            if a < b {
                prop_assert!(first.to_string() < second.to_string());
            }
        }

        #[test]
        fn stored_sandbox_id_parses_back_unchanged(text in "[a-zA-Z0-9_./ -]{0,6}") {
            if let Ok(id) = SandboxId::parse(&text) {
                prop_assert_eq!(id.as_str(), &text);
                prop_assert_eq!(SandboxId::parse(id.as_str()), Ok(id));
            }
        }

        #[test]
        fn parsing_request_id_never_panics_and_round_trips(text in ".{0,40}") {
            if let Ok(id) = RequestId::parse(&text) {
                prop_assert_eq!(id.to_string(), text.to_ascii_uppercase());
            }
        }
    }
}
