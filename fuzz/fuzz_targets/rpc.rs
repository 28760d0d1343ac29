//! Fuzzes the JSON-RPC messages of the bridge.
#![no_main]

use mcp::relay::set_meta;
use mcp::rpc::{Message, line};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(message) = Message::read_bytes(bytes.to_vec()) else {
        return;
    };
    assert_eq!(message.text().as_bytes(), bytes);
    // A round trip keeps every byte.
    if let Some(id) = message.id() {
        let there = Message::read(message.with_id("42")).expect("another id is a message");
        assert_eq!(there.with_id(id).as_bytes(), bytes);
    }
    // A message is one line that parses to the same message.
    let line = line(message.text());
    assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
    let again = Message::read_bytes(line).expect("a line is a message");
    assert_eq!((again.kind(), again.method()), (message.kind(), message.method()));
    if let Some(params) = message.params()
        && let Some(told) = set_meta(params, "k", "\"v\"")
    {
        let told = Message::read(message.with_params(&told)).expect("with _meta it is a message");
        assert_eq!(told.param_text(&["_meta", "k"]).as_deref(), Some("v"));
    }
});
