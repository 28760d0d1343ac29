//! Fuzzes the JSON-RPC messages of the bridge.
#![no_main]

use mcp::relay::set_meta;
use mcp::rpc::{RpcMessage, to_line};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(message) = RpcMessage::read_bytes(bytes.to_vec()) else {
        return;
    };
    assert_eq!(message.text().as_bytes(), bytes);
    // A round trip keeps every byte.
    if let Some(id) = message.id() {
        let with_other_id = RpcMessage::read(message.with_id("42")).expect("another id is a message");
        assert_eq!(with_other_id.with_id(id).as_bytes(), bytes);
    }
    // A message is one line that parses to the same message.
    let line = to_line(message.text());
    assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
    let parsed = RpcMessage::read_bytes(line).expect("a line is a message");
    assert_eq!(
        (parsed.kind(), parsed.method()),
        (message.kind(), message.method())
    );
    if let Some(params) = message.params()
        && let Some(changed) = set_meta(params, "k", "\"v\"")
    {
        let changed =
            RpcMessage::read(message.with_params(&changed)).expect("with _meta it is a message");
        assert_eq!(changed.param_text(&["_meta", "k"]).as_deref(), Some("v"));
    }
});
