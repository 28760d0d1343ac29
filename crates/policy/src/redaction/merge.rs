//! A text, changed to mean what a policy wants it to mean.
//!
//! A policy knows numbers only roughly and keys in no order. Where its value means the same as
//! the text, the text stays.

use std::collections::HashSet;

use serde_json::{Map, Value};

use crate::splice::{Edits, Entry, Inside, NoJson, Node, quote};

/// How far items that were taken out of a list are looked past.
const LOOK_AHEAD: usize = 64;

/// `text` with the meaning of `wanted`; nothing where it has that already.
pub(super) fn merge(text: &str, wanted: &Value) -> Result<Option<String>, NoJson> {
    let root = Node::read(text)?;
    let mut edits = Edits::default();
    walk(text, &root, wanted, &mut edits)?;
    if edits.is_empty() {
        return Ok(None);
    }
    edits.apply(text).map(Some)
}

fn walk(text: &str, node: &Node, wanted: &Value, edits: &mut Edits) -> Result<(), NoJson> {
    match (&node.inside, wanted) {
        (Inside::Map(entries), Value::Object(fields)) => {
            fields_of(text, node, entries, fields, edits)
        }
        (Inside::List(items), Value::Array(values)) if items.len() == values.len() => items
            .iter()
            .zip(values)
            .try_for_each(|(item, value)| walk(text, item, value, edits)),
        (Inside::List(items), Value::Array(values)) => {
            edits.put(node.span.clone(), list(text, items, values)?);
            Ok(())
        }
        (Inside::Text | Inside::Plain, wanted) if same(&read(text, node)?, wanted) => Ok(()),
        _ => {
            edits.put(node.span.clone(), wanted.to_string());
            Ok(())
        }
    }
}

fn fields_of(
    text: &str,
    node: &Node,
    entries: &[Entry],
    fields: &Map<String, Value>,
    edits: &mut Edits,
) -> Result<(), NoJson> {
    let spans: Vec<_> = entries.iter().map(|entry| entry.span.clone()).collect();
    let keeps: Vec<_> = entries
        .iter()
        .map(|entry| fields.contains_key(&entry.key))
        .collect();
    edits.keep(&spans, &keeps);
    for entry in entries {
        if let Some(value) = fields.get(&entry.key) {
            walk(text, &entry.value, value, edits)?;
        }
    }
    let mut comma = if keeps.contains(&true) { "," } else { "" };
    let mut added = String::new();
    let known: HashSet<&str> = entries.iter().map(|entry| entry.key.as_str()).collect();
    for (key, value) in fields {
        if !known.contains(key.as_str()) {
            added += &format!("{comma}{}:{value}", quote(key));
            comma = ",";
        }
    }
    if !added.is_empty() {
        let end = node.span.end - 1;
        edits.put(end..end, added);
    }
    Ok(())
}

/// A list of another length: what is still in it stays as it is written.
fn list(text: &str, items: &[Node], values: &[Value]) -> Result<String, NoJson> {
    let mut next = 0;
    let mut written = Vec::with_capacity(values.len());
    for value in values {
        let ahead = items.iter().enumerate().skip(next).take(LOOK_AHEAD);
        let mut found = None;
        for (index, item) in ahead {
            if same(&read(text, item)?, value) {
                found = Some((index, item));
                break;
            }
        }
        written.push(match found {
            Some((index, item)) => {
                next = index + 1;
                text.get(item.span.clone()).ok_or(NoJson)?.to_owned()
            }
            None => value.to_string(),
        });
    }
    Ok(format!("[{}]", written.join(",")))
}

fn read(text: &str, node: &Node) -> Result<Value, NoJson> {
    let raw = text.get(node.span.clone()).ok_or(NoJson)?;
    serde_json::from_str(raw).map_err(|_| NoJson)
}

/// Whether a policy that was given `ours` and answers `theirs` has changed nothing.
fn same(ours: &Value, theirs: &Value) -> bool {
    match (ours, theirs) {
        (Value::Number(a), Value::Number(b)) => {
            let whole = |number: &serde_json::Number| {
                let whole = number.as_i64().map(i128::from);
                whole.or(number.as_u64().map(i128::from))
            };
            match (whole(a), whole(b)) {
                (Some(a), Some(b)) => a == b,
                _ => a.as_f64() == b.as_f64(),
            }
        }
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len()
                && a.iter()
                    .all(|(key, a)| b.get(key).is_some_and(|b| same(a, b)))
        }
        _ => ours == theirs,
    }
}
