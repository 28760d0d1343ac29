use proptest::prelude::*;

use super::*;

fn read(text: &str) -> Result<RpcMessage, BadMessage> {
    RpcMessage::read(text.to_owned())
}

#[test]
fn message_is_parsed_as_request_notification_or_response() {
    let cases = [
        (
            r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#,
            Ok(RpcKind::Request),
        ),
        (
            r#"{"jsonrpc":"2.0","id":"a","method":"ping","params":{}}"#,
            Ok(RpcKind::Request),
        ),
        (
            r#"{"jsonrpc":"2.0","method":"notifications/x","params":[1]}"#,
            Ok(RpcKind::Notification),
        ),
        (
            r#"{"jsonrpc":"2.0","id":1,"result":{}}"#,
            Ok(RpcKind::Response),
        ),
        (
            r#"{"jsonrpc":"2.0","id":1,"result":null}"#,
            Ok(RpcKind::Response),
        ),
        (
            r#"{"jsonrpc":"2.0","id":null,"error":{"code":1,"message":""}}"#,
            Ok(RpcKind::Response),
        ),
        (
            r#"{"jsonrpc":"2.0","id":1,"result":{},"error":{}}"#,
            Err(code::INVALID_REQUEST),
        ),
        (
            r#"{"jsonrpc":"2.0","id":1,"method":"m","result":{}}"#,
            Err(code::INVALID_REQUEST),
        ),
        (
            r#"{"jsonrpc":"2.0","id":null,"method":"m"}"#,
            Err(code::INVALID_REQUEST),
        ),
        (
            r#"{"jsonrpc":"2.0","id":1.5,"method":"m"}"#,
            Err(code::INVALID_REQUEST),
        ),
        (
            r#"{"jsonrpc":"2.0","id":{},"method":"m"}"#,
            Err(code::INVALID_REQUEST),
        ),
        (
            r#"{"jsonrpc":"2.0","id":1,"id":2,"method":"m"}"#,
            Err(code::INVALID_REQUEST),
        ),
        (
            r#"{"jsonrpc":"2.0","id":1,"method":"m","params":3}"#,
            Err(code::INVALID_REQUEST),
        ),
        (
            r#"{"jsonrpc":"1.0","id":1,"method":"m"}"#,
            Err(code::INVALID_REQUEST),
        ),
        (r#"{"id":1,"method":"m"}"#, Err(code::INVALID_REQUEST)),
        (r#"{"jsonrpc":"2.0","id":1}"#, Err(code::INVALID_REQUEST)),
        (r#"[]"#, Err(code::INVALID_REQUEST)),
        (r#"7"#, Err(code::INVALID_REQUEST)),
        (r#"{"jsonrpc":"2.0","#, Err(code::PARSE_ERROR)),
        (
            r#"{"jsonrpc":"2.0","id":1,"method":"m"} x"#,
            Err(code::PARSE_ERROR),
        ),
        ("", Err(code::PARSE_ERROR)),
    ];
    for (text, expected) in cases {
        let found = read(text)
            .map(|message| message.kind())
            .map_err(|bad| bad.code());
        assert_eq!(found, expected, "{text}");
    }
}

#[test]
fn replacing_a_part_keeps_all_other_bytes() {
    let text = "{ \"z\": 123456789012345678901234567890.10, \"jsonrpc\" : \"2.0\",\n \"id\" : 7 , \"method\":\"tools/call\",\"params\":{\"b\":1,\"a\":{\"t\":\"\\u0041\"}} }";
    let message = read(text).unwrap();
    assert_eq!(message.id(), Some("7"));
    assert_eq!(message.with_id("\"x-1\""), text.replace(" 7 ", " \"x-1\" "));
    assert_eq!(message.param(&["a", "t"]), Some("\"\\u0041\""));
    assert_eq!(message.param_text(&["a", "t"]).as_deref(), Some("A"));
    assert_eq!(
        message.with_param(&["a", "t"], "5"),
        text.replace("\"\\u0041\"", "5")
    );
    assert_eq!(message.with_param(&["a", "none"], "5"), text);
    assert!(message.with_params("[]").ends_with("\"params\":[] }"));
    let bare = read(r#"{"jsonrpc":"2.0","id":1,"method":"m"}"#).unwrap();
    assert_eq!(
        bare.with_params("{}"),
        r#"{"jsonrpc":"2.0","id":1,"method":"m","params":{}}"#
    );
}

#[test]
fn line_contains_one_line_end() {
    let text = "{\"jsonrpc\":\"2.0\",\r\n\"method\":\"a\\nb\"}";
    let line = to_line(text);
    assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
    let parsed = RpcMessage::read_bytes(line).unwrap();
    assert_eq!(parsed.method(), Some("a\nb"));
}

/// Generates JSON values with optional whitespace.
fn json() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just("null".to_owned()),
        Just("true".to_owned()),
        "-?[1-9][0-9]{0,40}(\\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?",
        any::<String>().prop_map(|text| quote(&text)),
        Just("\"\\u00e9\\ud83d\\ude00\\/\"".to_owned()),
    ];
    leaf.prop_recursive(3, 24, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5)
                .prop_map(|items| format!("[\n{}]", items.join(" ,"))),
            prop::collection::vec((any::<String>(), inner), 0..5).prop_map(|fields| {
                let fields: Vec<_> = fields
                    .into_iter()
                    .map(|(key, value)| format!("{} :{value}", quote(&key)))
                    .collect();
                format!("{{{}}}", fields.join(", "))
            }),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    // **Feature: unified-sidecar, Property 12: Serialization Round-Trip** (JSON-RPC)
    #[test]
    fn property_12_serialization_round_trip_of_messages(
        id in prop_oneof!["0|[1-9][0-9]{0,29}", any::<String>().prop_map(|text| quote(&text))],
        method in any::<String>(),
        inner in json(),
        extra in json(),
    ) {
        prop_assume!(id.len() <= MAX_ID_BYTES);
        let text = format!(
            r#"{{"extra":{extra},"params":{{"x":{inner}}},"id":{id},"jsonrpc":"2.0","method":{}}}"#,
            quote(&method)
        );
        let message = RpcMessage::read(text.clone()).unwrap();
        prop_assert_eq!(message.text(), text.as_str());
        prop_assert_eq!(message.method(), Some(method.as_str()));
        prop_assert_eq!(message.param(&["x"]), Some(inner.as_str()));
        // Replacing the id and restoring it yields the same bytes.
        let replaced = RpcMessage::read(message.with_id("42")).unwrap();
        let restored = replaced.with_id(&id);
        prop_assert_eq!(restored.as_str(), text.as_str());
        // The line differs only in the whitespace between tokens.
        let line = String::from_utf8(to_line(&text)).unwrap();
        prop_assert_eq!(line, text.replace('\n', " ") + "\n");
    }

    #[test]
    fn parser_never_panics_on_arbitrary_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(message) = RpcMessage::read_bytes(bytes.clone()) {
            prop_assert_eq!(message.text().as_bytes(), bytes.as_slice());
        }
    }
}
