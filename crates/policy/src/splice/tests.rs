use proptest::prelude::*;
use serde_json::Value;

use super::*;

#[test]
fn value_is_found_by_its_path_of_keys() {
    let text = r#" {"a" : {"b\u0063": [1, {"x":2}], "d":null}, "e":"}"} "#;
    for (path, found) in [
        (&["a", "bc"][..], Some(r#"[1, {"x":2}]"#)),
        (&["a", "d"], Some("null")),
        (&["e"], Some(r#""}""#)),
        (&["a", "no"], None),
        (&["e", "x"], None),
    ] {
        assert_eq!(find(text, path), Ok(found), "{path:?}");
    }
}

#[test]
fn set_leaves_all_other_bytes_unchanged() {
    let text = r#"{ "n": 123456789012345678901234567890, "_meta" : { "k":1 } }"#;
    assert_eq!(
        set(text, &["_meta", "palisade/request"], "\"R\"").unwrap(),
        r#"{ "n": 123456789012345678901234567890, "_meta" : { "k":1 ,"palisade/request":"R"} }"#
    );
    assert_eq!(
        set(text, &["_meta", "k"], "2").unwrap(),
        r#"{ "n": 123456789012345678901234567890, "_meta" : { "k":2 } }"#
    );
    assert_eq!(set("{}", &["a", "b"], "1").unwrap(), r#"{"a":{"b":1}}"#);
    assert_eq!(
        set(r#"{"a":null}"#, &["a", "b"], "1").unwrap(),
        r#"{"a":{"b":1}}"#
    );
}

#[test]
fn remove_also_removes_comma_and_emptied_object() {
    for (text, path, left) in [
        (
            r#"{"a":1,"b":2,"c":3}"#,
            &["a"][..],
            Some(r#"{"b":2,"c":3}"#),
        ),
        (r#"{"a":1,"b":2,"c":3}"#, &["b"], Some(r#"{"a":1,"c":3}"#)),
        (r#"{"a":1, "b":2}"#, &["b"], Some(r#"{"a":1}"#)),
        (r#"{"x":1,"m":{"k":1}}"#, &["m", "k"], Some(r#"{"x":1}"#)),
        (
            r#"{"x":1,"m":{"k":1,"l":2}}"#,
            &["m", "k"],
            Some(r#"{"x":1,"m":{"l":2}}"#),
        ),
        (r#"{"m":{"k":1}}"#, &["m", "k"], Some("{}")),
        (r#"{"k":1,"k":2,"z":0}"#, &["k"], Some(r#"{"z":0}"#)),
        (r#"{"x":1}"#, &["m", "k"], None),
        ("[1]", &["m"], None),
    ] {
        let removed = remove(text, path).unwrap();
        assert_eq!(removed.as_deref(), left, "{text} without {path:?}");
    }
}

#[test]
fn invalid_json_is_an_error() {
    let deep = "[".repeat(200) + &"]".repeat(200);
    for text in [
        "", "{", "[1", "{\"a\"}", "{\"a\":}", "\"", "\"\\", "1 2", "{1:2}", "[,]", &deep,
    ] {
        assert_eq!(find(text, &[]), Err(InvalidJson), "{text}");
    }
}

/// Any JSON value.
pub(crate) fn json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "[a-z\"\\\\\u{7f}é\n😀]{0,6}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-cé\"]{0,2}", inner, 0..4)
                .prop_map(|map| map.into_iter().collect::<Value>()),
        ]
    })
}

proptest! {
    #[test]
    fn find_set_and_remove_match_the_parsed_value(value in json(), pretty: bool) {
        let text = if pretty { serde_json::to_string_pretty(&value) } else { serde_json::to_string(&value) };
        let text = text.unwrap();
        if let Value::Object(fields) = &value {
            for (key, field) in fields {
                let found = find(&text, &[key]).unwrap().unwrap();
                prop_assert_eq!(&serde_json::from_str::<Value>(found).unwrap(), field);
                let mut wanted = fields.clone();
                wanted.shift_remove(key);
                let left = remove(&text, &[key]).unwrap().unwrap();
                prop_assert_eq!(serde_json::from_str::<Value>(&left).unwrap(), Value::Object(wanted));
                let mut wanted = fields.clone();
                wanted.insert(key.clone(), Value::from("new"));
                let set = set(&text, &[key], "\"new\"").unwrap();
                prop_assert_eq!(serde_json::from_str::<Value>(&set).unwrap(), Value::Object(wanted));
            }
        }
    }

    #[test]
    fn arbitrary_text_never_panics(text in "[\\[\\]{}\",:\\\\a1 \n-]{0,40}") {
        let _ = find(&text, &["a"]);
        drop(set(&text, &["a"], "1"));
        drop(remove(&text, &["a"]));
    }
}
