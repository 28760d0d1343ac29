use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::splice::tests::json as any_json;

#[track_caller]
fn check(outputs: Value, text: &str, wanted: Option<&str>) {
    let redaction = Redaction::read(&outputs, Pattern::compile).unwrap();
    let redacted = redaction.apply(text).unwrap();
    assert_eq!(redacted.as_deref(), wanted, "{outputs}");
}

fn fields(paths: &[&str]) -> Value {
    json!({"redaction_rules": {"fields": paths}})
}

fn replacements(pairs: Value) -> Value {
    json!({"redaction_rules": {"replacements": pairs}})
}

#[test]
fn field_path_redacts_only_matching_values() {
    let text = r#"{ "name":"login", "arguments": {"user":"\u0061nna","password":"x","n":123456789012345678901234567890} }"#;
    check(
        fields(&["arguments.password"]),
        text,
        Some(
            r#"{ "name":"login", "arguments": {"user":"\u0061nna","password":"[redacted]","n":123456789012345678901234567890} }"#,
        ),
    );
    let text = r#"{"content":[{"type":"text","text":"a"},{"type":"text","text":"b"}],"h":{"x.y":{"t":1}}}"#;
    for (path, wanted) in [
        (
            "content[*].text",
            Some(
                r#"{"content":[{"type":"text","text":"[redacted]"},{"type":"text","text":"[redacted]"}],"h":{"x.y":{"t":1}}}"#,
            ),
        ),
        (
            "$.content[1].text",
            Some(
                r#"{"content":[{"type":"text","text":"a"},{"type":"text","text":"[redacted]"}],"h":{"x.y":{"t":1}}}"#,
            ),
        ),
        (
            "content",
            Some(r#"{"content":"[redacted]","h":{"x.y":{"t":1}}}"#),
        ),
        (
            r#"h["x.y"].t"#,
            Some(
                r#"{"content":[{"type":"text","text":"a"},{"type":"text","text":"b"}],"h":{"x.y":{"t":"[redacted]"}}}"#,
            ),
        ),
        (
            "**.t",
            Some(
                r#"{"content":[{"type":"text","text":"a"},{"type":"text","text":"b"}],"h":{"x.y":{"t":"[redacted]"}}}"#,
            ),
        ),
        (
            "*.*",
            Some(r#"{"content":["[redacted]","[redacted]"],"h":{"x.y":"[redacted]"}}"#),
        ),
        ("content[2]", None),
        ("h.x.y", None),
    ] {
        check(fields(&[path]), text, wanted);
    }
}

#[test]
fn replacement_applies_to_string_values_only() {
    check(
        replacements(json!({"[a-z]+@example\\.com": "<mail>", "(k)ey-\\d+": "${1}…"})),
        r#"{"anna@example.com":["write to \u0061nna@example.com or bob@example.com"],"k":"key-1","n":1.50}"#,
        Some(r#"{"anna@example.com":["write to <mail> or <mail>"],"k":"k…","n":1.50}"#),
    );
    check(replacements(json!({"x": "y"})), r#"{"a":"b"}"#, None);
    // Escaped characters are matched, too.
    check(
        replacements(json!({"secret": "*"})),
        r#""s\u0065cret""#,
        Some(r#""*""#),
    );
}

#[test]
fn modified_data_changes_only_what_differs() {
    let text = r#"{ "big": 123456789012345678901234567890, "z":1.0, "a":"\u00e9", "drop":1, "list":[1,{"x":2,"y":3}] }"#;
    check(
        json!({"modified_data": {"a": "é", "big": 1.234_567_890_123_456_8e29, "list": [1, {"x": 0, "y": 3}], "new": true, "z": 1}}),
        text,
        Some(
            r#"{ "big": 123456789012345678901234567890, "z":1.0, "a":"\u00e9", "list":[1,{"x":0,"y":3}] ,"new":true}"#,
        ),
    );
    // Removing items does not change the digits of the others.
    check(
        json!({"modified_data": [1e30, 3]}),
        "[1, 1000000000000000000000000000000, 2, 3]",
        Some("[1000000000000000000000000000000,3]"),
    );
    check(json!({"modified_data": {"a": 1}}), r#"{"a":1}"#, None);
}

#[test]
fn empty_or_malformed_outputs_are_rejected() {
    for nothing in [
        json!(null),
        json!({}),
        json!({"modified_data": null}),
        json!({"redaction_rules": {}}),
        json!({"redaction_rules": {"fields": [], "replacements": {}}}),
    ] {
        let read = Redaction::read(&nothing, Pattern::compile);
        assert!(matches!(read, Err(BadRedaction::Nothing)), "{nothing}");
    }
    for bad in [
        json!("x"),
        json!({"modified": {}}),
        json!({"redaction_rules": {"field": ["a"]}}),
        json!({"redaction_rules": {"fields": "a"}}),
        json!({"redaction_rules": {"fields": [1]}}),
        json!({"redaction_rules": {"replacements": ["a"]}}),
        json!({"redaction_rules": {"replacements": {"a": 1}}}),
        fields(&[""]),
        fields(&["a..b"]),
        fields(&["a."]),
        fields(&["a[x]"]),
        fields(&["a[1"]),
        fields(&["a]"]),
        fields(&["a*"]),
        fields(&["params.arguments.password"]),
        fields(&["result.content"]),
    ] {
        let read = Redaction::read(&bad, Pattern::compile);
        assert!(matches!(read, Err(BadRedaction::Shape(_))), "{bad}");
    }
    for bad in ["(", "a{1000}{1000}{1000}", &"a".repeat(2000)] {
        let read = Redaction::read(&replacements(json!({bad: ""})), Pattern::compile);
        assert!(matches!(read, Err(BadRedaction::Pattern { .. })), "{bad}");
    }
}

#[test]
fn replacement_that_grows_text_too_much_is_rejected() {
    let outputs = replacements(json!({"a": "b".repeat(1000)}));
    let redaction = Redaction::read(&outputs, Pattern::compile).unwrap();
    let text = quote(&"a".repeat(100_000));
    assert_eq!(redaction.apply(&text), Err(BadRedaction::TooLarge));
    let many = format!("[{}\"a\"]", "\"a\",".repeat(100_000));
    assert_eq!(redaction.apply(&many), Err(BadRedaction::TooLarge));
}

/// Quadratic time in the size of a message, or exponential time in the stars of a path, would
/// exceed the time limit of the test.
#[test]
fn large_and_deep_messages_are_redacted_in_time() {
    let many: Value = (0..100_000)
        .map(|n| (n.to_string(), Value::from(n)))
        .collect();
    let mut wanted = many.clone();
    wanted["0"] = json!("x");
    let redaction = Redaction::read(&json!({"modified_data": wanted}), Pattern::compile).unwrap();
    let merged = redaction.apply(&many.to_string()).unwrap().unwrap();
    assert!(merged.starts_with(r#"{"0":"x","1":1,"#));
    let deep = r#"{"a":"#.repeat(120) + r#"{"x":1}"# + &"}".repeat(120);
    check(
        fields(&["**.*.**.*.**.*.**.*.**.*.**.x"]),
        &deep,
        Some(&deep.replace(r#"{"x":1}"#, r#"{"x":"[redacted]"}"#)),
    );
}

#[test]
fn string_with_unpaired_surrogate_is_rejected() {
    let redaction = Redaction::read(&replacements(json!({"a": ""})), Pattern::compile).unwrap();
    // An unpaired surrogate is valid in JSON's grammar, but is not Unicode text.
    let redacted = redaction.apply(r#""\ud800""#);
    assert!(matches!(redacted, Err(BadRedaction::NoJson(_))));
}

proptest! {
    #[test]
    fn merged_text_has_value_of_modified_data(before in any_json(), after in any_json(), pretty: bool) {
        prop_assume!(!after.is_null());
        let text = if pretty { serde_json::to_string_pretty(&before) } else { serde_json::to_string(&before) };
        let text = text.unwrap();
        let redaction = Redaction::read(&json!({"modified_data": after}), Pattern::compile).unwrap();
        let merged = redaction.apply(&text).unwrap();
        let merged = merged.unwrap_or(text);
        prop_assert_eq!(serde_json::from_str::<Value>(&merged).unwrap(), after);
    }

    #[test]
    fn json_is_still_json_after_every_change(value in any_json(), text in "[\\[\\]{}\",:\\\\ab1 \n-]{0,40}") {
        prop_assert!(fuzz_check(value.to_string().as_bytes()));
        prop_assert!(fuzz_check(text.as_bytes()));
    }

    #[test]
    fn no_string_value_still_matches_replaced_expression(value in any_json()) {
        let text = serde_json::to_string(&value).unwrap();
        let redaction = Redaction::read(&replacements(json!({"[a-m]": "_"})), Pattern::compile).unwrap();
        let redacted = redaction.apply(&text).unwrap().unwrap_or(text);
        fn clean(value: &Value) -> bool {
            match value {
                Value::String(text) => !text.contains(|c| ('a'..='m').contains(&c)),
                Value::Array(items) => items.iter().all(clean),
                Value::Object(fields) => fields.values().all(clean),
                _ => true,
            }
        }
        prop_assert!(clean(&serde_json::from_str(&redacted).unwrap()));
    }
}
