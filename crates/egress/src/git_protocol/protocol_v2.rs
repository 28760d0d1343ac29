//! Upload-pack requests of the gate in git protocol version 2: `ls-refs`, and a `fetch` of commits
//! and trees without blobs.
//!
//! No I/O: this module builds request bytes and parses response bytes.

use std::collections::BTreeMap;

use policy::push::ObjectFormat;
use policy::refs::ObjectId;

use super::pkt_line::{self, PktLine};

/// Content type of an upload-pack request.
pub const REQUEST_TYPE: &str = "application/x-git-upload-pack-request";

/// Content type of an upload-pack response.
pub const RESULT_TYPE: &str = "application/x-git-upload-pack-result";

/// Why an upload-pack response cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UploadPackError {
    /// Bytes that are no pkt-line.
    #[error(transparent)]
    PktLine(#[from] pkt_line::PktLineError),
    /// Upstream sent an error.
    #[error("upstream refused the request")]
    Refused,
    /// The response does not belong to this request.
    #[error("upstream sent an unexpected response")]
    Unexpected,
    /// The response ended early.
    #[error("upstream's response is incomplete")]
    Incomplete,
}

fn command(name: &str, format: ObjectFormat) -> Vec<u8> {
    let mut out = Vec::new();
    pkt_line::write(&mut out, format!("command={name}\n").as_bytes());
    pkt_line::write(&mut out, b"agent=palisade\n");
    // A server that supports only SHA-1 rejects the capability.
    if format == ObjectFormat::Sha256 {
        pkt_line::write(&mut out, b"object-format=sha256\n");
    }
    out.extend_from_slice(b"0001");
    out
}

/// Builds an `ls-refs` request for `HEAD` and for refs that begin with `names`.
pub fn ls_refs_request<'a>(format: ObjectFormat, names: impl Iterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut out = command("ls-refs", format);
    pkt_line::write(&mut out, b"ref-prefix HEAD\n");
    for name in names {
        pkt_line::write(&mut out, &[b"ref-prefix ", name, b"\n"].concat());
    }
    pkt_line::flush(&mut out);
    out
}

/// Parses the response to [`ls_refs_request`]: object ids by ref name. The request has prefixes,
/// so the response may have further names.
pub fn parse_refs(response: &[u8]) -> Result<BTreeMap<Vec<u8>, ObjectId>, UploadPackError> {
    let mut refs = BTreeMap::new();
    let mut rest = response;
    loop {
        let (line, length) = pkt_line::first(rest)?.ok_or(UploadPackError::Incomplete)?;
        let data = match line {
            PktLine::Flush => return Ok(refs),
            PktLine::Other => return Err(UploadPackError::Unexpected),
            PktLine::Data(data) => pkt_line::chomp(data),
        };
        if data.starts_with(b"ERR ") {
            return Err(UploadPackError::Refused);
        }
        let mut words = data.split(|byte| *byte == b' ');
        let (Some(id), Some(name)) = (words.next(), words.next()) else {
            return Err(UploadPackError::Unexpected);
        };
        // A branch without a commit has `unborn` in place of an id.
        if let Ok(id) = ObjectId::parse(id) {
            refs.insert(name.to_vec(), id);
        }
        rest = rest.get(length..).unwrap_or_default();
    }
}

/// Builds a `fetch` request for these commits and all their trees, without history and blobs.
pub fn fetch_trees_request(format: ObjectFormat, wants: &[ObjectId]) -> Vec<u8> {
    let mut out = command("fetch", format);
    for argument in ["no-progress", "ofs-delta", "filter blob:none", "deepen 1"] {
        pkt_line::write(&mut out, format!("{argument}\n").as_bytes());
    }
    for want in wants {
        pkt_line::write(&mut out, format!("want {want}\n").as_bytes());
    }
    pkt_line::write(&mut out, b"done\n");
    pkt_line::flush(&mut out);
    out
}

/// Extracts the pack from the response to [`fetch_trees_request`].
#[derive(Debug, Default)]
pub struct PackExtractor {
    pending: Vec<u8>,
    state: State,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Sections,
    Pack,
    Ended,
}

impl PackExtractor {
    /// Takes the next bytes of the response. Returns the bytes of the pack.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<Vec<u8>, UploadPackError> {
        self.pending.extend_from_slice(bytes);
        let (mut at, mut pack) = (0, Vec::new());
        while let Some((line, length)) =
            pkt_line::first(self.pending.get(at..).unwrap_or_default())?
        {
            self.state = read_line(self.state, line, &mut pack)?;
            at += length;
        }
        self.pending.drain(..at);
        Ok(pack)
    }

    /// Checks at the end of the response that the pack is complete.
    pub fn finish(&self) -> Result<(), UploadPackError> {
        if self.state == State::Ended {
            Ok(())
        } else {
            Err(UploadPackError::Incomplete)
        }
    }
}

