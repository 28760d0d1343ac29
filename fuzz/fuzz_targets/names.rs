//! Fuzzes the normalisation of host names, authorities and paths, one per line.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    for line in String::from_utf8_lossy(bytes).lines() {
        policy::host::fuzz_check(line);
        policy::path::fuzz_check(line);
    }
});
