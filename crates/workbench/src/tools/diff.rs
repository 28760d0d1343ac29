//! The diff of an edit with line numbers: `-12 old`, `+12 new`, ` 11 unchanged`.

use std::fmt::Write;
use std::ops::Range;
use std::time::{Duration, Instant};

use memchr::{memchr, memrchr};
use similar::{Algorithm, ChangeTag, capture_diff_slices_deadline};

use crate::truncation::count_lines;

/// Number of unchanged lines shown before and after a change.
const CONTEXT: usize = 4;

/// Time limit of the diff algorithm.
const DEADLINE: Duration = Duration::from_millis(200);

/// The diff from `before` to `after`, where the `length` bytes of `before` at `at` were replaced.
///
/// The rest of the file is the same, so only the lines around the change are compared.
pub(super) fn numbered_diff(before: &[u8], after: &[u8], at: usize, length: usize) -> String {
    let start = line_start(before, at);
    let old = start..line_end(before, at + length);
    let new = start..after.len() + old.end - before.len();
    let first = usize::try_from(count_lines(slice(before, 0..start))).unwrap_or(usize::MAX);

    let above = lines_before(before, start);
    let mut shown: Vec<(char, usize, &[u8])> = Vec::new();
    for (index, line) in above.iter().enumerate() {
        shown.push((' ', first - above.len() + index + 1, line));
    }
    let old_lines = lines(slice(before, old.clone()));
    let new_lines = lines(slice(after, new));
    let deadline = Instant::now() + DEADLINE;
    let steps =
        capture_diff_slices_deadline(Algorithm::Myers, &old_lines, &new_lines, Some(deadline));
    let changes = steps
        .iter()
        .flat_map(|step| step.iter_changes(&old_lines, &new_lines));
    let (mut old_number, mut new_number) = (first + 1, first + 1);
    for change in changes {
        let line = change.value();
        match change.tag() {
            ChangeTag::Delete => {
                shown.push(('-', old_number, line));
                old_number += 1;
            }
            ChangeTag::Insert => {
                shown.push(('+', new_number, line));
                new_number += 1;
            }
            ChangeTag::Equal => {
                shown.push((' ', old_number, line));
                old_number += 1;
                new_number += 1;
            }
        }
    }
    let below = lines(slice(before, old.end..before.len()));
    for (index, line) in below.iter().take(CONTEXT).enumerate() {
        shown.push((' ', old_number + index, line));
    }
    let has_more = below.len() > CONTEXT;
    let longest = 1 + count_lines(before).max(count_lines(after));
    trim(&shown, has_more, longest.to_string().len())
}

/// Formats the lines, without unchanged lines far from the first and the last change.
fn trim(shown: &[(char, usize, &[u8])], has_more: bool, width: usize) -> String {
    let is_change = |line: &(char, usize, &[u8])| line.0 != ' ';
    let first = shown.iter().position(is_change).unwrap_or(0);
    let last = shown.iter().rposition(is_change).unwrap_or(0);
    let start = first.saturating_sub(CONTEXT);
    let end = (last + 1 + CONTEXT).min(shown.len());
    let mut output = DiffText {
        text: String::new(),
        width,
    };
    let kept = shown.get(start..end).unwrap_or_default();
    if kept.first().is_some_and(|line| line.1 > 1) {
        output.ellipsis();
    }
    for (sign, number, line) in kept {
        output.line(*sign, *number, line);
    }
    if has_more || end < shown.len() {
        output.ellipsis();
    }
    output.text
}

struct DiffText {
    text: String,
    width: usize,
}

impl DiffText {
    fn line(&mut self, sign: char, number: usize, line: &[u8]) {
        self.new_line();
        let width = self.width;
        let line = String::from_utf8_lossy(line);
        let _ = write!(self.text, "{sign}{number:>width$} {line}");
    }

    fn ellipsis(&mut self) {
        self.new_line();
        let width = self.width;
        let _ = write!(self.text, " {:width$} ...", "");
    }

    fn new_line(&mut self) {
        if !self.text.is_empty() {
            self.text.push('\n');
        }
    }
}

fn slice(bytes: &[u8], range: Range<usize>) -> &[u8] {
    bytes.get(range).unwrap_or_default()
}

/// The start of the line that contains `at`.
fn line_start(bytes: &[u8], at: usize) -> usize {
    memrchr(b'\n', slice(bytes, 0..at)).map_or(0, |index| index + 1)
}

/// The end of the line that contains `at`, after its newline.
fn line_end(bytes: &[u8], at: usize) -> usize {
    memchr(b'\n', slice(bytes, at..bytes.len())).map_or(bytes.len(), |index| at + index + 1)
}

/// The last lines before `end`, which is the start of a line.
fn lines_before(bytes: &[u8], end: usize) -> Vec<&[u8]> {
    let mut lines = Vec::new();
    let mut end = end;
    while lines.len() < CONTEXT && end > 0 {
        let start = line_start(bytes, end - 1);
        lines.push(slice(bytes, start..end - 1));
        end = start;
    }
    lines.reverse();
    lines
}

/// The lines of a text; a trailing newline does not start another line.
fn lines(text: &[u8]) -> Vec<&[u8]> {
    let mut lines: Vec<&[u8]> = text.split(|byte| *byte == b'\n').collect();
    if lines.last().is_some_and(|last| last.is_empty()) {
        lines.pop();
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(before: &str, old: &str, new: &str, expected: &[&str]) {
        let at = before.find(old).unwrap();
        let after = before.replacen(old, new, 1);
        let diff = numbered_diff(before.as_bytes(), after.as_bytes(), at, old.len());
        assert_eq!(diff.lines().collect::<Vec<_>>(), expected, "{before:?}");
    }

    #[test]
    fn change_is_shown_with_context_lines() {
        let ten: String = (1..=12).map(|n| format!("l{n}\n")).collect();
        check(
            &ten,
            "l6\n",
            "new\nlines\n",
            &[
                "    ...",
                "  2 l2",
                "  3 l3",
                "  4 l4",
                "  5 l5",
                "- 6 l6",
                "+ 6 new",
                "+ 7 lines",
                "  7 l7",
                "  8 l8",
                "  9 l9",
                " 10 l10",
                "    ...",
            ],
        );
    }

    #[test]
    fn unchanged_lines_of_the_replaced_text_are_context() {
        check(
            "a\nb\nc\n",
            "a\nb\nc",
            "a\nx\nc",
            &[" 1 a", "-2 b", "+2 x", " 3 c"],
        );
    }

    #[test]
    fn changes_at_the_ends_of_a_file_are_shown() {
        check("a", "a", "b", &["-1 a", "+1 b"]);
        check("a\n", "a\n", "", &["-1 a"]);
        check("a\nb", "\nb", "", &[" 1 a", "-2 b"]);
        check("ab", "b", "b\nc", &[" 1 ab", "+2 c"]);
        check("a\nb\n", "a", "", &["-1 a", "+1 ", " 2 b"]);
    }
}
