//! JSON Schema of a kind of file, derived from its type, and queries for one pointer.

use jsonschema::Validator;
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use crate::leaf::{self, FORMATS, FormatRow};
use crate::tree::segments;
use crate::unavailable::Unavailable;

/// The schema of one kind of file, with its validator.
pub(crate) struct FileSchema {
    pub(crate) schema: Value,
    pub(crate) validator: Validator,
    /// Keys of features that this version does not have.
    pub(crate) unavailable: &'static [Unavailable],
    /// Keys that older files have at the top level, and the keys that replace them.
    moved: &'static [(&'static str, &'static str)],
}

impl FileSchema {
    #[expect(
        clippy::expect_used,
        reason = "the schema is derived from our own types, and a test builds each"
    )]
    pub(crate) fn for_type<T: JsonSchema>(
        unavailable: &'static [Unavailable],
        moved: &'static [(&'static str, &'static str)],
    ) -> Self {
        let generator = SchemaSettings::draft2020_12().into_generator();
        let mut schema = generator.into_root_schema_for::<T>().to_value();
        simplify(&mut schema);
        annotate(&mut schema, unavailable);
        let mut options = jsonschema::options()
            .should_validate_formats(true)
            .should_ignore_unknown_formats(false);
        for row in FORMATS {
            options = options.with_format(row.name, |text: &str| (row.check)(text).is_ok());
        }
        let validator = options.build(&schema).expect("a derived schema is valid");
        Self {
            schema,
            validator,
            unavailable,
            moved,
        }
    }

    /// The key that replaces an old top-level key.
    pub(crate) fn replacement_key(&self, key: &str) -> Option<&'static str> {
        let found = self.moved.iter().find(|(old, _)| *old == key);
        found.map(|(_, new)| *new)
    }

    /// The schemas that apply at `pointer`, with references and alternatives resolved.
    pub(crate) fn node_at(&self, pointer: &str) -> SchemaNode<'_> {
        let mut node = self.node_of(&self.schema);
        for segment in segments(pointer) {
            node = node.child(&segment);
        }
        node
    }

    /// The node of `schema`, with the schemas that it refers to or combines.
    fn node_of<'a>(&'a self, schema: &'a Value) -> SchemaNode<'a> {
        let mut node = SchemaNode {
            file_schema: self,
            schemas: Vec::new(),
        };
        node.add(schema);
        node
    }
}

/// The schemas that apply at one pointer of a file.
pub(crate) struct SchemaNode<'a> {
    file_schema: &'a FileSchema,
    schemas: Vec<&'a Map<String, Value>>,
}

impl<'a> SchemaNode<'a> {
    fn add(&mut self, schema: &'a Value) {
        let Value::Object(schema) = schema else {
            return;
        };
        self.schemas.push(schema);
        if let Some(target) = schema.get("$ref").and_then(Value::as_str) {
            let target = target.strip_prefix('#').unwrap_or(target);
            if let Some(target) = self.file_schema.schema.pointer(target) {
                self.add(target);
            }
        }
        for keyword in ["anyOf", "oneOf", "allOf"] {
            let branches = schema.get(keyword).and_then(Value::as_array);
            for branch in branches.into_iter().flatten() {
                self.add(branch);
            }
        }
    }

    /// The schemas that apply below `segment`, a key or an index.
    pub(crate) fn child(&self, segment: &str) -> SchemaNode<'a> {
        let mut inner = SchemaNode {
            file_schema: self.file_schema,
            schemas: Vec::new(),
        };
        for schema in &self.schemas {
            let property = schema
                .get("properties")
                .and_then(|properties| properties.get(segment));
            if let Some(property) = property {
                inner.add(property);
            } else {
                for keyword in ["additionalProperties", "items"] {
                    if let Some(schema) = schema.get(keyword) {
                        inner.add(schema);
                    }
                }
            }
        }
        inner
    }

    /// The known keys.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.schemas
            .iter()
            .filter_map(|schema| schema.get("properties").and_then(Value::as_object))
            .flat_map(|properties| properties.keys().map(String::as_str))
    }

    /// The required format.
    pub(crate) fn format(&self) -> Option<&'static FormatRow> {
        self.schemas
            .iter()
            .filter_map(|schema| schema.get("format").and_then(Value::as_str))
            .find_map(leaf::find_format)
    }

    /// Whether the value at this pointer, or a value below it, must not be shown.
    pub(crate) fn is_secret(&self) -> bool {
        let sensitive = |schema: &Map<String, Value>| {
            schema.get("writeOnly") == Some(&Value::Bool(true))
                || schema
                    .get("format")
                    .and_then(Value::as_str)
                    .and_then(leaf::find_format)
                    .is_some_and(|row| row.sensitive)
        };
        self.schemas.iter().any(|schema| {
            if sensitive(schema) {
                return true;
            }
            let properties = schema.get("properties").and_then(Value::as_object);
            let inner = properties.into_iter().flat_map(Map::values);
            let inner = inner.chain(schema.get("additionalProperties"));
            let mut inner = inner.chain(schema.get("items"));
            inner.any(|schema| self.file_schema.node_of(schema).is_secret())
        })
    }
}

