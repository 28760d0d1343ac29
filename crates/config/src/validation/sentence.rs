//! Messages for violations of the schema.

use std::collections::BTreeSet;

use jsonschema::JsonType;
use serde_json::Value;

use super::{Fault, FaultKind};
use crate::problem::{Problem, closest, quote};
use crate::schema::{FileSchema, SchemaNode};
use crate::tree::{Content, Tree, dotted, join};

impl Fault {
    /// The problem with its position. None if it was already reported.
    pub(super) fn describe(&self, file_schema: &FileSchema, tree: &Tree) -> Option<Problem> {
        let schema_node = file_schema.node_at(&self.pointer);
        let variable = tree
            .get(&self.pointer)
            .and_then(|node| node.variable.as_deref());
        let writer = MessageWriter {
            fault: self,
            name: match self.pointer.as_str() {
                "" => "the file".to_owned(),
                pointer => dotted(pointer),
            },
            is_hidden: variable.is_some() || schema_node.is_secret(),
            schema_node,
        };
        let (message, hint) = match &self.kind {
            FaultKind::UnknownKey(key) => {
                let at = tree.key_position(&self.pointer, key);
                let (message, hint) = writer.unknown_key(key, file_schema);
                let mut problem = tree.problem(&self.pointer, message);
                (problem.line, problem.column) = (at.line, at.column);
                problem.pointer = join(&self.pointer, key);
                problem.hint = hint;
                return Some(problem);
            }
            FaultKind::BadKey { key, format } => {
                let at = tree.key_position(&self.pointer, key);
                let mut problem =
                    tree.problem(&self.pointer, writer.bad_key(key, format.as_deref()));
                (problem.line, problem.column) = (at.line, at.column);
                if !may_contain_user(key) {
                    problem.pointer = join(&self.pointer, key);
                }
                return Some(problem);
            }
            FaultKind::Missing(key) => {
                let pointer = join(&self.pointer, key);
                match tree.get(&pointer).map(|node| &node.content) {
                    Some(Content::Faulty) => return None,
                    Some(Content::Absent) => {
                        let message = format!("{} needs a value", dotted(&pointer));
                        return Some(tree.problem(&pointer, message));
                    }
                    _ => writer.missing_key(key),
                }
            }
            FaultKind::Type(types) => writer.wrong_type(types),
            FaultKind::NotInEnum(words) => writer.not_in_enum(words),
            FaultKind::Format(format) => (writer.wrong_format(format), None),
            FaultKind::BelowMinimum(limit) => {
                (writer.out_of_bounds(&format!("at least {limit}")), None)
            }
            FaultKind::NotAboveMinimum(limit) => {
                (writer.out_of_bounds(&format!("more than {limit}")), None)
            }
            FaultKind::AboveMaximum(limit) => {
                (writer.out_of_bounds(&format!("at most {limit}")), None)
            }
            FaultKind::NotBelowMaximum(limit) => {
                (writer.out_of_bounds(&format!("less than {limit}")), None)
            }
            FaultKind::TooFew(1) => (format!("{} must not be empty", writer.name), None),
            FaultKind::TooFew(limit) => (
                format!("{} needs at least {limit} items", writer.name),
                None,
            ),
            FaultKind::TooMany(limit) => {
                (format!("{} has at most {limit} items", writer.name), None)
            }
            FaultKind::DuplicateItems => (format!("{} has duplicate items", writer.name), None),
            FaultKind::Other => (format!("{} is not valid", writer.name), None),
        };
        let mut problem = tree.problem(&self.pointer, message);
        problem.hint = match variable {
            Some(name) => Some(format!("the value comes from ${{{name}}}")),
            None => hint,
        };
        Some(problem)
    }
}

/// Writes the message of a fault.
struct MessageWriter<'a> {
    fault: &'a Fault,
    name: String,
    is_hidden: bool,
    schema_node: SchemaNode<'a>,
}

