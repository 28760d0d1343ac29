//! The output of grep: blocks of lines sorted by path, within the size limit.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

use crate::request::{GrepDetails, GrepResult};
use crate::truncation::{Bounds, MAX_BYTES, TextHead, as_u64};

/// Maximum number of displayed characters of a line.
const MAX_LINE_CHARS: usize = 500;

/// Number of bytes of a line that always contain `MAX_LINE_CHARS` characters and show whether the
/// line is longer.
pub(super) const MAX_LINE_BYTES: usize = 4 * (MAX_LINE_CHARS + 1) + 2;

/// The lines of one file.
#[derive(Debug, Default)]
pub(super) struct Block {
    /// The first lines, up to the size limit.
    text: String,
    lines: u64,
    bytes: u64,
    /// Whether long lines were shortened.
    has_short_lines: bool,
}

impl Block {
    pub(super) fn is_empty(&self) -> bool {
        self.lines == 0
    }

    /// Adds `path:12: line` for a match, `path-12- line` for context.
    pub(super) fn push(&mut self, path: &str, sign: char, number: u64, line: &[u8]) {
        let shown = line
            .get(..line.len().min(MAX_LINE_BYTES))
            .unwrap_or_default();
        let text = String::from_utf8_lossy(shown);
        let text = text.trim_end_matches(['\n', '\r']);
        let start = self.text.len();
        if self.lines > 0 {
            self.text.push('\n');
        }
        let _ = write!(self.text, "{path}{sign}{number}{sign} ");
        match text.char_indices().nth(MAX_LINE_CHARS) {
            None => self.text.extend(text.chars().filter(|c| *c != '\r')),
            Some((end, _)) => {
                let kept = text.get(..end).unwrap_or_default();
                self.text.extend(kept.chars().filter(|c| *c != '\r'));
                self.text.push_str("... [truncated]");
                self.has_short_lines = true;
            }
        }
        self.lines += 1;
        self.bytes += as_u64(self.text.len() - start);
        // Lines after the size limit are never shown.
        if as_u64(start) > MAX_BYTES {
            self.text.truncate(start);
        }
    }
}

/// The blocks of all files.
#[derive(Debug, Default)]
pub(super) struct Listing {
    blocks: BTreeMap<PathBuf, String>,
    kept: u64,
    lines: u64,
    bytes: u64,
    /// Whether long lines were shortened.
    has_short_lines: bool,
}

impl Listing {
    pub(super) fn add(&mut self, path: PathBuf, block: Block) {
        self.lines += block.lines;
        self.bytes += block.bytes + u64::from(self.bytes > 0);
        self.has_short_lines |= block.has_short_lines;
        self.kept += as_u64(block.text.len());
        self.blocks.insert(path, block.text);
        // Drops the last blocks while the remaining ones exceed the limit.
        while let Some(last) = self.blocks.last_entry() {
            let length = as_u64(last.get().len());
            if self.kept - length <= MAX_BYTES {
                break;
            }
            self.kept -= length;
            last.remove();
        }
    }

    /// The displayed text; `limit` is set if the search stopped at that number of matches.
    pub(super) fn result(self, limit: Option<u64>) -> GrepResult {
        if self.lines == 0 {
            return GrepResult {
                content: "No matches found".to_owned(),
                details: None,
            };
        }
        let blocks: Vec<String> = self.blocks.into_values().collect();
        let head = TextHead {
            kept: blocks.join("\n").into_bytes(),
            total_lines: self.lines,
            total_bytes: self.bytes,
        };
        let cut = head.head(Bounds {
            lines: u64::from(u32::MAX),
            bytes: MAX_BYTES,
        });
        let mut content = cut.content.clone();
        let mut notes = Vec::new();
        if let Some(limit) = limit {
            notes.push(format!(
                "{limit} matches limit reached. Use limit={} for more, or refine pattern",
                limit.saturating_mul(2)
            ));
        }
        if cut.truncated {
            notes.push(format!("{}KB limit reached", MAX_BYTES / 1024));
        }
        if self.has_short_lines {
            notes.push(format!(
                "Some lines truncated to {MAX_LINE_CHARS} chars. Use read tool to see full lines"
            ));
        }
        if !notes.is_empty() {
            let _ = write!(content, "\n\n[{}]", notes.join(". "));
        }
        let details = GrepDetails {
            match_limit_reached: limit,
            truncation: cut.truncated.then_some(cut),
            lines_truncated: self.has_short_lines,
        };
        GrepResult {
            content,
            details: (!notes.is_empty()).then_some(details),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(path: &str, lines: &[(char, u64, &[u8])]) -> Block {
        let mut block = Block::default();
        for (sign, number, line) in lines {
            block.push(path, *sign, *number, line);
        }
        block
    }

    #[test]
    fn line_has_path_number_and_match_sign() {
        let block = block(
            "f",
            &[('-', 11, b"a\n"), (':', 12, b"x\r\n"), ('-', 13, b"\xff")],
        );
        assert_eq!(block.text, "f-11- a\nf:12: x\nf-13- \u{fffd}");
    }

    #[test]
    fn long_line_is_truncated_with_a_note() {
        let mut listing = Listing::default();
        let long = "ä".repeat(501);
        listing.add("f".into(), block("f", &[(':', 1, long.as_bytes())]));
        let result = listing.result(None);
        let shown = format!("f:1: {}... [truncated]\n\n[Some lines", "ä".repeat(500));
        assert!(result.content.starts_with(&shown));
        assert!(result.details.unwrap().lines_truncated);
        let just = block("f", &[(':', 1, "ä".repeat(500).as_bytes())]);
        assert!(!just.has_short_lines);
    }

    #[test]
    fn first_files_by_path_are_shown_and_all_counted() {
        let line = [b'x'; 400];
        let mut listing = Listing::default();
        for number in (0..1000).rev() {
            let path = format!("f{number:03}");
            listing.add(path.clone().into(), block(&path, &[(':', 1, &line)]));
            assert!(listing.kept <= 2 * MAX_BYTES);
        }
        let result = listing.result(Some(1000));
        assert!(result.content.starts_with("f000:1: x"));
        let details = result.details.unwrap();
        let cut = details.truncation.unwrap();
        assert_eq!((cut.total_lines, cut.total_bytes), (1000, 409 * 1000 - 1));
        assert_eq!(cut.output_lines, 125);
        assert_eq!(details.match_limit_reached, Some(1000));
    }
}
