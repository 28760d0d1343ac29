//! Truncation of a text to its first or last whole lines, and a description of what was cut.

use serde::{Deserialize, Serialize};

/// Default maximum number of lines of a tool's output.
pub const MAX_LINES: u64 = 2000;

/// Default maximum size of a tool's output in bytes.
pub const MAX_BYTES: u64 = 50 * 1024;

/// A truncated text, and what was cut.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Truncation {
    /// The remaining text.
    pub content: String,
    /// Whether the text was truncated.
    pub truncated: bool,
    /// The limit that was exceeded.
    pub truncated_by: Option<Limit>,
    /// Lines before truncation.
    pub total_lines: u64,
    /// Bytes before truncation.
    pub total_bytes: u64,
    /// Remaining lines.
    pub output_lines: u64,
    /// Remaining bytes.
    pub output_bytes: u64,
    /// Whether the start of the last line was cut; only for a tail.
    pub last_line_partial: bool,
    /// Whether the first line alone exceeds the limit; only for a head.
    pub first_line_exceeds_limit: bool,
    /// The limit of lines.
    pub max_lines: u64,
    /// The limit of bytes.
    pub max_bytes: u64,
}

/// The limit that truncated a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Limit {
    /// The limit of lines.
    Lines,
    /// The limit of bytes.
    Bytes,
}

/// Limits of lines and bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) lines: u64,
    pub(crate) bytes: u64,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            lines: MAX_LINES,
            bytes: MAX_BYTES,
        }
    }
}

/// The first bytes of a text, and its total size.
#[derive(Debug)]
pub(crate) struct TextHead {
    /// The whole text, or more bytes than the bounds allow.
    pub(crate) kept: Vec<u8>,
    pub(crate) total_lines: u64,
    pub(crate) total_bytes: u64,
}

impl TextHead {
    /// A whole text.
    pub(crate) fn whole(text: String) -> Self {
        let total_lines = 1 + count_lines(text.as_bytes());
        Self {
            total_bytes: as_u64(text.len()),
            total_lines,
            kept: text.into_bytes(),
        }
    }

    /// The first whole lines. Invalid UTF-8 becomes replacement characters, as in the original
    /// sidecar.
    pub(crate) fn head(self, bounds: Bounds) -> Truncation {
        let is_whole = as_u64(self.kept.len()) == self.total_bytes;
        let text = match String::from_utf8(self.kept) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        };
        // Replacement characters can make the text longer.
        let total_bytes = self.total_bytes.max(as_u64(text.len()));
        let mut cut = Truncation {
            content: String::new(),
            truncated: true,
            truncated_by: Some(Limit::Bytes),
            total_lines: self.total_lines,
            total_bytes,
            output_lines: 0,
            output_bytes: 0,
            last_line_partial: false,
            first_line_exceeds_limit: false,
            max_lines: bounds.lines,
            max_bytes: bounds.bytes,
        };
        if is_whole && self.total_lines <= bounds.lines && total_bytes <= bounds.bytes {
            cut.truncated = false;
            cut.truncated_by = None;
            cut.output_lines = cut.total_lines;
            cut.output_bytes = total_bytes;
            cut.content = text;
            return cut;
        }
        let mut end = 0;
        for line in text.split('\n') {
            if cut.output_lines >= bounds.lines {
                break;
            }
            let next = end + line.len() + usize::from(cut.output_lines > 0);
            if as_u64(next) > bounds.bytes {
                break;
            }
            end = next;
            cut.output_lines += 1;
        }
        if cut.output_lines >= bounds.lines {
            cut.truncated_by = Some(Limit::Lines);
        }
        cut.first_line_exceeds_limit = cut.output_lines == 0;
        cut.content = text.get(..end).unwrap_or_default().to_owned();
        cut.output_bytes = as_u64(end);
        cut
    }
}

/// The last lines of a growing text.
#[derive(Debug)]
pub(crate) struct Tail {
    kept: String,
    lines: u64,
    bytes: u64,
    bounds: Bounds,
}

impl Default for Tail {
    fn default() -> Self {
        Self {
            kept: String::new(),
            lines: 1,
            bytes: 0,
            bounds: Bounds::default(),
        }
    }
}

impl Tail {
    /// Appends text.
    pub(crate) fn push(&mut self, text: &str) {
        self.lines += count_lines(text.as_bytes());
        self.bytes += as_u64(text.len());
        self.kept.push_str(text);
        let most = usize::try_from(self.bounds.bytes).unwrap_or(usize::MAX);
        // Trims rarely, so that every byte is moved only once or twice.
        if self.kept.len() > most.saturating_mul(2) {
            let cut = self.kept.floor_char_boundary(self.kept.len() - most - 1);
            self.kept.drain(..cut);
        }
    }

