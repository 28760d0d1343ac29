//! Generates docs/config.md from the schemas, so that the two agree.

use std::fmt::Write;

use policy::github::GithubRules;
use serde_json::{Map, Value};

use crate::grants::GRANTS;
use crate::leaf::FORMATS;
use crate::palisade_file::PALISADE;
use crate::policy_file::{ALLOWLIST, POLICY};
use crate::repository::REPOSITORY;
use crate::schema::FileSchema;

const INTRODUCTION: &str = include_str!("reference.md");
const GITHUB: &str = include_str!("reference/github.md");

/// The complete page.
pub(crate) fn write() -> String {
    let mut page = INTRODUCTION.to_owned();
    let files = [
        ("palisade.yaml", &PALISADE.schema, &*PALISADE),
        ("allowlist.yaml", &ALLOWLIST.schema, &*ALLOWLIST),
        ("grants.yaml", &GRANTS.schema, &*GRANTS),
        ("policy.yaml", &POLICY.schema, &*POLICY),
        (".palisade.yaml", &REPOSITORY.schema, &*REPOSITORY),
    ];
    for (name, schema, file_schema) in files {
        let _ = write!(page, "\n## {name}\n");
        let mut rows = Vec::new();
        add_rows(file_schema, schema, "", &mut rows);
        // One table per section; keys outside of sections are in the first table.
        let mut heading = None;
        for row in rows {
            let section = row.section();
            if heading.as_deref() != Some(section) {
                if !section.is_empty() {
                    let _ = write!(page, "\n### {section}\n");
                }
                page.push_str("\n| key | type | default | |\n| --- | --- | --- | --- |\n");
                heading = Some(section.to_owned());
            }
            let _ = writeln!(
                page,
                "| `{}` | {} | {} | {} |",
                row.key, row.kind, row.default, row.description
            );
        }
    }
    page.push_str(GITHUB);
    for (name, opens) in GithubRules::names() {
        let state = if GithubRules::is_default(name) {
            "on"
        } else {
            "off"
        };
        let _ = writeln!(page, "| `{name}` | {state} | {} |", escape(opens));
    }
    page.push_str("\n## Types\n\n| type | written as |\n| --- | --- |\n");
    for format in FORMATS {
        let _ = writeln!(page, "| {} | {} |", format.name, escape(format.description));
    }
    page
}

/// A row of a table: one key of a file.
struct ReferenceRow {
    key: String,
    kind: String,
    default: String,
    description: String,
    is_parent: bool,
}

impl ReferenceRow {
    fn section(&self) -> &str {
        let end = self.key.find(['.', '[']);
        match end {
            Some(end) => self.key.get(..end).unwrap_or_default(),
            None if self.is_parent => &self.key,
            None => "",
        }
    }
}

/// Adds a row for every key below `schema`.
fn add_rows(file_schema: &FileSchema, schema: &Value, prefix: &str, rows: &mut Vec<ReferenceRow>) {
    let Some(object) = resolve(file_schema, schema).as_object() else {
        return;
    };
    let properties = object.get("properties").and_then(Value::as_object);
    let required: Vec<&str> = object
        .get("required")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    for (name, property) in properties.into_iter().flatten() {
        let key = match prefix {
            "" => name.clone(),
            prefix => format!("{prefix}.{name}"),
        };
        let (inner, suffix) = nested_schema(file_schema, property);
        let kind = kind(file_schema, property);
        rows.push(ReferenceRow {
            is_parent: inner.is_some() || kind.starts_with("mapping"),
            kind,
            default: default(property, required.contains(&name.as_str()), inner.is_some()),
            description: escape(text(property.as_object(), "description")),
            key: key.clone(),
        });
        if let Some(inner) = inner {
            add_rows(file_schema, inner, &format!("{key}{suffix}"), rows);
        }
    }
}

