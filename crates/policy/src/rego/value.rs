//! Conversion between JSON and values of regorus.

use std::collections::BTreeMap;

use regorus::Value;

/// Maximum nesting of inputs and results, the same as in serde_json.
const MAX_DEPTH: usize = 128;

/// Converts JSON to a value. None if it is nested too deeply.
pub(super) fn from_json(json: &serde_json::Value) -> Option<Value> {
    convert(json, MAX_DEPTH)
}

fn convert(json: &serde_json::Value, remaining_depth: usize) -> Option<Value> {
    let remaining_depth = remaining_depth.checked_sub(1)?;
    Some(match json {
        serde_json::Value::Null => Value::Null,
        serde_json::Value::Bool(one) => Value::Bool(*one),
        serde_json::Value::Number(number) => {
            if let Some(whole) = number.as_u64() {
                Value::from(whole)
            } else if let Some(whole) = number.as_i64() {
                Value::from(whole)
            } else {
                Value::from(number.as_f64()?)
            }
        }
        serde_json::Value::String(text) => Value::from(text.as_str()),
        serde_json::Value::Array(items) => {
            let items: Option<Vec<_>> = items
                .iter()
                .map(|item| convert(item, remaining_depth))
                .collect();
            Value::from(items?)
        }
        serde_json::Value::Object(fields) => {
            let fields = fields.iter().map(|(key, field)| {
                Some((Value::from(key.as_str()), convert(field, remaining_depth)?))
            });
            let fields: Option<BTreeMap<_, _>> = fields.collect();
            Value::from(fields?)
        }
    })
}

/// Whether a result is nested no deeper than an input may be.
pub(super) fn is_shallow(value: &Value) -> bool {
    is_within_depth(value, MAX_DEPTH)
}

fn is_within_depth(value: &Value, remaining_depth: usize) -> bool {
    let Some(remaining_depth) = remaining_depth.checked_sub(1) else {
        return false;
    };
    match value {
        Value::Array(items) => items
            .iter()
            .all(|item| is_within_depth(item, remaining_depth)),
        Value::Set(items) => items
            .iter()
            .all(|item| is_within_depth(item, remaining_depth)),
        Value::Object(fields) => fields.iter().all(|(key, field)| {
            is_within_depth(key, remaining_depth) && is_within_depth(field, remaining_depth)
        }),
        _ => true,
    }
}

/// Converts a value to JSON. A set becomes a list.
pub(super) fn to_json(value: &Value) -> serde_json::Value {
    serde_json::to_value(value).unwrap_or_default()
}
