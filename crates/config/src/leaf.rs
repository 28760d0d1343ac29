//! Scalar values of the configuration: durations, sizes, addresses, patterns.
//!
//! Each kind has a name, which is the `format` in the schema, so that an invalid scalar is found by
//! the same pass, and reported in the same way, as a misspelt key. Parsers of values that decide
//! something are in `policy`; here they only get a name.

mod address;
mod location;
mod name;
mod quantity;
mod rule;
mod source;

use std::borrow::Cow;
use std::fmt::Display;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use policy::endpoint::PathPattern;
use policy::host::{Authority, Host, HostPattern};
use policy::refs::RefPattern;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serializer};

pub use address::{Cidr, DnsUpstream};
pub use quantity::{read_size, show_size};
pub use rule::{AuthScheme, Endpoint, PortMapping, RegexPattern};
pub use source::{EnvEntry, SecretSource};

pub(crate) use address::DnsType;
pub(crate) use location::{GitUrl, HttpUrl, TreePath, UrlPath, WebhookUrl};
pub(crate) use name::{HeaderName, HostKey, Image, Name, SandboxName, Slug};
pub(crate) use rule::{MAX_METHODS, MAX_PATTERNS, MethodName};
pub(crate) use source::EnvName;

/// A kind of text with a name, a description and a check.
pub(crate) trait Format {
    /// The name of the format in the schema.
    const NAME: &'static str;
    /// Description of valid text, as it follows 'must be'.
    const WHAT: &'static str;
    /// The largest integer that is accepted instead of text, if integers are accepted.
    const INTEGER: Option<u64> = None;
    /// Whether text of this kind may contain a secret, which messages must not repeat.
    const SENSITIVE: bool = false;
    /// Whether the text names a host or an address, so that `user:password@` may precede it.
    const ADDRESS: bool = false;

    /// Why `text` is invalid, as a detail after [`Format::WHAT`]; may be empty.
    fn check(text: &str) -> Result<(), String>;
}

/// A kind of text that has a type of its own in [`crate::Settings`].
pub(crate) trait Leaf: Format + Sized {
    /// Parses text that passed the check.
    fn read(text: &str) -> Result<Self, String>;
    /// The text that parses to this value.
    fn write(&self) -> String;
}

/// One row of the table that the validator is built from.
pub(crate) struct FormatRow {
    pub(crate) name: &'static str,
    pub(crate) what: &'static str,
    pub(crate) sensitive: bool,
    pub(crate) is_address: bool,
    pub(crate) check: fn(&str) -> Result<(), String>,
}

const fn row<F: Format>() -> FormatRow {
    FormatRow {
        name: F::NAME,
        what: F::WHAT,
        sensitive: F::SENSITIVE,
        is_address: F::ADDRESS,
        check: F::check,
    }
}

/// Every format. A test finds formats of the schema that are missing here.
pub(crate) const FORMATS: &[FormatRow] = &[
    row::<Duration>(),
    row::<u64>(),
    row::<SocketAddr>(),
    row::<Host>(),
    row::<HostPattern>(),
    row::<Authority>(),
    row::<Cidr>(),
    row::<SecretSource>(),
    row::<EnvName>(),
    row::<EnvEntry>(),
    row::<PathBuf>(),
    row::<UrlPath>(),
    row::<TreePath>(),
    row::<HttpUrl>(),
    row::<WebhookUrl>(),
    row::<GitUrl>(),
    row::<Name>(),
    row::<Slug>(),
    row::<SandboxName>(),
    row::<Image>(),
    row::<HostKey>(),
    row::<PortMapping>(),
    row::<HeaderName>(),
    row::<AuthScheme>(),
    row::<RegexPattern>(),
    row::<MethodName>(),
    row::<PathPattern>(),
    row::<Endpoint>(),
    row::<RefPattern>(),
    row::<DnsUpstream>(),
    row::<DnsType>(),
];

/// The format called `name`.
pub(crate) fn format(name: &str) -> Option<&'static FormatRow> {
    FORMATS.iter().find(|row| row.name == name)
}

/// Represents a format where the schema is derived: `#[schemars(with = "Text<Image>")]`.
pub(crate) struct Text<F>(PhantomData<F>);

