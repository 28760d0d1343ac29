//! Messages for violations of the schema.

use std::collections::BTreeSet;

use jsonschema::JsonType;
use serde_json::Value;

use super::{Fault, Kind};
use crate::problem::{Problem, closest, quote};
use crate::schema::{FileSchema, SchemaNode};
use crate::tree::{Content, Tree, dotted, join};

impl Fault {
    /// The problem with its position. None if it was already reported.
    pub(super) fn describe(&self, shape: &FileSchema, tree: &Tree) -> Option<Problem> {
        let place = shape.at(&self.pointer);
        let variable = tree
            .get(&self.pointer)
            .and_then(|node| node.variable.as_deref());
        let writer = MessageWriter {
            fault: self,
            name: match self.pointer.as_str() {
                "" => "the file".to_owned(),
                pointer => dotted(pointer),
            },
            hidden: variable.is_some() || place.is_secret(),
            place,
        };
        let (message, hint) = match &self.kind {
            Kind::UnknownKey(key) => {
                let at = tree.key_position(&self.pointer, key);
                let (message, hint) = writer.unknown_key(key, shape);
                let mut problem = tree.problem(&self.pointer, message);
                (problem.line, problem.column) = (at.line, at.column);
                problem.pointer = join(&self.pointer, key);
                problem.hint = hint;
                return Some(problem);
            }
            Kind::BadKey { key, format } => {
                let at = tree.key_position(&self.pointer, key);
                let mut problem =
                    tree.problem(&self.pointer, writer.bad_key(key, format.as_deref()));
                (problem.line, problem.column) = (at.line, at.column);
                if !names_a_user(key) {
                    problem.pointer = join(&self.pointer, key);
                }
                return Some(problem);
            }
            Kind::Missing(key) => {
                let pointer = join(&self.pointer, key);
                match tree.get(&pointer).map(|node| &node.content) {
                    Some(Content::Faulty) => return None,
                    Some(Content::Absent) => {
                        let message = format!("{} needs a value", dotted(&pointer));
                        return Some(tree.problem(&pointer, message));
                    }
                    _ => writer.missing(key),
                }
            }
            Kind::Type(types) => writer.mistyped(types),
            Kind::Word(words) => writer.not_a_word(words),
            Kind::Format(format) => (writer.malformed(format), None),
            Kind::Least(limit) => (writer.bounded(&format!("at least {limit}")), None),
            Kind::Above(limit) => (writer.bounded(&format!("more than {limit}")), None),
            Kind::Most(limit) => (writer.bounded(&format!("at most {limit}")), None),
            Kind::Below(limit) => (writer.bounded(&format!("less than {limit}")), None),
            Kind::TooFew(1) => (format!("{} must not be empty", writer.name), None),
            Kind::TooFew(limit) => (
                format!("{} needs at least {limit} items", writer.name),
                None,
            ),
            Kind::TooMany(limit) => (format!("{} has at most {limit} items", writer.name), None),
            Kind::Repeats => (format!("{} has duplicate items", writer.name), None),
            Kind::Other => (format!("{} is not valid", writer.name), None),
        };
        let mut problem = tree.problem(&self.pointer, message);
        problem.hint = match variable {
            Some(name) => Some(format!("the value comes from ${{{name}}}")),
            None => hint,
        };
        Some(problem)
    }
}

/// Writes the message of a fault: the fault, the name of its value, and the schema there.
struct MessageWriter<'a> {
    fault: &'a Fault,
    name: String,
    hidden: bool,
    place: SchemaNode<'a>,
}

impl MessageWriter<'_> {
    fn unknown_key(&self, key: &str, shape: &FileSchema) -> (String, Option<String>) {
        let known: Vec<&str> = self.place.keys().collect();
        let moved = match self.fault.pointer.as_str() {
            "" => shape.moved(key),
            _ => None,
        };
        let hint = moved
            .map(|place| format!("write {place} instead"))
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
        let row = format.and_then(crate::leaf::format);
        let what = row.map_or("something else", |row| row.what);
        if names_a_user(key) {
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

    fn missing(&self, key: &str) -> (String, Option<String>) {
        let message = match self.fault.pointer.as_str() {
            "" => format!("the key '{key}' is missing"),
            _ => format!("the key '{key}' is missing in {}", self.name),
        };
        let hint = (self.fault.pointer.is_empty() && key == "version")
            .then(|| "begin the file with version: \"1.0\"".to_owned());
        (message, hint)
    }

    fn mistyped(&self, types: &[JsonType]) -> (String, Option<String>) {
        let wanted = match self.place.format() {
            Some(row) => row.what.to_owned(),
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
        let message = format!("{} must be {wanted}, not {}", self.name, self.found());
        (message, hint.map(str::to_owned))
    }

    fn not_a_word(&self, words: &[Value]) -> (String, Option<String>) {
        let text = |value: &Value| match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let mut known: Vec<String> = words.iter().filter(|w| !w.is_null()).map(text).collect();
        known.dedup();
        let known: Vec<&str> = known.iter().map(String::as_str).collect();
        let hint = match &self.fault.found {
            Value::String(given) if !self.hidden => closest(given, known.iter().copied()),
            _ => None,
        };
        (
            format!(
                "{} must be {}, not {}",
                self.name,
                list(&known),
                self.found()
            ),
            hint.map(|word| format!("did you mean '{word}'?")),
        )
    }

    fn malformed(&self, format: &str) -> String {
        let Some(row) = crate::leaf::format(format) else {
            return format!("{} is not a valid {format}", self.name);
        };
        let text = self.fault.found.as_str().unwrap_or_default();
        let detail = (row.check)(text).err().unwrap_or_default();
        if self.hidden {
            format!("{} must be {}", self.name, row.what)
        } else if row.is_address && names_a_user(text) {
            format!(
                "{} must be {}, without user and password",
                self.name, row.what
            )
        } else if detail.is_empty() {
            format!("{} must be {}, not {}", self.name, row.what, quote(text))
        } else {
            format!(
                "{} must be {}, not {}: {detail}",
                self.name,
                row.what,
                quote(text)
            )
        }
    }

    fn bounded(&self, bound: &str) -> String {
        format!("{} must be {bound}, not {}", self.name, self.found())
    }

    fn found(&self) -> String {
        match (&self.fault.found, self.hidden) {
            (Value::Null, _) => "empty".to_owned(),
            (Value::Bool(_), true) => "a truth value".to_owned(),
            (Value::Bool(value), false) => value.to_string(),
            (Value::Number(_), true) => "a number".to_owned(),
            (Value::Number(number), false) => number.to_string(),
            (Value::String(_), true) => "this text".to_owned(),
            (Value::String(text), false) if names_a_user(text) => "this text".to_owned(),
            (Value::String(text), false) => quote(text),
            (Value::Array(_), _) => "a list".to_owned(),
            (Value::Object(_), _) => "a mapping".to_owned(),
        }
    }
}

/// Whether `text` may be an address with `user:password@`.
fn names_a_user(text: &str) -> bool {
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
        [one] => (*one).to_owned(),
        [front @ .., last] => format!("{} or {last}", front.join(", ")),
    }
}
