//! Fuzzes DNS queries, upstream answers, and queries over TCP.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| egress::dns::fuzz_check(bytes));
