//! Trust store in Java's format.
//!
//! The format is JKS without the digest at the end, which depends on a password: every version
//! reads it if no password is given, as is usual for certificates.

use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

// Values of the format.
const MAGIC: u32 = 0xfeed_feed;
const VERSION: u32 = 2;
const CERTIFICATE: u32 = 2;
const KIND: &str = "X.509";

/// Builds a trust store of all certificates in a bundle. Malformed ones are skipped.
pub(super) fn store(bundle: &[u8]) -> Vec<u8> {
    let all: Vec<CertificateDer<'_>> = CertificateDer::pem_slice_iter(bundle)
        .filter_map(Result::ok)
        .collect();
    let mut out = Vec::with_capacity(bundle.len());
    let count = u32::try_from(all.len()).unwrap_or(u32::MAX);
    for word in [MAGIC, VERSION, count] {
        out.extend(word.to_be_bytes());
    }
    for (number, certificate) in all.iter().enumerate() {
        out.extend(CERTIFICATE.to_be_bytes());
        put_text(&mut out, &format!("palisade-{number}"));
        // The time of the entry, which is not used.
        out.extend(0_u64.to_be_bytes());
        put_text(&mut out, KIND);
        // A bundle's length fits a u32.
        let length = u32::try_from(certificate.len()).unwrap_or(u32::MAX);
        out.extend(length.to_be_bytes());
        out.extend_from_slice(certificate);
    }
    out
}

/// Writes a text as `DataOutput.writeUTF`, for ASCII.
fn put_text(out: &mut Vec<u8>, text: &str) {
    let length = u16::try_from(text.len()).unwrap_or(u16::MAX);
    out.extend(length.to_be_bytes());
    out.extend(text.bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_has_each_certificate_under_a_unique_name() {
        let one = "-----BEGIN CERTIFICATE-----\nAQID\n-----END CERTIFICATE-----\n";
        let odd = "# a word\n-----BEGIN X-----\nAQID\n-----END X-----\n";
        let entry = |name: u8| {
            let mut bytes = b"\0\0\0\x02\0\x0apalisade-".to_vec();
            bytes.push(name);
            bytes.extend(b"\0\0\0\0\0\0\0\0\0\x05X.509\0\0\0\x03\x01\x02\x03");
            bytes
        };
        let head = b"\xfe\xed\xfe\xed\0\0\0\x02\0\0\0\x02".to_vec();
        assert_eq!(
            store([one, odd, one].concat().as_bytes()),
            [head, entry(b'0'), entry(b'1')].concat()
        );
        assert_eq!(store(b"").len(), 12);
    }
}
