//! What is wrong with a file, said so that a person can put it right.

use std::fmt;
use std::path::{Path, PathBuf};

/// One mistake: where it is, what it is, and what might be meant.
///
/// A message never holds the value of a secret, nor that of an environment variable.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The file it is in, as the caller or the including file spelt it.
    pub file: PathBuf,
    /// The line, from 1; 0 when the file as a whole is meant.
    pub line: usize,
    /// The column in characters, from 1.
    pub column: usize,
    /// JSON pointer to the value.
    pub pointer: String,
    /// What is wrong.
    pub message: String,
    /// What to do about it.
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

    /// The same problem with advice.
    #[must_use]
    pub fn hinting(mut self, hint: impl Into<String>) -> Self {
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

/// More mistakes than anybody reads in one go.
pub(crate) const MOST_PROBLEMS: usize = 200;

/// Every mistake that was found: sorted by file and position, each once, never empty
/// where it is an error. Of more than 200, the first 200 and a last one that says how many
/// more there are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Problems(Vec<Problem>);

impl Problems {
    /// In order of place, without repetition.
    pub fn iter(&self) -> std::slice::Iter<'_, Problem> {
        self.0.iter()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether nothing is wrong.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<Vec<Problem>> for Problems {
    fn from(mut list: Vec<Problem>) -> Self {
        list.sort();
        list.dedup();
        if let Some(first) = list.get(MOST_PROBLEMS) {
            let message = format!("and {} more mistakes", list.len() - MOST_PROBLEMS);
            let more = Problem::with_file(&first.file, message);
            list.truncate(MOST_PROBLEMS);
            list.push(more);
        }
        Self(list)
    }
}

impl From<Problem> for Problems {
    fn from(one: Problem) -> Self {
        Self(vec![one])
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
        for (place, problem) in self.0.iter().enumerate() {
            if place > 0 {
                f.write_str("\n")?;
            }
            problem.fmt(f)?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// `text` between single quotes, shortened, and with everything that could steer a
/// terminal escaped: some files are written by strangers.
pub(crate) fn quote(text: &str) -> String {
    const LONGEST: usize = 64;
    let mut quoted = String::from("'");
    for (place, c) in text.chars().enumerate() {
        if place == LONGEST {
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

/// The word of `known` that `given` was probably meant to be. Comparing takes the product
/// of both lengths, and nobody means a word by a page.
pub(crate) fn closest<'a>(
    given: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    if given.len() > 64 {
        return None;
    }
    let lower = given.to_lowercase();
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
    fn problems_are_sorted_told_once_and_read_like_a_compilers() {
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
            at("a.yaml", 12, 5, "second").hinting("look up"),
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
    fn a_quoted_value_cannot_steer_a_terminal() {
        assert_eq!(quote("plain 'x'"), "'plain 'x''");
        assert_eq!(quote("\u{1b}[2J\n\u{202e}é"), "'\\u{1b}[2J\\n\\u{202e}é'");
        assert_eq!(quote(&"x".repeat(100)).chars().count(), 67);
    }

    #[test]
    fn only_a_near_word_is_suggested() {
        let known = ["allowlist", "domains", "dns", "id"];
        assert_eq!(closest("alowlist", known), Some("allowlist"));
        assert_eq!(closest("Domains", known), Some("domains"));
        assert_eq!(closest("dsn", known), Some("dns"));
        assert_eq!(closest("frobnicate", known), None);
    }
}
