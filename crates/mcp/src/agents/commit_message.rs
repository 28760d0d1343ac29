//! Commit messages of snapshots: one line with the tool and its file or command.

/// The longest description after the tool's name, in characters.
const MAX_CHARS: usize = 200;

/// The commit message of one tool call, with the first line of `description`.
pub fn for_tool(tool: &str, description: &str) -> String {
    let mut lines = description
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty());
    let first = lines.next().unwrap_or_default();
    let plain = first.chars().map(|char| match char {
        char if char.is_control() => ' ',
        char => char,
    });
    let mut kept: String = plain.clone().take(MAX_CHARS).collect();
    if plain.count() > MAX_CHARS || lines.next().is_some() {
        kept.push_str(" …");
    }
    format!("{tool}: {kept}").trim_end().to_owned()
}

/// The commit message of a tool call that changed `files`.
pub fn for_files(tool: &str, files: &[String]) -> String {
    for_tool(tool, &files.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_is_one_bounded_line() {
        for (description, expected) in [
            ("cargo test", "bash: cargo test"),
            ("\n  make\n", "bash: make"),
            ("cd a &&\n  make", "bash: cd a && …"),
            ("a\tb\u{1b}[31m", "bash: a b [31m"),
            ("", "bash:"),
        ] {
            assert_eq!(for_tool("bash", description), expected);
        }
        let long = for_tool("write", &"ä".repeat(5000));
        assert_eq!(long.chars().count(), "write: ".len() + MAX_CHARS + 2);
    }

    #[test]
    fn message_names_all_files_of_a_patch() {
        let files = ["a.rs".to_owned(), "b.rs".to_owned()];
        assert_eq!(for_files("patch", &files), "patch: a.rs, b.rs");
    }
}
