//! Every kind of file that an operator or a repository has.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| config::exercise(bytes));
