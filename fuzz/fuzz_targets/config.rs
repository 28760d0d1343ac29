//! Fuzzes the parsers of operator and repository files.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| config::fuzz_check(bytes));
