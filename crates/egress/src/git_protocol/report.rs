//! What became of a push, in git's own words: written where we refuse, read where upstream
//! answers.

use std::collections::BTreeSet;

use super::line::{self, Line};
use super::push::Capabilities;

/// What the other end of a push hears in.
pub const CONTENT_TYPE: &str = "application/x-git-receive-pack-result";

/// The report itself.
const BAND_REPORT: u8 = 1;

/// Sentences for a person.
const BAND_TALK: u8 = 2;

/// Says no to every ref. None where the client does not want to hear what became of them:
/// it would take any answer for a yes.
pub fn refuse<'a>(
    capabilities: Capabilities,
    sentences: &[String],
    refs: impl Iterator<Item = (&'a [u8], &'a str)>,
) -> Option<Vec<u8>> {
    if !capabilities.report {
        return None;
    }
    let mut report = Vec::new();
    line::write(&mut report, b"unpack ok\n");
    for (name, why) in refs {
        line::write(
            &mut report,
            &[b"ng ", name, b" ", why.as_bytes(), b"\n"].concat(),
        );
    }
    line::flush(&mut report);
    if !capabilities.side_band {
        return Some(report);
    }
    let mut answer = Vec::new();
    for sentence in sentences {
        talk(&mut answer, sentence);
    }
    for piece in report.chunks(line::MOST_DATA - 1) {
        line::write(&mut answer, &[&[BAND_REPORT][..], piece].concat());
    }
    line::flush(&mut answer);
    Some(answer)
}

/// One sentence beside the report. Git shows it after `remote: `.
pub fn talk(out: &mut Vec<u8>, sentence: &str) {
    for text in sentence.lines() {
        line::write(
            out,
            &[&[BAND_TALK][..], b"palisade: ", text.as_bytes(), b"\n"].concat(),
        );
    }
}

/// Reads upstream's answer as it passes.
#[derive(Debug)]
pub struct Reader {
    side_band: bool,
    /// What is not read yet, of the answer and of the report in it.
    outer: Vec<u8>,
    inner: Vec<u8>,
    unpacked: bool,
    accepted: BTreeSet<Vec<u8>>,
    rejected: bool,
    /// Nothing that follows is understood.
    lost: bool,
}

/// How many refs are remembered: more than a push may have.
const MOST_REFS: usize = 10_000;

impl Reader {
    /// Reads the answer to a push with these capabilities.
    pub fn new(capabilities: Capabilities) -> Self {
        Self {
            side_band: capabilities.side_band,
            outer: Vec::new(),
            inner: Vec::new(),
            unpacked: false,
            accepted: BTreeSet::new(),
            rejected: false,
            lost: !capabilities.report,
        }
    }

    /// Takes the next bytes.
    pub fn feed(&mut self, bytes: &[u8]) {
        if self.lost {
            return;
        }
        if self.side_band {
            self.outer.extend_from_slice(bytes);
            let mut outer = std::mem::take(&mut self.outer);
            let read = each(&outer, |line| self.take_band(line));
            self.keep(&mut outer, read, true);
        } else {
            self.inner.extend_from_slice(bytes);
        }
        let mut inner = std::mem::take(&mut self.inner);
        let read = each(&inner, |line| self.take_line(line));
        self.keep(&mut inner, read, false);
    }

    /// The refs that upstream moved.
    pub fn accepted(&self) -> &BTreeSet<Vec<u8>> {
        &self.accepted
    }

    /// Whether upstream did not unpack the push, or did not move one of its refs.
    pub fn is_rejected(&self) -> bool {
        self.rejected
    }

    fn keep(&mut self, bytes: &mut Vec<u8>, read: Option<usize>, outer: bool) {
        match read {
            Some(read) => {
                bytes.drain(..read);
                let place = if outer {
                    &mut self.outer
                } else {
                    &mut self.inner
                };
                *place = std::mem::take(bytes);
            }
            None => self.lost = true,
        }
    }

    fn take_band(&mut self, line: Line<'_>) {
        if let Line::Data([BAND_REPORT, data @ ..]) = line {
            self.inner.extend_from_slice(data);
        }
    }

    fn take_line(&mut self, line: Line<'_>) {
        let Line::Data(data) = line else { return };
        let text = line::chomp(data);
        if text == b"unpack ok" {
            self.unpacked = true;
        } else if text.starts_with(b"unpack ") || text.starts_with(b"ng ") {
            self.rejected = true;
        } else if let Some(name) = text.strip_prefix(b"ok ")
            && self.unpacked
            && self.accepted.len() < MOST_REFS
        {
            self.accepted.insert(name.to_vec());
        }
    }
}

