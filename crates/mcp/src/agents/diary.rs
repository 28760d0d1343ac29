//! What a snapshot is called: one line that says what was done, so that the branch's log reads
//! like a diary.

/// The longest entry, in characters.
const LONGEST: usize = 200;

/// The entry for what a tool did.
pub fn entry(tool: &str, what: &str) -> String {
    let mut lines = what.lines().map(str::trim).filter(|line| !line.is_empty());
    let first = lines.next().unwrap_or_default();
    let plain = first.chars().map(|char| match char {
        char if char.is_control() => ' ',
        char => char,
    });
    let mut kept: String = plain.clone().take(LONGEST).collect();
    if plain.count() > LONGEST || lines.next().is_some() {
        kept.push_str(" …");
    }
    format!("{tool}: {kept}").trim_end().to_owned()
}

/// The same for several things, such as the files of a patch.
pub fn entry_of_all(tool: &str, all: &[String]) -> String {
    entry(tool, &all.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_one_bounded_line() {
        for (what, expected) in [
            ("cargo test", "bash: cargo test"),
            ("\n  make\n", "bash: make"),
            ("cd a &&\n  make", "bash: cd a && …"),
            ("a\tb\u{1b}[31m", "bash: a b [31m"),
            ("", "bash:"),
        ] {
            assert_eq!(entry("bash", what), expected);
        }
        let long = entry("write", &"ä".repeat(5000));
        assert_eq!(long.chars().count(), "write: ".len() + LONGEST + 2);
    }

    #[test]
    fn several_files_are_named_in_one_entry() {
        let files = ["a.rs".to_owned(), "b.rs".to_owned()];
        assert_eq!(entry_of_all("patch", &files), "patch: a.rs, b.rs");
    }
}
