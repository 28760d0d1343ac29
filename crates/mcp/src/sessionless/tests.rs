use http::{HeaderMap, HeaderValue};
use serde_json::json;

use super::*;

#[test]
fn answer_of_an_earlier_revision_is_translated_with_http_status() {
    let cases = [
        (
            "tools/call",
            r#"{"jsonrpc":"2.0","id":1,"result":{"n":1.50}}"#,
            200,
            r#"{"jsonrpc":"2.0","id":1,"result":{"resultType":"complete","n":1.50}}"#,
        ),
        (
            "tools/list",
            r#"{"jsonrpc":"2.0","id":1,"result":{"tools":[],"ttlMs":5}}"#,
            200,
            r#"{"jsonrpc":"2.0","id":1,"result":{"resultType":"complete","cacheScope":"private","tools":[],"ttlMs":5}}"#,
        ),
        (
            "prompts/get",
            r#"{"jsonrpc":"2.0","id":1,"result":{}}"#,
            200,
            r#"{"jsonrpc":"2.0","id":1,"result":{"resultType":"complete"}}"#,
        ),
        (
            "tools/call",
            r#"{"jsonrpc":"2.0","id":1,"result":{"resultType":"input_required"}}"#,
            200,
            r#"{"jsonrpc":"2.0","id":1,"result":{"resultType":"input_required"}}"#,
        ),
        (
            "resources/read",
            r#"{"jsonrpc":"2.0","id":"a","error":{"code":-32002,"message":"none","data":{"uri":"x:y"}}}"#,
            400,
            r#"{"jsonrpc":"2.0","id":"a","error":{"code":-32602,"message":"none","data":{"uri":"x:y"}}}"#,
        ),
        (
            "prompts/list",
            r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32601,"message":"no"}}"#,
            404,
            r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32601,"message":"no"}}"#,
        ),
        (
            "tools/call",
            r#"{"jsonrpc":"2.0","id":1,"error":{"code":-5,"message":"its own"}}"#,
            200,
            r#"{"jsonrpc":"2.0","id":1,"error":{"code":-5,"message":"its own"}}"#,
        ),
    ];
    for (method, old, status, new) in cases {
        let (found, text) = translate_answer(method, old.to_owned());
        assert_eq!((found.as_u16(), text.as_str()), (status, new), "{old}");
    }
}

fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
    let pair = |(name, value): &(&'static str, &'static str)| {
        let name = http::HeaderName::from_static(name);
        (name, HeaderValue::from_static(value))
    };
    pairs.iter().map(pair).collect()
}

fn read(params: &Value, pairs: &[(&'static str, &'static str)]) -> Result<(), String> {
    let text = RpcMessage::request("7", "tools/call", &params.to_string());
    let read = Request::read(RpcMessage::read(text).unwrap(), &headers(pairs));
    read.map(drop).map_err(|refused| refused.text("7"))
}

#[test]
fn request_whose_headers_contradict_its_body_is_refused() {
    let meta = |version: &str| {
        json!({
            "io.modelcontextprotocol/protocolVersion": version,
            "io.modelcontextprotocol/clientCapabilities": {},
        })
    };
    let params = json!({"name": "add", "_meta": meta(REVISION)});
    let right = [
        ("mcp-protocol-version", REVISION),
        ("mcp-method", "tools/call"),
        ("mcp-name", "add"),
    ];
    assert_eq!(read(&params, &right), Ok(()));
    let coded = [right[0], right[1], ("mcp-name", "=?base64?YWRk?=")];
    assert_eq!(read(&params, &coded), Ok(()));
    let code = |params: &Value, pairs: &[(&'static str, &'static str)]| {
        let error: Value = serde_json::from_str(&read(params, pairs).unwrap_err()).unwrap();
        assert_eq!(error["id"], 7);
        error["error"]["code"].as_i64().unwrap()
    };
    let mismatch = code::HEADER_MISMATCH;
    for wrong in [
        &right[..2],
        &right[1..],
        &[right[0], right[2]],
        &[right[0], right[1], ("mcp-name", "sub")],
        &[right[0], right[1], ("mcp-name", "=?base64?%%%?=")],
        &[right[0], ("mcp-method", "Tools/Call"), right[2]],
        &[("mcp-protocol-version", "2025-11-25"), right[1], right[2]],
    ] {
        assert_eq!(code(&params, wrong), mismatch, "{wrong:?}");
    }
    assert_eq!(code(&json!({"name": "add"}), &right), code::INVALID_PARAMS);
    let other = json!({"name": "add", "_meta": meta("v9")});
    let pairs = [("mcp-protocol-version", "v9"), right[1], right[2]];
    assert_eq!(code(&other, &pairs), code::UNSUPPORTED_VERSION);
}

#[test]
fn only_requests_of_revision_2026_07_28_are_sessionless() {
    let none = HeaderMap::new();
    let old = br#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"x","arguments":{"text":"io.modelcontextprotocol/protocolVersion server/discover"}}}"#;
    assert!(!is_sessionless(&none, old));
    assert!(is_sessionless(
        &headers(&[("mcp-protocol-version", REVISION)]),
        old
    ));
    let discover = br#"{"jsonrpc":"2.0","id":1,"method":"server/discover"}"#;
    assert!(is_sessionless(&none, discover));
    let versioned = br#"{"jsonrpc":"2.0","id":1,"method":"ping","params":{"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28"}}}"#;
    assert!(is_sessionless(&none, versioned));
    assert!(!is_sessionless(&none, b"server/discover"));
}
