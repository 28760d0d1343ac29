//! A file of another tool as JSON values, with errors that name the key.

use std::path::Path;

use serde_json::{Map, Value};

use super::ImportError;
use crate::problem::{Problems, quote};
use crate::tree::{Content, Node, Tree};

/// A parsed file.
pub(super) struct Document(Value);

/// A value in a file, with the name of its key.
#[derive(Clone)]
pub(super) struct Item<'v> {
    pub(super) value: &'v Value,
    pub(super) key: String,
}

impl Document {
    /// Parses JSON.
    pub(super) fn json(bytes: &[u8]) -> Result<Self, ImportError> {
        serde_json::from_slice(bytes)
            .map(Self)
            .map_err(|error| ImportError::Invalid(format!("not JSON: {error}")))
    }

    /// Parses YAML.
    pub(super) fn yaml(bytes: &[u8]) -> Result<Self, ImportError> {
        let mut problems = Vec::new();
        let tree = Tree::parse(Path::new("the file"), bytes, &mut problems);
        match tree {
            Some(tree) if problems.is_empty() => Ok(Self(value_of(&tree.root))),
            _ => {
                let problems = Problems::from(problems);
                let first = problems.iter().next().map(ToString::to_string);
                Err(ImportError::Invalid(format!(
                    "not YAML: {}",
                    first.unwrap_or_default()
                )))
            }
        }
    }

    /// The whole file, which must be a mapping.
    pub(super) fn root(&self) -> Result<Item<'_>, ImportError> {
        let root = Item {
            value: &self.0,
            key: String::new(),
        };
        root.map().map(|_| root)
    }
}

fn value_of(node: &Node) -> Value {
    match &node.content {
        Content::Faulty | Content::Absent | Content::Null => Value::Null,
        Content::Bool(value) => Value::Bool(*value),
        Content::Number(number) => Value::Number(number.clone()),
        Content::Text(text) => Value::String(text.clone()),
        Content::List(items) => items.iter().map(value_of).collect(),
        Content::Map(entries) => entries
            .iter()
            .map(|entry| (entry.key.clone(), value_of(&entry.value)))
            .collect(),
    }
}

impl<'v> Item<'v> {
    fn wrong(&self, expected: &str) -> ImportError {
        let key = match self.key.as_str() {
            "" => "the file".to_owned(),
            key => shown(key),
        };
        ImportError::Invalid(format!("{key} must be {expected}"))
    }

    /// The entries of a mapping.
    pub(super) fn map(&self) -> Result<&'v Map<String, Value>, ImportError> {
        self.value
            .as_object()
            .ok_or_else(|| self.wrong("a mapping"))
    }

    /// A key of a mapping; none if it is absent or null.
    pub(super) fn get(&self, name: &str) -> Result<Option<Item<'v>>, ImportError> {
        let found = self.map()?.get(name).filter(|value| !value.is_null());
        Ok(found.map(|value| Item {
            value,
            key: self.below(name),
        }))
    }

    /// The items of a list.
    pub(super) fn list(&self) -> Result<Vec<Item<'v>>, ImportError> {
        let items = self.value.as_array().ok_or_else(|| self.wrong("a list"))?;
        let item = |(index, value)| Item {
            value,
            key: format!("{}[{index}]", self.key),
        };
        Ok(items.iter().enumerate().map(item).collect())
    }

    /// The items of a list below a key; empty if it is absent.
    pub(super) fn list_at(&self, name: &str) -> Result<Vec<Item<'v>>, ImportError> {
        match self.get(name)? {
            Some(item) => item.list(),
            None => Ok(Vec::new()),
        }
    }

    /// Text.
    pub(super) fn text(&self) -> Result<&'v str, ImportError> {
        self.value.as_str().ok_or_else(|| self.wrong("text"))
    }

    /// The keys of a mapping that `known` does not contain and that have a value, quoted.
    pub(super) fn other_keys(&self, known: &[&str]) -> Result<Vec<String>, ImportError> {
        let entries = self.map()?.iter();
        let other = entries.filter(|(key, value)| {
            let is_empty = match value {
                Value::Null | Value::Bool(false) => true,
                Value::Array(items) => items.is_empty(),
                Value::Object(object) => object.is_empty(),
                _ => false,
            };
            !known.contains(&key.as_str()) && !is_empty
        });
        Ok(other.map(|(key, _)| shown(&self.below(key))).collect())
    }

    fn below(&self, name: &str) -> String {
        match self.key.as_str() {
            "" => name.to_owned(),
            key => format!("{key}.{name}"),
        }
    }
}

/// A key or value in a message: short, and without terminal control characters.
pub(super) fn shown(text: &str) -> String {
    let quoted = quote(text);
    let inner = quoted
        .strip_prefix('\'')
        .and_then(|rest| rest.strip_suffix('\''));
    inner.unwrap_or(&quoted).to_owned()
}