/// Reads whole lines from the beginning of `bytes`, and says how far they go; none where
/// there is something that is no line.
fn each(bytes: &[u8], mut take: impl FnMut(Line<'_>)) -> Option<usize> {
    let mut at = 0;
    while let Some((line, length)) = line::first(bytes.get(at..)?).ok()? {
        take(line);
        at += length;
    }
    Some(at)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BOTH: Capabilities = Capabilities {
        report: true,
        side_band: true,
        atomic: false,
        options: false,
    };
    const BARE: Capabilities = Capabilities {
        side_band: false,
        ..BOTH
    };

    fn refused(capabilities: Capabilities) -> Option<Vec<u8>> {
        let refs: [(&[u8], &str); 2] = [(b"refs/heads/a", "no"), (b"refs/heads/\xff", "nor this")];
        let sentences = ["One.\nTwo.".to_owned()];
        refuse(capabilities, &sentences, refs.into_iter())
    }

    #[test]
    fn a_refusal_reads_as_gits_own_report() {
        let bare = b"000eunpack ok\n0017ng refs/heads/a no\n001dng refs/heads/\xff nor this\n0000";
        assert_eq!(refused(BARE).unwrap(), bare);
        let banded = [
            &b"0014\x02palisade: One.\n0014\x02palisade: Two.\n"[..],
            b"004b\x01",
            bare,
            b"0000",
        ]
        .concat();
        assert_eq!(
            String::from_utf8_lossy(&refused(BOTH).unwrap()),
            String::from_utf8_lossy(&banded)
        );
        assert_eq!(refused(Capabilities::default()), None);
    }

    #[test]
    fn a_long_report_is_cut_into_lines_that_git_takes() {
        let names: Vec<String> = (0..5_000).map(|n| format!("refs/heads/{n}")).collect();
        let refs = names.iter().map(|name| (name.as_bytes(), "no"));
        let answer = refuse(BOTH, &[], refs).unwrap();
        let mut report = Vec::new();
        let read = each(&answer, |line| {
            if let Line::Data([BAND_REPORT, data @ ..]) = line {
                report.extend_from_slice(data);
            }
        });
        assert_eq!(read, Some(answer.len()));
        let mut refused = 0;
        let read = each(&report, |line| {
            refused += usize::from(matches!(line, Line::Data(data) if data.starts_with(b"ng ")));
        });
        assert_eq!((read, refused), (Some(report.len()), 5_000));
    }

    fn report(lines: &[&str]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for text in lines {
            line::write(&mut bytes, text.as_bytes());
        }
        line::flush(&mut bytes);
        bytes
    }

    fn banded(report: &[u8], piece: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        line::write(&mut bytes, b"\x02hello\n");
        for piece in report.chunks(piece) {
            line::write(&mut bytes, &[&[BAND_REPORT][..], piece].concat());
        }
        line::flush(&mut bytes);
        bytes
    }

    #[test]
    fn a_push_is_rejected_where_it_is_not_unpacked_or_a_ref_stays() {
        for (lines, rejected) in [
            (&["unpack ok\n", "ok refs/heads/a\n"][..], false),
            (
                &["unpack ok\n", "ok refs/heads/a\n", "ng refs/heads/b no\n"],
                true,
            ),
            (&["unpack disk full\n"], true),
            (&[], false),
        ] {
            let mut reader = Reader::new(BARE);
            reader.feed(&report(lines));
            assert_eq!(reader.is_rejected(), rejected, "{lines:?}");
        }
    }

    fn read(capabilities: Capabilities, bytes: &[u8], piece: usize) -> Vec<String> {
        let mut reader = Reader::new(capabilities);
        for piece in bytes.chunks(piece) {
            reader.feed(piece);
        }
        let names = reader.accepted().iter();
        names
            .map(|name| String::from_utf8_lossy(name).into_owned())
            .collect()
    }

    #[test]
    fn only_refs_that_upstream_moved_count() {
        let whole = report(&["unpack ok\n", "ok refs/heads/a\n", "ng refs/heads/b no\n"]);
        assert_eq!(read(BARE, &whole, 7), ["refs/heads/a"]);
        assert_eq!(read(BOTH, &banded(&whole, 9), 5), ["refs/heads/a"]);
        let failed = report(&["unpack disk full\n", "ok refs/heads/a\n"]);
        let expected: [&str; 0] = [];
        assert_eq!(read(BARE, &failed, 100), expected);
        assert_eq!(read(Capabilities::default(), &whole, 100), expected);
        assert_eq!(read(BOTH, b"<html>ok refs/heads/a", 100), expected);
        // Text on the progress band is no report.
        let mut spoken = Vec::new();
        line::write(&mut spoken, b"\x02000eunpack ok\n0014ok refs/heads/a\n");
        assert_eq!(read(BOTH, &spoken, 100), expected);
    }

    proptest! {
        #[test]
        fn however_an_answer_is_split_the_same_is_read(piece in 1..80usize, band in 1..80usize) {
            let lines = ["unpack ok\n", "ok refs/heads/a\n", "option refname x\n", "ok refs/tags/b\n"];
            let bytes = banded(&report(&lines), band);
            prop_assert_eq!(read(BOTH, &bytes, piece), ["refs/heads/a", "refs/tags/b"]);
        }
    }
}
