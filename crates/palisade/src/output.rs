//! Output of commands: results for people and scripts on stdout, messages on stderr.

use std::ffi::OsStr;
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use unicode_width::UnicodeWidthStr;

use crate::paths::find_program;

/// Prints a value as indented JSON.
pub fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    print_line(&safe_json(&serde_json::to_string_pretty(value)?))
}

/// Prints JSON lines whose bytes were hashed: unchanged, but escaped on a terminal.
pub fn print_hashed(lines: &[u8]) -> anyhow::Result<()> {
    if io::stdout().is_terminal() {
        // A line that is not UTF-8 is damaged, so its bytes need not be kept.
        write_out(safe_json(&String::from_utf8_lossy(lines)).as_bytes())
    } else {
        write_out(lines)
    }
}

/// Prints a line. If the reader has closed the pipe (`| head`), the process exits without an
/// error.
pub fn print_line(line: &str) -> anyhow::Result<()> {
    write_out(format!("{line}\n").as_bytes())
}

/// Writes bytes to stdout.
pub fn write_out(bytes: &[u8]) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        other => Ok(other?),
    }
}

/// Prints a message on stderr. A closed stderr is not an error.
pub fn print_message(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// The command to show in hints: `palisade`, or the path of this program if PATH does not
/// contain it, as with `cargo run`.
pub fn program_name() -> String {
    const NAME: &str = "palisade";
    let on_path = find_program(OsStr::new(NAME)).is_some();
    match std::env::args().next() {
        Some(started) if !on_path && started.contains('/') => safe(&started),
        _ => NAME.to_owned(),
    }
}

/// A spinner on the terminal. Shows nothing for the first [`Spinner::DELAY`].
pub struct Spinner {
    done: Option<mpsc::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
    message: Arc<Mutex<String>>,
}

impl Spinner {
    /// How long nothing is shown.
    const DELAY: Duration = Duration::from_millis(400);

    /// Starts a spinner with a message.
    pub fn start(text: &str) -> Self {
        let message = Arc::new(Mutex::new(text.to_owned()));
        if !Self::is_visible() {
            return Self {
                done: None,
                thread: None,
                message,
            };
        }
        let (done, is_done) = mpsc::channel::<()>();
        let shown = Arc::clone(&message);
        let thread = std::thread::spawn(move || {
            let done_within = |limit| {
                !matches!(
                    is_done.recv_timeout(limit),
                    Err(mpsc::RecvTimeoutError::Timeout)
                )
            };
            if done_within(Self::DELAY) {
                return;
            }
            let message = || shown.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let bar = ProgressBar::new_spinner().with_message(message());
            if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
                bar.set_style(style);
            }
            while !done_within(Duration::from_millis(100)) {
                bar.set_message(message());
                bar.tick();
            }
            bar.finish_and_clear();
        });
        Self {
            done: Some(done),
            thread: Some(thread),
            message,
        }
    }

    /// Whether stderr is a terminal.
    pub fn is_visible() -> bool {
        io::stderr().is_terminal()
    }

    /// Replaces the message.
    pub fn set_message(&self, message: String) {
        *self.message.lock().unwrap_or_else(PoisonError::into_inner) = message;
    }

    /// Removes the spinner; the line is empty when this returns.
    pub fn end(mut self) {
        drop(self.done.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Whether a character could move the cursor, or reorder or hide text. Used for tables,
/// messages, JSON and the log. Variation selectors of emoji (U+FE00 to U+FE0F) are safe.
pub fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}'
            | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{feff}' | '\u{ffa0}'
            | '\u{fff0}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}'
            | '\u{e0000}'..='\u{e0fff}')
}

/// Appends `c` as `\uXXXX`, as a surrogate pair if necessary (RFC 8259, section 7).
pub fn push_escaped(text: &mut String, c: char) {
    let mut units = [0; 2];
    for unit in c.encode_utf16(&mut units) {
        text.push_str(&format!("\\u{unit:04x}"));
    }
}

/// JSON with unsafe characters as escapes, which a JSON parser reads as the same text. Outside
/// of strings, serialised JSON contains no unsafe characters except line ends.
fn safe_json(json: &str) -> String {
    let mut shown = String::with_capacity(json.len());
    for c in json.chars() {
        if c != '\n' && is_unsafe(c) {
            push_escaped(&mut shown, c);
        } else {
            shown.push(c);
        }
    }
    shown
}

/// Untrusted text, made safe for a terminal: control characters and characters that reorder or
/// hide text are escaped.
pub fn safe(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if is_unsafe(c) {
            shown.extend(c.escape_unicode());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// A table: rows under a heading, in columns as wide as their widest cell.
pub fn table(heading: &[&str], rows: &[Vec<String>]) -> String {
    let rows: Vec<Vec<String>> = rows
        .iter()
        .map(|row| row.iter().map(|cell| safe(cell)).collect())
        .collect();
    let mut widths: Vec<usize> = heading.iter().map(|title| title.width()).collect();
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.width());
        }
    }
    let render = |cells: Vec<&str>| {
        let mut line = String::new();
        for (cell, width) in cells.iter().zip(&widths) {
            line.push_str(cell);
            line.push_str(&" ".repeat(width - cell.width() + 2));
        }
        line.trim_end().to_owned()
    };
    let mut lines = vec![render(heading.to_vec())];
    lines.extend(
        rows.iter()
            .map(|row| render(row.iter().map(String::as_str).collect())),
    );
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_text_is_escaped() {
        assert_eq!(safe("a\x1b]52;c;x\x07b"), "a\\u{1b}]52;c;x\\u{7}b");
        assert_eq!(safe("evil\u{202e}txt.exe"), "evil\\u{202e}txt.exe");
        assert_eq!(safe("größe 猫"), "größe 猫");
    }

    // Issue 14, number 6.
    #[test]
    fn json_with_unsafe_characters_is_escaped_with_equal_meaning() {
        let value = serde_json::json!({
            "a\u{9b}\u{202e}": ["\u{7f}\u{85}\u{2028}\u{2066}\u{200b}\u{e0041}", "\n\t", "größe 猫🦀"],
        });
        for written in [
            value.to_string() + "\n",
            serde_json::to_string_pretty(&value).unwrap(),
        ] {
            let shown = safe_json(&written);
            assert!(!shown.contains(|c| c != '\n' && is_unsafe(c)), "{shown}");
            assert!(shown.contains("größe 猫🦀"), "{shown}");
            assert!(
                shown.contains(r"\u007f\u0085\u2028\u2066\u200b\udb40\udc41"),
                "{shown}"
            );
            let read: serde_json::Value = serde_json::from_str(&shown).unwrap();
            assert_eq!(read, value);
        }
    }

    #[test]
    fn table_columns_align_without_trailing_spaces() {
        let rows = vec![
            vec!["a".into(), "猫猫".into()],
            vec!["long one".into(), "b".into()],
        ];
        assert_eq!(
            table(&["ID", "NAME"], &rows),
            "ID        NAME\na         猫猫\nlong one  b"
        );
    }
}