/// The schema of the keys below `schema`, if it has any, and the text between the two keys: empty,
/// `[]` for a list, `.<name>` for a mapping with free names.
fn nested_schema<'a>(
    file_schema: &'a FileSchema,
    schema: &'a Value,
) -> (Option<&'a Value>, &'static str) {
    for branch in branches(file_schema, schema) {
        if branch.get("properties").is_some() {
            return (Some(branch), "");
        }
        for (keyword, suffix) in [("items", "[]"), ("additionalProperties", ".<name>")] {
            let inner = branch.get(keyword).filter(|inner| inner.is_object());
            if let Some((Some(found), _)) = inner.map(|inner| nested_schema(file_schema, inner)) {
                return (Some(found), suffix);
            }
        }
    }
    (None, "")
}

fn resolve<'a>(file_schema: &'a FileSchema, schema: &'a Value) -> &'a Value {
    let target = schema.get("$ref").and_then(Value::as_str);
    let target = target.and_then(|target| target.strip_prefix('#'));
    target
        .and_then(|target| file_schema.schema.pointer(target))
        .unwrap_or(schema)
}

fn branches<'a>(file_schema: &'a FileSchema, schema: &'a Value) -> Vec<&'a Value> {
    let schema = resolve(file_schema, schema);
    match schema.get("anyOf").and_then(Value::as_array) {
        Some(list) => list
            .iter()
            .flat_map(|branch| branches(file_schema, branch))
            .collect(),
        None => vec![schema],
    }
}

fn kind(file_schema: &FileSchema, schema: &Value) -> String {
    let words: Vec<String> = branches(file_schema, schema)
        .into_iter()
        .filter_map(|branch| kind_of(file_schema, branch))
        .collect();
    words.join(" or ")
}

fn kind_of(file_schema: &FileSchema, schema: &Value) -> Option<String> {
    if let Some(words) = schema.get("enum").and_then(Value::as_array) {
        let words = words.iter().filter(|word| !word.is_null());
        let mut words: Vec<String> = words
            .map(|word| format!("`{}`", format_value(word)))
            .collect();
        words.dedup();
        return Some(words.join(" \\| "));
    }
    if let Some(format) = schema.get("format").and_then(Value::as_str) {
        return Some(format.to_owned());
    }
    let kinds: Vec<&str> = match schema.get("type") {
        Some(Value::String(kind)) => vec![kind],
        Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let kind = kinds.into_iter().find(|kind| *kind != "null")?;
    Some(match kind {
        "array" => {
            let items = schema
                .get("items")
                .map(|items| kind_in_list(file_schema, items));
            format!("list of {}", items.unwrap_or_default())
        }
        "object" if schema.get("properties").is_none() => {
            let values = schema.get("additionalProperties");
            let values = values.map(|values| kind_in_list(file_schema, values));
            format!("mapping to {}", values.unwrap_or_default())
        }
        "object" => "mapping".to_owned(),
        "string" if schema.get("writeOnly").is_some() => "secret".to_owned(),
        "string" => "text".to_owned(),
        "integer" => "whole number".to_owned(),
        "boolean" => "`true` \\| `false`".to_owned(),
        other => other.to_owned(),
    })
}

fn kind_in_list(file_schema: &FileSchema, schema: &Value) -> String {
    kind(file_schema, schema).replace("mapping", "mappings")
}

fn default(property: &Value, required: bool, has_keys: bool) -> String {
    match property.get("default") {
        _ if required => "required".to_owned(),
        Some(Value::Object(object)) if has_keys && !object.is_empty() => String::new(),
        None | Some(Value::Null) => "none".to_owned(),
        Some(value) => format!("`{}`", format_value(value)),
    }
}

fn format_value(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(format_value).collect();
            format!("[{}]", items.join(", "))
        }
        other => other.to_string(),
    }
}

fn text<'a>(object: Option<&'a Map<String, Value>>, key: &str) -> &'a str {
    let value = object.and_then(|object| object.get(key));
    value.and_then(Value::as_str).unwrap_or_default()
}

/// Escapes `text` for one cell of a table.
fn escape(text: &str) -> String {
    text.replace('\n', " ").replace('|', "\\|")
}
