//! Git push reports (`report-status`): writes the report of a refused push, and reads upstream's
//! report of a forwarded one.

use std::collections::BTreeSet;

use super::pkt_line::{self, PktLine};
use super::push::PushCapabilities;

/// Content type of a receive-pack response.
pub const CONTENT_TYPE: &str = "application/x-git-receive-pack-result";

/// Side-band of the report.
const BAND_REPORT: u8 = 1;

/// Side-band of messages for the user.
const BAND_MESSAGES: u8 = 2;

/// Writes a report that rejects every ref. None if the client did not request a report: such a
/// client would take any response for a success.
pub fn write_rejection<'a>(
    capabilities: PushCapabilities,
    messages: &[String],
    refs: impl Iterator<Item = (&'a [u8], &'a str)>,
) -> Option<Vec<u8>> {
    if !capabilities.report {
        return None;
    }
    let mut report = Vec::new();
    pkt_line::write(&mut report, b"unpack ok\n");
    for (name, message) in refs {
        pkt_line::write(
            &mut report,
            &[b"ng ", name, b" ", message.as_bytes(), b"\n"].concat(),
        );
    }
    pkt_line::flush(&mut report);
    if !capabilities.side_band {
        return Some(report);
    }
    let mut response = Vec::new();
    for message in messages {
        write_message(&mut response, message);
    }
    for piece in report.chunks(pkt_line::MAX_DATA - 1) {
        pkt_line::write(&mut response, &[&[BAND_REPORT][..], piece].concat());
    }
    pkt_line::flush(&mut response);
    Some(response)
}

/// Writes a message for the user. Git shows it after `remote: `.
pub fn write_message(out: &mut Vec<u8>, message: &str) {
    for text in message.lines() {
        pkt_line::write(
            out,
            &[&[BAND_MESSAGES][..], b"palisade: ", text.as_bytes(), b"\n"].concat(),
        );
    }
}

/// Reads upstream's response to a push while it is forwarded.
#[derive(Debug)]
pub struct ReportReader {
    side_band: bool,
    /// Unparsed bytes of the side-band stream.
    band_buffer: Vec<u8>,
    /// Unparsed bytes of the report in that stream.
    report_buffer: Vec<u8>,
    unpacked: bool,
    accepted: BTreeSet<Vec<u8>>,
    rejected: bool,
    /// Whether the response cannot be parsed any further.
    is_unreadable: bool,
}

/// Maximum number of accepted refs that are kept: more than a push may have.
const MAX_REFS: usize = 10_000;

impl ReportReader {
    /// A reader for the response to a push with these capabilities.
    pub fn new(capabilities: PushCapabilities) -> Self {
        Self {
            side_band: capabilities.side_band,
            band_buffer: Vec::new(),
            report_buffer: Vec::new(),
            unpacked: false,
            accepted: BTreeSet::new(),
            rejected: false,
            is_unreadable: !capabilities.report,
        }
    }

    /// Takes the next bytes.
    pub fn feed(&mut self, bytes: &[u8]) {
        if self.is_unreadable {
            return;
        }
        if self.side_band {
            self.band_buffer.extend_from_slice(bytes);
            let mut band = std::mem::take(&mut self.band_buffer);
            let read = for_each_line(&band, |line| self.read_band(line));
            self.keep_rest(&mut band, read, true);
        } else {
            self.report_buffer.extend_from_slice(bytes);
        }
        let mut report = std::mem::take(&mut self.report_buffer);
        let read = for_each_line(&report, |line| self.read_report_line(line));
        self.keep_rest(&mut report, read, false);
    }

    /// The refs that upstream updated.
    pub fn accepted(&self) -> &BTreeSet<Vec<u8>> {
        &self.accepted
    }

    /// Whether upstream failed to unpack the push or rejected one of its refs.
    pub fn is_rejected(&self) -> bool {
        self.rejected
    }

    fn keep_rest(&mut self, bytes: &mut Vec<u8>, read: Option<usize>, is_band: bool) {
        match read {
            Some(read) => {
                bytes.drain(..read);
                let buffer = if is_band {
                    &mut self.band_buffer
                } else {
                    &mut self.report_buffer
                };
                *buffer = std::mem::take(bytes);
            }
            None => self.is_unreadable = true,
        }
    }

    fn read_band(&mut self, line: PktLine<'_>) {
        if let PktLine::Data([BAND_REPORT, data @ ..]) = line {
            self.report_buffer.extend_from_slice(data);
        }
    }

    fn read_report_line(&mut self, line: PktLine<'_>) {
        let PktLine::Data(data) = line else { return };
        let text = pkt_line::chomp(data);
        if text == b"unpack ok" {
            self.unpacked = true;
        } else if text.starts_with(b"unpack ") || text.starts_with(b"ng ") {
            self.rejected = true;
        } else if let Some(name) = text.strip_prefix(b"ok ")
            && self.unpacked
            && self.accepted.len() < MAX_REFS
        {
            self.accepted.insert(name.to_vec());
        }
    }
}

