//! Fuzzes the strict HTTP/1 framing check below hyper.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| egress::framing::fuzz_check(bytes));
