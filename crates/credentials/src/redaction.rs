//! Redacts a stream: replaces each match by as many other bytes, so that lengths stay the same.
//!
//! A match may be split between chunks. Only bytes at the end of a chunk that could begin a match
//! are held back, so that a stream of events is not delayed.

use std::ops::Range;

use aho_corasick::AhoCorasick;
use bytes::{Bytes, BytesMut};
use zeroize::Zeroizing;

use crate::placeholder::{CORE_LENGTH, PlaceholderFinder, begins_core};

/// Written over the marker and tag of a placeholder.
const OVER_PLACEHOLDER: &[u8; CORE_LENGTH] = b"REDACTED-BY-GATE";

/// What a [`StreamRedactor`] replaces.
pub enum Redacted {
    /// Placeholders of any sandbox.
    Placeholders(Box<PlaceholderFinder>),
    /// Exact texts.
    Texts(SecretTexts),
}

/// Exact texts to replace.
pub struct SecretTexts {
    automaton: AhoCorasick,
    texts: Vec<Zeroizing<Vec<u8>>>,
}

impl SecretTexts {
    /// The texts; `None` if there is no text, or the search cannot be built.
    pub fn new(texts: Vec<Zeroizing<Vec<u8>>>) -> Option<Self> {
        let automaton = AhoCorasick::builder()
            .match_kind(aho_corasick::MatchKind::LeftmostLongest)
            .build(texts.iter().map(|text| text.as_slice()))
            .ok()?;
        (!texts.is_empty()).then_some(Self { automaton, texts })
    }

    /// Whether `text` contains one of the texts.
    pub fn is_in(&self, text: &[u8]) -> bool {
        self.automaton.is_match(text)
    }

    /// `text` with each match overwritten.
    pub fn redact(&self, text: &[u8]) -> Vec<u8> {
        let mut text = text.to_vec();
        let mut from = 0;
        while let Some(found) = self.find(&text, from) {
            overwrite(&mut text, &found, b"*");
            from = found.end;
        }
        text
    }

    fn find(&self, text: &[u8], from: usize) -> Option<Range<usize>> {
        let found = self.automaton.find(text.get(from..)?)?;
        Some(from + found.start()..from + found.end())
    }
}

impl Redacted {
    fn find(&self, text: &[u8], from: usize) -> Option<Range<usize>> {
        match self {
            Redacted::Placeholders(finder) => {
                let found = finder.find(text.get(from..)?)?;
                Some(from + found.start..from + found.end)
            }
            Redacted::Texts(texts) => texts.find(text, from),
        }
    }

    /// Whether more bytes after `tail` could make it a match.
    fn begins_match(&self, tail: &[u8]) -> bool {
        match self {
            Redacted::Placeholders(_) => begins_core(tail),
            Redacted::Texts(texts) => {
                let longer =
                    |text: &Zeroizing<Vec<u8>>| text.len() > tail.len() && text.starts_with(tail);
                texts.texts.iter().any(longer)
            }
        }
    }

    fn max_length(&self) -> usize {
        match self {
            Redacted::Placeholders(_) => CORE_LENGTH,
            Redacted::Texts(texts) => {
                let lengths = texts.texts.iter().map(|text| text.len());
                lengths.max().unwrap_or_default()
            }
        }
    }

    fn replacement(&self) -> &'static [u8] {
        match self {
            Redacted::Placeholders(_) => OVER_PLACEHOLDER,
            Redacted::Texts(_) => b"*",
        }
    }
}

/// Redacts the chunks of one stream.
pub struct StreamRedactor {
    redacted: Redacted,
    /// The end of the last chunk, which may begin a match.
    held: BytesMut,
    /// How many matches were replaced.
    count: u32,
}

impl StreamRedactor {
    /// A redactor at the start of a stream.
    pub fn new(redacted: Redacted) -> Self {
        Self {
            redacted,
            held: BytesMut::new(),
            count: 0,
        }
    }

    /// How many bytes are held back.
    pub fn held_length(&self) -> u64 {
        u64::try_from(self.held.len()).unwrap_or_default()
    }

