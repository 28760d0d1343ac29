//! Bodies of GraphQL requests, as the rules for GitHub read them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| policy::github::exercise(bytes));
