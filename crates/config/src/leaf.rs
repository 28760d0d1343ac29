//! The smallest things an operator writes: durations, sizes, addresses, patterns.
//!
//! Each has a name that stands as `format` in the schema, so that a bad leaf is found by
//! the same pass, and reported in the same way, as a misspelt key. Parsers that decide
//! something live in `policy`; here they are only given a name.

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
pub use rule::{AuthScheme, Endpoint, PublishedPort, RegexPattern};
pub use source::{EnvEntry, SecretSource};

pub(crate) use address::DnsType;
pub(crate) use location::{GitUrl, HttpUrl, TreePath, UrlPath, WebhookUrl};
pub(crate) use name::{HeaderName, HostKey, Image, Name, SandboxName, Slug};
pub(crate) use rule::{MOST_METHODS, MOST_PATTERNS, MethodName};
pub(crate) use source::EnvName;

/// A kind of text with a name, a description and a check.
pub(crate) trait Format {
    /// The word in the schema.
    const NAME: &'static str;
    /// What a person should have written, after 'must be'.
    const WHAT: &'static str;
    /// Whether a bare integer will do as well, up to this one.
    const INTEGER: Option<u64> = None;
    /// Whether text of this kind may hold something that must not be shown.
    const SENSITIVE: bool = false;
    /// Whether it names a host or an address, so that `user:password@` may have been put in front.
    const ADDRESS: bool = false;

    /// What is wrong with `text`, as a detail after [`Format::WHAT`]; may be empty.
    fn check(text: &str) -> Result<(), String>;
}

/// A kind of text that has a type of its own in [`crate::Settings`].
pub(crate) trait Leaf: Format + Sized {
    /// Reads what passed the check.
    fn read(text: &str) -> Result<Self, String>;
    /// The text that reads back as this value.
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

/// Every format. A test finds one that the schema uses and this table lacks.
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
    row::<PublishedPort>(),
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

/// The row called `name`.
pub(crate) fn format(name: &str) -> Option<&'static FormatRow> {
    FORMATS.iter().find(|row| row.name == name)
}

/// Stands for a format where the schema is derived: `#[schemars(with = "Text<Image>")]`.
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

/// Stands for a mapping whose keys have a format.
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

/// serde's `with` for one leaf.
pub(crate) mod one {
    use super::{Deserializer, Leaf, Serializer, take};

    pub(crate) fn serialize<T: Leaf, S: Serializer>(
        value: &T,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&value.write())
    }

    pub(crate) fn deserialize<'de, T: Leaf, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<T, D::Error> {
        take(deserializer)
    }
}

/// serde's `with` for a leaf that may be absent.
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

/// serde's `with` for a list of leaves.
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

/// A leaf on its way through serde.
pub(crate) struct ParsedLeaf<T>(pub(crate) T);

impl<'de, T: Leaf> Deserialize<'de> for ParsedLeaf<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        take(deserializer).map(ParsedLeaf)
    }
}

fn take<'de, T: Leaf, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Integer(u64),
        Text(String),
    }
    let text = match Written::deserialize(deserializer)? {
        Written::Integer(value) => value.to_string(),
        Written::Text(text) => text,
    };
    T::read(&text).map_err(|detail| D::Error::custom(format!("not {}: {detail}", T::WHAT)))
}

/// The detail of a parser's refusal.
fn detail<T, E: Display>(result: Result<T, E>) -> Result<T, String> {
    result.map_err(|error| error.to_string())
}

/// A refusal that needs no detail.
fn plain<T>(value: Option<T>) -> Result<T, String> {
    value.ok_or_else(String::new)
}

fn when(holds: bool) -> Result<(), String> {
    plain(holds.then_some(()))
}

/// Gives a format, and the reading and writing, to types that parse and print themselves.
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
