//! Queries, answers of an upstream, and queries on a stream.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| egress::dns::exercise(bytes));
