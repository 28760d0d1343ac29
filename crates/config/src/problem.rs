//! Mistakes in configuration files, with position, message and hint.

use std::fmt;
use std::path::{Path, PathBuf};

/// One mistake: its position, a message, and a hint.
///
/// A message never contains the value of a secret or of an environment variable.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The file, as the caller or the including file wrote its path.
    pub file: PathBuf,
    /// The line, from 1; 0 for the file as a whole.
    pub line: usize,
    /// The column in characters, from 1.
    pub column: usize,
    /// JSON pointer to the value.
    pub pointer: String,
    /// The message.
    pub message: String,
    /// How to correct the mistake.
    pub hint: Option<String>,
}

impl Problem {
    /// A problem with `file` itself: it is missing, unreadable, too large.
    pub fn with_file(file: &Path, message: impl Into<String>) -> Self {
        Self {
            file: file.to_owned(),
            line: 0,
            column: 0,
            pointer: String::new(),
            message: message.into(),
            hint: None,
        }
    }

    /// The problem with a hint.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.file.display())?;
        if self.line > 0 {
            write!(f, "{}:{}:", self.line, self.column)?;
        }
        write!(f, " {}", self.message)?;
        match &self.hint {
            Some(hint) => write!(f, "; {hint}"),
            None => Ok(()),
        }
    }
}

/// Maximum number of problems that are reported.
pub(crate) const MAX_PROBLEMS: usize = 200;

/// The problems of one load, sorted by file and position, without duplicates. As an error, the list
/// is never empty. Of more than 200 problems it has the first 200, and one more with the number of
/// the others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Problems(Vec<Problem>);

impl Problems {
    /// The problems, sorted, without duplicates.
    pub fn iter(&self) -> std::slice::Iter<'_, Problem> {
        self.0.iter()
    }

    /// The number of problems.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no problems.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<Vec<Problem>> for Problems {
    fn from(mut list: Vec<Problem>) -> Self {
        list.sort();
        list.dedup();
        if let Some(first) = list.get(MAX_PROBLEMS) {
            let message = format!("and {} more mistakes", list.len() - MAX_PROBLEMS);
            let more = Problem::with_file(&first.file, message);
            list.truncate(MAX_PROBLEMS);
            list.push(more);
        }
        Self(list)
    }
}

impl From<Problem> for Problems {
    fn from(problem: Problem) -> Self {
        Self(vec![problem])
    }
}

impl IntoIterator for Problems {
    type Item = Problem;
    type IntoIter = std::vec::IntoIter<Problem>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<'a> IntoIterator for &'a Problems {
    type Item = &'a Problem;
    type IntoIter = std::slice::Iter<'a, Problem>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            problem.fmt(f)?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// `text` in single quotes, shortened, and with terminal control characters escaped: some files are
/// untrusted.
pub(crate) fn quote(text: &str) -> String {
    const MAX_CHARS: usize = 64;
    let mut quoted = String::from("'");
    for (index, c) in text.chars().enumerate() {
        if index == MAX_CHARS {
            quoted.push('…');
            break;
        }
        match c {
            '\'' | '"' => quoted.push(c),
            c => quoted.extend(c.escape_debug()),
        }
    }
    quoted.push('\'');
    quoted
}

/// The word of `known` that is most similar to `input`, if any is similar. The time of a comparison
/// is the product of both lengths, so long texts are not compared.
pub(crate) fn closest<'a>(
    input: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    if input.len() > 64 {
        return None;
    }
    let lower = input.to_lowercase();
    known
        .into_iter()
        .map(|word| (strsim::damerau_levenshtein(&lower, word), word))
        .filter(|(distance, word)| *distance <= 1 + word.chars().count() / 4)
        .min()
        .map(|(_, word)| word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problems_print_sorted_without_duplicates_like_compiler_errors() {
        let at = |file: &str, line, column, message: &str| Problem {
            file: file.into(),
            line,
            column,
            pointer: String::new(),
            message: message.into(),
            hint: None,
        };
        let list = vec![
            at("b.yaml", 1, 1, "third"),
            at("a.yaml", 12, 5, "second").with_hint("look up"),
            at("a.yaml", 2, 9, "first"),
            at("a.yaml", 2, 9, "first"),
            Problem::with_file(Path::new("c.yaml"), "is a directory"),
        ];
        assert_eq!(
            Problems::from(list).to_string(),
            "a.yaml:2:9: first\n\
             a.yaml:12:5: second; look up\n\
             b.yaml:1:1: third\n\
             c.yaml: is a directory"
        );
    }

    #[test]
    fn quoted_value_contains_no_terminal_control_characters() {
        assert_eq!(quote("plain 'x'"), "'plain 'x''");
        assert_eq!(quote("\u{1b}[2J\n\u{202e}é"), "'\\u{1b}[2J\\n\\u{202e}é'");
        assert_eq!(quote(&"x".repeat(100)).chars().count(), 67);
    }

    #[test]
    fn only_a_similar_word_is_suggested() {
        let known = ["allowlist", "domains", "dns", "id"];
        assert_eq!(closest("alowlist", known), Some("allowlist"));
        assert_eq!(closest("Domains", known), Some("domains"));
        assert_eq!(closest("dsn", known), Some("dns"));
        assert_eq!(closest("frobnicate", known), None);
    }
}