    /// The last lines, and the truncation, if any.
    pub(crate) fn truncate(self) -> (String, Option<Truncation>) {
        let bounds = self.bounds;
        if self.lines <= bounds.lines && self.bytes <= bounds.bytes {
            return (self.kept, None);
        }
        let most = usize::try_from(bounds.bytes).unwrap_or(usize::MAX);
        let (mut start, mut lines, mut by) = (self.kept.len(), 0, Limit::Lines);
        let mut partial = false;
        for line in self.kept.rsplit('\n') {
            if lines >= bounds.lines {
                break;
            }
            let next = (start - usize::from(lines > 0)).saturating_sub(line.len());
            if self.kept.len() - next > most {
                by = Limit::Bytes;
                if lines == 0 {
                    start = self.kept.ceil_char_boundary(self.kept.len() - most);
                    (lines, partial) = (1, true);
                }
                break;
            }
            start = next;
            lines += 1;
        }
        let content = self.kept.get(start..).unwrap_or_default().to_owned();
        let truncation = Truncation {
            truncated: true,
            truncated_by: Some(by),
            total_lines: self.lines,
            total_bytes: self.bytes,
            output_lines: lines,
            output_bytes: as_u64(content.len()),
            last_line_partial: partial,
            first_line_exceeds_limit: false,
            max_lines: bounds.lines,
            max_bytes: bounds.bytes,
            content: content.clone(),
        };
        (content, Some(truncation))
    }
}

pub(crate) fn count_lines(bytes: &[u8]) -> u64 {
    as_u64(memchr::memchr_iter(b'\n', bytes).count())
}

pub(crate) fn as_u64(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(text: &str, lines: u64, bytes: u64) -> Truncation {
        TextHead::whole(text.to_owned()).head(Bounds { lines, bytes })
    }

    #[test]
    fn head_holds_whole_lines() {
        for (text, lines, bytes, content, by) in [
            ("", 1, 0, "", None),
            ("a\nb", 2, 3, "a\nb", None),
            ("a\nb\n", 2, 9, "a\nb", Some(Limit::Lines)),
            ("a\nb", 1, 9, "a", Some(Limit::Lines)),
            ("a\nbc", 9, 3, "a", Some(Limit::Bytes)),
            ("a\nbc", 9, 2, "a", Some(Limit::Bytes)),
            ("abc\nd", 9, 2, "", Some(Limit::Bytes)),
            ("äö\nü", 9, 4, "äö", Some(Limit::Bytes)),
        ] {
            let cut = head(text, lines, bytes);
            assert_eq!(
                (cut.content.as_str(), cut.truncated_by, cut.truncated),
                (content, by, by.is_some()),
                "{text:?}"
            );
            assert_eq!(cut.total_bytes, as_u64(text.len()));
            assert_eq!(cut.output_bytes, as_u64(content.len()));
            assert_eq!(cut.total_lines, as_u64(text.split('\n').count()));
        }
        assert!(head("abc\nd", 9, 2).first_line_exceeds_limit);
        assert_eq!(head("abc\nd", 9, 2).output_lines, 0);
    }

    #[test]
    fn invalid_bytes_count_as_their_replacement_characters() {
        let kept = b"a\n\xff\xff".to_vec();
        let head = TextHead {
            total_lines: 2,
            total_bytes: 4,
            kept,
        };
        let cut = head.head(Bounds { lines: 9, bytes: 5 });
        assert_eq!((cut.content.as_str(), cut.total_bytes), ("a", 8));
    }

    fn tail(text: &str, lines: u64, bytes: u64) -> (String, Option<Truncation>) {
        let mut tail = Tail {
            bounds: Bounds { lines, bytes },
            ..Tail::default()
        };
        // One character at a time, so that the kept text is trimmed on the way.
        let mut buffer = [0; 4];
        for character in text.chars() {
            tail.push(character.encode_utf8(&mut buffer));
        }
        tail.truncate()
    }

    #[test]
    fn tail_holds_the_last_whole_lines() {
        for (text, lines, bytes, content, by) in [
            ("a\nb", 2, 3, "a\nb", None),
            ("a\nb\nc", 2, 9, "b\nc", Some(Limit::Lines)),
            ("aaa\nbb\nc", 9, 4, "bb\nc", Some(Limit::Bytes)),
            ("aaa\nbb\nc", 9, 3, "c", Some(Limit::Bytes)),
            ("aaa\nbbbbbbb", 9, 3, "bbb", Some(Limit::Bytes)),
            ("aaa\näöüä", 9, 3, "ä", Some(Limit::Bytes)),
            ("aaaaaaaaaaaaa\n", 9, 3, "", Some(Limit::Bytes)),
        ] {
            let (kept, truncation) = tail(text, lines, bytes);
            assert_eq!(kept, content, "{text:?}");
            assert_eq!(truncation.as_ref().and_then(|cut| cut.truncated_by), by);
            if let Some(cut) = truncation {
                assert_eq!(cut.total_bytes, as_u64(text.len()));
                assert_eq!(cut.total_lines, as_u64(text.split('\n').count()));
            }
        }
        let (_, cut) = tail("aaa\nbbbbbbb", 9, 3);
        assert!(cut.unwrap().last_line_partial);
    }

    #[test]
    fn tail_memory_is_bounded() {
        let mut tail = Tail::default();
        let line = "0123456789abcde\n".repeat(1024);
        for _ in 0..1024 {
            tail.push(&line);
            assert!(tail.kept.len() <= 3 * 50 * 1024 + line.len());
        }
        let (kept, cut) = tail.truncate();
        let cut = cut.unwrap();
        assert!(kept.ends_with("abcde\n"));
        assert_eq!((cut.total_lines, cut.output_lines), ((1 << 20) + 1, 2000));
    }
}