/// Calls `take` for every complete pkt-line at the beginning of `bytes`. Returns the number of
/// bytes read, or none if a line is invalid.
fn for_each_line(bytes: &[u8], mut take: impl FnMut(PktLine<'_>)) -> Option<usize> {
    let mut at = 0;
    while let Some((line, length)) = pkt_line::first(bytes.get(at..)?).ok()? {
        take(line);
        at += length;
    }
    Some(at)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const REPORT_AND_SIDE_BAND: PushCapabilities = PushCapabilities {
        report: true,
        side_band: true,
        atomic: false,
        options: false,
    };
    const REPORT_ONLY: PushCapabilities = PushCapabilities {
        side_band: false,
        ..REPORT_AND_SIDE_BAND
    };

    fn write_refusal(capabilities: PushCapabilities) -> Option<Vec<u8>> {
        let refs: [(&[u8], &str); 2] = [(b"refs/heads/a", "no"), (b"refs/heads/\xff", "nor this")];
        let messages = ["One.\nTwo.".to_owned()];
        write_rejection(capabilities, &messages, refs.into_iter())
    }

    #[test]
    fn refusal_is_a_valid_git_report() {
        let bare = b"000eunpack ok\n0017ng refs/heads/a no\n001dng refs/heads/\xff nor this\n0000";
        assert_eq!(write_refusal(REPORT_ONLY).unwrap(), bare);
        let banded = [
            &b"0014\x02palisade: One.\n0014\x02palisade: Two.\n"[..],
            b"004b\x01",
            bare,
            b"0000",
        ]
        .concat();
        assert_eq!(
            String::from_utf8_lossy(&write_refusal(REPORT_AND_SIDE_BAND).unwrap()),
            String::from_utf8_lossy(&banded)
        );
        assert_eq!(write_refusal(PushCapabilities::default()), None);
    }

    #[test]
    fn long_report_is_split_into_valid_pkt_lines() {
        let names: Vec<String> = (0..5_000).map(|n| format!("refs/heads/{n}")).collect();
        let refs = names.iter().map(|name| (name.as_bytes(), "no"));
        let answer = write_rejection(REPORT_AND_SIDE_BAND, &[], refs).unwrap();
        let mut report = Vec::new();
        let read = for_each_line(&answer, |line| {
            if let PktLine::Data([BAND_REPORT, data @ ..]) = line {
                report.extend_from_slice(data);
            }
        });
        assert_eq!(read, Some(answer.len()));
        let mut refused = 0;
        let read = for_each_line(&report, |line| {
            refused += usize::from(matches!(line, PktLine::Data(data) if data.starts_with(b"ng ")));
        });
        assert_eq!((read, refused), (Some(report.len()), 5_000));
    }

    fn report(lines: &[&str]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for text in lines {
            pkt_line::write(&mut bytes, text.as_bytes());
        }
        pkt_line::flush(&mut bytes);
        bytes
    }

    fn in_side_band(report: &[u8], piece: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        pkt_line::write(&mut bytes, b"\x02hello\n");
        for piece in report.chunks(piece) {
            pkt_line::write(&mut bytes, &[&[BAND_REPORT][..], piece].concat());
        }
        pkt_line::flush(&mut bytes);
        bytes
    }

    #[test]
    fn push_with_failed_unpack_or_rejected_ref_is_rejected() {
        for (lines, rejected) in [
            (&["unpack ok\n", "ok refs/heads/a\n"][..], false),
            (
                &["unpack ok\n", "ok refs/heads/a\n", "ng refs/heads/b no\n"],
                true,
            ),
            (&["unpack disk full\n"], true),
            (&[], false),
        ] {
            let mut reader = ReportReader::new(REPORT_ONLY);
            reader.feed(&report(lines));
            assert_eq!(reader.is_rejected(), rejected, "{lines:?}");
        }
    }

    fn read(capabilities: PushCapabilities, bytes: &[u8], piece: usize) -> Vec<String> {
        let mut reader = ReportReader::new(capabilities);
        for piece in bytes.chunks(piece) {
            reader.feed(piece);
        }
        let names = reader.accepted().iter();
        names
            .map(|name| String::from_utf8_lossy(name).into_owned())
            .collect()
    }

    #[test]
    fn only_refs_that_upstream_updated_are_accepted() {
        let whole = report(&["unpack ok\n", "ok refs/heads/a\n", "ng refs/heads/b no\n"]);
        assert_eq!(read(REPORT_ONLY, &whole, 7), ["refs/heads/a"]);
        assert_eq!(
            read(REPORT_AND_SIDE_BAND, &in_side_band(&whole, 9), 5),
            ["refs/heads/a"]
        );
        let failed = report(&["unpack disk full\n", "ok refs/heads/a\n"]);
        let expected: [&str; 0] = [];
        assert_eq!(read(REPORT_ONLY, &failed, 100), expected);
        assert_eq!(read(PushCapabilities::default(), &whole, 100), expected);
        assert_eq!(
            read(REPORT_AND_SIDE_BAND, b"<html>ok refs/heads/a", 100),
            expected
        );
        // Text on the side-band of messages is no report.
        let mut message_only = Vec::new();
        pkt_line::write(
            &mut message_only,
            b"\x02000eunpack ok\n0014ok refs/heads/a\n",
        );
        assert_eq!(read(REPORT_AND_SIDE_BAND, &message_only, 100), expected);
    }

    proptest! {
        #[test]
        fn result_does_not_depend_on_chunk_boundaries(piece in 1..80usize, band in 1..80usize) {
            let lines = ["unpack ok\n", "ok refs/heads/a\n", "option refname x\n", "ok refs/tags/b\n"];
            let bytes = in_side_band(&report(&lines), band);
            let accepted = read(REPORT_AND_SIDE_BAND, &bytes, piece);
            prop_assert_eq!(accepted, ["refs/heads/a", "refs/tags/b"]);
        }
    }
}
