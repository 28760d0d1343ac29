//! Fuzzes the search for the end of a pack: the result must not depend on how the input is split.
#![no_main]

use egress::git_protocol::pack_end::fuzz_check;
use policy::push::ObjectFormat;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let (choice, bytes) = bytes.split_first().unwrap_or((&1, &[]));
    let format = if choice & 1 == 0 {
        ObjectFormat::Sha1
    } else {
        ObjectFormat::Sha256
    };
    let piece = usize::from(choice >> 1).max(1);
    let whole = fuzz_check(format, bytes, usize::MAX);
    assert_eq!(whole, fuzz_check(format, bytes, piece));
});
