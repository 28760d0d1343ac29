//! Parser of push certificates: signed push commands.
//!
//! The signature is not verified, which is the server's task. The signed commands are checked
//! like unsigned ones.

use super::PushParseError;

/// Lines at which git detects a signature (gpg-interface.c).
const SIGNATURE_MARKERS: [&[u8]; 4] = [
    b"-----BEGIN PGP SIGNATURE-----",
    b"-----BEGIN PGP MESSAGE-----",
    b"-----BEGIN SIGNED MESSAGE-----",
    b"-----BEGIN SSH SIGNATURE-----",
];

/// Commands and push options of a certificate.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Certificate<'a> {
    pub(super) commands: Vec<&'a [u8]>,
    pub(super) options: Vec<&'a [u8]>,
}

/// Parses a certificate: headers, an empty line, commands, one signature. With several signatures
/// git ends the commands at the last one, so exactly one is accepted.
pub(super) fn parse(text: &[u8]) -> Result<Certificate<'_>, PushParseError> {
    let is_signature = |line: &&[u8]| {
        SIGNATURE_MARKERS
            .iter()
            .any(|marker| line.starts_with(marker))
    };
    let mut lines = text.split(|byte| *byte == b'\n');
    if lines.clone().filter(is_signature).count() != 1
        || lines.next() != Some(b"certificate version 0.1")
    {
        return Err(PushParseError::Certificate);
    }
    let headers = lines.by_ref().take_while(|line| !line.is_empty());
    let options = headers
        .filter_map(|line| line.strip_prefix(b"push-option "))
        .collect();
    let commands: Vec<&[u8]> = lines.take_while(|line| !is_signature(line)).collect();
    if commands.is_empty() {
        return Err(PushParseError::Certificate);
    }
    Ok(Certificate { commands, options })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIGNED: &str = "certificate version 0.1\npusher A <a@example.com> 0 +0000\n\
        push-option one\nnonce x\n\nfirst\nsecond\n-----BEGIN SSH SIGNATURE-----\nxyz\n\
        -----END SSH SIGNATURE-----\n";

    #[test]
    fn commands_between_headers_and_signature_are_parsed() {
        let parsed = parse(SIGNED.as_bytes()).unwrap();
        assert_eq!(parsed.commands, [b"first".as_slice(), b"second"]);
        assert_eq!(parsed.options, [b"one"]);
    }

    #[test]
    fn certificate_without_exactly_one_signature_is_refused() {
        let twice = format!("{SIGNED}-----BEGIN PGP SIGNATURE-----\n");
        let header = SIGNED.replace("nonce x", "-----BEGIN PGP MESSAGE-----");
        let none = SIGNED.replace("BEGIN SSH", "BEGIN NO");
        let empty = SIGNED.replace("first\nsecond\n", "");
        let no_end = "certificate version 0.1\npusher\n-----BEGIN PGP SIGNATURE-----\n";
        for bad in [&twice, &header, &none, &empty, no_end, "", "\n\n"] {
            assert_eq!(
                parse(bad.as_bytes()),
                Err(PushParseError::Certificate),
                "{bad}"
            );
        }
    }
}
