//! OpenSSL's hash of a certificate subject (`X509_NAME_hash`), the file name of a certificate in a
//! directory of certificates.
//!
//! The canonical form is hashed: every value as UTF-8 in lower case with single spaces, and the
//! relative names concatenated without the enclosing sequence.

use aws_lc_rs::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};

/// Attribute types (X.520): the last number of the object identifier 2.5.4.x.
pub(super) const COMMON_NAME: u8 = 3;
pub(super) const ORGANIZATION: u8 = 10;

/// The hash of a subject with these values, in this order. Each value must be short.
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

/// Encodes a DER value with a one-byte length.
fn wrap(tag: u8, value: &[u8]) -> Vec<u8> {
    let length = u8::try_from(value.len()).unwrap_or(0x7f).min(0x7f);
    [&[tag, length], value].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_equals_that_of_openssl_x509() {
        // openssl x509 -noout -hash
        for name in ["Palisade gate 0123abcd", "  palisade  GATE 0123abcd "] {
            let parts = [(COMMON_NAME, name), (ORGANIZATION, "Palisade")];
            assert_eq!(hash(&parts), 0x2b03_1002);
        }
    }
}
