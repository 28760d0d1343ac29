//! A tool's message, changed in every way a policy can want.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    assert!(policy::redaction::exercise(bytes));
});
