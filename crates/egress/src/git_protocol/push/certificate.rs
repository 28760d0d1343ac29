//! The text of a push certificate: commands that somebody signed.
//!
//! Nothing here looks at the signature. The commands in it are judged like any others, and
//! whether it is worth something is the server's business.

use super::Malformed;

/// What git takes for the beginning of a signature (gpg-interface.c).
const SIGNATURES: [&[u8]; 4] = [
    b"-----BEGIN PGP SIGNATURE-----",
    b"-----BEGIN PGP MESSAGE-----",
    b"-----BEGIN SIGNED MESSAGE-----",
    b"-----BEGIN SSH SIGNATURE-----",
];

/// What a certificate asks for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Certificate<'a> {
    pub(super) commands: Vec<&'a [u8]>,
    pub(super) options: Vec<&'a [u8]>,
}

/// Reads a certificate: headers, an empty line, commands, one signature. Git takes the last
/// of several signatures for the end of the commands, so there must be one.
pub(super) fn read(text: &[u8]) -> Result<Certificate<'_>, Malformed> {
    let begins = |line: &&[u8]| SIGNATURES.iter().any(|begin| line.starts_with(begin));
    let mut lines = text.split(|byte| *byte == b'\n');
    if lines.clone().filter(begins).count() != 1 || lines.next() != Some(b"certificate version 0.1")
    {
        return Err(Malformed::Certificate);
    }
    let headers = lines.by_ref().take_while(|line| !line.is_empty());
    let options = headers
        .filter_map(|line| line.strip_prefix(b"push-option "))
        .collect();
    let commands: Vec<&[u8]> = lines.take_while(|line| !begins(line)).collect();
    if commands.is_empty() {
        return Err(Malformed::Certificate);
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
    fn commands_stand_between_the_headers_and_the_signature() {
        let read = read(SIGNED.as_bytes()).unwrap();
        assert_eq!(read.commands, [b"first".as_slice(), b"second"]);
        assert_eq!(read.options, [b"one"]);
    }

    #[test]
    fn what_has_no_signature_or_two_is_refused() {
        let twice = format!("{SIGNED}-----BEGIN PGP SIGNATURE-----\n");
        let header = SIGNED.replace("nonce x", "-----BEGIN PGP MESSAGE-----");
        let none = SIGNED.replace("BEGIN SSH", "BEGIN NO");
        let empty = SIGNED.replace("first\nsecond\n", "");
        let no_end = "certificate version 0.1\npusher\n-----BEGIN PGP SIGNATURE-----\n";
        for bad in [&twice, &header, &none, &empty, no_end, "", "\n\n"] {
            assert_eq!(read(bad.as_bytes()), Err(Malformed::Certificate), "{bad}");
        }
    }
}
