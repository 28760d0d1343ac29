//! Fuzzes the push parser: the result must not depend on how the input is split.
#![no_main]

use egress::git_protocol::push::fuzz_check;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let (piece, bytes) = bytes.split_first().unwrap_or((&1, &[]));
    let piece = usize::from(*piece).max(1);
    assert_eq!(fuzz_check(bytes, usize::MAX), fuzz_check(bytes, piece));
});