impl<F: Format> JsonSchema for Text<F> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        F::NAME.into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        match F::INTEGER {
            None => json_schema!({ "type": "string", "format": F::NAME }),
            Some(most) => json_schema!({
                "type": ["string", "integer"],
                "format": F::NAME,
                "minimum": 0,
                "maximum": most,
            }),
        }
    }
}

/// Represents a mapping whose keys have a format.
pub(crate) struct Keyed<K, V>(PhantomData<(K, V)>);

impl<K: Format, V: JsonSchema> JsonSchema for Keyed<K, V> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        format!("{}_by_{}", V::schema_name(), K::NAME).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "object",
            "propertyNames": { "format": K::NAME },
            "additionalProperties": generator.subschema_for::<V>(),
        })
    }
}

/// serde's `with` for one scalar.
pub(crate) mod one {
    use super::{Deserializer, Leaf, Serializer, parse_leaf};

    pub(crate) fn serialize<T: Leaf, S: Serializer>(
        value: &T,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&value.write())
    }

    pub(crate) fn deserialize<'de, T: Leaf, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<T, D::Error> {
        parse_leaf(deserializer)
    }
}

/// serde's `with` for an optional scalar.
pub(crate) mod maybe {
    use super::{Deserialize, Deserializer, Leaf, ParsedLeaf, Serializer};

    pub(crate) fn serialize<T: Leaf, S: Serializer>(
        value: &Option<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => serializer.serialize_str(&value.write()),
            None => serializer.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, T: Leaf, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<T>, D::Error> {
        let value = Option::<ParsedLeaf<T>>::deserialize(deserializer)?;
        Ok(value.map(|ParsedLeaf(value)| value))
    }
}

/// serde's `with` for a list of scalars.
pub(crate) mod list {
    use super::{Deserialize, Deserializer, Leaf, ParsedLeaf, Serializer};

    pub(crate) fn serialize<T: Leaf, S: Serializer>(
        values: &[T],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(values.iter().map(Leaf::write))
    }

    pub(crate) fn deserialize<'de, T: Leaf, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<T>, D::Error> {
        let values = Vec::<ParsedLeaf<T>>::deserialize(deserializer)?;
        Ok(values.into_iter().map(|ParsedLeaf(value)| value).collect())
    }
}

/// A scalar that implements serde's `Deserialize`.
pub(crate) struct ParsedLeaf<T>(pub(crate) T);

impl<'de, T: Leaf> Deserialize<'de> for ParsedLeaf<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        parse_leaf(deserializer).map(ParsedLeaf)
    }
}

fn parse_leaf<'de, T: Leaf, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Scalar {
        Integer(u64),
        Text(String),
    }
    let text = match Scalar::deserialize(deserializer)? {
        Scalar::Integer(value) => value.to_string(),
        Scalar::Text(text) => text,
    };
    T::read(&text).map_err(|detail| D::Error::custom(format!("not {}: {detail}", T::WHAT)))
}

/// A parser's error as text.
fn detail<T, E: Display>(result: Result<T, E>) -> Result<T, String> {
    result.map_err(|error| error.to_string())
}

/// An error without detail.
fn plain<T>(value: Option<T>) -> Result<T, String> {
    value.ok_or_else(String::new)
}

fn require(holds: bool) -> Result<(), String> {
    plain(holds.then_some(()))
}

/// Implements [`Format`] and [`Leaf`] for types with `parse` and `Display`.
macro_rules! parsed {
    ($($type:ty, $name:literal, $what:literal $(, $constant:ident)?;)*) => {$(
        impl $crate::leaf::Format for $type {
            const NAME: &'static str = $name;
            const WHAT: &'static str = $what;
            $(const $constant: bool = true;)?

            fn check(text: &str) -> Result<(), String> {
                <Self as $crate::leaf::Leaf>::read(text).map(drop)
            }
        }

        impl $crate::leaf::Leaf for $type {
            fn read(text: &str) -> Result<Self, String> {
                $crate::leaf::detail(Self::parse(text))
            }

            fn write(&self) -> String {
                self.to_string()
            }
        }
    )*};
}
use parsed;

#[cfg(test)]
mod tests;