    /// How many matches were replaced so far.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// The next bytes to send after `chunk` has arrived.
    pub fn push(&mut self, chunk: Bytes) -> Bytes {
        let is_plain = self.held.is_empty()
            && self.redacted.find(&chunk, 0).is_none()
            && self.tail_start(&chunk) == chunk.len();
        if is_plain {
            return chunk;
        }
        let mut text = std::mem::take(&mut self.held);
        text.extend_from_slice(&chunk);
        let mut from = 0;
        while let Some(found) = self.redacted.find(&text, from) {
            overwrite(&mut text, &found, self.redacted.replacement());
            self.count = self.count.saturating_add(1);
            from = found.end;
        }
        let tail = self.tail_start(&text).max(from);
        self.held = text.split_off(tail);
        text.freeze()
    }

    /// The bytes that were held back, at the end of the stream.
    pub fn finish(&mut self) -> Bytes {
        std::mem::take(&mut self.held).freeze()
    }

    /// Where the part of `text` starts that must be held back.
    fn tail_start(&self, text: &[u8]) -> usize {
        let longest = self.redacted.max_length().saturating_sub(1);
        let first = text.len().saturating_sub(longest);
        let begins = |start: &usize| {
            let tail = text.get(*start..).unwrap_or_default();
            self.redacted.begins_match(tail)
        };
        (first..text.len()).find(begins).unwrap_or(text.len())
    }
}

/// Overwrites a range with a repeated pattern.
fn overwrite(text: &mut [u8], range: &Range<usize>, pattern: &[u8]) {
    let place = text.get_mut(range.clone()).unwrap_or_default();
    for (byte, new) in place.iter_mut().zip(pattern.iter().cycle()) {
        *byte = *new;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PLACEHOLDER: &str = "ghp_PALISADEABCD2345xyz";

    fn secret_texts(texts: &[&str]) -> Redacted {
        let texts = texts
            .iter()
            .map(|text| Zeroizing::new(text.as_bytes().to_vec()));
        Redacted::Texts(SecretTexts::new(texts.collect()).unwrap())
    }

    fn run(redacted: Redacted, chunks: &[&[u8]]) -> (String, u32) {
        let mut redactor = StreamRedactor::new(redacted);
        let mut sent = Vec::new();
        for chunk in chunks {
            sent.extend_from_slice(&redactor.push(Bytes::copy_from_slice(chunk)));
        }
        sent.extend_from_slice(&redactor.finish());
        (String::from_utf8(sent).unwrap(), redactor.count())
    }

    #[test]
    fn placeholder_is_overwritten_with_the_same_length() {
        let finder = Redacted::Placeholders(Box::default());
        let (sent, count) = run(finder, &[format!("a {PLACEHOLDER} b").as_bytes()]);
        assert_eq!(sent, "a ghp_REDACTED-BY-GATExyz b");
        assert_eq!(count, 1);
    }

    #[test]
    fn bytes_that_begin_no_match_are_not_held_back() {
        let mut redactor = StreamRedactor::new(secret_texts(&["hunter2"]));
        assert_eq!(
            redactor.push(Bytes::from_static(b"data: x\n\n")),
            "data: x\n\n"
        );
        assert_eq!(redactor.push(Bytes::from_static(b"say hunt")), "say ");
        assert_eq!(redactor.push(Bytes::from_static(b"ing")), "hunting");
        assert_eq!(redactor.finish(), "");
    }

    #[test]
    fn longest_text_is_overwritten() {
        let (sent, count) = run(secret_texts(&["abc", "abcdef"]), &[b"abcabcdefab"]);
        assert_eq!(sent, "*********ab");
        assert_eq!(count, 2);
    }

    proptest! {
        #[test]
        fn result_does_not_depend_on_the_split(
            before in "[ -~]{0,30}",
            after in "[ -~]{0,30}",
            cuts in proptest::collection::vec(0..80_usize, 0..6),
            is_placeholder: bool,
        ) {
            let text = match is_placeholder {
                true => format!("{before}{PLACEHOLDER}{after}"),
                false => format!("{before}hunter2hunter2{after}"),
            };
            let redacted = || match is_placeholder {
                true => Redacted::Placeholders(Box::default()),
                false => secret_texts(&["hunter2", "ter2h"]),
            };
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let chunks: Vec<&[u8]> = cuts.windows(2).map(|w| &text.as_bytes()[w[0]..w[1]]).collect();
            let (split, _) = run(redacted(), &chunks);
            prop_assert_eq!(split.len(), text.len());
            prop_assert!(!split.contains("hunter2"));
            prop_assert!(PlaceholderFinder::default().find(split.as_bytes()).is_none());
        }
    }
}
