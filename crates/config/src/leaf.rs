//! Scalar values of the configuration: durations, sizes, addresses, patterns.
//!
//! Each kind has a name, which is the `format` in the schema, so that an invalid scalar is found by
//! the same pass, and reported in the same way, as a misspelt key. Hosts, patterns and other values
//! of rules are parsed by the `policy` crate; this module only gives them a format name.

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
    /// Description of valid text, which messages write after 'must be'.
    const DESCRIPTION: &'static str;
    /// The largest integer that is accepted instead of text, if integers are accepted.
    const INTEGER: Option<u64> = None;
    /// Whether text of this kind may contain a secret, which messages must not repeat.
    const SENSITIVE: bool = false;
    /// Whether the text names a host or an address, so that `user:password@` may precede it.
    const ADDRESS: bool = false;

    /// Why `text` is invalid, as a detail after [`Format::DESCRIPTION`]; may be empty.
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
    pub(crate) description: &'static str,
    pub(crate) sensitive: bool,
    pub(crate) is_address: bool,
    pub(crate) check: fn(&str) -> Result<(), String>,
}

const fn format_row<F: Format>() -> FormatRow {
    FormatRow {
        name: F::NAME,
        description: F::DESCRIPTION,
        sensitive: F::SENSITIVE,
        is_address: F::ADDRESS,
        check: F::check,
    }
}

/// Every format. A test checks that no format of a schema is missing in this list.
pub(crate) const FORMATS: &[FormatRow] = &[
    format_row::<Duration>(),
    format_row::<u64>(),
    format_row::<SocketAddr>(),
    format_row::<Host>(),
    format_row::<HostPattern>(),
    format_row::<Authority>(),
    format_row::<Cidr>(),
    format_row::<SecretSource>(),
    format_row::<EnvName>(),
    format_row::<EnvEntry>(),
    format_row::<PathBuf>(),
    format_row::<UrlPath>(),
    format_row::<TreePath>(),
    format_row::<HttpUrl>(),
    format_row::<WebhookUrl>(),
    format_row::<GitUrl>(),
    format_row::<Name>(),
    format_row::<Slug>(),
    format_row::<SandboxName>(),
    format_row::<Image>(),
    format_row::<HostKey>(),
    format_row::<PortMapping>(),
    format_row::<HeaderName>(),
    format_row::<AuthScheme>(),
    format_row::<RegexPattern>(),
    format_row::<MethodName>(),
    format_row::<PathPattern>(),
    format_row::<Endpoint>(),
    format_row::<RefPattern>(),
    format_row::<DnsUpstream>(),
    format_row::<DnsType>(),
];

/// The format called `name`.
pub(crate) fn find_format(name: &str) -> Option<&'static FormatRow> {
    FORMATS.iter().find(|row| row.name == name)
}

/// Stands for a format in derived schemas: `#[schemars(with = "Text<Image>")]`.
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

/// Stands for a mapping whose keys have a format in derived schemas.
pub(crate) struct KeyedMap<K, V>(PhantomData<(K, V)>);

impl<K: Format, V: JsonSchema> JsonSchema for KeyedMap<K, V> {
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
pub(crate) mod scalar {
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
pub(crate) mod optional {
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
    T::read(&text).map_err(|detail| D::Error::custom(format!("not {}: {detail}", T::DESCRIPTION)))
}

/// Converts a parser's error to text.
fn with_detail<T, E: Display>(result: Result<T, E>) -> Result<T, String> {
    result.map_err(|error| error.to_string())
}

/// Converts None to an error without detail.
fn without_detail<T>(value: Option<T>) -> Result<T, String> {
    value.ok_or_else(String::new)
}

/// Returns an error without detail unless `holds`.
fn require(holds: bool) -> Result<(), String> {
    without_detail(holds.then_some(()))
}

/// Implements [`Format`] and [`Leaf`] for types with `parse` and `Display`.
macro_rules! impl_leaf {
    ($($type:ty, $name:literal, $what:literal $(, $constant:ident)?;)*) => {$(
        impl $crate::leaf::Format for $type {
            const NAME: &'static str = $name;
            const DESCRIPTION: &'static str = $what;
            $(const $constant: bool = true;)?

            fn check(text: &str) -> Result<(), String> {
                <Self as $crate::leaf::Leaf>::read(text).map(drop)
            }
        }

        impl $crate::leaf::Leaf for $type {
            fn read(text: &str) -> Result<Self, String> {
                $crate::leaf::with_detail(Self::parse(text))
            }

            fn write(&self) -> String {
                self.to_string()
            }
        }
    )*};
}
use impl_leaf;

#[cfg(test)]
mod tests;
