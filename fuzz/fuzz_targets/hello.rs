//! Fuzzes the first bytes of a connection, split at any point.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| egress::hello::fuzz_check(bytes));