fn read_line(
    state: State,
    line: PktLine<'_>,
    pack: &mut Vec<u8>,
) -> Result<State, UploadPackError> {
    match (state, line) {
        (State::Sections, PktLine::Data(data)) => match pkt_line::chomp(data) {
            b"packfile" => Ok(State::Pack),
            text if text.starts_with(b"ERR ") => Err(UploadPackError::Refused),
            // The shallow commits, which the request causes.
            _ => Ok(State::Sections),
        },
        (State::Sections, PktLine::Other) => Ok(State::Sections),
        (State::Sections, PktLine::Flush) => Err(UploadPackError::Unexpected),
        (State::Pack, PktLine::Data([1, data @ ..])) => {
            pack.extend_from_slice(data);
            Ok(State::Pack)
        }
        (State::Pack, PktLine::Data([2, ..])) => Ok(State::Pack),
        (State::Pack, PktLine::Data([3, ..])) => Err(UploadPackError::Refused),
        (State::Pack, PktLine::Flush) => Ok(State::Ended),
        (State::Pack, PktLine::Data(_) | PktLine::Other) | (State::Ended, _) => {
            Err(UploadPackError::Unexpected)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const A: &str = "1111111111111111111111111111111111111111";
    const B: &str = "2222222222222222222222222222222222222222";

    fn lines(all: &[&[u8]]) -> Vec<u8> {
        let mut out = Vec::new();
        for data in all {
            match *data {
                b"" => pkt_line::flush(&mut out),
                b"0001" => out.extend_from_slice(b"0001"),
                data => pkt_line::write(&mut out, data),
            }
        }
        out
    }

    #[test]
    fn ls_refs_request_and_response_match_the_protocol() {
        let names: [&[u8]; 1] = [b"refs/heads/a"];
        let request = ls_refs_request(ObjectFormat::Sha256, names.into_iter());
        let text = String::from_utf8_lossy(&request);
        assert!(text.starts_with("0014command=ls-refs\n"), "{text}");
        assert!(text.contains("object-format=sha256\n0001") && text.ends_with("a\n0000"));
        let short = ls_refs_request(ObjectFormat::Sha1, std::iter::empty());
        assert!(!String::from_utf8_lossy(&short).contains("object-format"));

        let head = format!("{A} HEAD symref-target:refs/heads/main\n");
        let branch = format!("{B} refs/heads/a\n");
        let response = lines(&[
            head.as_bytes(),
            branch.as_bytes(),
            b"unborn refs/heads/b\n",
            b"",
        ]);
        let read = parse_refs(&response).unwrap();
        assert_eq!(read.len(), 2);
        assert_eq!(read[&b"HEAD"[..]].to_string(), A);
        assert_eq!(read[&b"refs/heads/a"[..]].to_string(), B);
        for (response, expected) in [
            (&response[..20], UploadPackError::Incomplete),
            (b"", UploadPackError::Incomplete),
            (b"0001", UploadPackError::Unexpected),
            (b"<html>", UploadPackError::PktLine(pkt_line::PktLineError)),
            (&lines(&[b"ERR no\n"]), UploadPackError::Refused),
            (&lines(&[b"x\n"]), UploadPackError::Unexpected),
        ] {
            assert_eq!(parse_refs(response), Err(expected));
        }
    }

    fn extract(response: &[u8], piece: usize) -> Result<Vec<u8>, UploadPackError> {
        let mut extractor = PackExtractor::default();
        let mut pack = Vec::new();
        for piece in response.chunks(piece) {
            pack.extend(extractor.feed(piece)?);
        }
        extractor.finish()?;
        Ok(pack)
    }

    #[test]
    fn pack_is_extracted_from_the_response() {
        let want = ObjectId::parse(A.as_bytes()).unwrap();
        let request = fetch_trees_request(ObjectFormat::Sha1, &[want]);
        let text = String::from_utf8_lossy(&request);
        for part in [
            "filter blob:none\n",
            "deepen 1\n",
            &format!("want {A}\n"),
            "done\n0000",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        let shallow = format!("shallow {A}\n");
        let response = lines(&[
            b"shallow-info\n",
            shallow.as_bytes(),
            b"0001",
            b"packfile\n",
            b"\x01PA",
            b"\x02working\n",
            b"\x01CK",
            b"",
        ]);
        assert_eq!(extract(&response, 5), Ok(b"PACK".to_vec()));
        assert_eq!(
            extract(&response[..response.len() - 4], 5),
            Err(UploadPackError::Incomplete)
        );
        assert_eq!(
            extract(&lines(&[b"ERR no\n"]), 5),
            Err(UploadPackError::Refused)
        );
        let failed = lines(&[b"packfile\n", b"\x03no\n", b""]);
        assert_eq!(extract(&failed, 5), Err(UploadPackError::Refused));
        assert_eq!(extract(&lines(&[b""]), 5), Err(UploadPackError::Unexpected));
        let more = [response.as_slice(), b"0000"].concat();
        assert_eq!(extract(&more, 5), Err(UploadPackError::Unexpected));
    }

    proptest! {
        #[test]
        fn arbitrary_response_never_panics(
            bytes in proptest::collection::vec(any::<u8>(), 0..100), piece in 1..20usize,
        ) {
            let _refs = parse_refs(&bytes);
            prop_assert_eq!(extract(&bytes, piece), extract(&bytes, 200));
        }
    }
}