impl MessageWriter<'_> {
    fn unknown_key(&self, key: &str, file_schema: &FileSchema) -> (String, Option<String>) {
        let known: Vec<&str> = self.schema_node.keys().collect();
        let moved = match self.fault.pointer.as_str() {
            "" => file_schema.replacement_key(key),
            _ => None,
        };
        let hint = moved
            .map(|new_key| format!("write {new_key} instead"))
            .or_else(|| {
                let word = closest(key, known.iter().copied())?;
                Some(format!("did you mean '{word}'?"))
            })
            .or_else(|| (known.len() <= 8).then(|| format!("known keys: {}", list(&known))))
            .filter(|_| !known.is_empty());
        let message = match self.fault.pointer.as_str() {
            "" => format!("unknown key {} at the top level", quote(key)),
            _ => format!("unknown key {} in {}", quote(key), self.name),
        };
        (message, hint)
    }

    fn bad_key(&self, key: &str, format: Option<&str>) -> String {
        let row = format.and_then(crate::leaf::find_format);
        let what = row.map_or("something else", |row| row.description);
        if may_contain_user(key) {
            let name = &self.name;
            return format!("a key in {name} must be {what}, without user and password");
        }
        let detail = row.and_then(|row| (row.check)(key).err());
        let detail = detail.filter(|detail| !detail.is_empty());
        let detail = detail.map(|detail| format!(" ({detail})"));
        format!(
            "the key {} in {} must be {what}{}",
            quote(key),
            self.name,
            detail.unwrap_or_default()
        )
    }

    fn missing_key(&self, key: &str) -> (String, Option<String>) {
        let message = match self.fault.pointer.as_str() {
            "" => format!("the key '{key}' is missing"),
            _ => format!("the key '{key}' is missing in {}", self.name),
        };
        let hint = (self.fault.pointer.is_empty() && key == "version")
            .then(|| "begin the file with version: \"1.0\"".to_owned());
        (message, hint)
    }

    fn wrong_type(&self, types: &[JsonType]) -> (String, Option<String>) {
        let wanted = match self.schema_node.format() {
            Some(row) => row.description.to_owned(),
            None => {
                let words: BTreeSet<&str> = types.iter().filter_map(|kind| word(*kind)).collect();
                words.into_iter().collect::<Vec<_>>().join(" or ")
            }
        };
        let hint = match (&self.fault.found, types) {
            (Value::Number(_) | Value::Bool(_), types) if types.contains(&JsonType::String) => {
                Some("put it in quotes")
            }
            (Value::String(text), [JsonType::Boolean])
                if matches!(text.as_str(), "yes" | "no" | "on" | "off") =>
            {
                Some("write true or false")
            }
            (Value::String(_), types) if types.contains(&JsonType::Array) => {
                Some("write it as a list: [ … ]")
            }
            _ => None,
        };
        let message = format!(
            "{} must be {wanted}, not {}",
            self.name,
            self.describe_found()
        );
        (message, hint.map(str::to_owned))
    }

    fn not_in_enum(&self, words: &[Value]) -> (String, Option<String>) {
        let text = |value: &Value| match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let mut known: Vec<String> = words.iter().filter(|w| !w.is_null()).map(text).collect();
        known.dedup();
        let known: Vec<&str> = known.iter().map(String::as_str).collect();
        let hint = match &self.fault.found {
            Value::String(text) if !self.is_hidden => closest(text, known.iter().copied()),
            _ => None,
        };
        (
            format!(
                "{} must be {}, not {}",
                self.name,
                list(&known),
                self.describe_found()
            ),
            hint.map(|word| format!("did you mean '{word}'?")),
        )
    }

    fn wrong_format(&self, format: &str) -> String {
        let Some(row) = crate::leaf::find_format(format) else {
            return format!("{} is not a valid {format}", self.name);
        };
        let text = self.fault.found.as_str().unwrap_or_default();
        let detail = (row.check)(text).err().unwrap_or_default();
        if self.is_hidden {
            format!("{} must be {}", self.name, row.description)
        } else if row.is_address && may_contain_user(text) {
            format!(
                "{} must be {}, without user and password",
                self.name, row.description
            )
        } else if detail.is_empty() {
            format!(
                "{} must be {}, not {}",
                self.name,
                row.description,
                quote(text)
            )
        } else {
            format!(
                "{} must be {}, not {}: {detail}",
                self.name,
                row.description,
                quote(text)
            )
        }
    }

    fn out_of_bounds(&self, bound: &str) -> String {
        format!(
            "{} must be {bound}, not {}",
            self.name,
            self.describe_found()
        )
    }

    fn describe_found(&self) -> String {
        match (&self.fault.found, self.is_hidden) {
            (Value::Null, _) => "empty".to_owned(),
            (Value::Bool(_), true) => "a truth value".to_owned(),
            (Value::Bool(value), false) => value.to_string(),
            (Value::Number(_), true) => "a number".to_owned(),
            (Value::Number(number), false) => number.to_string(),
            (Value::String(_), true) => "this text".to_owned(),
            (Value::String(text), false) if may_contain_user(text) => "this text".to_owned(),
            (Value::String(text), false) => quote(text),
            (Value::Array(_), _) => "a list".to_owned(),
            (Value::Object(_), _) => "a mapping".to_owned(),
        }
    }
}

/// Whether `text` may be an address with `user:password@`.
fn may_contain_user(text: &str) -> bool {
    text.contains('@')
}

fn word(kind: JsonType) -> Option<&'static str> {
    match kind {
        JsonType::Null => None,
        JsonType::Boolean => Some("true or false"),
        JsonType::Integer => Some("a whole number"),
        JsonType::Number => Some("a number"),
        JsonType::String => Some("text"),
        JsonType::Array => Some("a list"),
        JsonType::Object => Some("a mapping"),
    }
}

/// `a, b or c`.
fn list(words: &[&str]) -> String {
    match words {
        [] => String::new(),
        [word] => (*word).to_owned(),
        [front @ .., last] => format!("{} or {last}", front.join(", ")),
    }
}