/// Simplifies the derived schema for editors and for messages: a choice of documented words becomes
/// an `enum`, and formats that only name a Rust number type are removed.
fn simplify(schema: &mut Value) {
    match schema {
        Value::Object(object) => {
            if object
                .get("format")
                .and_then(Value::as_str)
                .is_some_and(is_rust_number)
            {
                object.shift_remove("format");
            }
            if let Some((words, descriptions)) = enum_words(object) {
                object.shift_remove("oneOf");
                object.insert("type".into(), "string".into());
                object.insert("enum".into(), words.into());
                object.insert("enumDescriptions".into(), descriptions.into());
            }
            object.values_mut().for_each(simplify);
        }
        Value::Array(items) => items.iter_mut().for_each(simplify),
        _ => {}
    }
}

/// Adds the note of each unavailable key to its description.
fn annotate(schema: &mut Value, unavailable: &[Unavailable]) {
    for entry in unavailable {
        for property in entry.properties(schema) {
            let Some(Value::Object(property)) = schema.pointer_mut(&property) else {
                continue;
            };
            let description = property.get("description").and_then(Value::as_str);
            let description = format!("{} {}", description.unwrap_or_default(), entry.note());
            property.insert("description".into(), description.trim().into());
        }
    }
}

fn is_rust_number(format: &str) -> bool {
    matches!(
        format,
        "uint8" | "uint16" | "uint32" | "uint64" | "int64" | "float" | "double" | "uint"
    )
}

/// The words of an `enum` and their descriptions, if `object` is a choice of words.
fn enum_words(object: &Map<String, Value>) -> Option<(Vec<Value>, Vec<Value>)> {
    let branches = object.get("oneOf")?.as_array()?;
    branches
        .iter()
        .map(|branch| {
            let word = branch.get("const")?.clone();
            let description = branch.get("description").cloned();
            Some((word, description.unwrap_or_else(|| json!(""))))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use crate::palisade_file::PALISADE;
    use crate::policy_file::{ALLOWLIST, POLICY};
    use crate::repository::REPOSITORY;

    #[test]
    fn every_schema_builds_and_every_format_is_known() {
        for file_schema in [&PALISADE, &ALLOWLIST, &POLICY, &REPOSITORY] {
            assert!(file_schema.schema.get("properties").is_some());
            assert!(!file_schema.schema.to_string().contains("\"oneOf\""));
        }
    }

    #[test]
    fn schema_node_has_its_keys_format_and_secrecy() {
        let keys: Vec<_> = PALISADE.node_at("/egress/domains/3").keys().collect();
        assert!(keys.contains(&"methods"), "{keys:?}");
        let format = PALISADE
            .node_at("/egress/timeouts/connect")
            .format()
            .unwrap();
        assert_eq!(format.name, "duration");
        for secret in [
            "/secrets/anything",
            "/secrets",
            "/server/auth_token",
            "/sandbox/remote/auth/token",
            "/sandbox/remote/1/auth/token",
            "/sandbox/remote",
            "/approvals/webhook",
            "/tools/0/env/0",
        ] {
            assert!(PALISADE.node_at(secret).is_secret(), "{secret}");
        }
        for public in [
            "/egress/domains/0",
            "/logging/level",
            "/server/interceptor_addr",
        ] {
            assert!(!PALISADE.node_at(public).is_secret(), "{public}");
        }
    }
}
