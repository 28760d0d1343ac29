//! The guard below the HTTP/1 library.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| egress::framing::exercise(bytes));
