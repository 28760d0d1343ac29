//! The hash of a subject, as OpenSSL names files by (`X509_NAME_hash`, the name of a
//! certificate in a directory of them).
//!
//! It is of the canonical form: every value as UTF-8 in lower case, with single spaces, and
//! the relative names one after the other without the sequence around them.

use aws_lc_rs::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};

/// Attribute types (X.520), as their last number below 2.5.4.
pub(super) const COMMON_NAME: u8 = 3;
pub(super) const ORGANIZATION: u8 = 10;

/// The hash of a subject of these values, in this order. They have to be short.
pub(super) fn hash(parts: &[(u8, &str)]) -> u32 {
    const SET: u8 = 0x31;
    const SEQUENCE: u8 = 0x30;
    const OBJECT: u8 = 0x06;
    const UTF8: u8 = 0x0c;
    let canonical: Vec<u8> = parts
        .iter()
        .flat_map(|(kind, value)| {
            let words: Vec<&str> = value.split_ascii_whitespace().collect();
            let value = words.join(" ").to_ascii_lowercase();
            let kind = wrap(OBJECT, &[0x55, 0x04, *kind]);
            let pair = [kind, wrap(UTF8, value.as_bytes())].concat();
            wrap(SET, &wrap(SEQUENCE, &pair))
        })
        .collect();
    let digest = digest(&SHA1_FOR_LEGACY_USE_ONLY, &canonical);
    let first = digest.as_ref().first_chunk().copied();
    u32::from_le_bytes(first.unwrap_or_default())
}

/// A value of DER whose length is one byte.
fn wrap(tag: u8, value: &[u8]) -> Vec<u8> {
    let length = u8::try_from(value.len()).unwrap_or(0x7f).min(0x7f);
    [&[tag, length], value].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_is_what_openssl_says() {
        // openssl x509 -noout -hash
        for name in ["Palisade gate 0123abcd", "  palisade  GATE 0123abcd "] {
            let parts = [(COMMON_NAME, name), (ORGANIZATION, "Palisade")];
            assert_eq!(hash(&parts), 0x2b03_1002);
        }
    }
}
