//! The first bytes of a connection, however they are split.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| egress::hello::exercise(bytes));
