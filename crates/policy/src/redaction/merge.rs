//! Merges a policy's `modified_data` into JSON text.
//!
//! A policy's values have rounded numbers and no order of keys. Where a value is equal to the
//! text's value, the text is not changed.

use std::collections::HashSet;

use serde_json::{Map, Value};

use crate::splice::{Entry, InvalidJson, Node, NodeContent, TextEdits, quote};

/// Maximum number of removed list items that are skipped to find the next kept one.
const MAX_LOOK_AHEAD: usize = 64;

/// `text` with the value `wanted`; none if the text has that value already.
pub(super) fn merge(text: &str, wanted: &Value) -> Result<Option<String>, InvalidJson> {
    let root = Node::read(text)?;
    let mut edits = TextEdits::default();
    merge_node(text, &root, wanted, &mut edits)?;
    if edits.is_empty() {
        return Ok(None);
    }
    edits.apply(text).map(Some)
}

fn merge_node(
    text: &str,
    node: &Node,
    wanted: &Value,
    edits: &mut TextEdits,
) -> Result<(), InvalidJson> {
    match (&node.content, wanted) {
        (NodeContent::Map(entries), Value::Object(fields)) => {
            merge_object(text, node, entries, fields, edits)
        }
        (NodeContent::List(items), Value::Array(values)) if items.len() == values.len() => items
            .iter()
            .zip(values)
            .try_for_each(|(item, value)| merge_node(text, item, value, edits)),
        (NodeContent::List(items), Value::Array(values)) => {
            edits.replace(node.span.clone(), merge_list(text, items, values)?);
            Ok(())
        }
        (NodeContent::Text | NodeContent::Plain, wanted)
            if is_equal(&parse_node(text, node)?, wanted) =>
        {
            Ok(())
        }
        _ => {
            edits.replace(node.span.clone(), wanted.to_string());
            Ok(())
        }
    }
}

fn merge_object(
    text: &str,
    node: &Node,
    entries: &[Entry],
    fields: &Map<String, Value>,
    edits: &mut TextEdits,
) -> Result<(), InvalidJson> {
    let spans: Vec<_> = entries.iter().map(|entry| entry.span.clone()).collect();
    let keeps: Vec<_> = entries
        .iter()
        .map(|entry| fields.contains_key(&entry.key))
        .collect();
    edits.retain(&spans, &keeps);
    for entry in entries {
        if let Some(value) = fields.get(&entry.key) {
            merge_node(text, &entry.value, value, edits)?;
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
        edits.replace(end..end, added);
    }
    Ok(())
}

/// Merges a list of another length: the text of items that are kept is not changed.
fn merge_list(text: &str, items: &[Node], values: &[Value]) -> Result<String, InvalidJson> {
    let mut next = 0;
    let mut written = Vec::with_capacity(values.len());
    for value in values {
        let ahead = items.iter().enumerate().skip(next).take(MAX_LOOK_AHEAD);
        let mut found = None;
        for (index, item) in ahead {
            if is_equal(&parse_node(text, item)?, value) {
                found = Some((index, item));
                break;
            }
        }
        written.push(match found {
            Some((index, item)) => {
                next = index + 1;
                text.get(item.span.clone()).ok_or(InvalidJson)?.to_owned()
            }
            None => value.to_string(),
        });
    }
    Ok(format!("[{}]", written.join(",")))
}

fn parse_node(text: &str, node: &Node) -> Result<Value, InvalidJson> {
    let raw = text.get(node.span.clone()).ok_or(InvalidJson)?;
    serde_json::from_str(raw).map_err(|_| InvalidJson)
}

/// Whether the value `output` of a policy's output is equal to the value `input` of its input.
fn is_equal(input: &Value, output: &Value) -> bool {
    match (input, output) {
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
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_equal(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len()
                && a.iter()
                    .all(|(key, a)| b.get(key).is_some_and(|b| is_equal(a, b)))
        }
        _ => input == output,
    }
}
