//! Wording checks: banned phrases, and public types that share a name.

use std::collections::BTreeMap;
use std::path::Path;

use crate::source_text::{comments, messages, without_tests};

/// Words and phrases that comments, logs, messages and documents do not use, and what to write
/// instead.
const BANNED: &[(&str, &str)] = &[
    (
        "nobody",
        "name the subject: no client, no caller, no process",
    ),
    ("somebody", "name the subject"),
    ("whoever", "name the subject"),
    ("anybody", "name the subject"),
    ("who asks", "the caller, the sandbox, the client"),
    ("what becomes of", "the outcome of, how … ends"),
    ("what comes of", "the outcome of"),
    ("came of it", "the result"),
    ("goes on", "continues"),
    ("for ever", "indefinitely, without a timeout"),
    ("is told", "receives, is sent"),
    ("are told", "receive, are sent"),
    ("is heard", "is received"),
    ("hears", "receives"),
    ("nothing to say", "empty, no message"),
    ("lies about", "is idle"),
    ("sees to it", "ensures"),
    ("see to it", "ensure"),
    ("under way", "in flight, running"),
];

/// Files in which `nobody` is a name: the system user, or the sandbox of `palisade policy try` when
/// none is given.
const FILES_WITH_NOBODY: &[&str] = &[
    "crates/control/src/traffic_actions.rs",
    "crates/sandbox/src/namespace/identity.rs",
    "crates/sandbox/src/namespace/layer.rs",
    "crates/sandbox/src/namespace/root.rs",
    "crates/sandbox/tests/namespace/needs_root.rs",
];

/// The wording violations of one file.
pub fn check(file: &str, text: &str) -> Vec<String> {
    if file == "xtask/src/tidy/words.rs" {
        return Vec::new();
    }
    let texts: Vec<(usize, String)> = if file.ends_with(".rs") {
        let mut texts = comments(text);
        texts.extend(messages(without_tests(text)));
        texts
    } else if file.ends_with(".md") {
        prose(text)
    } else {
        return Vec::new();
    };
    let mut violations = Vec::new();
    for (line, text) in texts {
        for (phrase, instead) in BANNED.iter().filter(|(phrase, _)| contains(&text, phrase)) {
            if *phrase == "nobody" && FILES_WITH_NOBODY.contains(&file) {
                continue;
            }
            violations.push(format!("{file}:{line}: '{phrase}': write {instead}"));
        }
    }
    violations
}

/// Whether `text` has `phrase` as whole words, outside of code in backticks.
fn contains(text: &str, phrase: &str) -> bool {
    let plain: String = text.split('`').step_by(2).collect::<Vec<_>>().join("`");
    let plain = plain.to_lowercase();
    let is_word = |c: char| c.is_alphanumeric() || c == '_' || c == '\'';
    plain.match_indices(phrase).any(|(at, _)| {
        let before = plain
            .get(..at)
            .and_then(|before| before.chars().next_back());
        let after = plain
            .get(at + phrase.len()..)
            .and_then(|after| after.chars().next());
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

/// The lines of a document outside of code blocks.
fn prose(text: &str) -> Vec<(usize, String)> {
    let mut in_code = false;
    let mut lines = Vec::new();
    for (number, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        } else if !in_code {
            lines.push((number + 1, line.to_owned()));
        }
    }
    lines
}

/// A violation for each name that several public types share.
pub fn check_names(root: &Path, files: &[String]) -> Vec<String> {
    let mut files_by_name: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let sources = files.iter().filter(|file| {
        let is_test = file
            .split('/')
            .any(|part| matches!(part, "tests" | "tests.rs" | "benches"));
        file.starts_with("crates/") && file.contains("/src/") && file.ends_with(".rs") && !is_test
    });
    for file in sources {
        let Ok(text) = std::fs::read_to_string(root.join(file)) else {
            continue;
        };
        for name in public_types(without_tests(&text)) {
            files_by_name.entry(name).or_default().push(file.clone());
        }
    }
    files_by_name
        .into_iter()
        .filter(|(_, files)| files.len() > 1)
        .map(|(name, files)| format!("public types share the name {name}: {}", files.join(", ")))
        .collect()
}

fn public_types(code: &str) -> impl Iterator<Item = String> {
    code.lines().filter_map(|line| {
        let line = line.strip_prefix("pub ")?;
        let rest = ["struct ", "enum ", "trait ", "type ", "union "]
            .iter()
            .find_map(|kind| line.strip_prefix(kind))?;
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
        rest.get(..end.unwrap_or(rest.len())).map(str::to_owned)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn banned_phrases_are_found_as_whole_words_outside_code() {
        assert!(contains("there is Nobody here", "nobody"));
        assert!(contains("nobody's file", "nobody's"));
        assert!(!contains("the user `nobody`", "nobody"));
        assert!(!contains("somebodyelse", "somebody"));
        let text = concat!("// Who", "ever asks.\nlet x = \"who", "ever\";\n");
        assert_eq!(check("xtask/src/a.rs", text).len(), 2);
        let text = concat!("Text\n```\nno", "body\n```\nno", "body\n");
        assert_eq!(check("CONTRIBUTING.md", text).len(), 1);
    }

    #[test]
    fn public_types_are_read_from_their_definitions() {
        let code = "pub struct One;\npub(crate) struct Two;\npub enum Three<T> {}\nstruct Four;\n";
        let found: Vec<String> = public_types(code).collect();
        assert_eq!(found, ["One", "Three"]);
    }
}
