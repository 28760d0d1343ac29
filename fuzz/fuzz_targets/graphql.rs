//! Fuzzes the GraphQL bodies that the GitHub rules parse.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| policy::github::fuzz_check(bytes));
