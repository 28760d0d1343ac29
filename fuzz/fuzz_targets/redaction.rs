//! Fuzzes redactions of tool messages.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    assert!(policy::redaction::fuzz_check(bytes));
});
